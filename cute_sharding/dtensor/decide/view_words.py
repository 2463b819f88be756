"""What errors and the log say about a view that is not free, and the log about one that is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cute_sharding.dtensor.bookkeeping.stats import logger
from cute_sharding.dtensor.bookkeeping.telling import is_new
from cute_sharding.dtensor.compiled.symbols import hints_of
from cute_sharding.dtensor.replaced.tensor_specs import (
    Placement,
    Shard,
    StridedShard,
    mesh_dim_text,
    mesh_text,
)
from cute_sharding.dtensor.run.placements import Cuts, cut_of, text, without
from cute_sharding.exchange import received_elements
from cute_sharding.layout import Size
from cute_sharding.propagation.carry import carry
from cute_sharding.propagation.suggestions import parts_that_do_not_divide
from cute_sharding.propagation.targets import Target
from cute_sharding.relations.table import ByDimMap
from cute_sharding.relations.view import View


class Asked(NamedTuple):
    """A view of the global shape, with its input.

    Attributes:
        op: its name in messages.
        row: the op's row in the table of rules, for what it needs on local tensors.
        mesh, names: the sizes and the names of the mesh dims.
        placements: the input's.
        speaks: whether this rank writes log lines that hold on all ranks.
    """

    op: str
    view: View
    row: ByDimMap
    mesh: tuple[int, ...]
    names: Sequence[str] | None
    placements: tuple[Placement, ...]
    speaks: Callable[[], bool] = lambda: True

    @property
    def cuts(self) -> Cuts:
        return tuple([cut_of(p) for p in self.placements])

    @property
    def has_numbers(self) -> bool:
        """Whether all sizes have a value in the call that is being compiled."""
        return None not in hints_of((*self.view.input_shape, *self.view.target))

    @property
    def at_hand(self) -> View:
        """The view for the sizes of the call that is being compiled."""
        view = self.view
        if not any(isinstance(n, Size) for n in (*view.input_shape, *view.sizes, *view.target)):
            return view
        return View(
            hints_of(view.input_shape),
            view.source,
            hints_of(view.sizes),
            hints_of(view.target),
            view.kept,
            view.home,
            view.rank,
        )


class Suggestion(NamedTuple):
    """Placements of the input under which the view is free, and those of its output."""

    target: Target
    source: tuple[Placement, ...]
    output: tuple[Placement, ...]


def explain_unknown(asked: Asked, fact: str) -> str:
    view, placements = asked.view, asked.placements
    return (
        f"{asked.op} of a DTensor from shape {tuple(view.input_shape)} to {view.output_shape} on "
        f"mesh {mesh_text(asked.mesh, asked.names)} with placements {text(placements)} may need "
        "communication, which depends on sizes without a value while the program is compiled. If "
        f"{fact} is true for every input, write torch._check({fact}) before the view. Otherwise, "
        f"first redistribute the tensor to {text(without((Shard, StridedShard), placements))}, "
        'or call cute_sharding.enable(implicit_redistribution="replicate").'
    )


def log_free(asked: Asked, output: tuple[Placement, ...], *, traced: bool) -> None:
    if not logger.isEnabledFor(logging.DEBUG):
        return
    how = "proved on each kind of device" if traced else "blocks of one size"
    logger.debug("%s: free, %s", _described(asked, output), how)


def log_redistribution(
    asked: Asked,
    source: tuple[Placement, ...],
    output: tuple[Placement, ...],
    suggestions: Callable[[], list[Suggestion] | None],
) -> None:
    """Log it once for each op, shape and placements, on the rank that ``speaks``."""
    if not logger.isEnabledFor(logging.INFO) or not asked.speaks():
        return
    what = f"{_described(asked, output)}: input redistributed to {text(source)}"
    if is_new(what):
        logger.info("%s", what + _with_less(asked, source, suggestions() or []))


def _with_less(asked: Asked, source: tuple[Placement, ...], suggestions: list[Suggestion]) -> str:
    """What a redistribution to ``source`` receives, why, and which suggestion receives less."""
    if not asked.has_numbers:
        return ""
    view, cuts, goal = asked.at_hand, hints_of(asked.cuts), [cut_of(p) for p in source]
    received = received_elements(view.input_shape, cuts, hints_of(tuple(goal)), asked.mesh)
    said = f", each device receives up to {received} elements"
    split = _split(asked, carry(view, cuts, asked.mesh).blocked)
    if split:
        said += f"; {split}"
    for suggestion in suggestions:
        if suggestion.target.received < received:
            return (
                f"{said}; .redistribute(placements={list(suggestion.source)!r}) before it "
                f"receives up to {suggestion.target.received}"
            )
    return said


def _split(asked: Asked, blocked: int | None) -> str | None:
    if blocked is None or not asked.has_numbers:
        return None
    return parts_that_do_not_divide(asked.at_hand, hints_of(asked.cuts), asked.mesh, blocked)


def _described(asked: Asked, output: tuple[Placement, ...]) -> str:
    return (
        f"{asked.op}: {tuple(asked.view.input_shape)} {text(asked.placements)} -> "
        f"{asked.view.output_shape} {text(output)} on mesh {tuple(asked.mesh)}"
    )


def explain(
    asked: Asked, blocked: int, suggestions: list[Suggestion] | None, said: str | None
) -> str:
    view, placements, mesh, names = asked.view, asked.placements, asked.mesh, asked.names
    axis = mesh_dim_text(blocked, names)
    lines = [
        f"{asked.op} of a DTensor from shape {tuple(view.input_shape)} to {view.output_shape} on "
        f"mesh {mesh_text(mesh, names)} with placements {text(placements)} cannot be done without "
        f"communication: no Shard or _StridedShard of the output gives the {mesh[blocked]} devices "
        f"of {axis} the elements that {placements[blocked]} gives them.",
    ]
    split = _split(asked, blocked)
    if split:
        lines.append(f"{split[0].upper()}{split[1:]}.")
    if suggestions is None:
        lines.append(
            "Redistribute the input first: "
            f".redistribute(placements={list(without((Shard, StridedShard), placements))!r})"
        )
    else:
        lines.append("Redistribute the input first, for example (cheapest for later ops first):")
        for target, source, output in suggestions:
            lines.append(
                f"  .redistribute(placements={list(source)!r})  then the output is {text(output)}; "
                f"each device receives up to {target.received} elements"
            )
        lines.append(
            "Or let views redistribute their input: "
            'cute_sharding.enable(implicit_redistribution="replicate").'
        )
    if said:
        lines.append(f"PyTorch's own rule says: {said}")  # programs and tests look for its words
    return "\n".join(lines)

"""Propagation on torch's placements: free where it can be, a redistribution where it may be, else
an error that says what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from cute_sharding.dtensor.bookkeeping.settings import Implicit
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.compiled.symbols import hinted
from cute_sharding.dtensor.redistributing.placements import Cuts, cut_of, replaced, text
from cute_sharding.dtensor.torch_private.registry import stock_propagate, torch_rule
from cute_sharding.dtensor.torch_private.tensor_specs import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    mesh_dim_text,
    mesh_text,
)
from cute_sharding.layout import Size, Undecided
from cute_sharding.redistribution import Target, free_targets
from cute_sharding.views import Row, View, carry, view_of

SUGGESTIONS = 3


class Decision(NamedTuple):
    """The placements that the input is to have, and those of the output."""

    source: tuple[Placement, ...]
    output: tuple[Placement, ...]
    outcome: str  # a key of stats()


def propagate_shape_and_sharding(
    input_src_placements: Sequence[Placement],
    global_input_shape: Sequence[int],
    rule: Sequence[Any],
    mesh_sizes: Sequence[int],
    strict_view: bool = False,
) -> tuple[Sequence[Placement], Sequence[Placement]]:
    """The placements that a view needs of its input, and those of its output.

    The signature, and the kinds of value, of
    torch.distributed.tensor._ops._view_ops.propagate_shape_and_sharding; the rule may be torch's
    DimMap or ours. Where the view can be free, the first result is ``input_src_placements``.

    Raises:
        RuntimeError: ``strict_view``, and no placements of the output hold what the devices hold.
            It names placements of the input that would do.
        ValueError: the arguments do not fit together.

    >>> from torch.distributed.tensor import Shard
    >>> from torch.distributed.tensor._ops._view_ops import view_groups
    >>> rule = view_groups((4, 6), (24,))
    >>> propagate_shape_and_sharding([Shard(1)], (4, 6), rule, (2,), strict_view=True)[1]
    [_StridedShard(dim=0, sf=4)]
    """
    placements, shape, mesh = tuple(input_src_placements), global_input_shape, tuple(mesh_sizes)
    if len(placements) != len(mesh):
        raise ValueError(
            f"{len(placements)} placements {text(placements)} for a mesh of {len(mesh)} dims "
            f"{mesh}: give one for each"
        )
    stock = partial(_stock_source, placements, shape, rule, mesh, strict_view)
    try:
        source, output, outcome = decide(
            view_of(shape, rule), placements, mesh, strict=strict_view, stock=stock
        )
    except RuntimeError as error:
        refused("view", error)
        raise
    count("view", outcome)
    return source, list(output)


def _stock_source(
    placements: tuple[Placement, ...],
    shape: Sequence[int],
    rule: Sequence[Any],
    mesh: tuple[int, ...],
    strict: bool,
) -> Sequence[Placement]:
    """The placements that torch's own propagation wants of the input. Raises what that raises."""
    return stock_propagate(placements, tuple(shape), torch_rule(rule), mesh, strict)[0]


def refused(op: str, error: RuntimeError) -> None:
    """Counts a refusal. Other outcomes are counted where they are final."""
    count(op, "refused")
    logger.debug("refused: %s", error)


class _Asked(NamedTuple):
    """A view, and what it is of. ``row``, ``names``: as of :func:`decide`."""

    op: str
    view: View
    row: Row | None
    mesh: tuple[int, ...]
    names: Sequence[str] | None
    placements: tuple[Placement, ...]

    @property
    def cuts(self) -> Cuts:
        return tuple([cut_of(p) for p in self.placements])

    @property
    def has_numbers(self) -> bool:
        """Whether all sizes have a value in the call that is being compiled."""
        return None not in hinted((*self.view.input_shape, *self.view.target))


class _Choice(NamedTuple):
    """Placements of the input under which the view is free, and those of its output."""

    target: Target
    source: tuple[Placement, ...]
    output: tuple[Placement, ...]


def decide(
    view: View,
    placements: tuple[Placement, ...],
    mesh: tuple[int, ...],
    *,
    strict: bool,
    op: str = "view",
    row: Row | None = None,
    mesh_names: Sequence[str] | None = None,
    implicit_redistribution: Implicit = False,
    stock: Callable[[], Sequence[Placement]] | None = None,
    diverged: Callable[[], bool] = lambda: False,
    reachable: Callable[[Cuts], bool] = lambda target: True,
) -> Decision:
    """Carry placements through a view, redistributing the input only where nothing else will do.

    Where it is redistributed, it goes where torch's rules for views that may communicate take it:
    the mesh dims that block the view are replicated, and the others kept. Programs around a view
    expect that. Only where ``implicit_redistribution`` is "cheapest" it goes where the fewest
    elements are received.

    Args:
        view: the view, on the global shape.
        strict: whether the op must not communicate.
        row: the op's row of the rule table, for the needs of its local form.
        implicit_redistribution: let strict ops redistribute as well, to the "cheapest" placements
            that make the view free, or so that what blocks it is on every device ("replicate").
        stock: what torch's own rule makes of the input placements; asked only for a strict view
            that cannot be free, since a program that runs on torch's silent redistribution keeps
            running on ours, and receives no more.
        diverged: whether the tensor may come of a view that is free here and redistributed by
            torch, so that in torch's hands it would not be what it is now. Asked last.
        reachable: whether an explicit redistribution of the input, as it would run now, can be
            trusted to get there: others are not suggested.

    Raises:
        RuntimeError: nothing is free, and redistribution is not allowed.
    """
    blocked: int | str | None
    try:
        cuts, blocked, traced = carry(view, tuple([cut_of(p) for p in placements]), mesh)
        _check_has_numbers(cuts)
        if row is not None:
            by_row = _blocked_by_row(row, view, mesh, placements)
            blocked = blocked if by_row is None else by_row
        if blocked is None:
            output = replaced(placements, cuts)
            free = Decision(placements, output, "tracing" if traced else "algebra")
            if logger.isEnabledFor(logging.DEBUG):
                _log(_Asked(op, view, row, mesh, mesh_names, placements), free)
            return free
    except Undecided as error:
        blocked = error.fact
    asked = _Asked(op, view, row, mesh, mesh_names, placements)
    to: Implicit = implicit_redistribution or (False if strict else "replicate")
    return _not_free(asked, blocked, to, stock, diverged, reachable)


def _not_free(
    asked: _Asked,
    blocked: int | str,
    to: Implicit,
    stock: Callable[[], Sequence[Placement]] | None,
    diverged: Callable[[], bool],
    reachable: Callable[[Cuts], bool],
) -> Decision:
    """:func:`decide` where a mesh dim blocks the view, or it is not known (what is the fact)
    whether one does; ``to`` is where the input may go.
    """
    if isinstance(blocked, str):
        if not to and not diverged():
            raise RuntimeError(_unknown(asked, blocked))
        return _redistributed(asked, *_everywhere(asked))
    said = None
    if not to:
        theirs, said = ask(stock)
        if (theirs is not None and theirs != asked.placements) or diverged():
            to = "replicate"
    if to:
        return _redistributed(asked, *_moved(asked, to))
    raise RuntimeError(_explain(asked, blocked, _suggestions(asked, reachable), said))


def _redistributed(
    asked: _Asked, source: tuple[Placement, ...], output: tuple[Placement, ...]
) -> Decision:
    decision = Decision(source, output, "redistribution")
    _log(asked, decision)
    return decision


def _everywhere(asked: _Asked) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Input and output where nothing is sharded: right whatever the sizes."""
    source = _reduced(asked.row, _unsharded(asked.placements))
    return source, source


def _moved(asked: _Asked, to: Implicit) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Where the input goes of a view that is not free, and what the output then is."""
    if to == "cheapest":
        if not asked.has_numbers:
            return _everywhere(asked)
        [(_, source, output)] = _choices(asked, 1)
        return source, output
    try:
        source = _unblocked(asked)
        cuts = tuple([cut_of(p) for p in source])
        return source, replaced(source, carry(asked.view, cuts, asked.mesh).cuts)
    except Undecided:
        return _everywhere(asked)


def _suggestions(asked: _Asked, reachable: Callable[[Cuts], bool]) -> list[_Choice] | None:
    """What an error suggests: placements without split factors, which an explicit redistribution
    gets to. None where sizes have no value yet.
    """
    if not asked.has_numbers:
        return None

    def is_plain(target: Cuts) -> bool:
        return reachable(target) and all(cut is None or cut[1] == 1 for cut in target)

    # To replicate everything is always among them, also where it cannot be reached.
    found = _choices(asked, SUGGESTIONS, is_plain)
    return [choice for choice in found if reachable(choice.target.source)]


def _choices(
    asked: _Asked, most: int, is_wanted: Callable[[Cuts], bool] = lambda target: True
) -> list[_Choice]:
    """Placements of the input that make the view free, cheapest first."""
    view, row = asked.view, asked.row
    not_sharded = (
        [d for d in range(len(view.input_shape)) if d not in view.kept]
        if row is not None and row.wants_whole_dims
        else []
    )
    pending = [m for m, p in enumerate(asked.placements) if isinstance(p, Partial)]
    result = []
    # Which is cheapest is a matter of the sizes at hand; that it is free is proved for all.
    at_hand = _at_hand(view)
    for target in free_targets(
        at_hand,
        hinted(asked.cuts),
        asked.mesh,
        fixed=pending,
        unsharded=not_sharded,
        allowed=is_wanted,
        most=most,
    ):
        source = _reduced(row, replaced(asked.placements, target.source))
        known = at_hand is view
        cuts_after = target.output if known else carry(view, target.source, asked.mesh).cuts
        result.append(_Choice(target, source, replaced(source, cuts_after)))
    return result


def _unblocked(asked: _Asked) -> tuple[Placement, ...]:
    """The placements with the mesh dims replicated that block the view, one after the other until
    none does.
    """
    source = _reduced(asked.row, asked.placements)
    while True:
        blocked = _blocked_by_row(asked.row, asked.view, asked.mesh, source)
        if blocked is None:
            blocked = carry(asked.view, tuple([cut_of(p) for p in source]), asked.mesh).blocked
        if blocked is None:
            return source
        source = (*source[:blocked], Replicate(), *source[blocked + 1 :])


def _at_hand(view: View) -> View:
    """The view for the sizes of the call that is being compiled."""
    if not any(isinstance(n, Size) for n in (*view.input_shape, *view.sizes, *view.target)):
        return view
    return View(
        hinted(view.input_shape),
        view.source,
        hinted(view.sizes),
        hinted(view.target),
        view.kept,
        view.home,
        view.rank,
    )


def _check_has_numbers(cuts: Cuts) -> None:
    """A placement needs its split factor as a number, at the latest where it leaves the compiled
    program.

    Raises:
        Undecided: one has none. That it is some number would do; 2 stands for it.
    """
    for cut in cuts:
        if cut is not None and isinstance(cut[1], Size) and hinted(cut[1]) is None:
            raise Undecided(f"{cut[1]} == 2")


def _unsharded(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple([Replicate() if isinstance(p, (Shard, StridedShard)) else p for p in placements])


def _unknown(asked: _Asked, fact: str) -> str:
    view, placements = asked.view, asked.placements
    return (
        f"{asked.op} of a DTensor of shape {tuple(view.input_shape)} to {view.output_shape} on "
        f"mesh {mesh_text(asked.mesh, asked.names)} with placements {text(placements)}: whether "
        "that is free depends on sizes that have no value while the program is compiled. It could "
        f"be decided if this were known: {fact}. Say so before the view, if it holds: "
        f"torch._check({fact}); or redistribute the tensor first to "
        f"{text(_unsharded(placements))}; or let views do so themselves: "
        "cute_sharding.enable(implicit_redistribution=True)."
    )


def _linear(placement: Placement) -> bool:
    return placement.reduce_op in ("sum", "avg")  # type: ignore[attr-defined]


def _blocked_by_row(
    row: Row | None, view: View, mesh: tuple[int, ...], placements: Sequence[Placement]
) -> int | None:
    """The first mesh dim that the op's local form cannot do with under these placements, whatever
    the layout says.
    """
    if row is None or not (row.wants_whole_dims or row.pairs):
        return None
    for mesh_dim, placement in enumerate(placements):
        cut = cut_of(placement)
        if (
            row.wants_whole_dims
            and cut is not None
            and cut[0] not in view.kept
            and mesh[mesh_dim] > 1
        ):
            return mesh_dim
        if row.pairs and isinstance(placement, Partial) and not _linear(placement):
            return mesh_dim
    return None


def _reduced(row: Row | None, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements with the pending reductions that the op does not commute with done."""
    if row is None or not row.pairs:
        return placements
    return tuple(
        [Replicate() if isinstance(p, Partial) and not _linear(p) else p for p in placements]
    )


def ask(
    stock: Callable[[], Sequence[Placement]] | None,
) -> tuple[tuple[Placement, ...] | None, str | None]:
    """The placements that torch's own rule wants of the input; None and what it says where it
    raises.
    """
    if stock is None:
        return None, None
    try:
        return tuple(stock()), None
    except Exception as error:  # whatever torch raises: it does not run
        return None, next(iter(str(error).splitlines()), "") or type(error).__name__


def _log(asked: _Asked, decision: Decision) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        how = {
            "algebra": "free, blocks of one size",
            "tracing": "free, proved on each kind of device",
        }.get(decision.outcome, f"input redistributed to {text(decision.source)}")
        logger.debug(
            "%s: %s %s -> %s %s on mesh %s: %s",
            asked.op,
            tuple(asked.view.input_shape),
            text(asked.placements),
            asked.view.output_shape,
            text(decision.output),
            tuple(asked.mesh),
            how,
        )


def _explain(asked: _Asked, blocked: int, choices: list[_Choice] | None, said: str | None) -> str:
    view, placements, mesh, names = asked.view, asked.placements, asked.mesh, asked.names
    axis = mesh_dim_text(blocked, names)
    lines = [
        f"{asked.op} of a DTensor of shape {tuple(view.input_shape)} to {view.output_shape} on "
        f"mesh {mesh_text(mesh, names)} with placements {text(placements)} cannot be done without "
        f"communication: what {placements[blocked]} on {axis} gives to its {mesh[blocked]} devices "
        "is no Shard or _StridedShard of the output.",
    ]
    if choices is None:
        lines.append(
            "Redistribute the input first: "
            f".redistribute(placements={list(_unsharded(placements))!r})"
        )
    elif choices:
        lines.append("Redistribute the input first, for example (cheapest first):")
        for target, source, output in choices:
            lines.append(
                f"  .redistribute(placements={list(source)!r})  then the output is {text(output)}; "
                f"each device receives up to {target.received} elements"
            )
        lines.append(
            "or let views do so themselves: cute_sharding.enable(implicit_redistribution=True)."
        )
    else:
        lines.append(
            "Let views redistribute their input: "
            "cute_sharding.enable(implicit_redistribution=True)."
        )
        lines.append(
            "To redistribute it yourself, switch on enable(redistribution=True) first: torch's own "
            "redistribution reads these split factors as a shard order, which they are not, or "
            "plans "
            "ranks of different sizes differently, and gives wrong data or waits for ever."
        )
    if said:
        lines.append(f"torch's own rule says: {said}")  # programs and tests look for its words
    return "\n".join(lines)

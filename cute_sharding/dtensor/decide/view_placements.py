"""Placements of a view's output, from torch's placements of its input: without communication if
possible, else with a redistribution, or an error that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from cute_sharding._words import counted
from cute_sharding.dtensor.bookkeeping.settings import Implicit
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.compiled.symbols import hints_of
from cute_sharding.dtensor.decide.view_words import (
    Asked,
    Suggestion,
    explain,
    explain_unknown,
    log_free,
    log_redistribution,
)
from cute_sharding.dtensor.replaced.registry import stock_propagate, torch_rule
from cute_sharding.dtensor.replaced.tensor_specs import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.run.placements import Cuts, cut_of, replaced, text, without
from cute_sharding.layout import Size, Undecided
from cute_sharding.propagation.carry import carry, unblocked
from cute_sharding.propagation.suggestions import suggested_targets
from cute_sharding.propagation.targets import Target, free_targets
from cute_sharding.relations.table import BY_OP, ByDimMap
from cute_sharding.relations.view import view_of


class Decision(NamedTuple):
    """The placements that the input is redistributed to, and those of the output."""

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

    Signature and types are those of
    torch.distributed.tensor._ops._view_ops.propagate_shape_and_sharding; the rule may be torch's
    DimMap or ours. If the view can be free, the first result is ``input_src_placements``.

    Raises:
        RuntimeError: ``strict_view``, and no placements of the output describe the elements that
            the devices hold. The message names placements of the input that would do.
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
            f"the mesh {mesh} has {counted(len(mesh), 'dim')}, but the list of placements "
            f"{text(placements)} has {len(placements)}: give one placement for each mesh dim"
        )
    stock = partial(_stock_source, placements, shape, rule, mesh, strict_view)
    try:
        row = BY_OP["Tensor.view"]
        source, output, outcome = place_view(
            Asked("view", view_of(shape, rule), row, mesh, None, placements),
            if_not_free="error" if strict_view else "replicate",
            stock=stock,
        )
    except RuntimeError as error:
        count_refusal("view", error)
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
    """The placements of the input by torch's own propagation. Raises what that raises."""
    return stock_propagate(placements, tuple(shape), torch_rule(rule), mesh, strict)[0]


def count_refusal(op: str, error: RuntimeError) -> None:
    """Count a refusal. (Other outcomes are counted where they are final.)"""
    count(op, "refused")
    logger.debug("refused: %s", error)


def place_view(
    asked: Asked,
    *,
    if_not_free: Implicit,
    stock: Callable[[], Sequence[Placement]],
    reachable: Callable[[Cuts], bool] = lambda target: True,
) -> Decision:
    """Carry placements through a view; redistribute the input only if nothing else is possible.

    Args:
        if_not_free: what to do if no placements of the output describe the elements that the
            devices hold. "replicate": redistribute as torch's rules for non-strict views do; the
            mesh dims that block the view are replicated, the others kept. "cheapest": redistribute
            to the placements for which the fewest elements are received. "error": raise, unless
            torch's rule silently redistributes for this view.
        stock: the input placements by torch's own rule. Called only for an error, which quotes what
            torch's rule raises: programs and tests look for its words.
        reachable: whether an explicit redistribution of the input, as it would run now, is known to
            be right; an error suggests no other.

    Raises:
        RuntimeError: the view is not free, and ``if_not_free`` is "error".
    """
    blocked: int | str | None
    placements = asked.placements
    try:
        cuts, blocked, traced = carry(asked.view, asked.cuts, asked.mesh)
        _check_has_numbers(cuts)
        by_row = _blocked_by_row(asked)
        blocked = blocked if by_row is None else by_row
        if blocked is None:
            output = replaced(placements, cuts)
            log_free(asked, output, traced=traced)
            return Decision(placements, output, "tracing" if traced else "algebra")
    except Undecided as error:
        blocked = error.fact
    if isinstance(blocked, str):
        if if_not_free == "error":
            raise RuntimeError(explain_unknown(asked, blocked))
        source, output = _replicate_all(asked)
    elif if_not_free == "error":
        theirs, said = _asked_torch(stock)
        if theirs in (None, placements):
            raise RuntimeError(explain(asked, blocked, _suggestions(asked, reachable), said))
        source, output = _moved(asked, "replicate")
    else:
        source, output = _moved(asked, if_not_free)
    log_redistribution(asked, source, output, partial(_suggestions, asked, reachable))
    return Decision(source, output, "redistribution")


def _replicate_all(asked: Asked) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Input and output placements without any shard: right for all sizes."""
    source = _reduced(asked.row, without((Shard, StridedShard), asked.placements))
    return source, source


def _moved(asked: Asked, to: Implicit) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """The placements to redistribute the input of a view to that is not free, and the output's."""
    if to == "cheapest":
        if not asked.has_numbers:
            return _replicate_all(asked)
        [(_, source, output)] = _suggest(asked, free_targets, most=1)
        return source, output
    try:
        source = _reduced(asked.row, asked.placements)
        cuts = tuple([cut_of(p) for p in source])
        source = replaced(source, unblocked(asked.view, cuts, asked.mesh, _whole(asked)))
        cuts = tuple([cut_of(p) for p in source])
        return source, replaced(source, carry(asked.view, cuts, asked.mesh).cuts)
    except Undecided:
        return _replicate_all(asked)


def _suggestions(asked: Asked, reachable: Callable[[Cuts], bool]) -> list[Suggestion] | None:
    """The suggestions of an error and of the log, the same as of the command line: placements
    without split factors that an explicit redistribution reaches. None if sizes have no value yet.
    """
    if not asked.has_numbers:
        return None
    found = _suggest(asked, suggested_targets, allowed=reachable)
    # The search always gives full replication, even if it cannot be reached.
    return [one for one in found if reachable(one.target.source)]


def _suggest(asked: Asked, search: Callable[..., list[Target]], **options: Any) -> list[Suggestion]:
    """Placements of the input that make the view free, in the order of ``search``."""
    view, row = asked.view, asked.row
    pending = [m for m, p in enumerate(asked.placements) if isinstance(p, Partial)]
    result = []
    # The order depends on the sizes at hand; that the view is free is proved for all sizes.
    at_hand = asked.at_hand
    for target in search(
        at_hand,
        hints_of(asked.cuts),
        asked.mesh,
        fixed=pending,
        unsharded=_whole(asked),
        **options,
    ):
        source = _reduced(row, replaced(asked.placements, target.source))
        known = at_hand is view
        cuts_after = target.output if known else carry(view, target.source, asked.mesh).cuts
        result.append(Suggestion(target, source, replaced(source, cuts_after)))
    return result


def _whole(asked: Asked) -> list[int]:
    """The dims of the input that the op needs unsharded when it runs on local tensors."""
    if not asked.row.wants_whole_dims:
        return []
    return [d for d in range(len(asked.view.input_shape)) if d not in asked.view.kept]


def _check_has_numbers(cuts: Cuts) -> None:
    """Check that split factors have numbers, which placements need when they leave the program.

    Raises:
        Undecided: one has none. Any number would do; the message says 2.
    """
    for cut in cuts:
        if cut is not None and isinstance(cut[1], Size) and hints_of(cut[1]) is None:
            raise Undecided(f"{cut[1]} == 2")


def _may_stay(row: ByDimMap, placement: Placement) -> bool:
    """Whether the placement is not pending, or may stay so."""
    if not isinstance(placement, Partial):
        return True
    return row.may_stay(placement.reduce_op if type(placement) is Partial else None)


def _blocked_by_row(asked: Asked) -> int | None:
    """The first mesh dim whose placement the op cannot have on local tensors, whatever the layout
    says.
    """
    whole = _whole(asked)
    for m, (placement, cut) in enumerate(zip(asked.placements, asked.cuts)):
        if cut is not None and cut[0] in whole and asked.mesh[m] > 1:
            return m
        if not _may_stay(asked.row, placement):
            return m
    return None


def _reduced(row: ByDimMap, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements after reductions with which the op does not commute: those are replicated."""
    return tuple([p if _may_stay(row, p) else Replicate() for p in placements])


def _asked_torch(
    stock: Callable[[], Sequence[Placement]],
) -> tuple[tuple[Placement, ...] | None, str | None]:
    """The placements of the input by torch's own rule, and None; or None and the error's first
    line.
    """
    try:
        return tuple(stock()), None
    except Exception as error:  # whatever torch raises
        return None, next(iter(str(error).splitlines()), "") or type(error).__name__

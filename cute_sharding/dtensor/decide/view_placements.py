"""Placements of a view's input and output, from torch's placements of its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from cute_sharding._words import counted
from cute_sharding.dtensor.bookkeeping.stats import count
from cute_sharding.dtensor.compiled.symbols import hints_of
from cute_sharding.dtensor.replaced.tensor_specs import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    mesh_text,
)
from cute_sharding.dtensor.run.placements import (
    Cuts,
    cut_of,
    placement_of,
    replaced,
    text,
    without,
)
from cute_sharding.layout import Size, Undecided
from cute_sharding.propagation.carry import carry, unblocked
from cute_sharding.propagation.targets import cheapest
from cute_sharding.relations.table import BY_OP, ByDimMap
from cute_sharding.relations.view import View, view_of

# The placements that the input is redistributed to, those of the output, and a key of stats().
Way: TypeAlias = tuple[tuple[Placement, ...], tuple[Placement, ...], str]


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
    DimMap or ours. If the view can be free, the first result is ``input_src_placements``; else it
    is the cheapest placements for which the view is free.

    Raises:
        RuntimeError: ``strict_view``, and the view is not free. The message names the cheapest
            placements.
        ValueError: the arguments do not fit together.

    >>> from torch.distributed.tensor import Shard
    >>> from torch.distributed.tensor._ops._view_ops import view_groups
    >>> rule = view_groups((4, 6), (24,))
    >>> propagate_shape_and_sharding([Shard(1)], (4, 6), rule, (2,), strict_view=True)[1]
    [_StridedShard(dim=0, sf=4)]
    """
    placements, mesh = tuple(input_src_placements), tuple(mesh_sizes)
    if len(placements) != len(mesh):
        raise ValueError(
            f"the mesh {mesh} has {counted(len(mesh), 'dim')}, but the list of placements "
            f"{text(placements)} has {len(placements)}: give one placement for each mesh dim"
        )
    view, row = view_of(global_input_shape, rule), BY_OP["Tensor.view"]
    ways = ways_of_view(view, row, placements, mesh)
    source, output, outcome = next(ways, without_shards(row, placements))
    if strict_view and source != placements:
        raise RuntimeError(
            f"a view of a DTensor from shape {tuple(global_input_shape)} to {view.output_shape} on "
            f"mesh {mesh_text(mesh, None)} with placements {text(placements)} needs communication: "
            "no placements of the output give each device the elements that it holds. First "
            f"redistribute the tensor: .redistribute(placements={list(source)!r})"
        )
    count("view", outcome)
    return source, list(output)


def ways_of_view(
    view: View, row: ByDimMap, placements: tuple[Placement, ...], mesh: tuple[int, ...]
) -> Iterator[Way]:
    """The ways to do a view on a mesh of these sizes, the best one first: as the input lies, if
    the view is free; else with the input at the cheapest placements for which it is, and then with
    the input replicated on the mesh dims that block the view.

    Cheap placements are searched only if all sizes have values in the call that is being compiled;
    and there are no ways if it depends on sizes without a value what the view does. Reductions that
    the op does not commute with are done first.
    """
    cuts = tuple(map(cut_of, placements))
    reduced = _reduced(row, placements)
    dims = range(len(view.input_shape)) if row.wants_whole_dims else ()
    unsharded = [d for d in dims if d not in view.kept]
    try:
        kept, found = unblocked(view, cuts, mesh, unsharded)
        _check_has_numbers(found.cuts)
        if kept == cuts and reduced == placements:
            outcome = "tracing" if found.traced else "algebra"
            yield placements, replaced(placements, found.cuts), outcome
            return
        if kept != cuts and None not in hints_of((*view.input_shape, *view.target)):
            pending = [m for m, p in enumerate(placements) if isinstance(p, Partial)]
            values = hints_of(cuts)
            target = cheapest(
                view.of_sizes(hints_of), values, mesh, fixed=pending, unsharded=unsharded
            )
            source = _moved(reduced, values, target.source)
            # The search was for the sizes at hand; that the view is free is proved for all sizes.
            proved = carry(view, tuple(map(cut_of, source)), mesh)
            _check_has_numbers(proved.cuts)
            yield source, replaced(source, proved.cuts), "redistribution"
        source = _moved(reduced, cuts, kept)
        yield source, replaced(source, found.cuts), "redistribution"
    except Undecided:
        return


def without_shards(row: ByDimMap, placements: tuple[Placement, ...]) -> Way:
    """The way that is right for all sizes and orders of mesh dims: nothing is sharded."""
    source = without((Shard, StridedShard), _reduced(row, placements))
    return source, source, "redistribution"


def _reduced(row: ByDimMap, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """The placements after the reductions that the op does not commute with."""
    return tuple(
        [
            Replicate()
            if isinstance(p, Partial)
            and not row.may_stay(p.reduce_op if type(p) is Partial else None)
            else p
            for p in placements
        ]
    )


def _moved(placements: tuple[Placement, ...], before: Cuts, after: Cuts) -> tuple[Placement, ...]:
    """The placements, with those of mesh dims that change replaced."""
    return tuple([p if a == b else placement_of(b) for p, a, b in zip(placements, before, after)])


def _check_has_numbers(cuts: Cuts) -> None:
    """Check that split factors have numbers, which placements need when they leave the program.

    Raises:
        Undecided: one has none. Any number would do; the message says 2.
    """
    for cut in cuts:
        if cut is not None and isinstance(cut[1], Size) and hints_of(cut[1]) is None:
            raise Undecided(f"{cut[1]} == 2")

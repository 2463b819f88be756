"""Propagation on torch's placements: free where it can be, a redistribution where it may be, else an error that says what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from cute_sharding.dtensor.compat import Partial, Placement, Replicate, Shard, StridedShard, stock_propagate
from cute_sharding.dtensor.stats import count, logger
from cute_sharding.redistribution import Target, free_targets
from cute_sharding.sharding.deal import local_size
from cute_sharding.views import Cut, Row, View, carry, view_of

SUGGESTIONS = 3

Cuts: TypeAlias = tuple[Cut, ...]


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

    The signature, and the kinds of value, of torch.distributed.tensor._ops._view_ops.propagate_shape_and_sharding; the rule may be torch's DimMap or ours.
    Where the view can be free, the first result is ``input_src_placements``.

    Raises:
        RuntimeError: ``strict_view``, and no placements of the output hold what the devices hold. It names placements of the input that would do.
    """
    view = view_of(global_input_shape, rule)
    decision = decide(
        view,
        tuple(input_src_placements),
        tuple(mesh_sizes),
        strict=strict_view,
        stock=lambda: stock_propagate(input_src_placements, tuple(global_input_shape), tuple(rule), tuple(mesh_sizes), strict_view)[0],
    )
    return decision.source, list(decision.output)


def cut_of(placement: Placement) -> Cut:
    """What a placement does to the tensor, as views and redistribution see it. A kind of placement that is not known is refused, not taken for Replicate."""
    if isinstance(placement, StridedShard):
        return placement.dim, placement.split_factor  # type: ignore[return-value]  # a SymInt never gets here: see adapter.py
    if isinstance(placement, Shard):
        return placement.dim, 1
    if isinstance(placement, (Replicate, Partial)):
        return None
    raise RuntimeError(f"placement {placement!r} is of a kind that views cannot carry: redistribute to Shard, Replicate or Partial first")


def placement_of(cut: Cut) -> Placement:
    if cut is None:
        return Replicate()
    dim, split_factor = cut
    return Shard(dim) if split_factor == 1 else StridedShard(dim, split_factor=split_factor)


def replaced(placements: Sequence[Placement], cuts: Sequence[Cut]) -> tuple[Placement, ...]:
    """The placements of ``cuts``; where a mesh dim shards neither before nor after, the one of ``placements``, which may be Partial."""
    return tuple([p if cut is None and not isinstance(p, (Shard, StridedShard)) else placement_of(cut) for p, cut in zip(placements, cuts)])


def decide(
    view: View,
    placements: tuple[Placement, ...],
    mesh: tuple[int, ...],
    *,
    strict: bool,
    op: str = "view",
    row: Row | None = None,
    mesh_names: Sequence[str] | None = None,
    implicit_redistribution: bool = False,
    can_redistribute: bool = True,
    by_torch: bool = False,
    stock: Callable[[], Sequence[Placement]] | None = None,
    cost: Callable[[tuple[Placement, ...]], float] | None = None,
) -> Decision:
    """Carry placements through a view, redistributing the input only where nothing else will do.

    Args:
        view: the view, on the global shape.
        strict: whether the op must not communicate.
        row: the op's row of the rule table, for the needs of its local form.
        implicit_redistribution: let strict ops redistribute as well.
        can_redistribute: whether the input can be trusted to be redistributed rightly; if not, nothing is, and nothing is suggested.
        by_torch: choose among redistributions that torch's executor does rightly.
        stock: what torch's own rule makes of the input placements; asked only for a strict view that cannot be free, since a program that runs on
            torch's silent redistribution keeps running on ours.
        cost: of redistributing the input, by the model of what carries it out; then such a view costs no more than torch's.

    Raises:
        RuntimeError: nothing is free, and redistribution is not allowed.
    """
    cuts = tuple([cut_of(p) for p in placements])
    carried = carry(view, cuts, mesh)
    blocked = _blocked_by_row(view, row, placements, cuts, mesh)
    if blocked is None:
        blocked = carried.blocked
    if blocked is None:
        output = replaced(placements, carried.cuts)
        outcome = "tracing" if carried.traced else "algebra"
        _log(op, view, mesh, placements, placements, output, outcome)
        count(op, outcome)
        return Decision(placements, output, outcome)

    def targets(most: int, allowed: Callable[[Cuts], bool]) -> list[tuple[Target, tuple[Placement, ...], tuple[Placement, ...]]]:
        kept_whole = [d for d in range(len(view.input_shape)) if d not in view.kept] if row is not None and (row.drops_only_whole_dims or row.pairs) else []
        pending = [m for m, p in enumerate(placements) if not isinstance(p, (Shard, StridedShard, Replicate))]
        result = []
        for target in free_targets(view, cuts, mesh, fixed=pending, unsharded=kept_whole, allowed=allowed, most=most):
            source = _cleared(row, replaced(placements, target.source))
            result.append((target, source, replaced(source, target.output)))
        return result

    def trusted(target: Cuts) -> bool:
        return _torch_moves_rightly(view.input_shape, cuts, target, mesh)

    if by_torch and not trusted((None,) * len(mesh)):
        can_redistribute = False
    # A program that torch runs by redistributing inside a strict view keeps running.
    fallback = _stock_redistributes(stock, placements) if strict and not implicit_redistribution else None
    if can_redistribute and (fallback is not None or not strict or implicit_redistribution):
        _, source, output = targets(1, trusted if by_torch else _anything)[0]
        if fallback is not None and cost is not None and cost(fallback) < cost(source):
            as_stock = carry(view, tuple([cut_of(p) for p in fallback]), mesh)
            if as_stock.blocked is None:  # never at a greater cost than torch's
                source, output = fallback, replaced(fallback, as_stock.cuts)
        _log(op, view, mesh, placements, source, output, "redistribution")
        count(op, "redistribution")
        return Decision(source, output, "redistribution")

    count(op, "refused")
    message = _explain(op, view, mesh, mesh_names, placements, blocked, targets(SUGGESTIONS, lambda target: _plain(target) and trusted(target)) if can_redistribute else [])
    logger.debug("refused: %s", message)
    raise RuntimeError(message)


def _anything(target: Cuts) -> bool:
    return True


def _plain(target: Cuts) -> bool:
    """Without _StridedShard: what a user can be told to write."""
    return all(cut is None or cut[1] == 1 for cut in target)


def _torch_moves_rightly(shape: Sequence[int], source: Cuts, target: Cuts, mesh: Sequence[int]) -> bool:
    """Whether torch's executor can be trusted with a redistribution that a view is to follow.

    On a mesh of several dims it plans each rank by the rank's own sizes; where mesh dims share a tensor dim, with _StridedShard placements and sizes that do not divide, ranks then take different
    paths, and wait for one another. And its all-to-all leaves a local tensor that cannot be viewed where it had to pad.
    """
    nested = any(len(dims) != len(set(dims)) for dims in ([c[0] for c in cuts if c is not None] for cuts in (source, target)))
    strided = (len(mesh) > 2 or (len(mesh) > 1 and nested)) and not (_plain(source) and _plain(target))
    for cuts in (source, target):
        sizes = list(shape)
        for before, after, cut, parts in zip(source, target, cuts, mesh):
            exchanged = {c[0] for c in (before, after) if c is not None} if before is not None and after is not None and before != after else set()
            if any(sizes[dim] % parts for dim in exchanged):
                return False
            if cut is not None:
                if strided and sizes[cut[0]] % (cut[1] * parts):
                    return False
                sizes[cut[0]] = local_size(sizes[cut[0]], cut[1], parts, 0)
    return True


def _linear(placement: Placement) -> bool:
    return placement.reduce_op in ("sum", "avg")  # type: ignore[attr-defined]


def _blocked_by_row(view: View, row: Row | None, placements: Sequence[Placement], cuts: Sequence[Cut], mesh: Sequence[int]) -> int | None:
    """The first mesh dim that the op's local form cannot do with, whatever the layout says."""
    if row is None:
        return None
    for mesh_dim, (placement, cut) in enumerate(zip(placements, cuts)):
        if row.drops_only_whole_dims and cut is not None and cut[0] not in view.kept and mesh[mesh_dim] > 1:
            return mesh_dim
        if row.pairs and cut is not None and cut[0] == len(view.input_shape) - 1 and mesh[mesh_dim] > 1:
            return mesh_dim
        if row.pairs and isinstance(placement, Partial) and not _linear(placement):
            return mesh_dim
    return None


def _cleared(row: Row | None, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    if row is None or not row.pairs:
        return placements
    return tuple([Replicate() if isinstance(p, Partial) and not _linear(p) else p for p in placements])


def _stock_redistributes(stock: Callable[[], Sequence[Placement]] | None, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """The placements to which torch redistributes the input of this strict view; None where it raises, or takes the view for free (which it is not)."""
    if stock is None:
        return None
    try:
        wanted = tuple(stock())
    except Exception:  # whatever torch raises: it does not run
        return None
    return None if wanted == placements else wanted


def _log(op: str, view: View, mesh: Sequence[int], before: Sequence[Placement], source: Sequence[Placement], output: Sequence[Placement], outcome: str) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        how = {"algebra": "free, blocks of one size", "tracing": "free, traced on each kind of device"}.get(outcome, f"input redistributed to {text(source)}")
        logger.debug("%s: %s %s -> %s %s on mesh %s: %s", op, tuple(view.input_shape), text(before), view.output_shape, text(output), tuple(mesh), how)


def text(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(str, placements))}]"


def _explain(
    op: str,
    view: View,
    mesh: Sequence[int],
    names: Sequence[str] | None,
    placements: Sequence[Placement],
    blocked: int,
    targets: list[tuple[Target, tuple[Placement, ...], tuple[Placement, ...]]],
) -> str:
    sizes = ", ".join(f"{name}={n}" for name, n in zip(names, mesh)) if names else ", ".join(map(str, mesh))
    axis = f"mesh dim {blocked}" + (f" ({names[blocked]!r})" if names else "")
    lines = [
        f"{op} of a DTensor of shape {tuple(view.input_shape)} to {view.output_shape} on mesh ({sizes}) with placements {text(placements)} cannot be done without communication: "
        f"what {placements[blocked]} on {axis} gives to its {mesh[blocked]} devices is no Shard or _StridedShard of the output.",
    ]
    if not targets:
        lines.append(
            "Nor can torch be trusted to redistribute it: on a mesh of several dims it reads split factors as a shard order, which these are not, or plans ranks of different "
            "sizes differently, and gives wrong data or waits for ever. Make the tensor with Shard or Replicate placements in the first place."
        )
        return "\n".join(lines)
    lines.append("Redistribute the input first, for example (cheapest first):")
    for target, source, output in targets:
        lines.append(f"  .redistribute(placements={list(source)!r})  then the output is {text(output)}; each device receives up to {target.received} elements")
    lines.append("or let views do so themselves: cute_sharding.enable(implicit_redistribution=True).")
    return "\n".join(lines)

"""``stats``: what was counted, and what of it torch's own rules and redistribution would have
received.
"""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import Any

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.stats import (
    OUTCOMES,
    REDISTRIBUTE,
    Counted,
    Moved,
    Place,
    Received,
    Redistribution,
    read_counts,
)
from cute_sharding.dtensor.reports.stock import stock_plan
from cute_sharding.dtensor.reports.table import Counts, Stats
from cute_sharding.dtensor.run.placements import cut_of
from cute_sharding.exchange.cost import DEVICES


def stats(*, reset: bool = False) -> Stats:
    """Counts since the last reset: for each op, how its placements were decided, and the elements
    that ranks receive, with this package and with PyTorch's rules. Under "redistribute" are the
    planned redistributions.

    The result is a dict of dicts without zeros; an inner dict gives 0 for other keys.
    ``stats().table()`` returns the counts as text. ``python -m cute_sharding stats PROGRAM`` runs a
    program and prints the table.

    DTensor caches the placements of ops. So an op counts once for the same shapes and placements,
    with the elements of one run. A redistribution counts each time it runs; in a compiled program,
    it counts once, during compilation. A redistribution of a view counts under "redistribute", and
    as ``redistribution`` of the view.

    Keys of a view: ``algebra`` (free, all blocks of one size), ``tracing`` (free, blocks of
    different sizes), ``redistribution`` (the input is redistributed first), ``refused`` (an error)
    and ``stock`` (PyTorch decides: on meshes of one device, on which PyTorch also derives rules of
    other ops, and for sizes that differ between ranks).

    Keys of other ops: ``signature`` (the op's signature) and ``gate`` (the fallback). Keys of a
    movement op on a sharded dim: ``free``, ``exchanged`` (one exchange of the missing elements) and
    ``stock`` (without ``movement``). Keys of redistributions: ``plan``, ``stock`` (PyTorch's own
    steps), and ``collectives`` (of all plans).

    For views, movement ops and planned redistributions, ``received_elements`` counts the elements
    that the busiest device receives, and ``received_by_all`` the elements that all devices together
    receive. For ops that are compared with PyTorch's rules, there are more counts:
    ``compared_by_all`` for this package, and ``stock_received_elements`` (of rank 0) and
    ``stock_received_by_all`` for PyTorch. PyTorch pads blocks to one size, and the counts include
    padding.

    An op is not compared if PyTorch raises an error (``stock_raises``) or has no rule for it, if
    sizes are symbolic, or if there are already a thousand kinds of ops.

    Args:
        reset: set every count to 0 afterwards.

    >>> from torch.distributed.tensor import Shard
    >>> from torch.distributed.tensor._ops._view_ops import view_groups
    >>> from cute_sharding.dtensor import propagate_shape_and_sharding
    >>> _ = stats(reset=True)
    >>> _ = propagate_shape_and_sharding([Shard(0)], (4, 6), view_groups((4, 6), (24,)), (2,))
    >>> stats()
    {'view': {'algebra': 1}}
    """
    return Stats(_found(read_counts(reset=reset)))


def _found(counted: Counted) -> dict[str, Counts]:
    found: dict[str, Counts] = {}
    for outcome in OUTCOMES:
        for op in sorted({op for op, _ in counted.outcomes}):
            found.setdefault(op, Counts()).add(outcome, counted.outcomes.get((op, outcome), 0))
    for op, place in counted.places:
        _add_place(found.setdefault(op, Counts()), place)
    moved = counted.moved
    for kind, times in counted.kinds.items():
        moved = moved.plus(kind.moved, times)
    if any(moved[:2]):
        counts = found[REDISTRIBUTE] = _counts_of(moved)
        for kind, times in counted.kinds.items():
            if kind.redistribution is None:
                counts.add("stock_raises", times)
            else:
                _compare(counts, kind.moved.received, [kind.redistribution], times)
    return found


def _counts_of(moved: Moved) -> Counts:
    counts = Counts()
    for name in ("plan", "stock", "collectives"):
        counts.add(name, getattr(moved, name))
    _add_received(counts, moved.received)
    return counts


def _add_received(counts: Counts, received: Received) -> None:
    counts.add("received_elements", received.busiest)
    counts.add("received_by_all", received.by_all)


def _add_place(counts: Counts, place: Place) -> None:
    try:
        received = place.received()
    except Exception:  # it was answered, and then refused where it was redistributed
        return
    _add_received(counts, received)
    try:
        redistributions = place.theirs()
    except Exception:  # whatever torch raises
        counts.add("stock_raises", 1)
        return
    _compare(counts, received, redistributions)


def _compare(
    counts: Counts, received: Received, redistributions: list[Redistribution], times: int = 1
) -> None:
    theirs = Received()
    for redistribution in redistributions:
        of_one = _stock_received(*redistribution)
        if of_one is None:
            counts.add("stock_raises", times)
            return
        theirs = theirs.plus(of_one)
    counts.add("compared", times)
    counts.add("compared_by_all", times * received.by_all)
    counts.add("stock_received_elements", times * theirs.busiest)
    counts.add("stock_received_by_all", times * theirs.by_all)


@remembered
def _stock_received(*redistribution: Any) -> Received | None:
    """What torch would receive, rank 0 and all ranks; None where it cannot do it. It may take a
    while.

    On a mesh of one dim all ranks receive as much, as torch pads. So they do where sizes divide.
    Elsewhere each is asked for, on meshes of up to 64 devices; on larger ones rank 0, which
    receives the most, stands for all.
    """
    first = stock_plan(*redistribution)
    if first.error is not None:
        return None
    shape, mesh, *placements = redistribution
    devices, received = prod(mesh), first.received_elements
    is_flat = sum(n > 1 for n in mesh) < 2
    pieces = prod(cut[1] for cut in map(cut_of, chain(*placements)) if cut is not None)
    is_even = all(n % (devices * pieces) == 0 for n in shape)
    if is_flat or is_even or not received or devices > DEVICES:
        return Received(received, devices * received)
    others = [stock_plan(*redistribution, rank=rank) for rank in range(1, devices)]
    return Received(received, received + sum(plan.received_elements for plan in others))

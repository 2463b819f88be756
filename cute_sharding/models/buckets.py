"""Which tensors go together, so that no rank holds more than a limit: as many as can.

A bucket is packed, sent and unpacked. While it is on the wire the next one is packed, and that is
on the wire while this one is unpacked, where the limit leaves room for both. What shrinks goes
first. All of this is a function of the loads on all ranks, so that ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange import Bundle, MemoryLimitError


class Load(NamedTuple):
    """What a rank holds of a tensor while it moves, in bytes.

    Attributes:
        before: until it has moved.
        finished: of what was pending, once that is done, and what it takes to do it.
        sent, received: in buffers.
        early: of the target's, where messages go straight into it.
        made: the target's, where it is not the source's own memory.
        after: once it has moved.
        moved: what is sent and received, in buffers or not.
    """

    before: int = 0
    finished: int = 0
    sent: int = 0
    received: int = 0
    early: int = 0
    made: int = 0
    after: int = 0
    moved: int = 0

    def plus(self, other: Load) -> Load:
        """Of two tensors."""
        return Load(*(a + b for a, b in zip(self, other)))


# Of one tensor, or of several together, the load on each of the ranks that are looked at.
Loads: TypeAlias = "tuple[Load, ...]"

# Without a limit a bucket has an eighth of what a rank sends and receives, so that packing and
# unpacking hide behind what is on the wire; but 64 MiB at the least, and a GiB at the most.
SHARE, LEAST, MOST = 8, 64 << 20, 1 << 30


class Bucket(NamedTuple):
    """Tensors that go together.

    Attributes:
        members: their numbers in the plan.
        follows_at_once: whether it is packed, and sent, before the one in front of it is unpacked.
        bundle: what goes where, an item for each member.
    """

    members: tuple[int, ...]
    follows_at_once: bool = False
    bundle: Bundle = Bundle(())


def buckets(
    loads: Sequence[Loads],
    limit: int | None = None,
    kinds: Sequence[Hashable] | None = None,
    held_are: str = "sources, targets and buffers, even if one tensor moves at a time",
) -> list[Bucket]:
    """The buckets, in their order, of tensors of those loads. ``kinds``: only those of one kind can
    go together, and None stays where it is. ``held_are``: what the loads are of, for the error.

    Raises:
        MemoryLimitError: a rank holds more than ``limit`` bytes even with one tensor at a time.

    >>> grows, shrinks = (Load(8, 0, 4, 4, 0, 16, 16, 8),), (Load(16, 0, 4, 4, 0, 8, 8, 8),)
    >>> [each.members for each in buckets([grows, shrinks, shrinks])]
    [(1, 2, 0)]
    >>> [each.members for each in buckets([grows, shrinks, shrinks], limit=60)]
    [(1,), (2,), (0,)]
    """
    kinds = [""] * len(loads) if kinds is None else kinds
    order = _order(loads, kinds)
    found: list[Bucket] = []
    held = was = _before(loads)
    before: Loads | None = None
    most = None
    if limit is None:
        moved = zip(*([x.moved for x in loads[i]] for i in order))
        most = min(max(max(map(sum, moved), default=0) // SHARE, LEAST), MOST)
    while order:
        members, load = _next(order, loads, kinds, held, limit, most)
        rest = [i for i in order if i not in members]
        if limit is not None and not _fit_one_by_one(rest, loads, _moved(held, load), limit):
            # Of those that are in front of others of another kind, some grow: they wait.
            members, load = _next(_alike(order, kinds), loads, kinds, held, limit, most)
        if limit is not None and _peak(held, load) > limit:
            least = peak(loads, [Bucket((i,)) for i in _order(loads, kinds)])
            raise MemoryLimitError(
                f"memory_limit={limit} is too small: a device needs at least {least} bytes for "
                f"{held_are}. Raise the limit, or use more devices",
                limit=limit,
                least=least,
            )
        at_once = before is not None and (limit is None or _peak(was, before, load) <= limit)
        found.append(Bucket(tuple(members), at_once))
        order = [i for i in order if i not in members]
        was, held, before = held, _moved(held, load), load
    return found


def _alike(order: Sequence[int], kinds: Sequence[Hashable]) -> list[int]:
    """Those of the first one's kind that are in front of all others."""
    first = kinds[order[0]]
    return list(takewhile(lambda i: kinds[i] == first, order))


def _fit_one_by_one(
    order: Sequence[int], loads: Sequence[Loads], held: Sequence[int], limit: int
) -> bool:
    """Whether tensors keep within the limit in that order, each by itself."""
    for i in order:
        if _peak(held, loads[i]) > limit:
            return False
        held = _moved(held, loads[i])
    return True


def _order(loads: Sequence[Loads], kinds: Sequence[Hashable]) -> list[int]:
    """What shrinks first."""
    moving = [i for i, kind in enumerate(kinds) if kind is not None]
    return sorted(moving, key=lambda i: max(x.after - x.before for x in loads[i]))


def _next(
    order: Sequence[int],
    loads: Sequence[Loads],
    kinds: Sequence[Hashable],
    held: Sequence[int],
    limit: int | None,
    most: int | None,
) -> tuple[list[int], Loads]:
    """The first tensor, and as many of its kind behind it as fit; and their load together.
    ``most``: the most bytes that are sent and received, where there is no limit.
    """
    first, *others = order
    members, load = [first], loads[first]
    for i in others:
        if kinds[i] == kinds[first]:
            more = _together(load, loads[i])
            if not _fits(held, more, limit, most):
                break
            members, load = [*members, i], more
    return members, load


def peak(loads: Sequence[Loads], found: Sequence[Bucket], *, keeps: bool = False) -> int:
    """The most bytes that a rank holds at once: sources, targets and buffers. ``keeps``: these stay
    for the buckets that follow, and are as large as any needs.
    """
    most, held = max(_before(loads), default=0), _before(loads)
    every = [reduce(_together, [loads[i] for i in bucket.members]) for bucket in found]
    if keeps and found:
        slots = 1 + any(bucket.follows_at_once for bucket in found)
        stay = [slots * max(x.sent + x.received for x in of_rank) for of_rank in zip(*every)]
        held = [h + n for h, n in zip(held, stay)]
        every = [tuple([x._replace(sent=0, received=0) for x in load]) for load in every]
    for k, load in enumerate(every):
        then = every[k + 1] if k + 1 < len(found) and found[k + 1].follows_at_once else None
        most = max(most, _peak(held, load, then))
        held = _moved(held, load)
    return most


def _peak(held: Sequence[int], load: Loads, then: Loads | None = None) -> int:
    """The most that a rank holds while a bucket moves, and the one behind it is packed and sent."""
    most = 0
    nothing = (Load(),) * len(load)
    for h, x, y in zip(held, load, nothing if then is None else then):
        behind = y.finished + y.sent + y.received + y.early
        on_the_wire, unpacking = x.sent + x.received + x.early, x.received + x.made
        most = max(most, h + x.finished + max(on_the_wire, unpacking) + behind)
    return most


def _fits(held: Sequence[int], load: Loads, limit: int | None, most: int | None) -> bool:
    """Whether tensors may go together: with as much room again for the buffers of the next."""
    if limit is None:
        return most is None or all(x.moved <= most for x in load)
    return _peak(held, load, tuple([x._replace(finished=0) for x in load])) <= limit


def _before(loads: Sequence[Loads]) -> list[int]:
    return [sum(x.before for x in of_rank) for of_rank in zip(*loads)]


def _moved(held: Sequence[int], load: Loads) -> list[int]:
    """What is held once a bucket has moved."""
    return [h + x.after - x.before for h, x in zip(held, load)]


def _together(one: Loads, other: Loads) -> Loads:
    return tuple([a.plus(b) for a, b in zip(one, other)])

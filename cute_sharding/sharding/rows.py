"""The rows of one tensor dim that each device holds: cuts and chains of cuts, the deal that is
their normal form, and strided runs of rows and what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import lcm, prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

from cute_sharding._memory import remembered
from cute_sharding.layout.size import is_at_most, is_multiple, least, most, number

# -- deal ------------------------------------------------------------------------------------------
# How one mesh dim deals out the elements of a local tensor: the normal form on which propagation
# and reading back rest.
#
# ``Shard(d, f)`` on a mesh dim of M devices deals out the flat row-major positions of a local
# tensor like cards: it takes the positions in order, in *pieces*, and of each piece it gives device
# 0 a *block*, device 1 the next block, and so on. With n the local size of dim d and ``inner`` the
# number of elements below it:
#
#     piece = ceil(n / f),  block = ceil(piece / M)
#     n = full * piece + rest,  0 <= rest < piece
#
# all in rows; times ``inner``, in elements. So there are ``full`` whole pieces, then one of
# ``rest`` rows, dealt in blocks of ceil(rest / M); and the same again for each index of the dims
# above d.
#
# If rest = 0 this is the layout ``(pieces : piece, M : block, block : 1)``: the result of
# `logical_divide`, device mode in the middle. Two shardings, of any dims of any shapes, give every
# device the same positions *if and only if* their deals are equal:
#
# - Device k's first block starts at k * block, and positions first return to device 0 at ``piece``
#   (inside or at the end of each piece, for M >= 2 and piece >= 2 rows). So piece and block can be
#   read off the positions; full and rest can be read off the next piece of another length. A rest
#   of one row goes whole to device 0 and runs on into the next piece: no whole piece has such a
#   run.
# - With M = 1 or pieces of one row, device 0 has everything and the deal is ``None``: all such
#   shardings are equal.
#
# If it is not known whether a piece has one row, it is treated as having more: equal numbers still
# mean equal positions.

# (piece, block, full, rest, block of the rest), in elements except for the count ``full``;
# (piece, block) if rest is 0. None: device 0 holds everything.
Deal: TypeAlias = "tuple[int, ...] | None"


def deal(n: int, inner: int, split_factor: int, parts: int) -> Deal:
    """The deal of a local dim of ``n`` rows of ``inner`` elements among ``parts`` devices."""
    piece = -(-n // split_factor)
    if parts == 1 or (piece <= 1 if type(piece) is int else is_at_most(piece, 1)):
        return None
    block = -(-piece // parts)
    rest = n % piece
    if rest:
        return piece * inner, block * inner, n // piece, rest * inner, -(-rest // parts) * inner
    return piece * inner, block * inner


def piece_and_block(n: Any, split_factor: Any, parts: int) -> tuple[Any, Any]:
    """The rows of a whole piece of ``n`` rows and of a whole block, as ints, Sizes or SymInts."""
    piece = -(-n // split_factor)
    return piece, -(-piece // parts)


def pieces_of(n: int, split_factor: int) -> int:
    """The number of pieces that ``n`` >= 1 rows are cut into: below the split factor if that does
    not divide ``n`` and fewer pieces hold all rows.
    """
    return -(-n // -(-n // split_factor))


def dim_of(piece: int, shape: Sequence[int]) -> tuple[int, int]:
    """The only dim of ``shape`` that can be dealt in pieces of ``piece`` elements: one row of it
    has fewer elements, and the whole dim has at least as many. With it the number of elements of
    one of its rows. The dim is -1 if there is none.
    """
    inner = 1
    for dim in range(len(shape) - 1, -1, -1):
        reach = inner * shape[dim]
        if piece <= reach:
            return dim, inner
        inner = reach
    return -1, inner


def smallest_factor(dealt: tuple[int, ...], n: int, inner: int, parts: int) -> int | None:
    """The smallest split factor with which ``n`` rows of ``inner`` elements have the deal
    ``dealt``, or None.
    """
    piece = dealt[0] // inner
    if dealt[0] % inner or (piece < 2 if type(piece) is int else is_at_most(piece, 1)):
        return None
    smallest = -(-n // piece)
    return smallest if deal(n, inner, smallest, parts) == dealt else None


def local_size(n: int, split_factor: int, parts: int, device: int) -> int:
    """How many of ``n`` rows device ``device`` of ``parts`` holds.

    The second device's block begins at the end or before it; the last device has at most a block.
    """
    if n == 0:
        return 0
    piece = -(-n // split_factor)
    rest, size = n % piece, 0
    for length, count in ((piece, n // piece), (rest, 1))[: 2 if rest else 1]:
        block = -(-length // parts)
        mine = block if device == 0 else length - device * block
        mine = most(0, mine) if device > 1 else mine
        size += (least(block, mine) if 0 < device < parts - 1 else mine) * count
    return size


def are_even(n: int, cuts: Iterable[tuple[int, int]]) -> bool:
    """Whether successive cuts of (split factor, devices) are known to deal ``n`` rows in blocks of
    one size.
    """
    for split_factor, parts in cuts:
        if not is_multiple(n, split_factor * parts):
            return False
        n //= parts
    return True


def kinds_of_device(n: int, split_factor: int, parts: int) -> list[int]:
    """One device for each local size: at most five devices, whatever ``parts`` is."""
    if n % (split_factor * parts) == 0:
        return [0]
    piece = -(-n // split_factor)
    rest = n % piece
    devices = {0}
    for length in (piece, rest):
        if length:
            short = number(
                length // -(-length // parts), range(1, parts + 1)
            )  # the first device without a whole block
            devices |= {short, short + 1}
    sizes: dict[int, int] = {}
    for device in sorted(devices):
        if device < parts:
            sizes.setdefault(local_size(n, split_factor, parts, device), device)
    return list(sizes.values())


def runs(n: int, split_factor: int, parts: int, device: int) -> list[tuple[int, int, int, int]]:
    """Device ``device``'s rows of ``n`` as (start, length, period, count): ``count`` runs of
    ``length`` rows, ``period`` apart.
    """
    result: list[tuple[int, int, int, int]] = []
    if n == 0:
        return result
    piece = -(-n // split_factor)
    full, rest = divmod(n, piece)
    for length, start, count in ((piece, 0, full), (rest, full * piece, 1)):
        if length:
            block = -(-length // parts)
            begin = min(device * block, length)
            size = min(block, length - begin)
            if size:
                result.append((start + begin, size, piece, count))
    return result


# -- meeting ---------------------------------------------------------------------------------------
# Which rows two devices have in common, and where each device keeps them: intersections of layouts,
# as strided runs.
#
# A device holds rows of a tensor dim as runs that repeat with a period, in periods that repeat, and
# so on: one layout if sizes divide, else a few layouts side by side. A ``Run`` is one of them, with
# two numberings ``x`` and ``y`` of its rows: by the tensor and by the device, or by two devices.
# ``meet`` joins two lists of runs on the numbering that they share. It works on whole periods (of
# lengths p and q, on windows of lcm(p, q)). So its cost depends on the number of nested cuts and,
# if periods do not divide one another, on (p + q) / gcd(p, q): at most about the square root of the
# number of rows.

T = TypeVar("T")
S = TypeVar("S")

Loop: TypeAlias = "tuple[int, int, int]"
# (split factor, devices, the device's coordinate) of each mesh dim that cuts a tensor dim, in the
# order of the cuts.
Chain: TypeAlias = "tuple[tuple[int, int, int], ...]"


class Run(NamedTuple):
    """The pairs ``(x + i·dx + ... + j, y + i·dy + ... + j)`` for each loop ``(count, dx, dy)``,
    i < count, and j < length.

    Loops are outermost first, and turns of a loop do not overlap, so both sides ascend together.
    """

    x: int
    y: int
    loops: tuple[Loop, ...]
    length: int

    @property
    def size(self) -> int:
        """The number of pairs."""
        size = self.length
        for count, _, _ in self.loops:
            size *= count
        return size

    @property
    def reach(self) -> int:
        """The last x, plus 1."""
        x, _, loops, length = self
        for count, dx, _ in loops:
            x += (count - 1) * dx
        return x + length

    def turn(self, i: int) -> Run:
        """Turn ``i`` of the outermost loop."""
        (_, dx, dy), *inner = self.loops
        return Run(self.x + i * dx, self.y + i * dy, tuple(inner), self.length)

    def turns(self, first: int, stop: int) -> list[Run]:
        """The turns ``[first, stop)`` of the outermost loop."""
        if stop - first <= 1:
            return [self.turn(first)] if stop > first else []
        (_, dx, dy), *inner = self.loops
        return [
            Run(
                self.x + first * dx,
                self.y + first * dy,
                ((stop - first, dx, dy), *inner),
                self.length,
            )
        ]

    def flipped(self) -> Run:
        """The pairs as (y, x)."""
        return Run(
            self.y, self.x, tuple([(count, dy, dx) for count, dx, dy in self.loops]), self.length
        )


Runs: TypeAlias = "tuple[Run, ...]"


@remembered
def rows_held(n: int, chain: Chain) -> Runs:
    """The rows of ``n`` that a device holds: x in the tensor, y on the device, which stores them in
    ascending order.
    """
    found = [Run(0, 0, (), n)] if n else []
    for split_factor, parts, device in chain:
        taken, at = [], 0
        for start, length, period, count in runs(n, split_factor, parts, device):
            taken.append(Run(start, at, ((count, period, length),) if count > 1 else (), length))
            at += length * count
        found = meet_on_x([run.flipped() for run in found], taken)
        n = at
    return tuple(join(found))


def rows(n: int, chain: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The rows of ``n`` that a device holds, as maximal intervals ``[start, stop)``, ascending."""
    result: list[tuple[int, int]] = []
    for turn in sorted(turn for run in rows_held(n, tuple(chain)) for turn in each_turn(run)):
        start = result.pop()[0] if result and result[-1][1] == turn.x else turn.x
        result.append((start, turn.reach))
    return result


def each_turn(run: Run) -> Iterator[Run]:
    """Yield all turns of all loops, one after the other."""
    if not run.loops:
        yield run
        return
    for i in range(run.loops[0][0]):
        yield from each_turn(run.turn(i))


def row_at(n: int, chain: Sequence[tuple[int, int, int]], position: int) -> int:
    """The row of ``n`` at a position on the device, at a cost that does not grow with intervals."""
    held = rows_held(n, tuple(chain))
    if not 0 <= position < count_rows(held):
        raise IndexError(
            f"position {position} is out of range for the {count_rows(held)} rows on the device: "
            "count positions from 0"
        )
    found = meet_on_x([run.flipped() for run in held], [Run(position, position, (), 1)])
    return found[0].x


@remembered
def meet(n: int, one: Chain, other: Chain) -> Runs:
    """The rows of ``n`` that two devices both hold: x on the first, y on the second."""
    return tuple(join(meet_on_x(rows_held(n, one), rows_held(n, other))))


def same_rows(ones: Sequence[Run], others: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs, one of ``ones`` and one of ``others``, with the same x and the same loops in
    x: the parts whose x are equal.

    The result of :func:`meet_on_x` has no x. Along contiguous rows x - y is constant, so we encode
    both in one number, y + unit * (x - y); its steps are sums of steps in y and in x - y.
    """
    unit = 1 + max([run.flipped().reach for run in ones], default=0)
    both = [
        Run(
            run.x,
            run.y + unit * (run.x - run.y),
            tuple([(count, dx, dy + unit * (dx - dy)) for count, dx, dy in run.loops]),
            run.length,
        )
        for run in ones
    ]

    def sides(run: Run) -> tuple[Run, Run]:
        ahead, y = divmod(run.x, unit)
        steps = [(count, *divmod(step, unit), dz) for count, step, dz in run.loops]
        return (
            Run(y + ahead, y, tuple([(c, dy + da, dy) for c, da, dy, _ in steps]), run.length),
            Run(y + ahead, run.y, tuple([(c, dy + da, dz) for c, da, dy, dz in steps]), run.length),
        )

    return sorted(map(sides, join(meet_on_x(both, others))))


def near(n: int, split_factor: int, parts: int, rows: Runs) -> set[int]:
    """The devices, of the ``parts`` to which a cut of ``n`` rows deals them, that may hold some of
    ``rows`` (x). Every device that does is among them. All devices, if the rows are as long as a
    piece or have as many turns as there are devices.
    """
    every = set(range(parts))
    piece = -(-n // split_factor) if n else 1
    found: set[int] = set()
    for run in rows:
        if run.length >= piece or prod(count for count, _, _ in run.loops) >= parts:
            return every
        for turn in each_turn(run):
            for low, high in _in_pieces(turn.x, turn.reach, piece):
                whole = min(piece, n - low // piece * piece)
                block = -(-whole // parts)
                found |= {*range(low % piece // block, (high - 1) % piece // block + 1)}
    return found


def _in_pieces(start: int, stop: int, piece: int) -> list[tuple[int, int]]:
    """The interval, divided at the end of a piece."""
    edge = -(-stop // piece) * piece - piece
    return [(start, stop)] if start >= edge else [(start, edge), (edge, stop)]


def count_rows(found: Sequence[Run]) -> int:
    """The number of rows in the runs."""
    total = 0
    for _, _, loops, size in found:
        for count, _, _ in loops:
            size *= count
        total += size
    return total


def span(found: Runs, first: int, stop: int) -> Runs:
    """The rows at positions ``first`` to ``stop``, exclusive, in the order of the list."""
    result: list[Run] = []
    for run in found:
        if first < run.size and stop > 0:
            result += _share(run, max(first, 0), min(stop, run.size))
        first, stop = first - run.size, stop - run.size
    return tuple(result)


def _share(run: Run, first: int, stop: int) -> list[Run]:
    """The pairs at positions ``first`` to ``stop``, exclusive, of a run."""
    if first >= stop:
        return []
    if not run.loops:
        return [Run(run.x + first, run.y + first, (), stop - first)]
    each = run.size // run.loops[0][0]
    (i, head), (k, tail) = divmod(first, each), divmod(stop, each)
    if i == k:
        return _share(run.turn(i), head, tail)
    front = _share(run.turn(i), head, each) if head else []
    back = _share(run.turn(k), 0, tail) if tail else []
    return front + run.turns(i + bool(head), k) + back


def _cut(run: Run, first: int, stop: int) -> list[Run]:
    """The pairs with x in ``[first, stop)``."""
    if run.x >= first and run.reach <= stop:
        return [run]
    if not run.loops:
        begin, end = max(run.x, first), min(run.x + run.length, stop)
        return [Run(begin, run.y + begin - run.x, (), end - begin)] if begin < end else []
    count, dx, _ = run.loops[0]
    reach = run.turn(0).reach - run.x
    # Turns [some, until) have pairs in the interval; turns [whole, whole_until) lie whole in it.
    some = max(0, (first - run.x - reach) // dx + 1)
    until = min(count, -((run.x - stop) // dx))
    whole = max(some, -((run.x - first) // dx))
    whole_until = max(whole, min(until, (stop - run.x - reach) // dx + 1))
    result: list[Run] = []
    for i in range(some, min(whole, until)):
        result += _cut(run.turn(i), first, stop)
    result += run.turns(whole, whole_until) if whole < until else []
    for i in range(max(whole_until, some), until):
        result += _cut(run.turn(i), first, stop)
    return result


def meet_on_x(ones: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """The pairs (y of ``ones``, y of ``others``) with equal x."""
    result: list[Run] = []
    for one in ones:
        for other in others:
            if one.x < other.reach and other.x < one.reach:
                result += _meet_runs(one, other)
    return result


def _meet_runs(one: Run, other: Run) -> list[Run]:
    if not other.loops:
        shift = other.y - other.x
        return [
            Run(r.y, r.x + shift, tuple([(c, dy, dx) for c, dx, dy in r.loops]), r.length)
            for r in _cut(one, other.x, other.x + other.length)
        ]
    if not one.loops:
        return [r.flipped() for r in _meet_runs(other, one)]
    (_, p, dy), (_, q, dz) = one.loops[0], other.loops[0]
    # Extend to the end of the last period, even if the device does not hold its end.
    first, stop = (
        max(one.x, other.x),
        min(run.x + run.loops[0][0] * run.loops[0][1] for run in (one, other)),
    )
    window = lcm(p, q)
    times = (stop - first) // window
    if times >= 2:
        # Both repeat from window to window as long as both go on.
        loop = (times, window // p * dy, window // q * dz)
        once = meet_on_x(_cut(one, first, first + window), _cut(other, first, first + window))
        rest = first + times * window
        return [Run(r.x, r.y, (loop, *r.loops), r.length) for r in once] + meet_on_x(
            _cut(one, rest, stop), _cut(other, rest, stop)
        )
    if p < q:
        return [r.flipped() for r in _meet_runs(other, one)]
    result: list[Run] = []
    for i in range(max(0, (first - one.x) // p), min(one.loops[0][0], -((one.x - stop) // p))):
        turn = one.turn(i)
        if turn.x < stop and turn.reach > first:
            result += _meet_runs(turn, other)
    return result


def join(found: list[Run]) -> list[Run]:
    """The same pairs in fewer runs: runs that touch become one, neighbours at equal distances
    become turns of a loop, and loops that touch become one.
    """
    if len(found) < 2:
        return [*map(_coalesced, found)]
    result: list[Run] = []
    for run in sorted(map(_coalesced, found)):
        if result and not run.loops and not result[-1].loops:
            last = result[-1]
            if run.x - last.x == run.y - last.y == last.length:
                result[-1] = Run(last.x, last.y, (), last.length + run.length)
                continue
        result.append(run)
    while len(folded := _folded(result)) < len(result):
        result = folded
    return result


def _folded(found: list[Run]) -> list[Run]:
    return [
        first
        if step is None
        else _coalesced(Run(first.x, first.y, ((count, *step), *first.loops), first.length))
        for first, count, step in turns_of_loops(found, _step_between)
    ]


def _step_between(last: Run, following: Run) -> tuple[int, int] | None:
    """The steps (x, y) from a run to one of the same form that begins after it on both sides."""
    if (following.loops, following.length) != (last.loops, last.length):
        return None
    if following.x < last.reach or following.y < last.flipped().reach:
        return None
    return following.x - last.x, following.y - last.y


def turns_of_loops(
    items: Sequence[T], step_between: Callable[[T, T], S | None]
) -> Iterator[tuple[T, int, S | None]]:
    """Neighbours at equal steps, as turns of a loop: the first item, the number of turns, and the
    step (None for a single item).
    """
    i = 0
    while i < len(items):
        count, step = 1, None
        while i + count < len(items):
            found = step_between(items[i + count - 1], items[i + count])
            if found is None or (step is not None and found != step):
                break
            step, count = found, count + 1
        yield items[i], count, step
        i += count


def _coalesced(run: Run) -> Run:
    loops: list[Loop] = []
    length = run.length
    for count, dx, dy in reversed(run.loops):
        if count == 1:
            continue
        if not loops and dx == dy == length:
            length *= count
        elif loops and dx == loops[0][0] * loops[0][1] and dy == loops[0][0] * loops[0][2]:
            loops[0] = (count * loops[0][0], loops[0][1], loops[0][2])
        else:
            loops.insert(0, (count, dx, dy))
    return Run(run.x, run.y, tuple(loops), length)


# -- chains ----------------------------------------------------------------------------------------
# A sharding as the cuts of each tensor dim: the form that exchanges compute with.

Cut: TypeAlias = "tuple[int, int] | None"
"""The cut that a mesh dim makes: (tensor dim, split factor), or None if it cuts nothing
(Replicate, Partial).

>>> cuts: list[Cut] = [(1, 1), None]  # Shard(1) on one mesh dim, Replicate on the other
>>> from cute_sharding.sharding.rows import chains_of
>>> chains_of(cuts, 2, (2, 2))
((), ((0, 1),))
"""

# For each tensor dim, the (mesh dim, split factor) pairs that cut it, in the order of the cuts.
# Mesh dims of one device cut nothing and are left out.
Chains: TypeAlias = "tuple[tuple[tuple[int, int], ...], ...]"
Device: TypeAlias = "tuple[int, ...]"


def chains_of(cuts: Sequence[Cut], ndim: int, mesh: Sequence[int]) -> Chains:
    """The chains of cuts, one for each mesh dim, that are applied from left to right."""
    chains: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    for m, (cut, n) in enumerate(zip(cuts, mesh)):
        if cut is not None and n > 1:
            chains[cut[0]].append((m, cut[1]))
    return tuple(map(tuple, chains))


def chain_of(
    chain: tuple[tuple[int, int], ...], mesh: Sequence[int], device: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """The cuts of one tensor dim for one device: (split factor, devices, the device's coordinate)
    of each cut.
    """
    return tuple([(split_factor, mesh[m], device[m]) for m, split_factor in chain])


@remembered
def chains_on(chains: Chains, mesh: tuple[int, ...], device: Device) -> tuple[Chain, ...]:
    """The cuts of each tensor dim for one device: see :func:`chain_of`."""
    return tuple([chain_of(chain, mesh, device) for chain in chains])


def cutting(chains: Chains) -> frozenset[int]:
    """The mesh dims that cut a tensor dim."""
    return frozenset([m for chain in chains for m, _ in chain])


def appended(chains: Chains, m: int, dim: int, split_factor: int) -> Chains:
    """The chains with one more cut, which divides what the others leave."""
    return tuple(
        [(*chain, (m, split_factor)) if d == dim else chain for d, chain in enumerate(chains)]
    )


def up_to(chain: tuple[tuple[int, int], ...], m: int) -> tuple[tuple[int, int], ...] | None:
    """The cuts of one tensor dim up to mesh dim ``m``'s; None if ``m`` does not cut it."""
    for i, (mesh_dim, _) in enumerate(chain):
        if mesh_dim == m:
            return chain[: i + 1]
    return None


def cuts_up_to(chains: Chains, m: int) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """The tensor dim that mesh dim ``m`` cuts, and its cuts :func:`up_to` that one; None if it cuts
    nothing.
    """
    for d, chain in enumerate(chains):
        found = up_to(chain, m)
        if found is not None:
            return d, found
    return None


def placements_text(
    chains: Chains,
    mesh_dims: int,
    names: Sequence[str] | None = None,
    pending: Sequence[tuple[int, str]] = (),
) -> str:
    """The chains and pending reductions as placements, with the order of the cuts if it is not that
    of the mesh dims. ``names``: the names of the mesh dims.

    >>> placements_text((((0, 1), (2, 2)), ()), 3, pending=[(1, "sum")])
    '[S(0), P(sum), _S(0,2)]'
    >>> placements_text((((1, 1), (0, 1)),), 2, ("dp", "tp"))
    '[S(0), S(0)], cut in the order tp, dp'
    """
    placed = ["R"] * mesh_dims
    for m, op in pending:
        placed[m] = f"P({op})" if " " not in op else "P"
    for dim, chain in enumerate(chains):
        for m, factor in chain:
            placed[m] = f"S({dim})" if factor == 1 else f"_S({dim},{factor})"
    said = f"[{', '.join(placed)}]"
    if any(list(chain) != sorted(chain) for chain in chains):
        order = [str(m if names is None else names[m]) for chain in chains for m, _ in chain]
        said += f", cut in the order {', '.join(order)}"
    return said

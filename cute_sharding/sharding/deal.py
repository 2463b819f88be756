"""How one mesh dim deals out the elements of a local tensor: the normal form on which propagation
and reading back rest.

``Shard(d, f)`` on a mesh dim of M devices, seen on the flat row-major positions of a local tensor,
deals like a card player: it takes the positions in order, in *pieces*, and from each piece gives
device 0 a *block*, device 1 the next block, and so on. With n the local size of dim d and ``inner``
the number of elements below it:

    piece = ceil(n / f),  block = ceil(piece / M)
    n = full * piece + rest,  0 <= rest < piece

all in rows; times ``inner``, in elements. So there are ``full`` whole pieces, then one of ``rest``
rows, dealt in blocks of ceil(rest / M); and so again for each of the elements above dim d.

Where rest = 0 this is the layout ``(pieces : piece, M : block, block : 1)``: what `logical_divide`
makes, device mode in the middle. Two shardings, of whatever dims of whatever shapes, give every
device the same positions *if and only if* their deals are equal:

- Device k's first block starts at k * block and the first fall back to device 0 comes at ``piece``
  (there is one inside or at the end of each piece, for M >= 2 and piece >= 2 rows), so piece and
  block can be read off the positions; and so, at the next piece of another length, can full and
  rest. A rest of one row goes to device 0 whole and runs on into the next piece: a run no whole
  piece has.
- With M = 1 or pieces of one row, device 0 has everything and the deal is ``None``: all such
  shardings agree.

Where nobody knows whether a piece has one row, it is taken for one that has more: equal numbers say
equal positions all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from cute_sharding.layout.size import is_at_most, is_multiple, least, most, number

# (piece, block, full, rest, block of the rest) in elements, but for full, a count; (piece, block)
# where rest is 0. None: device 0 holds everything.
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
    """Rows of a whole piece of ``n`` rows, and of a whole block: of ints, Sizes and SymInts."""
    piece = -(-n // split_factor)
    return piece, -(-piece // parts)


def pieces_of(n: int, split_factor: int) -> int:
    """How many pieces ``n`` rows, one at the least, are cut into: fewer than the split factor where
    that does not divide, and pieces of one row more are enough.
    """
    return -(-n // -(-n // split_factor))


def dim_of(piece: int, shape: Sequence[int]) -> tuple[int, int]:
    """The only dim of ``shape`` that can be dealt in pieces of so many elements: the one whose rows
    have fewer, and whose whole has no fewer; and how many a row of it has. The dim is -1 if there
    is none.
    """
    inner = 1
    for dim in range(len(shape) - 1, -1, -1):
        reach = inner * shape[dim]
        if piece <= reach:
            return dim, inner
        inner = reach
    return -1, inner


def smallest_factor(dealt: tuple[int, ...], n: int, inner: int, parts: int) -> int | None:
    """The smallest split factor that deals ``n`` rows of ``inner`` elements as ``dealt``,
    or None.
    """
    piece = dealt[0] // inner
    if dealt[0] % inner or (piece < 2 if type(piece) is int else is_at_most(piece, 1)):
        return None
    smallest = -(-n // piece)
    return smallest if deal(n, inner, smallest, parts) == dealt else None


def local_size(n: int, split_factor: int, parts: int, device: int) -> int:
    """How many of ``n`` rows device ``device`` of ``parts`` holds: a block, or what is left.

    The second device begins no later than at the end; the last one finds no more than a block.
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
    """Whether ``n`` rows are known to be dealt in blocks of one size, by cuts of (split factor,
    devices), one after the other.
    """
    for split_factor, parts in cuts:
        if not is_multiple(n, split_factor * parts):
            return False
        n //= parts
    return True


def kinds_of_device(n: int, split_factor: int, parts: int) -> list[int]:
    """One device of each local size: at most five, whatever ``parts`` is."""
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

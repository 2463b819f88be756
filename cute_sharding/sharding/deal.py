"""How one mesh dim deals out the elements of a local tensor: the normal form on which propagation
and reading back rest.

``Shard(d, f)`` on a mesh dim of M devices deals out the flat row-major positions of a local tensor
like cards: it takes the positions in order, in *pieces*, and of each piece it gives device 0 a
*block*, device 1 the next block, and so on. With n the local size of dim d and ``inner`` the number
of elements below it:

    piece = ceil(n / f),  block = ceil(piece / M)
    n = full * piece + rest,  0 <= rest < piece

all in rows; times ``inner``, in elements. So there are ``full`` whole pieces, then one of ``rest``
rows, dealt in blocks of ceil(rest / M); and the same again for each index of the dims above d.

If rest = 0 this is the layout ``(pieces : piece, M : block, block : 1)``: the result of
`logical_divide`, device mode in the middle. Two shardings, of any dims of any shapes, give every
device the same positions *if and only if* their deals are equal:

- Device k's first block starts at k * block, and positions first return to device 0 at ``piece``
  (inside or at the end of each piece, for M >= 2 and piece >= 2 rows). So piece and block can be
  read off the positions; full and rest can be read off the next piece of another length. A rest of
  one row goes whole to device 0 and runs on into the next piece: no whole piece has such a run.
- With M = 1 or pieces of one row, device 0 has everything and the deal is ``None``: all such
  shardings are equal.

If it is not known whether a piece has one row, it is treated as having more: equal numbers still
mean equal positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from cute_sharding.layout.size import is_at_most, is_multiple, least, most, number

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

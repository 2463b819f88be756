"""Devices as text: sets of them in a cell, and in the legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, product
from math import prod

# Sets of up to so many devices are listed one by one.
LISTED = 3


def number(mesh: Sequence[int], coordinate: Sequence[int]) -> int:
    """The number of a device: its place in the mesh, row-major."""
    result = 0
    for size, c in zip(mesh, coordinate):
        result = result * size + c
    return result


def coordinate(mesh: Sequence[int], device: int) -> tuple[int, ...]:
    """The coordinate of a device in the mesh, from its number."""
    result = []
    for size in reversed(mesh):
        device, c = divmod(device, size)
        result.append(c)
    return tuple(reversed(result))


def first_of(mesh: Sequence[int], fixed: Mapping[int, int]) -> int:
    """The first of the devices that have those coordinates on those mesh dims."""
    return number(mesh, [fixed.get(m, 0) for m in range(len(mesh))])


def devices_text(
    mesh: Sequence[int],
    fixed: Mapping[int, int],
    joint: str = ",",
    ranks: Sequence[int] | None = None,
) -> str:
    """The numbers of the devices that have the coordinates ``fixed``, short enough for a cell; or
    their ``ranks``, given by number.

    >>> devices_text((2, 4), {0: 1, 1: 2}), devices_text((2, 4), {1: 2}), devices_text((2, 4), {})
    ('6', '2,6', '0-7')
    >>> devices_text((8, 4), {1: 2}), devices_text((4,), {}, ranks=range(8, 12))
    ('2..', '8-11')
    """
    count = prod(n for m, n in enumerate(mesh) if m not in fixed)
    if count <= LISTED:
        return joint.join(str(_rank(ranks, n)) for n in _some(mesh, fixed, count))
    first, last, is_run = _ends(mesh, fixed, count, ranks)
    return f"{first}-{last}" if is_run else f"{first}.."


def devices_named(
    mesh: Sequence[int],
    fixed: Mapping[int, int],
    word: str = "device",
    ranks: Sequence[int] | None = None,
) -> str:
    """The devices in words.

    >>> devices_named((8, 4), {1: 2}), devices_named((2, 4), {0: 1, 1: 1})
    ('devices 2, 6, 10, .., 30', 'device 5')
    >>> devices_named((2, 4), {0: 1}, "rank", ranks=range(8, 16))
    'ranks 12 to 15'
    """
    count = prod(n for m, n in enumerate(mesh) if m not in fixed)
    first, last, is_run = _ends(mesh, fixed, count, ranks)
    if count == 1:
        return f"{word} {first}"
    if is_run and count > 2:
        return f"{word}s {first} to {last}"
    listed = [str(_rank(ranks, n)) for n in _some(mesh, fixed, min(count, LISTED))]
    if count > LISTED:
        listed += [*([".."] if count > LISTED + 1 else []), str(last)]
    return f"{word}s {', '.join(listed)}"


def _rank(ranks: Sequence[int] | None, device: int) -> int:
    return device if ranks is None else ranks[device]


def _ends(
    mesh: Sequence[int], fixed: Mapping[int, int], count: int, ranks: Sequence[int] | None
) -> tuple[int, int, bool]:
    """The first and the last of the devices, and whether they are those from one to the other."""
    first = first_of(mesh, fixed)
    last = number(mesh, [fixed.get(m, n - 1) for m, n in enumerate(mesh)])
    is_run = last - first + 1 == count
    if is_run and ranks is not None and not isinstance(ranks, range):
        is_run = all(ranks[n] + 1 == ranks[n + 1] for n in range(first, last))
    return _rank(ranks, first), _rank(ranks, last), is_run


def _some(mesh: Sequence[int], fixed: Mapping[int, int], count: int) -> list[int]:
    """The first few of the devices. Sets of the product's factors are ranges, not listed."""
    axes = [(fixed[m],) if m in fixed else range(min(n, count)) for m, n in enumerate(mesh)]
    return [number(mesh, c) for c in islice(product(*axes), count)]

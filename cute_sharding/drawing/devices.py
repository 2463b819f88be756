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


def devices_text(mesh: Sequence[int], fixed: Mapping[int, int], joint: str = ",") -> str:
    """The numbers of the devices that have the coordinates ``fixed``, short enough for a cell.

    >>> devices_text((2, 4), {0: 1, 1: 2}), devices_text((2, 4), {1: 2}), devices_text((2, 4), {})
    ('6', '2,6', '0-7')
    >>> devices_text((8, 4), {1: 2})
    '2..'
    """
    count = prod(n for m, n in enumerate(mesh) if m not in fixed)
    first = first_of(mesh, fixed)
    if count <= LISTED:
        return joint.join(map(str, _some(mesh, fixed, count)))
    last = number(mesh, [fixed.get(m, n - 1) for m, n in enumerate(mesh)])
    return f"{first}-{last}" if last - first + 1 == count else f"{first}.."


def devices_named(mesh: Sequence[int], fixed: Mapping[int, int], word: str = "device") -> str:
    """The devices in words.

    >>> devices_named((8, 4), {1: 2}), devices_named((2, 4), {0: 1, 1: 1})
    ('devices 2, 6, 10, .., 30', 'device 5')
    """
    count = prod(n for m, n in enumerate(mesh) if m not in fixed)
    if count == 1:
        return f"{word} {first_of(mesh, fixed)}"
    last = number(mesh, [fixed.get(m, n - 1) for m, n in enumerate(mesh)])
    first = first_of(mesh, fixed)
    if last - first + 1 == count and count > 2:
        return f"{word}s {first} to {last}"
    listed = [str(device) for device in _some(mesh, fixed, min(count, LISTED))]
    if count > LISTED:
        listed += [*([".."] if count > LISTED + 1 else []), str(last)]
    return f"{word}s {', '.join(listed)}"


def _some(mesh: Sequence[int], fixed: Mapping[int, int], count: int) -> list[int]:
    """The first few of the devices. Sets of the product's factors are ranges, not listed."""
    axes = [(fixed[m],) if m in fixed else range(min(n, count)) for m, n in enumerate(mesh)]
    return [number(mesh, c) for c in islice(product(*axes), count)]

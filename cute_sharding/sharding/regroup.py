"""The same devices under another mesh: mesh dims that are flattened into one, or one that is made
several, and what then says that every device holds what it held.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

# What one mesh dim does: a cut, (dim, split factor); the op of a reduction that is pending; None
# where all devices have the same.
Part: TypeAlias = "tuple[int, int] | str | None"


def regrouped(
    shape: Sequence[int], parts: Sequence[Part], mesh: Sequence[int], other: Sequence[int]
) -> tuple[Part, ...] | None:
    """What the mesh dims of ``other`` do to a tensor, where those of ``mesh`` do ``parts``: every
    device holds the same, in the same order. None where no parts are known to say that.

    The devices are the same, numbered row-major, on both. Both meshes are taken apart into the
    shortest runs of mesh dims that are of as many devices. Of mesh dims that one after the other
    cut a dim into even blocks, by one split factor, a device holds the block of every piece that
    has its number within the run: the pieces stay as many, and are of one block each. So it does
    not matter into which sizes a run is divided, and of what is pending neither. That is the whole
    proof. Mesh dims of one device do nothing.

    Args:
        shape: sizes of the global tensor.
        parts: for each mesh dim of ``mesh`` a cut, (dim, split factor), the op of a pending
            reduction, or None.
        mesh, other: sizes of the mesh dims.

    Returns:
        Parts for the mesh dims of ``other``; None where mesh dims of a run do different things,
        blocks are of different sizes, or the meshes are not of as many devices.

    >>> regrouped((8, 6), ((0, 1),), (4,), (2, 2))
    ((0, 1), (0, 1))
    >>> regrouped((8, 6), ((0, 1), (0, 1)), (2, 2), (4,))
    ((0, 1),)
    >>> regrouped((8, 6), ((0, 1), (1, 1)), (2, 2), (4,))  # mesh dims do different things
    >>> regrouped((6, 6), ((0, 1), (0, 1)), (2, 2), (4,))  # blocks of 2, 1, 2, 1 rows; of 2, 2, 2
    """
    runs = _runs(mesh, other)
    if runs is None:
        return None
    sizes = list(shape)
    found: list[Part] = [None] * len(other)
    for of, to in runs:
        done = {parts[m] for m in of}
        if len(done) > 1:
            return None
        part = done.pop()
        if isinstance(part, tuple):
            dim, factor = part
            devices = prod(mesh[m] for m in of)
            if sizes[dim] % (factor * devices):
                return None
            sizes[dim] //= devices
        for m in to:
            found[m] = part
    return tuple(found)


def _runs(
    mesh: Sequence[int], other: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """The shortest runs of mesh dims of both that are of as many devices, without those of one
    device; None where the meshes are not.
    """
    left, right = ([m for m, n in enumerate(sizes) if n != 1] for sizes in (mesh, other))
    found = []
    while left and right:
        of, to = [left.pop(0)], [right.pop(0)]
        a, b = mesh[of[0]], other[to[0]]
        while a != b:
            taken, rest = (of, left) if a < b else (to, right)
            if not rest:
                return None
            taken.append(rest.pop(0))
            a, b = prod(mesh[m] for m in of), prod(other[m] for m in to)
        found.append((tuple(of), tuple(to)))
    return None if left or right else found

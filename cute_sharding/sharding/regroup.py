"""The same devices under another mesh: several mesh dims flattened into one, or one divided into
several, and the placements with which every device still holds the same elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

# What one mesh dim does: a cut, (dim, split factor); the op of a pending reduction; or None, where
# all devices have the same.
Part: TypeAlias = "tuple[int, int] | str | None"


def regrouped(
    shape: Sequence[int], parts: Sequence[Part], mesh: Sequence[int], other: Sequence[int]
) -> tuple[Part, ...] | None:
    """The parts on the mesh dims of ``other`` with which every device holds the same elements, in
    the same order, as with ``parts`` on ``mesh``. None if no such parts are known.

    Both meshes have the same devices, numbered row-major. They are divided into the shortest runs
    of mesh dims with as many devices on both sides. If the mesh dims of a run, one after the other,
    cut a tensor dim into even blocks by one split factor, then each device holds, of every piece,
    the block with the device's number within the run; the number of pieces stays the same, and each
    of them is reduced to one block. So the sizes within a run do not matter, for pending reductions
    neither. That is the whole proof. Mesh dims of one device do nothing.

    Args:
        shape: sizes of the global tensor.
        parts: for each mesh dim of ``mesh`` a cut, (dim, split factor), the op of a pending
            reduction, or None.
        mesh, other: sizes of the mesh dims.

    Returns:
        Parts for the mesh dims of ``other``; None if mesh dims of a run do different things, if
            blocks differ in size, or if the meshes have different numbers of devices.

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
    """The shortest runs of mesh dims of both meshes with as many devices, without runs of one
    device; None if the meshes have different numbers of devices.
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

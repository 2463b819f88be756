"""A tensor's distribution as a thread-value layout whose threads are devices, and back; and the
same devices under another mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from math import prod
from typing import TypeAlias

from cute_sharding._words import counted
from cute_sharding.layout import Layout, LayoutError, coalesce
from cute_sharding.layout.layout import from_leaves, row_major
from cute_sharding.sharding.boxes import Box, boxes
from cute_sharding.sharding.digits import layout_of
from cute_sharding.sharding.placement import Partial, Placement, Replicate, Shard, format_placements
from cute_sharding.sharding.rows import (
    Chain,
    Chains,
    chain_of,
    chains_of,
    dim_of,
    local_size,
    row_at,
    rows,
    smallest_factor,
)

# -- sharding --------------------------------------------------------------------------------------
# A tensor's distribution as a thread-value layout whose threads are devices, and back.


@dataclass(frozen=True)
class Sharding:
    """A tensor of global ``shape`` on a device mesh of sizes ``mesh``, one placement a mesh dim.

    Placements apply in DTensor's order, left to right: each divides what the ones before it left of
    the tensor dim (torch/distributed/tensor/_utils.py, compute_local_shape_and_global_offset).

    Attributes:
        shape: the global shape, in elements.
        mesh: the number of devices of each mesh dim.
        placements: one for each mesh dim.

    Raises:
        ValueError: shape, mesh and placements do not fit together.
        TypeError: a placement is not one of this package's classes.

    >>> s = Sharding((4, 6), (2, 3), (Shard(0), Shard(1)))
    >>> s.layout
    ((2,3),(2,2)):((12,2),(6,1))
    >>> s.local_shape((1, 0)), s.global_offset((1, 0))
    ((2, 2), (2, 0))
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        for name in ("shape", "mesh", "placements"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.placements) != len(self.mesh):
            raise ValueError(
                f"the mesh {self.mesh} has {counted(len(self.mesh), 'dim')}, but the list of "
                f"placements {format_placements(self.placements)} has {len(self.placements)}: give "
                "one placement for each mesh dim"
            )
        if any(n < 0 for n in self.shape):
            raise ValueError(f"shape {self.shape} has a negative size")
        if any(n < 1 for n in self.mesh):
            raise ValueError(f"mesh {self.mesh}: each mesh dim must have at least one device")
        for placement in self.placements:
            if not isinstance(placement, (Shard, Replicate, Partial)):
                raise TypeError(
                    f"{placement!r} is not a placement: use Shard, Replicate or Partial of "
                    "cute_sharding.sharding"
                )
            if isinstance(placement, Shard) and placement.dim >= len(self.shape):
                raise ValueError(
                    f"placement {placement} is for tensor dim {placement.dim}, but the shape "
                    f"{self.shape} has only {counted(len(self.shape), 'dim')}"
                )

    @property
    def cuts(self) -> tuple[tuple[int, int] | None, ...]:
        """For each mesh dim (tensor dim, split factor), or None if it shards nothing."""
        return tuple(
            (p.dim, p.split_factor) if isinstance(p, Shard) else None for p in self.placements
        )

    @property
    def _chains(self) -> Chains:
        return chains_of(self.cuts, len(self.shape), self.mesh)

    # -- as a layout -------------------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        """T : ((device coordinate), (local coordinate)) -> flat row-major index of the global
        tensor.

        Mode 0 has a mode for each mesh dim (stride 0 where it shards nothing), mode 1 one for each
        tensor dim.

        Raises:
            LayoutError: blocks differ in size, or a block starts inside a mode of an earlier split,
                so no layout says who holds what.
        """
        try:
            return layout_of(self.shape, self._chains, self.mesh)
        except LayoutError as error:
            raise LayoutError(
                f"{self} has no layout: {error}. Use local_shape, global_offset or rows"
            ) from None

    @classmethod
    def read(cls, layout: Layout, shape: Sequence[int]) -> Sharding:
        """The sharding of a tensor of ``shape`` that a thread-value layout describes, in the
        simplest placements.

        ``layout`` has two modes: the device modes, one for each mesh dim, and the local modes in
        row-major order of the local tensor. Their values are flat indices of the tensor, so
        ``read(composition(V, s.layout), new_shape)`` is a view's propagation.

        Raises:
            LayoutError: the modes do not hold each element once (replicas aside), or a device mode
                cannot be expressed by a placement; the message says which and why.

        >>> s = Sharding((4, 6), (2,), (Shard(1),))
        >>> print(Sharding.read(s.layout, (24,)))
        (24,) on mesh (2,) as [_S(0,4)]
        """
        shape = tuple(shape)
        if layout.rank != 2:
            raise LayoutError(
                f"{layout!r} has {counted(layout.rank, 'mode')}, but the layout of a sharding has "
                "two modes, (devices, local)"
            )
        devices = layout[0] if isinstance(layout[0].shape, tuple) else (layout[0],)
        mesh = tuple(mode.size for mode in devices)
        modes = [coalesce(mode) for mode in devices]
        local = [leaf for leaf in layout[1].leaves if leaf[0] != 1]
        cutting = [
            [leaf for leaf in mode.leaves if leaf[0] != 1 and leaf[1] != 0] for mode in modes
        ]
        _check_each_element_once(layout, [*local, *chain.from_iterable(cutting)], shape)
        placements: list[Placement] = []
        local_shape = list(shape)
        for mesh_dim, (parts, mode) in enumerate(zip(mesh, modes, strict=True)):
            if parts == 1 or all(d == 0 for _, d in mode.leaves):
                placements.append(Replicate())
                continue
            # This mesh dim divides the local modes and those of later mesh dims.
            rest = [*local, *chain.from_iterable(cutting[mesh_dim + 1 :])]
            where = f"mesh dim {mesh_dim}, device mode {mode!r}"
            placement = _shard_of(mode, parts, rest, local_shape, where)
            placements.append(placement)
            local_shape[placement.dim] //= parts
        return cls(shape, mesh, tuple(placements))

    # -- on one device -----------------------------------------------------------------------------

    def _checked(self, device: Sequence[int]) -> tuple[int, ...]:
        device = tuple(device)
        if len(device) != len(self.mesh) or any(
            not 0 <= c < n for c, n in zip(device, self.mesh, strict=False)
        ):
            raise ValueError(f"device {device} is not on the mesh {self.mesh}")
        return device

    def local_shape(self, device: Sequence[int]) -> tuple[int, ...]:
        """The local shape of the device at that mesh coordinate; sizes need not divide."""
        shape = list(self.shape)
        for coordinate, parts, cut in zip(self._checked(device), self.mesh, self.cuts, strict=True):
            if cut is not None:
                shape[cut[0]] = local_size(shape[cut[0]], cut[1], parts, coordinate)
        return tuple(shape)

    def rows(self, dim: int, device: Sequence[int]) -> list[tuple[int, int]]:
        """The global rows of tensor dim ``dim`` that the device holds, as maximal intervals
        ``[start, stop)``, ascending.

        The list has as many entries as there are intervals: up to the product of the split factors.
        """
        return rows(self.shape[dim], self._chain(dim, device))

    def row_at(self, dim: int, device: Sequence[int], position: int) -> int:
        """The global row of the local row ``position`` of tensor dim ``dim``, at a cost that does
        not grow with the number of intervals.
        """
        return row_at(self.shape[dim], self._chain(dim, device), position)

    def boxes(self, device: Sequence[int]) -> tuple[Box, ...]:
        """The elements of the device at that mesh coordinate, as boxes of strided runs, each
        element in one box; empty if it has no element. Each box names the reductions that are
        pending on mesh dims of more than one device.

        >>> s = Sharding((10, 4), (2, 2), (Shard(0, split_factor=2), Partial()))
        >>> for box in s.boxes((1, 0)):
        ...     print(box.global_offset, box.size, box.local_offset, box.loops, box.pending)
        (3, 0) (4, 4) (0, 0) (((2, 5, 2),), ()) ('sum',)
        """
        pending = [
            p.reduce_op
            for p, n in zip(self.placements, self.mesh, strict=True)
            if isinstance(p, Partial) and n > 1
        ]
        chains = [self._chain(dim, device) for dim in range(len(self.shape))]
        return boxes(self.shape, chains, pending)

    def _chain(self, dim: int, device: Sequence[int]) -> Chain:
        return chain_of(self._chains[dim], self.mesh, self._checked(device))

    def global_offset(self, device: Sequence[int]) -> tuple[int, ...]:
        """The global index of the device's first element, dim by dim; the dim's size if the device
        holds no row of it.

        As in torch.distributed.tensor._utils.compute_local_shape_and_global_offset.
        """
        return tuple(
            [
                self.row_at(dim, device, 0) if size else self.shape[dim]
                for dim, size in enumerate(self.local_shape(device))
            ]
        )

    def flat_indices(self, device: Sequence[int]) -> Iterator[int]:
        """The flat global index of each element that the device holds, in local row-major order. It
        takes one step for each element: for tests and small pictures.
        """
        strides = row_major(self.shape)
        dims = [
            [row * d for start, stop in self.rows(dim, device) for row in range(start, stop)]
            for dim, d in enumerate(strides)
        ]
        return (sum(offsets) for offsets in product(*dims))

    def __str__(self) -> str:
        return f"{self.shape} on mesh {self.mesh} as {format_placements(self.placements)}"


def _check_each_element_once(
    layout: Layout, leaves: list[tuple[int, int]], shape: tuple[int, ...]
) -> None:
    """Raise unless the ``leaves`` of ``layout``, without replicas, reach each element of ``shape``
    exactly once.
    """
    elements = prod(shape)
    if elements == 0:
        raise LayoutError(
            f"shape {shape} has no elements, so a layout cannot describe its sharding"
        )
    everything = from_leaves(sorted(leaves, key=lambda leaf: -leaf[1]))
    if coalesce(everything) != (Layout(elements, 1) if elements > 1 else Layout(1, 0)):
        raise LayoutError(
            f"{layout!r} is not a sharding of shape {shape}: without replicas, exactly one device "
            f"must hold each of the {elements} elements"
        )


def _shard_of(
    mode: Layout, parts: int, rest: list[tuple[int, int]], local_shape: list[int], where: str
) -> Shard:
    """The placement of a device mode of ``parts`` devices; ``rest``: the leaves of the part of
    ``local_shape`` that each device keeps; ``where`` is for messages.

    Raises:
        LayoutError: no placement gives this mode.
    """
    # Sub-modes with no other mode between them are one mode of what the earlier mesh dims left.
    strides = [d for _, d in mode.leaves]
    if (
        strides != sorted(strides, reverse=True)
        or 0 in strides
        or any(strides[-1] < d < strides[0] for _, d in rest)
    ):
        raise LayoutError(
            f"{where}: one placement cannot describe the {mode.rank} sub-modes: use a mesh with "
            "one dim for each sub-mode"
        )
    inside = prod(n for n, d in rest if d < strides[-1])
    dealt = (parts * inside, inside)
    dim, below = dim_of(parts * inside, local_shape)
    factor = smallest_factor(dealt, local_shape[dim], below, parts)
    if factor is None:
        raise LayoutError(
            f"{where}: no placement divides tensor dim {dim} into blocks of "
            f"{counted(inside, 'element')} for {parts} devices. The local shape "
            f"{tuple(local_shape)} has {counted(local_shape[dim], 'row')} of "
            f"{counted(below, 'element')} in tensor dim {dim}"
        )
    return Shard(dim, factor)


# -- regroup ---------------------------------------------------------------------------------------
# The same devices under another mesh: several mesh dims flattened into one, or one divided into
# several, and the placements with which every device still holds the same elements.

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

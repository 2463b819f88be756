"""A view as a layout: the output's flat index to the input's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from cute_sharding.layout import Layout, make_layout
from cute_sharding.layout.layout import row_major


class View:
    """A view op on a tensor of a given shape, as *source dims* read in order under a target shape.

    ``source`` lists the input's dims in the order in which the output reads them, with None for a
    fresh dim that the output repeats or broadcasts over; ``sizes`` are their sizes and ``target``
    is the output shape, so ``prod(sizes) == prod(target)``. A permutation reorders the source, a
    reshape regroups it, and broadcasting adds to it: there is nothing else to a view op.

    ``kept`` maps each input dim that the view leaves whole to its output dim, and ``home`` each one
    that it repeats, broadcasts or takes apart in place to the output dim it becomes: there the
    local op makes the local shape by itself, also of nothing. ``position`` is where an input dim
    stands in the source. ``rank`` is the number of target dims that a placement may name: a
    trailing target dim beyond it (the two halves of a complex number) has no name.
    """

    __slots__ = ("__dict__", "home", "input_shape", "kept", "rank", "sizes", "source", "target")

    def __init__(
        self,
        input_shape: Sequence[int],
        source: Sequence[int | None],
        sizes: Sequence[int],
        target: Sequence[int],
        kept: Mapping[int, int],
        home: Mapping[int, int] | None = None,
        rank: int | None = None,
    ) -> None:
        self.input_shape = input_shape
        self.source = source
        self.sizes = sizes
        self.target = target
        self.kept = kept
        self.home = home or {}
        self.rank = len(target) if rank is None else rank
        if prod(sizes) != prod(target):
            raise ValueError(
                f"the rule does not fit: it reads dims of sizes {tuple(sizes)} as shape "
                f"{tuple(target)}, which has another number of elements"
            )

    @property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(self.target[: self.rank])

    @cached_property
    def position(self) -> dict[int, int]:
        return {dim: at for at, dim in enumerate(self.source) if dim is not None}

    @cached_property
    def layout(self) -> Layout:
        """The view as a layout from the output's flat index to the input's, one mode a source dim.

        Strides are the input's row-major strides, and 0 for the fresh dims. Permutations permute
        strides; a reshape is the identity.
        """
        strides = row_major(tuple(self.input_shape))
        return make_layout(
            *(
                Layout(n, 0 if dim is None else strides[dim])
                for dim, n in zip(self.source, self.sizes, strict=True)
            )
        )


def view_of(input_shape: Sequence[int], dim_map: Sequence[Any]) -> View:
    """The view that a DimMap describes, for an input of that shape.

    The DimMap may be ours or torch's (torch.distributed.tensor._ops._view_ops): specs are told
    apart by class name. Input dims that the DimMap leaves out are of size 1 (a view cannot drop
    elements) and stand first in the source.
    """
    source: list[int | None] = []
    sizes: list[int] = []
    target: list[int] = []
    kept: dict[int, int] = {}
    home: dict[int, int] = {}

    def settle(spec: Any) -> None:
        if type(spec).__name__ == "InputDim":
            home[spec.input_dim] = len(target)

    def read(spec: Any) -> int:
        """Append the source dims of ``spec``; return its size."""
        kind = type(spec).__name__
        if kind == "InputDim":
            dim = spec.input_dim
            n = input_shape[dim]
            source.append(dim)
            sizes.append(n)
            return n
        if kind == "Split":
            size = spec.group_shape[spec.split_id]
            if spec.split_id == 0:  # the group's first dim stands for the whole group
                n, group = read(spec.input_dim), prod(spec.group_shape)
                if (
                    n and group != n and group % n == 0
                ):  # view_as_real: each element becomes several
                    settle(spec.input_dim)
                    source.append(None)
                    sizes.append(group // n)
            return size
        if kind == "Flatten":
            n = 1
            for part in spec.input_dims:
                n *= read(part)
            return n
        if kind == "Singleton":
            return 1
        if kind == "Repeat":
            settle(spec.input_dim)
            source.append(None)
            sizes.append(spec.times)
            return spec.times * read(spec.input_dim)
        if kind == "Broadcast":
            settle(spec.dim)
            read(spec.dim)
            source.append(None)
            sizes.append(spec.dim_size)
            return spec.dim_size
        if kind == "NewDim":
            source.append(None)
            sizes.append(spec.size)
            return spec.size
        raise TypeError(
            f"unknown DimSpec {spec!r} in the rule; known: InputDim, Flatten, Split, Singleton, "
            "Broadcast, NewDim, Repeat"
        )

    for spec in dim_map:
        if type(spec).__name__ == "InputDim":
            kept[spec.input_dim] = len(target)
        target.append(read(spec))
    if len(kept) < len(input_shape):
        gone = [dim for dim in range(len(input_shape)) if dim not in source]
        if gone:
            source[:0] = gone
            sizes[:0] = [input_shape[dim] for dim in gone]
    if not prod(target):
        # Rules of empty tensors may leave dims out (view_groups drops the empty ones): with no
        # elements, any order of dims will do.
        source, sizes = list(range(len(input_shape))), list(input_shape)
        if prod(sizes):
            source, sizes = [*source, None], [*sizes, 0]
    return View(input_shape, source, sizes, target, kept, home)

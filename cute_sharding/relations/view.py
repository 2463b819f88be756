"""A view as a layout from the output's flat index to the input's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from cute_sharding._words import counted
from cute_sharding.layout import Layout, make_layout
from cute_sharding.layout.layout import row_major


class View:
    """A view op on a tensor of a given shape, as *source dims* read in order under a target shape.

    ``source`` lists the input's dims in the order in which the output reads them, with None for a
    fresh dim that the output repeats or broadcasts over; ``sizes`` are their sizes and ``target``
    is the output shape, so ``prod(sizes) == prod(target)``. A permutation reorders the source, a
    reshape regroups it, and broadcasting adds to it: there is nothing else to a view op.

    ``kept`` maps each input dim that the view leaves whole to its output dim. ``home`` maps each
    input dim that the view repeats, broadcasts or splits in place to its output dim: there the
    local op computes the local shape itself, also for empty tensors. ``elements`` is the number of
    output elements. ``rank`` is the number of target dims that a placement may name: a trailing
    target dim beyond it (the two halves of a complex number, the bytes of a number) has no name.

    Raises:
        ValueError: ``sizes`` and ``target`` have different numbers of elements.

    >>> transpose = View((4, 6), source=(1, 0), sizes=(6, 4), target=(6, 4), kept={0: 1, 1: 0})
    >>> transpose.layout
    (6,4):(1,6)
    """

    __slots__ = (
        "__dict__",
        "elements",
        "home",
        "input_shape",
        "kept",
        "rank",
        "sizes",
        "source",
        "target",
    )

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
        self.home = {} if home is None else home
        self.rank = len(target) if rank is None else rank
        self.elements = prod(target)
        if prod(sizes) != self.elements:
            raise ValueError(
                f"the rule turns dims of sizes {tuple(sizes)} into shape {tuple(target)}, but the "
                "numbers of elements differ"
            )

    @classmethod
    def of_runs(cls, shape: Sequence[int], output: Sequence[int], k: int) -> View:
        """A view each of whose elements is ``k`` elements of the input's last dim, in units of the
        input's elements: the output ends in a dim of size ``k`` that has no name.

        >>> bytes_as_int32 = View.of_runs((2, 12), (2, 3), 4)
        >>> bytes_as_int32.output_shape, bytes_as_int32.target
        ((2, 3), (2, 3, 4))
        """
        ndim = len(shape)
        kept = {d: d for d in range(ndim - 1)}
        target = (*output, k)
        return cls(shape, range(ndim), tuple(shape), target, kept, rank=len(output))

    def of_sizes(self, value: Callable[[Any], Any]) -> View:
        """The view with ``value`` of its sizes, which takes tuples, in place of them."""
        shape, sizes, target = map(value, map(tuple, (self.input_shape, self.sizes, self.target)))
        return View(shape, self.source, sizes, target, self.kept, self.home, self.rank)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The output's shape, as the op's caller sees it."""
        return tuple(self.target[: self.rank])

    def position(self, dim: int) -> int:
        """The position of an input dim in the source.

        Raises:
            ValueError: there is no such dim.
        """
        try:
            return self.source.index(dim)
        except ValueError:
            raise ValueError(
                f"a placement shards dim {dim}, but the shape {tuple(self.input_shape)} has "
                f"{counted(len(self.input_shape), 'dim')}, counted from 0: use a dim of the shape"
            ) from None

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
    """The view that a DimMap describes, for an input of this shape.

    The DimMap may be ours or torch's (torch.distributed.tensor._ops._view_ops): specs are told
    apart by class name. Input dims that the DimMap leaves out are of size 1 (a view cannot drop
    elements) and come first in the source.

    Raises:
        TypeError: the DimMap has a spec of no known class.
        ValueError: the DimMap does not fit the shape.

    >>> from torch.distributed.tensor._ops._view_ops import view_groups
    >>> view_of((4, 6), view_groups((4, 6), (2, 2, 6))).target
    [2, 2, 6]
    """
    reading = _Reading(input_shape)
    source, sizes, target = reading.source, reading.sizes, reading.target
    kept: dict[int, int] = {}
    for spec in dim_map:
        read = _READERS[type(spec)]
        if read is _Reading.input_dim:
            kept[spec.input_dim] = len(target)
        target.append(read(reading, spec))
    if len(source) - source.count(None) < len(input_shape):
        gone = sorted(set(range(len(input_shape))).difference(source))
        source[:0] = gone
        sizes[:0] = [input_shape[dim] for dim in gone]
    if 0 in target:
        # Rules for empty tensors may leave dims out (view_groups drops the empty ones). Without
        # elements any order of dims will do.
        source, sizes = list(range(len(input_shape))), list(input_shape)
        if prod(sizes):
            source, sizes = [*source, None], [*sizes, 0]
    return View(input_shape, source, sizes, target, kept, reading.home)


class _Reading:
    """A DimMap while it is read: the source dims and output dims so far, as :class:`View` has them.
    Each method reads one kind of spec, appends its source dims, and returns its size.
    """

    __slots__ = ("home", "input_shape", "sizes", "source", "target")

    def __init__(self, input_shape: Sequence[int]) -> None:
        self.input_shape = input_shape
        self.source: list[int | None] = []
        self.sizes: list[int] = []
        self.target: list[int] = []
        self.home: dict[int, int] = {}

    def size_of(self, spec: Any) -> int:
        return _READERS[type(spec)](self, spec)

    def _made_in_place(self, spec: Any) -> None:
        """Record that the next output dim is made of that input dim alone."""
        if _READERS[type(spec)] is _Reading.input_dim:
            self.home[spec.input_dim] = len(self.target)

    def _fresh(self, size: int) -> None:
        self.source.append(None)
        self.sizes.append(size)

    def input_dim(self, spec: Any) -> int:
        dim = spec.input_dim
        n = self.input_shape[dim]
        self.source.append(dim)
        self.sizes.append(n)
        return n

    def split(self, spec: Any) -> int:
        if spec.split_id == 0:  # the group's first dim stands for the whole group
            n, group = self.size_of(spec.input_dim), prod(spec.group_shape)
            if n and group != n and group % n == 0:  # each element becomes several
                self._made_in_place(spec.input_dim)
                self._fresh(group // n)
        size: int = spec.group_shape[spec.split_id]
        return size

    def flatten(self, spec: Any) -> int:
        shape, source, sizes, n = self.input_shape, self.source, self.sizes, 1
        for spec_of_dim in spec.input_dims:
            dim = spec_of_dim.input_dim
            source.append(dim)
            sizes.append(shape[dim])
            n *= shape[dim]
        return n

    def singleton(self, spec: Any) -> int:
        return 1

    def repeat(self, spec: Any) -> int:
        self._made_in_place(spec.input_dim)
        self._fresh(spec.times)
        times: int = spec.times
        return times * self.size_of(spec.input_dim)

    def broadcast(self, spec: Any) -> int:
        self._made_in_place(spec.dim)
        self.size_of(spec.dim)
        self._fresh(spec.dim_size)
        size: int = spec.dim_size
        return size

    def new_dim(self, spec: Any) -> int:
        self._fresh(spec.size)
        size: int = spec.size
        return size

    def unknown(self, spec: Any) -> int:
        raise TypeError(
            f"unknown DimSpec {spec!r} in the rule: use one of {', '.join(sorted(_BY_NAME))}"
        )


_BY_NAME: dict[str, Callable[[_Reading, Any], int]] = {
    "InputDim": _Reading.input_dim,
    "Split": _Reading.split,
    "Flatten": _Reading.flatten,
    "Singleton": _Reading.singleton,
    "Repeat": _Reading.repeat,
    "Broadcast": _Reading.broadcast,
    "NewDim": _Reading.new_dim,
}


class _Readers(dict[type, Callable[[_Reading, Any], int]]):
    """The method that reads a spec, by the spec's class: ours, torch's, or another of that name."""

    def __missing__(self, kind: type) -> Callable[[_Reading, Any], int]:
        return self.setdefault(kind, _BY_NAME.get(kind.__name__, _Reading.unknown))


_READERS = _Readers()

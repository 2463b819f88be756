"""Views: a DimMap says which input dims each output dim is made of, and a view is its layout, from
the output's flat index to the input's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, TypeAlias

from cute_sharding._words import counted
from cute_sharding.layout import Layout, make_layout
from cute_sharding.layout.layout import row_major
from cute_sharding.layout.size import Size, expression, is_at_most, is_same

# -- dim map ---------------------------------------------------------------------------------------
# DimMaps: for each output dim of a view op, the input dims that it is made of.
#
# The specs and their normal forms are those of torch.distributed.tensor._ops._view_ops, so that
# each library can read the other's rules. The functions that build DimMaps are in the rows of the
# table (cute_sharding/relations/table/views.py). All are pure: they take shapes and arguments only.


class DimSpec:
    """How one output dim is made."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Singleton(DimSpec):
    """A dim of size 1, made of no input dim."""


@dataclass(frozen=True, slots=True)
class InputDim(DimSpec):
    """An input dim, unchanged."""

    input_dim: int


@dataclass(frozen=True, slots=True)
class Broadcast(DimSpec):
    """A dim of size 1 read ``dim_size`` times."""

    dim: DimSpec
    dim_size: int


@dataclass(frozen=True, slots=True)
class NewDim(DimSpec):
    """A dim that no input dim is part of."""

    size: int


@dataclass(frozen=True, slots=True)
class Repeat(DimSpec):
    """A dim repeated ``times`` times, one copy after the other."""

    input_dim: DimSpec
    times: int


@dataclass(frozen=True, slots=True)
class Flatten(DimSpec):
    """Several input dims joined to one, the last varying fastest."""

    input_dims: tuple[InputDim, ...]


@dataclass(frozen=True, slots=True)
class Split(DimSpec):
    """Dim ``split_id`` of a dim (maybe a Flatten) that is split into the shape ``group_shape``."""

    input_dim: DimSpec
    group_shape: tuple[int, ...]
    split_id: int


DimMap: TypeAlias = tuple[DimSpec, ...]

_SINGLETON = Singleton()


def _is_one(n: int) -> bool:
    """Whether ``n`` is known to be 1. If an unknown ``n`` is 1, the DimMap is only longer, and
    still right.
    """
    return n == 1 if type(n) is int else is_same(n, 1)


def repeat_of(dim: DimSpec, times: int) -> DimSpec:
    """``dim`` repeated ``times`` times; if its size is 1, a broadcast."""
    if _is_one(times):
        return dim
    return Broadcast(dim, times) if isinstance(dim, Singleton) else Repeat(dim, times)


def flatten_of(dims: tuple[InputDim, ...]) -> DimSpec:
    """The dims joined to one; no dims give a dim of size 1."""
    if len(dims) == 1:
        return dims[0]
    return Flatten(dims) if dims else _SINGLETON


def split_into(dim: DimSpec, sizes: Sequence[int]) -> list[DimSpec]:
    """The dims that ``dim`` gives when it is split into ``sizes``. Sizes 1 become singletons, and
    the group shapes of the other dims leave them out.
    """
    if len(sizes) == 1:
        return [dim]
    group = tuple([n for n in sizes if not _is_one(n)])
    result: list[DimSpec] = []
    split_id = 0
    for n in sizes:
        if _is_one(n):
            result.append(_SINGLETON)
        elif len(group) == 1:
            # A group of one stays a Split, so that all rules of one view give equal DimMaps.
            result.append(Split(dim, group, 0))
        else:
            result.append(Split(dim, group, split_id))
            split_id += 1
    return result


def normalize_dim(dim: int, ndim: int) -> int:
    """``dim`` counted from 0. A scalar counts as one dim, as in torch.

    Raises:
        IndexError: there is no such dim.
    """
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        raise IndexError(
            f"dim {dim} is out of range for a tensor of {ndim} dims: use {-bound} to {bound - 1}"
        )
    return dim % bound


def normalize_dims(dims: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """One dim or several, counted from 0.

    Raises:
        IndexError: there is no such dim.
        ValueError: a dim is named twice.
    """
    dims = (dims,) if isinstance(dims, int) else dims
    result = tuple([normalize_dim(d, ndim) for d in dims])
    if len(set(result)) != len(result):
        raise ValueError(f"dims {tuple(dims)} repeat a dim: give each dim once")
    return result


def _varargs(args: tuple) -> tuple[int, ...]:
    """The sizes, given one by one or as one sequence."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else tuple(args)


@lru_cache(maxsize=64)  # the same few, in every rule
def identity(ndim: int) -> tuple[InputDim, ...]:
    """Each input dim unchanged."""
    return tuple([InputDim(i) for i in range(ndim)])


# -- the rows --------------------------------------------------------------------------------------


def same(shape: Sequence[int]) -> DimMap:
    """A copy of the whole tensor: each dim unchanged."""
    return identity(len(shape))


def at_least(minimum: int):  # type: ignore[no-untyped-def]
    """atleast_1d and atleast_2d: adds dims of size 1 in front."""

    def dim_map(shape: Sequence[int]) -> DimMap:
        return (_SINGLETON,) * (minimum - len(shape)) + identity(len(shape))

    return dim_map


def at_least_3d(shape: Sequence[int]) -> DimMap:
    """atleast_3d: adds dims of size 1: around one dim, or behind two; a scalar gets three."""
    before, after = {0: (3, 0), 1: (1, 1), 2: (0, 1)}.get(len(shape), (0, 0))
    return (_SINGLETON,) * before + identity(len(shape)) + (_SINGLETON,) * after


def expand(shape: Sequence[int], *sizes: int | Sequence[int], implicit: bool = False) -> DimMap:
    """expand and broadcast_to; -1 keeps a dim's size."""
    target = _varargs(sizes)
    pad = len(target) - len(shape)
    if pad < 0:
        raise ValueError(
            f"cannot expand shape {tuple(shape)} to {target}: the target has fewer dims"
        )
    result: list[DimSpec] = []
    for j, size in enumerate(target):
        dim: DimSpec = _SINGLETON if j < pad else InputDim(j - pad)
        actual = 1 if j < pad else shape[j - pad]
        if (
            is_same(size, actual)
            or (size == -1 and j >= pad)
            or (not _is_one(actual) and size == actual)
        ):
            result.append(dim)
        elif actual != 1 or size < 0:
            raise ValueError(
                f"cannot expand shape {tuple(shape)} to {target}: output dim {j} cannot change "
                f"from size {actual} to size {size}"
            )
        else:
            result.append(Broadcast(dim, size))
    return tuple(result)


def flatten(shape: Sequence[int], start_dim: int = 0, end_dim: int = -1) -> DimMap:
    """flatten and ravel: joins the dims from ``start_dim`` to ``end_dim``, inclusive."""
    ndim = len(shape)
    if ndim == 0:
        return (_SINGLETON,)
    start, end = normalize_dim(start_dim, ndim), normalize_dim(end_dim, ndim)
    if start > end:
        raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    dims = identity(ndim)
    return (*dims[:start], flatten_of(dims[start : end + 1]), *dims[end + 1 :])


def unflatten(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> DimMap:
    """unflatten: splits ``dim`` into ``sizes``, of which one may be -1."""
    at = normalize_dim(dim, len(shape))
    dims = identity(len(shape))
    return (
        *dims[:at],
        *split_into(dims[at], list(infer_size(shape[at], tuple(sizes)))),
        *dims[at + 1 :],
    )


def movedim(
    shape: Sequence[int], source: int | Sequence[int], destination: int | Sequence[int]
) -> DimMap:
    """movedim: moves the dims ``source`` to ``destination``; the others keep their order."""
    ndim = len(shape)
    moved, to = normalize_dims(source, ndim), normalize_dims(destination, ndim)
    if len(moved) != len(to):
        raise ValueError(
            f"movedim has {counted(len(moved), 'source dim')} {source}, but "
            f"{counted(len(to), 'destination dim')} {destination}: give one destination dim for "
            "each source dim"
        )
    order = [d for d in range(ndim) if d not in moved]
    for d, j in sorted(zip(moved, to), key=lambda pair: pair[1]):
        order.insert(j, d)
    return tuple([InputDim(d) for d in order])


def permute(shape: Sequence[int], *dims: int | Sequence[int]) -> DimMap:
    """permute: reorders the dims."""
    order = normalize_dims(_varargs(dims), len(shape))
    if len(order) != len(shape):
        raise ValueError(
            f"permute has {counted(len(order), 'dim')} {order} for a tensor of "
            f"{counted(len(shape), 'dim')}: give each tensor dim once"
        )
    return tuple([InputDim(d) for d in order])


def repeat(shape: Sequence[int], *sizes: int | Sequence[int]) -> DimMap:
    """repeat: repeats each dim so many times; further numbers add dims in front."""
    times = _varargs(sizes)
    pad = len(times) - len(shape)
    if pad < 0:
        raise ValueError(
            f"repeat has {counted(len(times), 'number')} {times} for a tensor of "
            f"{counted(len(shape), 'dim')}: give at least one number for each dim"
        )
    dims = (_SINGLETON,) * pad + identity(len(shape))
    return tuple([repeat_of(dim, n) for dim, n in zip(dims, times)])


def tile(shape: Sequence[int], *dims: int | Sequence[int]) -> DimMap:
    """tile: :func:`repeat`, of the last dims if there are fewer numbers than dims."""
    times = _varargs(dims)
    return repeat(shape, (1,) * (len(shape) - len(times)) + times)


def squeeze(shape: Sequence[int], dim: int | Sequence[int] | None = None) -> DimMap:
    """squeeze: drops the dims of size 1, or those of them that are named."""
    chosen = range(len(shape)) if dim is None else normalize_dims(dim, len(shape))
    return tuple(
        [
            InputDim(i)
            for i, n in enumerate(shape)
            if i not in chosen or (n != 1 if type(n) is int else not is_at_most(n, 1))
        ]
    )


def unsqueeze(shape: Sequence[int], dim: int) -> DimMap:
    """unsqueeze: inserts a dim of size 1 before ``dim``."""
    at = normalize_dim(dim, len(shape) + 1)
    dims = identity(len(shape))
    return (*dims[:at], _SINGLETON, *dims[at:])


def transpose(shape: Sequence[int], dim0: int, dim1: int) -> DimMap:
    """transpose: swaps two dims; a scalar stays."""
    dims = list(identity(len(shape)))
    if dims:
        a, b = normalize_dim(dim0, len(shape)), normalize_dim(dim1, len(shape))
        dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


def turned(shape: Sequence[int]) -> DimMap:
    """t: swaps the dims of a matrix; a vector stays."""
    return identity(len(shape))[::-1]


def view_as_real(shape: Sequence[int]) -> DimMap:
    """torch's rule, in units of real numbers: splits each complex number, an element of the last
    dim, into two. A scalar has no dim to split: its two numbers are a new dim.
    """
    if not shape:
        return (NewDim(2),)
    last = InputDim(len(shape) - 1)
    group = (shape[-1], 2)
    return (*identity(len(shape) - 1), Split(last, group, 0), Split(last, group, 1))


def infer_size(numel: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """``sizes`` with a -1 replaced by what makes the product ``numel``."""
    if -1 not in sizes:
        if prod(sizes) != numel:
            raise ValueError(
                f"shape {sizes} has {prod(sizes)} elements, but the tensor has {numel}"
            )
        return sizes
    unknown = [i for i, n in enumerate(sizes) if n == -1]
    known = prod([n for n in sizes if n != -1])
    if len(unknown) > 1:
        raise ValueError(f"shape {sizes} has {len(unknown)} sizes of -1: give at most one")
    if known == 0 or numel % known:
        raise ValueError(
            f"the -1 in shape {sizes} cannot be inferred for {numel} elements, because the product "
            f"of the other sizes is {known}"
        )
    return tuple([numel // known if n == -1 else n for n in sizes])


def reshape(shape: Sequence[int], *sizes: int | Sequence[int]) -> DimMap:
    """view and reshape: both shapes are divided into the smallest runs of dims with equal products;
    each run is flattened and split.
    """
    target = infer_size(prod(shape), _varargs(sizes))
    if Size in map(type, shape) or Size in map(type, target):
        return _regrouped(shape, target)
    result: list[DimSpec] = []
    i, j, ndim, out = 0, 0, len(shape), len(target)
    dims = identity(ndim)
    while i < ndim and j < out:
        f, t = shape[i], target[j]
        if f == t:
            result.append(dims[i])
            i, j = i + 1, j + 1
        elif f == 1:
            i += 1
        elif t == 1:
            result.append(_SINGLETON)
            j += 1
        else:
            first, start = i, j
            i, j = i + 1, j + 1
            while f != t:
                if i < ndim and (j >= out or f < t or t == 0):
                    f *= shape[i]
                    i += 1
                elif j < out:
                    t *= target[j]
                    j += 1
                else:
                    break
            if f != t:  # the zeros of an empty tensor's shape need not match up
                result += [_SINGLETON if n == 1 else NewDim(n) for n in target[start:j]]
                continue
            dim = Flatten(dims[first:i]) if i > first + 1 else dims[first]
            group = target[start:j]
            if j == start + 1:
                result.append(dim)
            elif 1 in group:
                result += split_into(dim, group)
            else:
                result += [Split(dim, group, split_id) for split_id in range(j - start)]
    while j < out:  # sizes of 1, as the rest of the input's are (or the tensor is empty)
        result.append(_SINGLETON if target[j] == 1 else NewDim(target[j]))
        j += 1
    return tuple(result)


def _regrouped(shape: Sequence[int], target: Sequence[int]) -> DimMap:
    """:func:`reshape` if some sizes are unknown: a run ends where as many elements of the input as
    of the output are known to come before. No guard is set.
    """
    if is_same(prod(target), 0):
        return tuple(
            [_SINGLETON if _is_one(n) else NewDim(n) for n in target]
        )  # no elements to say how dims match

    def ends(sizes: Sequence[int]) -> dict[Any, int]:
        """The number of elements up to the end of each dim -> the number of dims up to it."""
        return {expression(prod(sizes[: i + 1])): i + 1 for i in range(len(sizes))}

    dims = [d for d, n in enumerate(shape) if not _is_one(n)]
    parts = [n for n in target if not _is_one(n)]
    reached = ends([shape[d] for d in dims])
    runs: list[tuple[int, list[DimSpec]]] = []  # the first input dim after a run; its output dims
    i, j = 0, 0
    for elements, end in [*ends(parts).items(), (None, len(parts))]:
        to = len(dims) if elements is None else reached.get(elements)
        if to is not None and j < end:
            runs.append(
                (
                    dims[to - 1] + 1 if to else 0,
                    split_into(flatten_of(tuple([InputDim(d) for d in dims[i:to]])), parts[j:end]),
                )
            )
            i, j = to, end
    result: list[DimSpec] = []
    at, left = 0, iter(runs)
    made: list[DimSpec] = []
    for n in target:
        if not _is_one(n):
            if not made:
                after, made = next(left)
                at = max(at, after)
            result.append(made.pop(0))
        elif not made and at < len(shape) and _is_one(shape[at]):
            result.append(InputDim(at))
            at += 1
        else:
            result.append(_SINGLETON)
    return tuple(result)


# -- view ------------------------------------------------------------------------------------------
# A view as a layout from the output's flat index to the input's.


class View:
    """A view op on a tensor of a given shape, as *source dims* read in order under a target shape.

    ``source`` lists the input's dims in the order in which the output reads them, with None for a
    fresh dim that the output repeats or broadcasts over; ``sizes`` are their sizes and ``target``
    is the output shape, so ``prod(sizes) == prod(target)``. A permutation reorders the source, a
    reshape regroups it, and broadcasting adds to it: there is nothing else to a view op.

    ``kept`` maps each input dim that the view leaves whole to its output dim. ``home`` maps each
    input dim that the view repeats, broadcasts or splits in place to its output dim: there the
    local op computes the local shape itself, also for empty tensors. ``elements`` is the number of
    output elements, ``repeats`` whether it reads some of the input several times, or by halves.
    ``rank`` is the number of target dims that a placement may name: a trailing target dim beyond it
    (the two halves of a complex number, the bytes of a number) has no name.

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
        self.repeats = not all(_is_one(n) for d, n in zip(source, sizes) if d is None)
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

"""DimMaps: for each output dim of a view op, the input dims that it is made of.

The specs and their normal forms are those of torch.distributed.tensor._ops._view_ops, so that each
library can read the other's rules. The functions that build DimMaps are in the rows of the table
(cute_sharding/relations/table/views.py). All are pure: they take shapes and arguments only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

from cute_sharding._words import counted
from cute_sharding.layout.size import Size, expression, is_at_most, is_same


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

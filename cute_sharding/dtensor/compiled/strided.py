"""Views by size and stride: what a compiled program knows of the views of its inputs that it
returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.replaced import tensor_specs


class Steps(NamedTuple):
    """A permutation of the tensor, a shape for that, a permutation of the result (of which some
    dims are of size 1), and the shape to expand it to.
    """

    first: tuple[int, ...]
    shape: tuple[int, ...]
    then: tuple[int, ...]
    size: tuple[int, ...]


def steps(
    size: Sequence[int], stride: Sequence[int], new_size: Sequence[int], new_stride: Sequence[int]
) -> Steps | None:
    """The views that lead from a tensor of one size and stride to those of another with the same
    storage; None where none do.

    As layouts: both must be permutations of one row-major layout, the new one with dims of stride 0
    beside.
    """
    first = _outermost_first(size, stride)
    read = [d for d in range(len(new_size)) if new_stride[d] or new_size[d] == 1]
    order = [
        read[i]
        for i in _outermost_first([new_size[d] for d in read], [new_stride[d] for d in read])
    ]
    order += [d for d in range(len(new_size)) if d not in read]  # of size 1, to be expanded
    shape = [new_size[d] if d in read else 1 for d in order]
    if prod(shape) != prod(size) or not _is_compact(
        [size[d] for d in first], [stride[d] for d in first]
    ):
        return None
    if not _is_compact(shape, [new_stride[d] for d in order]):
        return None
    return Steps(
        tuple(first),
        tuple(shape),
        tuple([order.index(d) for d in range(len(order))]),
        tuple(new_size),
    )


def _outermost_first(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dims by descending stride; those of size 1, whose stride says nothing, in front."""
    return sorted(range(len(size)), key=lambda d: (size[d] != 1, -stride[d]))


def _is_compact(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for n, d in zip(reversed(size), reversed(stride)):
        if n != 1:
            if d != expected:
                return False
            expected *= n
    return True


class Rows(NamedTuple):
    """Of each dim of a tensor the step between the rows that are taken and how many these are, or
    None where one row is taken and the dim is gone; a permutation of the dims that are left; and
    the places of dims of one row among those of the result.
    """

    taken: tuple[tuple[int, int] | None, ...]
    then: tuple[int, ...]
    new: tuple[int, ...]


def rows(
    size: Sequence[int], stride: Sequence[int], new_size: Sequence[int], new_stride: Sequence[int]
) -> Rows | None:
    """The slices that lead from a tensor of one size and stride to those of another, wherever they
    begin; None where none do.

    >>> rows((3, 8, 6), (48, 6, 1), (3, 6), (54, 1))  # a diagonal
    >>> rows((3, 8, 6), (48, 6, 1), (3, 8, 1), (2, 6, 1))
    Rows(taken=(None, (1, 8), (2, 3)), then=(1, 0), new=(2,))
    """
    taken: list[tuple[int, int] | None] = [None] * len(size)
    of: list[int] = []
    for n, step in zip(new_size, new_stride):
        if n == 1:
            continue
        inside = [d for d in range(len(size)) if size[d] != 1 and 0 < stride[d] <= step]
        d = max(inside, key=lambda d: stride[d], default=None)
        if d is None or step % stride[d] or n * step > size[d] * stride[d] or d in of:
            return None
        taken[d] = step // stride[d], n
        of.append(d)
    left = sorted(of)
    new = [e for e, n in enumerate(new_size) if n == 1]
    return Rows(tuple(taken), tuple([left.index(d) for d in of]), tuple(new))


def as_view(tensor: Any, like: Any) -> torch.Tensor | None:
    """The view of a DTensor that has the global size and stride of another, and its local tensor;
    None where it is no chain of views.
    """
    size, stride = tuple(like.shape), tuple(like.stride())
    if not prod(size) and not tensor.numel():
        return tensor.view(size)
    found = steps(tuple(tensor.shape), tuple(tensor.stride()), size, stride)
    if found is None or like.storage_offset() != tensor.storage_offset():
        return _of_rows(tensor, like)
    return tensor.permute(found.first).view(found.shape).permute(found.then).expand(found.size)


def _of_rows(tensor: Any, like: Any) -> torch.Tensor | None:
    """The slices of dims that are not cut, which a device has of its own rows. Where they begin the
    local tensor tells; that of a device without elements may tell what it likes.
    """
    found = rows(tuple(tensor.shape), tuple(tensor.stride()), tuple(like.shape), like.stride())
    cut = [tensor_specs.cut_of(p) for p in tensor.placements]
    whole = {d: (1, tensor.shape[d]) for d, _ in filter(None, cut)}
    if found is None or any(found.taken[d] != all_of for d, all_of in whole.items()):
        return None
    local, wanted = tensor._local_tensor, like._local_tensor
    begin = wanted.storage_offset() - local.storage_offset() if wanted.numel() else 0
    index: list[slice | int] = [slice(None)] * tensor.ndim
    for d in sorted(set(range(tensor.ndim)) - whole.keys(), key=lambda d: -local.stride(d)):
        first, begin = divmod(begin, max(local.stride(d), 1)) if tensor.shape[d] > 1 else (0, begin)
        step, n = found.taken[d] or (1, 1)
        if not 0 <= first <= first + step * (n - 1) < tensor.shape[d]:
            return None
        last = first + step * (n - 1) + 1
        index[d] = first if found.taken[d] is None else slice(first, last, step)
    view = tensor[tuple(index)].permute(found.then)
    for d in found.new:
        view = view.unsqueeze(d)
    return view if _is_same(view._local_tensor, wanted) else None


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they are the same elements in the same memory."""
    strides = [(x, y) for n, x, y in zip(a.shape, a.stride(), b.stride()) if n != 1]
    return a.shape == b.shape and (
        not a.numel() or (a.data_ptr() == b.data_ptr() and all(x == y for x, y in strides))
    )

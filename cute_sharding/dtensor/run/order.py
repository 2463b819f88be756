"""Lays out local tensors by the strides of their DTensor, on every rank.

The global strides decide whether a view is legal, but the view then runs on the local tensors. A
collective's result is row-major, whatever the global strides are, and torch leaves it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import collective_ops, dispatch_modes, symints
from cute_sharding.dtensor.replaced.tensor_specs import TensorMeta
from cute_sharding.dtensor.run.ranks import on_each_rank
from cute_sharding.layout.layout import row_major

# The row-major order, by the number of dims; no tensor has more.
_ROWS = tuple([tuple(range(count)) for count in range(65)])


def lay_out(local: torch.Tensor, meta: Any) -> torch.Tensor:
    """The local tensor without gaps, its dims in the memory order of the whole, whose TensorMeta is
    ``meta``: itself if it is laid out like this, and else a copy.
    """
    return lie_in(local, order_of(meta))


def lie_in(local: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The local tensor without gaps, its dims in this order, as from :func:`order_of`: itself if it
    is laid out like this or has another number of dims, and else a copy.
    """
    if order is None or len(order) != local.ndim:
        return local
    if type(local) is torch.Tensor or dispatch_modes.local_tensor_mode() is None:
        lies = collective_ops.in_flight(local)
        if (lies if order == _ROWS[len(order)] else lies.permute(order)).is_contiguous():
            return local
    back = sorted(range(len(order)), key=order.__getitem__)
    return on_each_rank(
        lambda _, x: x.permute(order).contiguous().permute(back), collective_ops.wait_for(local)
    )


def order_of(meta: Any) -> tuple[int, ...] | None:
    """The dims from the outermost in memory to the innermost; None if the TensorMeta is None, or a
    symbolic size has no value yet.

    For symbolic strides it is the order of the numbers at hand. Other sizes have another order only
    if one of them is 0 or 1, and no symbol is.
    """
    if meta is None:
        return None
    try:
        return memory_order(meta.shape, meta.stride)
    except TypeError:  # the cache cannot look up symbols
        numbers = symints.numbers_at_hand((tuple(meta.shape), tuple(meta.stride)))
    return None if numbers is None else memory_order(*numbers)


@remembered
def memory_order(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[int, ...]:
    """The dims from the outermost to the innermost, as ``clone()`` orders them (infer_dense_strides
    of aten/src/ATen/ExpandUtils.cpp), and pointwise ops with several operands
    (reorder_dimensions of TensorIterator.cpp). Two dims are compared by stride, then by size; the
    first operand that tells them apart decides. Expanded dims, of stride 0, keep their place.

    >>> memory_order((12, 8), (1, 12)), memory_order((4, 8), (0, 1))
    ((1, 0), (0, 1))
    >>> memory_order((4, 8), (0, 1), (1, 4))
    (1, 0)
    """
    order = list(reversed(range(len(sizes))))
    for last in range(1, len(order)):
        at = last
        for before in reversed(range(last)):
            inner, dim = order[before], order[at]
            if (found := _compared(inner, dim, sizes, strides)) > 0:
                order[before], order[at] = dim, inner
                at = before
            elif found < 0:
                break
    return tuple(reversed(order))


def _compared(inner: int, dim: int, sizes: Sequence[int], operands: Sequence[Sequence[int]]) -> int:
    """Below 0 if ``inner`` lies within ``dim``, above 0 for the reverse, 0 if undecided."""
    for strides in operands:
        if strides[inner] and strides[dim]:
            if strides[inner] != strides[dim]:
                return -1 if strides[inner] < strides[dim] else 1
            if sizes[inner] > sizes[dim]:
                return 1
    return 0


def lies_row_by_row(meta: TensorMeta) -> bool:
    """Whether the tensor is row-major without gaps."""
    rows = row_major(tuple(meta.shape))
    return all(n == 1 or a == b for n, a, b in zip(meta.shape, meta.stride, rows))


def lying_apart(meta: TensorMeta) -> TensorMeta:
    """The TensorMeta of a copy: the same, unless elements share memory, as overlapping windows do;
    then with strides in the same order under which they do not. A view of such windows may be legal
    with their own strides, but not with those of a copy.

    >>> meta = TensorMeta(torch.Size((5, 2)), (1, 1), torch.float32)
    >>> lying_apart(meta).stride
    (2, 1)
    """
    strides, step = list(meta.stride), 1
    for d in reversed(memory_order(tuple(meta.shape), tuple(meta.stride))):
        if meta.shape[d] > 1:
            strides[d] = max(strides[d], step)
            step = strides[d] * meta.shape[d]
    if 0 in meta.stride or tuple(strides) == tuple(meta.stride):
        return meta
    return TensorMeta(meta.shape, tuple(strides), meta.dtype)

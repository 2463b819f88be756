"""Views by size and stride: what a compiled program knows of the views of its inputs that it
returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch


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


def as_view(
    tensor: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int
) -> torch.Tensor | None:
    """The view of a DTensor that has this global size and stride; None where it is no chain of
    views.
    """
    if storage_offset != tensor.storage_offset():
        return None
    if not prod(size) and not tensor.numel():
        return tensor.view(size)
    found = steps(tuple(tensor.shape), tuple(tensor.stride()), size, stride)
    if found is None:
        return None
    return tensor.permute(found.first).view(found.shape).permute(found.then).expand(found.size)

"""``as_strided`` as views that other rows of the table know: permutations, slices, windows.

Each result dim is a mode ``n:stride`` of the tensor's memory. A mode that is a whole dim of the
tensor, inside of whose rows the inner modes stay, is that dim: it may be sharded. The others are
windows of the inner dims, flattened: ``n`` windows that start ``stride`` elements apart, each as
long as the modes inside of it reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

STRIDED = "as_strided.default"


class MethodCall(NamedTuple):
    """A method of a tensor, and its arguments."""

    name: str
    args: tuple


def calls_of_strided(
    shape: Sequence[int],
    strides: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int = 0,
) -> list[MethodCall] | None:
    """The calls, one after the other, that give ``x.as_strided(size, stride)`` of a tensor with
    this shape and these strides, ``offset`` elements after its first. None if the result reads
    memory that is not the tensor's, or in no such way.

    >>> calls_of_strided((2, 32), (32, 1), (2, 7, 8), (32, 4, 1))
    [MethodCall(name='unfold', args=(1, 8, 4))]
    """
    if 0 in (*shape, *size) or len(size) != len(stride) or min((0, offset, *stride)) < 0:
        return None
    order = sorted(range(len(shape)), key=lambda d: (shape[d] == 1, -strides[d]))
    dims = [(shape[d], strides[d]) for d in order if shape[d] > 1]
    calls = [MethodCall("permute", (tuple(order),))] if order != [*range(len(shape))] else []
    ones = tuple(range(len(dims), len(shape)))
    calls += [MethodCall("squeeze", (ones,))] if ones else []
    modes = [k for k, (n, step) in enumerate(zip(size, stride)) if n > 1 and step]
    modes.sort(key=lambda k: (-stride[k], size[k]))
    reach = [offset + sum((size[k] - 1) * stride[k] for k in modes[i:]) for i in range(len(modes))]
    reach.append(offset)
    kept = 0
    while (
        kept < min(len(modes), len(dims))
        and (size[modes[kept]], stride[modes[kept]]) == dims[kept]
        and reach[kept + 1] < dims[kept][1]
    ):
        kept += 1
    inner = dims[kept:]
    if inner:
        found = _windows(kept, inner, [(size[k], stride[k]) for k in modes[kept:]], offset)
        if found is None:
            return None
        calls += found
    elif modes[kept:] or offset:
        return None
    calls += _placed(size, modes)
    return calls


def _windows(
    at: int, dims: Sequence[tuple[int, int]], modes: Sequence[tuple[int, int]], offset: int
) -> list[MethodCall] | None:
    """The calls that make these modes of the dims from ``at`` on, flattened."""
    unit, length = dims[-1][1], 1
    for n, step in reversed(dims):
        if step != unit * length:
            return None
        length *= n
    if offset % unit or any(step % unit for _, step in modes):
        return None
    calls = [MethodCall("flatten", (at,))] if len(dims) > 1 else []
    steps = [step // unit for _, step in modes]
    spans = [
        1 + sum((n - 1) * step for (n, _), step in zip(modes[i:], steps[i:]))
        for i in range(len(modes) + 1)
    ]
    if offset // unit + spans[0] > length:
        return None
    if spans[0] < length:
        calls.append(MethodCall("narrow", (at, offset // unit, spans[0])))
    if not modes:
        return [*calls, MethodCall("squeeze", (at,))]
    for i, step in enumerate(steps[:-1]):
        calls.append(MethodCall("unfold", (at + i, spans[i + 1], step)))
    if steps[-1] > 1:
        last = at + len(modes) - 1
        calls += [MethodCall("unfold", (last, 1, steps[-1])), MethodCall("squeeze", (last + 1,))]
    return calls


def _placed(size: Sequence[int], modes: Sequence[int]) -> list[MethodCall]:
    """The calls that bring these modes to their places, among dims that are one row repeated."""
    calls = []
    in_order = sorted(modes)
    if in_order != [*modes]:
        calls.append(MethodCall("permute", (tuple([modes.index(k) for k in in_order]),)))
    others = [k for k in range(len(size)) if k not in modes]
    calls += [MethodCall("unsqueeze", (k,)) for k in others]
    if any(size[k] > 1 for k in others):
        calls.append(MethodCall("expand", (tuple(size),)))
    return calls

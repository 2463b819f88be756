"""Finds memory that is both read and written by one run: what is written early may be read late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch


class Meeting(NamedTuple):
    """A tensor that is written to memory from which another one is read.

    Attributes:
        read, written: their keys.
        onto: the tensor that is written.
    """

    read: int
    written: int
    onto: torch.Tensor


class _Span(NamedTuple):
    start: int
    end: int
    number: int
    tensor: torch.Tensor
    is_written: bool


def meetings(
    read: Mapping[int, torch.Tensor], written: Mapping[int, Sequence[torch.Tensor]]
) -> Iterator[Meeting]:
    """All meetings of contiguous tensors, by their keys. (Strided ones may interleave.)

    >>> memory = torch.zeros(8)
    >>> read, written = {0: memory[:4], 1: memory[4:]}, {0: [torch.zeros(4)], 1: [memory[3:5]]}
    >>> [(each.read, each.written) for each in meetings(read, written)]
    [(0, 1), (1, 1)]
    """
    spans = [*_spans(((i, x) for i, x in read.items()), is_written=False)]
    spans += _spans(((i, x) for i, some in written.items() for x in some), is_written=True)
    open_: list[_Span] = []
    for span in sorted(spans, key=lambda each: each.start):
        open_ = [each for each in open_ if each.end > span.start]
        for each in open_:
            if each.is_written != span.is_written:
                one, other = (span, each) if each.is_written else (each, span)
                yield Meeting(one.number, other.number, other.tensor)
        open_.append(span)


def _spans(tensors: Iterator[tuple[int, torch.Tensor]], *, is_written: bool) -> Iterator[_Span]:
    for i, x in tensors:
        if x.numel() and not x.is_meta and x.is_contiguous():
            start = x.data_ptr()
            yield _Span(start, start + x.numel() * x.element_size(), i, x, is_written)


def lie_alike(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same memory: no copy is needed."""
    return (
        one is not None
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    )

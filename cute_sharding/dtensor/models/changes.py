"""What has changed of the elements of one message: where and what, or all of them where that is
less.

A message of n elements is gone through in the order in which it is packed, in blocks of 65,536. Of
those that differ by their bits the values are sent, how many there are in each block, in 4 bytes,
and where in its block each of them is, in 2. Whether that is less follows from their number, so it
is all that the receiver has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from cute_sharding.dtensor.run.packing import read, write
from cute_sharding.exchange.flow import Copy, cut_up, flat

BLOCK = 1 << 16
# So many elements are compared at a time.
PIECE = 1 << 18
# The number that says that all elements are sent.
ALL = -1


def bytes_of(count: int, size: int, width: int) -> int:
    """What is sent of a message of ``size`` elements of ``width`` bytes, of which ``count`` have
    changed.

    >>> bytes_of(0, 1000, 2), bytes_of(10, 1000, 2), bytes_of(600, 1000, 2), bytes_of(ALL, 1000, 2)
    (0, 44, 2000, 2000)
    """
    if not count:
        return 0
    found = count * (width + 2) + _blocks(size) * 4
    return size * width if count == ALL else min(found, size * width)


def _is_whole(count: int, size: int, width: int) -> bool:
    return bytes_of(count, size, width) == size * width


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def changes(
    copies: Sequence[Copy], now: torch.Tensor, before: torch.Tensor | None, dtype: torch.dtype
) -> tuple[int, list[torch.Tensor]]:
    """How many elements of a message have changed, and what is sent of it, as bytes.

    Args:
        copies: into a buffer, one behind the other.
        now, before: the tensor, and what it was when it was sent last; None: all is sent.
        dtype: of elements on their way: what differs is what they are there.
    """
    size = sum(prod(copy.sizes) for copy in copies)
    found = None if before is None else _differing(copies, now, before, dtype, size)
    if found is None:
        buffer = torch.empty(size, dtype=dtype, device=now.device)
        for copy in copies:
            write(copy, now, buffer)
        return ALL, [buffer.view(torch.uint8)]
    places, values = found
    if not len(places):
        return 0, []
    counts = torch.bincount(places // BLOCK, minlength=_blocks(size)).to(torch.int32)
    within = (places % BLOCK).to(torch.uint16)
    return len(places), [x.view(torch.uint8).view(-1) for x in (values, counts, within)]


def _differing(
    copies: Sequence[Copy],
    now: torch.Tensor,
    before: torch.Tensor,
    dtype: torch.dtype,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Where in the message something has changed, ascending, and what is there now, as words; None:
    it is not less than all.
    """
    places, values, count = [], [], 0
    for piece in (piece for copy in copies for piece in cut_up(copy, PIECE)):
        ours, theirs = (_words(read(x, piece).to(dtype).reshape(-1)) for x in (now, before))
        unlike = ours != theirs
        differs = _where(unlike.any(-1) if unlike.shape[1] > 1 else unlike.view(-1))
        count += len(differs)
        if _is_whole(count, size, dtype.itemsize):
            return None
        places.append(differs + piece.y[0])
        values.append(ours[differs])
    device = now.device
    return (
        torch.cat(places or [torch.empty(0, dtype=torch.int64, device=device)]),
        torch.cat(values or [torch.empty(0, dtype=torch.int64, device=device)]),
    )


def _where(true: torch.Tensor) -> torch.Tensor:
    """The places at which it is true, ascending: few, so eight are looked at together."""
    whole = len(true) - len(true) % 8
    eights = true[:whole].view(torch.int64).nonzero().view(-1)
    which, at = true[:whole].view(-1, 8)[eights].nonzero(as_tuple=True)
    return torch.cat([eights[which] * 8 + at, true[whole:].nonzero().view(-1) + whole])


def _words(line: torch.Tensor) -> torch.Tensor:
    """Elements in a row as whole numbers of their bits: torch compares, and has places for, these
    of any dtype. Those of 16 bytes are two.
    """
    width = line.element_size()
    if line.stride(-1) != 1:  # a single one may have any stride
        line = line.clone(memory_format=torch.contiguous_format)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(width, torch.int64)
    return line.view(word).view(-1, max(width // 8, 1))


def write_changes(
    copies: Sequence[Copy],
    received: torch.Tensor,
    count: int,
    into: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Write what has come of a message, ``count`` changes or all, into what it was sent of before.

    Args:
        copies: out of a buffer, one behind the other.
        received: bytes.
    """
    size = sum(prod(copy.sizes) for copy in copies)
    if _is_whole(count, size, dtype.itemsize):
        buffer = _aligned(received, dtype)
        for copy in copies:
            write(copy, buffer, into)
    elif count:
        split = [count * dtype.itemsize, _blocks(size) * 4, count * 2]
        values, counts, within = received.split(split)
        starts = torch.arange(0, size, BLOCK, device=into.device)
        places = starts.repeat_interleave(_aligned(counts, torch.int32).long(), output_size=count)
        places += _aligned(within, torch.uint16).long()
        _put(copies, places, _words(_aligned(values, dtype).to(into.dtype)), into)


def _aligned(received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements: they may begin anywhere."""
    elements = torch.empty(len(received) // dtype.itemsize, dtype=dtype, device=received.device)
    elements.view(torch.uint8).copy_(received)
    return elements


def _put(
    copies: Sequence[Copy], places: torch.Tensor, values: torch.Tensor, into: torch.Tensor
) -> None:
    """Write elements at those places of the message where they are in the tensor."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(into.shape, into.stride()))
    line = _words(into.as_strided((reach,), (1,), into.storage_offset()))
    ends = torch.tensor([copy.x[0] + prod(copy.sizes) for copy in copies], device=places.device)
    highs: list[int] = torch.searchsorted(places, ends).tolist()
    for copy, low, high in zip(copies, [0, *highs], highs):
        rest = places[low:high] - copy.x[0]
        at = torch.full_like(rest, flat(copy.y, into.stride()))
        for n, step in zip(reversed(copy.sizes), reversed(copy.dy)):
            at += rest % n * flat(step, into.stride())
            rest = rest // n
        line[at] = values[low:high]

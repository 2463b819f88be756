"""What devices send to one another in an exchange, and the flat buffers that it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.copies import Copy, from_runs, in_place, packed
from cute_sharding.layout.layout import row_major
from cute_sharding.sharding.meeting import Runs, count_rows


class Message(NamedTuple):
    """What one device sends to another: the box of these rows, x on the sender and y on the
    receiver.
    """

    runs: tuple[Runs, ...]

    @property
    def size(self) -> int:
        """In elements."""
        return prod(map(count_rows, self.runs))

    @property
    def boxes(self) -> list[Copy]:
        """As copies, one for each choice of one run of each dim."""
        return [from_runs(runs) for runs in product(*self.runs)]


class Buffer(NamedTuple):
    """Messages one after the other in a flat buffer: their sizes, and the copies from a tensor (x)
    to the buffer (y), or, flipped, the other way.
    """

    sizes: tuple[int, ...]
    copies: list[Copy]


def one_by_one(messages: Sequence[Message | None], *, into: bool) -> Buffer:
    """Messages one after the other in a flat buffer; ``into``: those that the tensor is made of."""
    sizes, copies, at = [], [], 0
    for message in messages:
        begin = at
        for copy in message.boxes if message is not None else ():
            copies.append(packed(copy.flipped if into else copy, at))
            at += prod(copy.sizes)
        sizes.append(at - begin)
    return Buffer(tuple(sizes), copies)


def as_they_lie(
    whole: Sequence[Buffer],
    own: Message,
    source_shape: tuple[int, ...],
    target_shape: tuple[int, ...],
    *,
    at_once: bool,
) -> tuple[bool, bool]:
    """Whether the source is to be the send buffer and the receive buffer the target, as they
    lie. That needs no copy, but its own part then travels along: worth it where less is its own
    than would be copied, and within memory. ``at_once``: in one round.
    """
    sending, receiving = whole
    sent, got, kept = sum(sending.sizes), sum(receiving.sizes), own.size
    alone = len(sending.sizes) == 1
    pack_free = at_once and (alone or 2 * kept < sent) and _lies_as(sending, source_shape)
    unpack_free = at_once and (alone or 2 * kept < got) and _lies_as(receiving, target_shape)
    if unpack_free and not pack_free and sent > max(prod(source_shape), got):
        unpack_free = alone
    return pack_free, unpack_free


def _lies_as(buffer: Buffer, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of that shape, as it lies, is the buffer."""
    return sum(buffer.sizes) == prod(shape) and in_place(buffer.copies, row_major(shape))

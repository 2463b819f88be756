"""Messages of one tensor that are sent by themselves, beside the packed ones of many tensors.

A tensor's message is sent by itself if it is long and is one run of memory in the source or in the
target, so that it need not be copied there. Sender and receiver decide alike, from the exchange
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.exchange import Exchange
from cute_sharding.exchange.flow import Copy, Message, fold, run_of
from cute_sharding.exchange.part import Shape
from cute_sharding.layout.layout import row_major

ByPeer: TypeAlias = "Mapping[int, list[Message]]"

# The least bytes of a long message: to copy more takes longer than another message does.
LONG = 2 << 20


class Single(NamedTuple):
    """A message of one tensor that is sent by itself, as one of its two ranks sees it.

    Attributes:
        peer: the other rank.
        size: in elements.
        start: the start of its run in this rank's contiguous tensor; None: it is no run there.
        copies: between the tensor and a buffer of the message's own.
        is_run: whether it is a run in the sender's tensor. Those that are go first.
    """

    peer: int
    size: int
    start: int | None
    copies: tuple[Copy, ...]
    is_run: bool


class Alone(NamedTuple):
    """The messages of one tensor that a rank sends and receives by themselves."""

    sent: tuple[Single, ...] = ()
    taken: tuple[Single, ...] = ()


def messages_alone(
    exchange: Exchange,
    rank: int,
    sides: tuple[ByPeer, ByPeer],
    least: int,
    as_they_are: tuple[bool, bool],
) -> Alone:
    """The messages of one tensor that a rank sends and receives by themselves.

    Args:
        least: the number of elements from which a message is long.
        as_they_are: whether elements travel as they are in the source, and as they are in the
            target; otherwise they are cast there, and so copied.
    """
    if not any(as_they_are):
        return Alone()
    found: list[tuple[Single, ...]] = []
    for by_peer, is_sent in zip(sides, (True, False)):
        some = []
        for peer, messages in by_peer.items():
            if sum(message.size for message in messages) >= least:
                ends = (rank, peer) if is_sent else (peer, rank)
                starts = _starts(exchange, ends, messages, as_they_are)
                if starts != (None, None):
                    some.append(_single(peer, messages, starts, is_sent))
        found.append(tuple(some))
    return Alone(*found)


def _starts(
    exchange: Exchange,
    ends: tuple[int, int],
    messages: Sequence[Message],
    as_they_are: tuple[bool, bool],
) -> tuple[int | None, int | None]:
    """The start of the message if it is a run: in its sender's tensor, in its receiver's tensor."""
    into, out_of = (in_a_row(messages, is_sent=is_sent) for is_sent in (True, False))
    source, target = exchange.sources[0], exchange.targets[0]
    return (
        _start(into, source.local_shape(ends[0])) if as_they_are[0] else None,
        _start([c.flipped for c in out_of], target.local_shape(ends[1]))
        if as_they_are[1]
        else None,
    )


def _start(copies: Sequence[Copy], shape: Shape | None) -> int | None:
    if shape is None:
        return None
    return run_of(copies, row_major(shape))


def _single(
    peer: int, messages: Sequence[Message], starts: tuple[int | None, int | None], is_sent: bool
) -> Single:
    size, copies = sum(message.size for message in messages), in_a_row(messages, is_sent=is_sent)
    return Single(peer, size, starts[not is_sent], tuple(fold(copies)), starts[0] is not None)


def in_a_row(messages: Iterable[Message], *, is_sent: bool) -> list[Copy]:
    """The copies of messages, one behind the other, into a buffer or out of it."""
    copies: list[Copy] = []
    at = 0
    for message in messages:
        for _, some in message.into(at) if is_sent else message.out_of(at):
            copies += some
        at += message.size
    return copies

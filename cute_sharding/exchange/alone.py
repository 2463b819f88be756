"""Messages of one tensor that go by themselves, beside those in which many are packed.

What is sent of one tensor goes by itself where it is long, and lies as one run in the tensor that
it comes from or in the one that it goes to: it is not copied there. Sender and receiver decide
alike, from the exchange alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange.copies import Copy, folded, run_of
from cute_sharding.exchange.exchange import Exchange
from cute_sharding.exchange.flow import Message
from cute_sharding.exchange.part import Shape
from cute_sharding.layout.layout import row_major

ByPeer: TypeAlias = "Mapping[int, list[Message]]"

# From so many bytes on: to copy them takes longer than a message does.
LONG = 2 << 20


class Single(NamedTuple):
    """A message of one tensor by itself, as one of its two ranks sees it.

    Attributes:
        peer: the other one.
        size: in elements.
        start: where the run begins that it is in this rank's tensor, if that lies row by row; None:
            it is none.
        copies: between the tensor and a buffer of its own.
        is_run: whether it is a run where it comes from. Those that are go first.
    """

    peer: int
    size: int
    start: int | None
    copies: tuple[Copy, ...]
    is_run: bool


class Alone(NamedTuple):
    """What one rank sends and receives of a tensor in messages by themselves."""

    sent: tuple[Single, ...] = ()
    taken: tuple[Single, ...] = ()


def alone(
    exchange: Exchange,
    rank: int,
    sides: tuple[ByPeer, ByPeer],
    least: int,
    as_they_are: tuple[bool, bool],
) -> Alone:
    """The messages that go by themselves, of those that a rank sends and receives of one tensor.

    Args:
        least: how many elements a long one has.
        as_they_are: whether elements are on their way as they are in the source, and as they are to
            be in the target; else they are cast there, and so copied.
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
    """Where the message is a run, in the tensors of its sender and of its receiver."""
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
    return Single(peer, size, starts[not is_sent], tuple(folded(copies)), starts[0] is not None)


def in_a_row(messages: Iterable[Message], *, is_sent: bool) -> list[Copy]:
    """The copies of messages, one behind the other, into a buffer or out of it."""
    copies: list[Copy] = []
    at = 0
    for message in messages:
        for _, some in message.into(at) if is_sent else message.out_of(at):
            copies += some
        at += message.size
    return copies

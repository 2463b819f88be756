"""Buckets of which only what has changed is sent.

Of each bucket a rank first tells those that it sends something to how much of each tensor has
changed. From that both know what follows: of each tensor what has changed, all of it where that is
less, or nothing; and no message, where that is so of all.

A message of n elements is gone through in the order in which it is packed, in blocks of 65,536. Of
those that differ by their bits the values are sent, how many there are in each block, in 4 bytes,
and where in its block each of them is, in 2. Whether that is less follows from their number, so it
is all that the receiver has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.run.packing import (
    Letter,
    in_group,
    post_messages,
    read,
    start_exchange,
    write,
)
from cute_sharding.dtensor.run.runner import Arrived, PlanRunner
from cute_sharding.exchange import BundlePart, Exchange
from cute_sharding.exchange.bundle import in_a_row, own_part
from cute_sharding.exchange.flow import Copy, cut_up, flat

# The bytes of a number that says how much has changed.
WIDTH = 8
BLOCK = 1 << 16
# So many elements are compared at a time.
PIECE = 1 << 18
# The number that says that all elements are sent.
ALL = -1


class SentPiece(NamedTuple):
    """What one rank sends another of one tensor: its number in the bucket, how many elements, and
    the copies into a buffer, or out of it, in which they lie one behind the other.
    """

    number: int
    size: int
    copies: tuple[Copy, ...]


class Update:
    """A bucket of which what has changed is on its way.

    Args:
        now, before: what this rank sends of each tensor, and sent last; without elements where it
            has none. None: all of it is sent.
        into: what came of it then, by the number of the tensor in the plan: written to.
    """

    def __init__(
        self,
        runner: PlanRunner,
        number: int,
        now: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor | None],
        into: Mapping[int, torch.Tensor],
    ) -> None:
        self._into, self._members = into, runner.plan.packed[number].members
        self._device, self._group = runner.device(number), runner.group_of(number)
        self._shipment = runner.shipments[number]
        self._dtypes, self._is_sealed = self._shipment.dtypes, self._shipment.seal is not None
        exchanges = [member.exchange for member in runner.members(number)]
        self._sent, self._taken = (_pieces(exchanges, is_sent=is_sent) for is_sent in (True, False))
        for member, x, mine in zip(self._members, now, runner.part(number).parts):
            if member in into:
                for _, copy in mine.kept():
                    write(copy, x, into[member])
        self._messages: dict[int, torch.Tensor] = {}
        told = {peer: self._packed(peer, now, before) for peer in self._sent}
        self._counts = self._told(self._tell(told)())
        self._received = {peer: self._buffer(sum(self._sizes(peer))) for peer in self._counts}
        letters = [Letter(x, peer, True) for peer, x in self._messages.items() if len(x)]
        letters += [Letter(x, peer, False) for peer, x in self._received.items() if len(x)]
        self._works = post_messages(letters, self._group, number)

    def _packed(
        self,
        peer: int,
        now: Sequence[torch.Tensor],
        then: Sequence[torch.Tensor | None],
    ) -> list[int]:
        """Pack what has changed of what goes to a peer; how much that is of each tensor."""
        counts, parts = [], [self._buffer(0)]
        for k, _, copies in self._sent[peer]:
            count, some = changes(copies, now[k], then[k], self._dtypes[k])
            counts.append(count)
            parts += some
        self._messages[peer] = torch.cat(parts)
        return counts

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _tell(self, told: Mapping[int, list[int]]) -> Callable[[], torch.Tensor]:
        """Send how much has changed, behind a seal where messages have one."""
        peers = tuple(sorted({*self._sent, *self._taken}))
        part = BundlePart(
            peers,
            tuple([self._said(self._sent.get(peer)) for peer in peers]),
            tuple([self._said(self._taken.get(peer)) for peer in peers]),
            (),
        )
        first = [0] * self._is_sealed
        numbers = [n for peer in peers if peer in told for n in (*first, *told[peer])]
        buffer = torch.tensor(numbers, dtype=torch.int64, device=self._device).view(torch.uint8)
        part = in_group(part, self._group)
        to = self._group, self._shipment.number, self._shipment.seal
        return start_exchange(lambda _: part, buffer, *to)

    def _said(self, pieces: Sequence[SentPiece] | None) -> int:
        return 0 if pieces is None else (len(pieces) + self._is_sealed) * WIDTH

    def _told(self, received: torch.Tensor) -> dict[int, list[int]]:
        """How much has changed of what each peer sends, of each tensor."""
        numbers = iter(received.view(torch.int64).tolist())
        found = {}
        for peer, pieces in self._taken.items():
            if self._is_sealed:
                next(numbers)  # the seal
            found[peer] = [next(numbers) for _ in pieces]
        return found

    def _sizes(self, peer: int) -> list[int]:
        """The bytes that a peer sends of each tensor."""
        return [
            bytes_of(count, size, self._dtypes[k].itemsize)
            for count, (k, size, _) in zip(self._counts[peer], self._taken[peer])
        ]

    def land(self, arrived: Arrived) -> None:
        """Wait for what is sent to this rank, write it, and hand over what was written to."""
        for work in self._works:
            work.wait()
        self._messages.clear()
        for peer, received in self._received.items():
            starts = accumulate(self._sizes(peer), initial=0)
            sizes = zip(starts, self._sizes(peer), self._counts[peer], self._taken[peer])
            for start, size, count, (k, _, copies) in sizes:
                some = received.narrow(0, start, size)
                write_changes(copies, some, count, self._into[self._members[k]], self._dtypes[k])
        for member in self._members:
            arrived(member, self._into.get(member, self._buffer(0)))


def _pieces(exchanges: Sequence[Exchange], *, is_sent: bool) -> dict[int, list[SentPiece]]:
    """What this rank sends each peer, or what it is sent, tensor by tensor."""
    found: dict[int, list[SentPiece]] = {}
    for k, exchange in enumerate(exchanges):
        mine = own_part(exchange, communication.this_rank())
        for peer, messages in (mine.sent if is_sent else mine.taken).items():
            copies = in_a_row(messages, is_sent=is_sent)
            size = sum(message.size for message in messages)
            found.setdefault(peer, []).append(SentPiece(k, size, tuple(copies)))
    return dict(sorted(found.items()))


# -- one message -----------------------------------------------------------------------------------


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

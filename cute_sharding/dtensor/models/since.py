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
from itertools import accumulate, product
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
from cute_sharding.dtensor.run.runner import Arrived, PlanRunner, constant
from cute_sharding.exchange import BundlePart, Exchange
from cute_sharding.exchange.bundle import own_part
from cute_sharding.exchange.flow import Copy, cut_up, flat

# The bytes of a number that says how much has changed.
WIDTH = 8
BLOCK = 1 << 16
# So many elements are compared at a time.
PIECE = 1 << 18
# The number that says that all elements are sent.
ALL = -1


class SentPiece(NamedTuple):
    """What one rank sends another of one member: its number in the bucket, how many elements, and
    the copies into a buffer, or out of it, in which they lie one behind the other, each with the
    number of its operand, or of its result.
    """

    number: int
    size: int
    copies: tuple[tuple[int, Copy], ...]


class Update:
    """A bucket of which what has changed is on its way.

    Args:
        now, before: of each member what this rank sends of its operands, and sent last; without
            elements where it has none. None: all of it is sent.
        into: what came of it then, by the number of the result in the plan: written to.
    """

    def __init__(
        self,
        runner: PlanRunner,
        number: int,
        now: Sequence[Sequence[torch.Tensor]],
        before: Sequence[Sequence[torch.Tensor] | None],
        into: Mapping[int, torch.Tensor],
    ) -> None:
        self._into, self._members = into, runner.members(number)
        self._device, self._group = runner.device(number), runner.group_of(number)
        self._shipment = runner.shipments[number]
        self._dtypes, self._is_sealed = self._shipment.dtypes, self._shipment.seal is not None
        self._finished = [
            runner.finished_by(number, k, member) for k, member in enumerate(self._members)
        ]
        exchanges = [member.exchange for member in self._members]
        self._sent, self._taken = (_pieces(exchanges, is_sent=is_sent) for is_sent in (True, False))
        for member, some, mine in zip(self._members, now, runner.part(number).parts):
            given = [*some, *map(constant, member.constants)]
            for k, result in enumerate(member.results):
                for i, copy in mine.kept(k) if result in into else ():
                    write(copy, given[i], into[result])
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
        now: Sequence[Sequence[torch.Tensor]],
        then: Sequence[Sequence[torch.Tensor] | None],
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
                into = [self._into.get(result) for result in self._members[k].results]
                write_changes(copies, some, count, into, self._dtypes[k])
        for finished in self._finished:
            for result in finished:
                arrived(result, self._into.get(result, self._buffer(0)))


def _pieces(exchanges: Sequence[Exchange], *, is_sent: bool) -> dict[int, list[SentPiece]]:
    """What this rank sends each peer, or what it is sent, tensor by tensor."""
    found: dict[int, list[SentPiece]] = {}
    for k, exchange in enumerate(exchanges):
        mine = own_part(exchange, communication.this_rank())
        for peer, messages in (mine.sent if is_sent else mine.taken).items():
            copies, at = [], 0
            for message in messages:
                for i, some in message.into(at) if is_sent else message.out_of(at):
                    copies += [(i, copy) for copy in some]
                at += message.size
            found.setdefault(peer, []).append(SentPiece(k, at, tuple(copies)))
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
    copies: Sequence[tuple[int, Copy]],
    now: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor] | None,
    dtype: torch.dtype,
) -> tuple[int, list[torch.Tensor]]:
    """How many elements of a message have changed, and what is sent of it, as bytes.

    Args:
        copies: into a buffer, one behind the other, each with the number of its operand.
        now, before: the operands, and what they were when they were sent last; None: all is sent.
        dtype: of elements on their way: what differs is what they are there.
    """
    size = sum(prod(copy.sizes) for _, copy in copies)
    found = None if before is None else _differing(copies, now, before, dtype, size)
    if found is None:
        buffer = torch.empty(size, dtype=dtype, device=now[0].device)
        for i, copy in copies:
            write(copy, now[i], buffer)
        return ALL, [buffer.view(torch.uint8)]
    places, values = found
    if not len(places):
        return 0, []
    counts = torch.bincount(places // BLOCK, minlength=_blocks(size)).to(torch.int32)
    within = (places % BLOCK).to(torch.uint16)
    return len(places), [x.view(torch.uint8).view(-1) for x in (values, counts, within)]


def _differing(
    copies: Sequence[tuple[int, Copy]],
    now: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    dtype: torch.dtype,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Where in the message something has changed, ascending, and what is there now, as words; None:
    it is not less than all.
    """
    places, values, count = [], [], 0
    for i, piece in ((i, piece) for i, copy in copies for piece in cut_up(copy, PIECE)):
        both = now[i], before[i]
        ours, theirs = (_words(read(x, piece).to(dtype).reshape(-1)) for x in both)
        unlike = ours != theirs
        differs = _where(unlike.any(-1) if unlike.shape[1] > 1 else unlike.view(-1))
        count += len(differs)
        if _is_whole(count, size, dtype.itemsize):
            return None
        places.append(differs + piece.y[0])
        values.append(ours[differs])
    device = now[0].device
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
    copies: Sequence[tuple[int, Copy]],
    received: torch.Tensor,
    count: int,
    into: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
) -> None:
    """Write what has come of a message, ``count`` changes or all, into what it was sent of before.

    Args:
        copies: out of a buffer, one behind the other, or several out of the same place, each with
            the number of its result.
        received: bytes.
        into: the results; None: none is written to.
    """
    size = max([copy.x[0] + _reach(copy.sizes, copy.dx) for _, copy in copies], default=0)
    if _is_whole(count, size, dtype.itemsize):
        buffer = _aligned(received, dtype)
        for i, copy in copies:
            if (onto := into[i]) is not None:
                write(copy, buffer, onto)
    elif count:
        split = [count * dtype.itemsize, _blocks(size) * 4, count * 2]
        values, counts, within = received.split(split)
        starts = torch.arange(0, size, BLOCK, device=received.device)
        places = starts.repeat_interleave(_aligned(counts, torch.int32).long(), output_size=count)
        places += _aligned(within, torch.uint16).long()
        elements = _aligned(values, dtype)
        for i, copy in copies:
            if (onto := into[i]) is not None:
                _put(copy, places, elements, onto)


def _aligned(received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements: they may begin anywhere."""
    elements = torch.empty(len(received) // dtype.itemsize, dtype=dtype, device=received.device)
    elements.view(torch.uint8).copy_(received)
    return elements


def _put(copy: Copy, places: torch.Tensor, elements: torch.Tensor, into: torch.Tensor) -> None:
    """Write those elements, at places of a message, that a copy takes from there."""
    x, y = copy.x[0], flat(copy.y, into.stride())
    modes: list[tuple[int, int, int]] = []
    still: list[tuple[int, int, int]] = []
    for n, (dx,), dy in zip(copy.sizes, copy.dx, [flat(step, into.stride()) for step in copy.dy]):
        if dx < 0:
            x, y, dx, dy = x + (n - 1) * dx, y + (n - 1) * dy, -dx, -dy
        (modes if dx else still).append((n, dx, dy))
    at, left = torch.full_like(places, y), places - x
    is_taken = left >= 0
    reach = 1
    for n, dx, _ in sorted(modes, key=lambda mode: mode[1]):
        assert dx >= reach, "turns of a message's copies do not overlap"
        reach += (n - 1) * dx
    for n, dx, dy in sorted(modes, key=lambda mode: -mode[1]):
        digit = torch.div(left, dx, rounding_mode="floor")
        is_taken &= digit < n
        at += digit * dy
        left = left - digit * dx
    is_taken &= left == 0
    at, some = at[is_taken], elements[is_taken].to(into.dtype)
    length = 1 + sum((n - 1) * stride for n, stride in zip(into.shape, into.stride()))
    line = _words(into.as_strided((length,), (1,), into.storage_offset()))
    for turn in product(*[range(n) for n, _, _ in still]):  # the same element, to several places
        line[at + sum(k * dy for k, (_, _, dy) in zip(turn, still))] = _words(some)


def _reach(sizes: Sequence[int], steps: Sequence[tuple[int, ...]]) -> int:
    """How many places of a buffer a copy reaches over, from its first one on."""
    return 1 + sum((n - 1) * max(step[0], 0) for n, step in zip(sizes, steps))

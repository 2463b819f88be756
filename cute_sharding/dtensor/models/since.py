"""Buckets of which only what has changed is sent.

Of each bucket a rank first tells those that it sends something to how much of each tensor has
changed. From that both know what follows: of each tensor what has changed, all of it where that is
less, or nothing; and no message, where that is so of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

from cute_sharding.dtensor.models.changes import bytes_of, changes, write_changes
from cute_sharding.dtensor.models.moving import LocalBucket, SentPiece
from cute_sharding.dtensor.replaced.tensor_specs import Partial
from cute_sharding.dtensor.run.packing import Letter, in_group, post_messages, start_exchange, write
from cute_sharding.exchange import BundlePart

# The bytes of a number that says how much has changed.
WIDTH = 8


class Update:
    """A bucket of which what has changed is on its way.

    Args:
        given, before: what this rank has of each tensor, and had when it was sent last.
        into: what it gave then, by the number of the tensor in the plan: written to.
    """

    def __init__(
        self,
        bucket: LocalBucket,
        given: Sequence[torch.Tensor | None],
        before: Sequence[torch.Tensor | None],
        into: Mapping[int, torch.Tensor],
    ) -> None:
        self._bucket, self._into = bucket, into
        self._sent, self._taken = bucket.pieces
        self._dtypes = [end.on_the_way for end in bucket.ends]
        now = bucket.finished(given)
        then = bucket.finished([None if p else x for x, p in zip(before, _pending(bucket))])
        for member, x, mine in zip(bucket.packed.members, now, bucket.part.parts):
            if x is not None and member in into:
                for _, copy in mine.kept():
                    write(copy, x, into[member])
        self._messages: dict[int, torch.Tensor] = {}
        told = {peer: self._packed(peer, now, then) for peer in self._sent}
        self._counts = self._told(self._tell(told)())
        self._received = {peer: self._buffer(sum(self._sizes(peer))) for peer in self._counts}
        letters = [Letter(x, peer, True) for peer, x in self._messages.items() if len(x)]
        letters += [Letter(x, peer, False) for peer, x in self._received.items() if len(x)]
        self._works = post_messages(letters, bucket.group, bucket.number)

    def _packed(
        self,
        peer: int,
        now: Sequence[torch.Tensor | None],
        then: Sequence[torch.Tensor | None],
    ) -> list[int]:
        """Pack what has changed of what goes to a peer; how much that is of each tensor."""
        counts, parts = [], [self._buffer(0)]
        for k, _, copies in self._sent[peer]:
            x = now[k]
            assert x is not None
            count, some = changes(copies, x, then[k], self._dtypes[k])
            counts.append(count)
            parts += some
        self._messages[peer] = torch.cat(parts)
        return counts

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._bucket.device)

    def _tell(self, told: Mapping[int, list[int]]) -> Callable[[], torch.Tensor]:
        """Send how much has changed, behind a seal where messages have one."""
        peers = tuple(sorted({*self._sent, *self._taken}))
        part = BundlePart(
            peers,
            tuple([self._said(self._sent.get(peer)) for peer in peers]),
            tuple([self._said(self._taken.get(peer)) for peer in peers]),
            (),
        )
        first = [0] * self._bucket.is_told
        numbers = [n for peer in peers if peer in told for n in (*first, *told[peer])]
        bucket = self._bucket
        buffer = torch.tensor(numbers, dtype=torch.int64, device=bucket.device).view(torch.uint8)
        part = in_group(part, bucket.group)
        to = bucket.group, bucket.number, bucket.shipment.seal
        return start_exchange(lambda _: part, buffer, *to)

    def _said(self, pieces: Sequence[SentPiece] | None) -> int:
        return 0 if pieces is None else (len(pieces) + self._bucket.is_told) * WIDTH

    def _told(self, received: torch.Tensor) -> dict[int, list[int]]:
        """How much has changed of what each peer sends, of each tensor."""
        numbers = iter(received.view(torch.int64).tolist())
        found = {}
        for peer, pieces in self._taken.items():
            if self._bucket.is_told:
                next(numbers)  # the seal
            found[peer] = [next(numbers) for _ in pieces]
        return found

    def _sizes(self, peer: int) -> list[int]:
        """The bytes that a peer sends of each tensor."""
        return [
            bytes_of(count, size, self._dtypes[k].itemsize)
            for count, (k, size, _) in zip(self._counts[peer], self._taken[peer])
        ]

    def land(self, arrived: Callable[[int, torch.Tensor], None]) -> None:
        """Wait for what is sent to this rank, write it, and hand over what was written to, by the
        number of the tensor in the plan.
        """
        for work in self._works:
            work.wait()
        self._messages.clear()
        members = self._bucket.packed.members
        for peer, received in self._received.items():
            starts = accumulate(self._sizes(peer), initial=0)
            sizes = zip(starts, self._sizes(peer), self._counts[peer], self._taken[peer])
            for start, size, count, (k, _, copies) in sizes:
                some = received.narrow(0, start, size)
                write_changes(copies, some, count, self._into[members[k]], self._dtypes[k])
        for member in members:
            arrived(member, self._into.get(member, self._buffer(0)))


def _pending(bucket: LocalBucket) -> list[bool]:
    """Of each tensor whether something is pending: what comes of that is sent whole, as a sum may
    not give the same bits twice.
    """
    return [any(isinstance(p, Partial) for p in s.current.placements) for s in bucket.specs]

"""Sends packed buffers in an exchange: in one all-to-all of a group, or in one batch of
point-to-point messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced import (
    collective_ops,
    dispatch_modes,
    local_tensors,
    process_groups,
)
from cute_sharding.dtensor.run.packing import WIRE, pack, pack_as, to_wire
from cute_sharding.dtensor.run.ranks import ints_on_each_rank, on_each_rank, only_rank
from cute_sharding.exchange import BundlePart, Part
from cute_sharding.exchange.bundle import part_among
from cute_sharding.exchange.pieces import Joined

_B = TypeVar("_B")
_F = TypeVar("_F")
# A rank's part, with how much it sends to whom and receives from whom: in one exchange, or in those
# of many tensors. In a group its peers are all ranks of the group, in the group's order.
Peers: TypeAlias = "Part | BundlePart"


class Seal(NamedTuple):
    """The mark at the start of each message, if ranks may disagree about what they exchange.

    Attributes:
        mark: eight bytes. A part leaves room for them in front of what it sends.
        refuse: raises an error; called if a message starts with other bytes.
    """

    mark: bytes
    refuse: Callable[[], NoReturn]


def exchange_messages(
    part: Callable[[int], Part],
    operands: Sequence[torch.Tensor],
    group: Any,
    *,
    gathers: bool = False,
    async_op: bool = False,
) -> torch.Tensor:
    """The buffer that a rank receives in an exchange of a group.

    Args:
        part: gives each rank's part.
        operands: local tensors of one dtype.
        gathers: whether all ranks of the group get the same buffer from a rank.
        async_op: whether the buffer of the group's collective is returned unwaited.
    """
    if not gathers and (rank := only_rank()) is not None:
        mine = part(rank)
        pieces = mine.joined(*[x.stride() for x in operands])[-1]
        return exchange_of_this_rank(mine, operands, pieces, group, async_op=async_op)
    buffer = on_each_rank(lambda rank, *some: to_wire(pack(part(rank), some)), *operands)
    if gathers:
        return collective_ops.all_gather(buffer, group, async_op=async_op)
    return _all_to_all(part, buffer, _width(operands[0]), group, async_op=async_op)


def exchange_of_this_rank(
    part: Part,
    operands: Sequence[torch.Tensor],
    pieces: Joined | None,
    group: Any,
    *,
    async_op: bool = False,
) -> torch.Tensor:
    """The buffer that this rank receives in an exchange of a group, in a program that is not
    traced; the send buffer has these pieces (:func:`~.packing.pack_as`).
    """
    buffer, width = to_wire(pack_as(part, operands, pieces)), _width(operands[0])
    receives, sends = [n * width for n in part.receives], [n * width for n in part.sends]
    return _send(buffer, width, receives, sends, group, async_op=async_op)


def in_group(part: BundlePart, group: Any | None) -> BundlePart:
    """The part with its messages in the order of the group; unchanged for None."""
    return part if group is None else part_among(part, dist.get_process_group_ranks(group))


def start_exchange(
    part: Callable[[int], BundlePart],
    buffer: torch.Tensor,
    group: Any | None,
    tag: int = 0,
    seal: Seal | None = None,
    into: torch.Tensor | None = None,
    *,
    async_op: bool = True,
) -> Callable[[], torch.Tensor]:
    """Send a buffer of bytes, and return a function that waits for the received one: the messages
    in the order of the peers.

    Args:
        group: has all ranks that call this; None: point to point, under ``tag``.
        into: memory for what is received, if each rank is a process.
        async_op: whether a collective may go on when this returns.
    """
    if seal is not None:
        mark = seal.mark
        buffer = on_each_rank(lambda rank, x: _seal(part(rank), x, mark), buffer)
    if group is not None and into is not None and not process_groups.is_fake(group):
        mine = part(process_groups.this_rank())
        sizes = [*mine.receives], [*mine.sends]
        work: Any = dist.all_to_all_single(into, buffer, *sizes, group=group, async_op=True)
        wait = partial(_wait, [into], [buffer], [work])
    elif group is not None:
        received = _all_to_all(part, buffer, 1, group, async_op=async_op)
        wait = partial(_wait, [received], [buffer], [])
    elif dispatch_modes.local_tensor_mode() is not None:
        found = on_each_rank(lambda rank, _: _take_messages(part, buffer, rank), buffer)
        wait = partial(_wait, [found], [], [])
    else:
        wait = _point_to_point(part(process_groups.this_rank()), buffer, tag, into)
    return wait if seal is None else lambda: _unseal(part, wait(), seal)


def _all_to_all(
    part: Callable[[int], Peers], buffer: torch.Tensor, width: int, group: Any, *, async_op: bool
) -> torch.Tensor:
    """The buffer that a rank receives, by ``sends`` and ``receives`` of ``part(rank)``. ``width``:
    how many elements of the buffer are one that these count.
    """

    def sizes(rank: int) -> list[int]:
        mine = part(rank)
        return [n * width for n in (*mine.receives, *mine.sends)]

    both = ints_on_each_rank(sizes)
    receives, sends = both[: len(both) // 2], both[len(both) // 2 :]
    return _send(buffer, width, receives, sends, group, async_op=async_op)


def _width(local: torch.Tensor) -> int:
    """The number of elements of a buffer for each element of the tensor."""
    return 1 if local.dtype in WIRE else local.element_size()


def _send(
    buffer: torch.Tensor,
    width: int,
    receives: list[Any],
    sends: list[Any],
    group: Any,
    *,
    async_op: bool,
) -> torch.Tensor:
    if (
        not any(sends)
        and any(receives)
        and dispatch_modes.local_tensor_mode() is None
        and process_groups.is_fake(group)
    ):
        # The fake backend of dry runs refuses calls in which a rank sends nothing: send it
        # something; it moves nothing anyway.
        at = dist.get_rank(group)
        sends[at], receives[at] = width, receives[at] + width
        given = buffer.new_zeros(width)
        got = collective_ops.all_to_all(given, receives, sends, group)
        return got[width:].clone()  # a view as another dtype needs an aligned start
    return collective_ops.all_to_all(buffer, receives, sends, group, async_op=async_op)


def in_flight(
    buckets: Iterable[_B],
    start: Callable[[_B], _F],
    land: Callable[[_B, _F], None],
    follows_at_once: Callable[[_B], bool],
) -> None:
    """Run buckets in order: each is packed and sent (``start``), then waited for and unpacked
    (``land``). One that ``follows_at_once`` is sent before the one in front is waited for.
    """
    flying: tuple[_B, _F] | None = None
    for bucket in buckets:
        if flying is not None and not follows_at_once(bucket):
            land(*flying)
            flying = None
        following = bucket, start(bucket)
        if flying is not None:
            land(*flying)
        flying = following
    if flying is not None:
        land(*flying)


def _wait(received: list[torch.Tensor], read: list[torch.Tensor], works: list[Any]) -> Any:
    """Wait for a received buffer; it and those that were read until then are kept no longer."""
    for work in works:
        work.wait()
    result = collective_ops.wait_for(received.pop())
    works.clear()
    read.clear()
    return result


def _seal(part: BundlePart, buffer: torch.Tensor, mark: bytes) -> torch.Tensor:
    """The send buffer, with the mark written in front of each message."""
    if any(part.sends):
        seal = _bytes(mark, buffer.device)
        for start in _starts(part.sends):
            buffer[start : start + len(mark)] = seal
    return buffer


def _unseal(part: Callable[[int], BundlePart], received: torch.Tensor, seal: Seal) -> torch.Tensor:
    """The received buffer, after a check that each message has the seal."""

    def checked(rank: int, got: torch.Tensor) -> torch.Tensor:
        sizes, count = part(rank).receives, len(seal.mark)
        if any(sizes):
            mark = _bytes(seal.mark, got.device)
            if not bool(torch.stack([got[s : s + count] for s in _starts(sizes)]).eq(mark).all()):
                seal.refuse()
        return got

    return received if local_tensors.is_imagined(received) else on_each_rank(checked, received)


def _bytes(seal: bytes, device: Any) -> torch.Tensor:
    return torch.tensor(list(seal), dtype=torch.uint8, device=device)


def _starts(sizes: Sequence[int]) -> list[int]:
    """The starts of the messages in a buffer."""
    return [s for s, n in zip(accumulate(sizes, initial=0), sizes) if n]


def _point_to_point(
    part: BundlePart, buffer: torch.Tensor, tag: int, into: torch.Tensor | None
) -> partial[torch.Tensor]:
    received = buffer.new_empty(sum(part.receives)) if into is None else into
    letters = []
    for is_sent, tensor, sizes in ((True, buffer, part.sends), (False, received, part.receives)):
        for peer, start, n in zip(part.peers, accumulate(sizes, initial=0), sizes):
            if n:
                letters.append(Letter(tensor.narrow(0, start, n), peer, is_sent))
    return partial(_wait, [received], [buffer], post_messages(letters, tag=tag))


class Letter(NamedTuple):
    """A contiguous tensor that is sent to a rank, or that is received from it."""

    tensor: torch.Tensor
    peer: int
    is_sent: bool


def post_messages(letters: Sequence[Letter], group: Any | None = None, tag: int = 0) -> list[Any]:
    """Start one batch of point-to-point messages, in the order of the letters for each two ranks.

    Returns:
        Works to wait for: one for each letter, or one for all. Wait only once for each: gloo's
            second wait for a message does not end.
    """
    if not letters or local_tensors.is_imagined(letters[0].tensor):
        return []
    ops = [
        dist.P2POp(dist.isend if is_sent else dist.irecv, x, peer, group, tag)
        for x, peer, is_sent in letters
    ]
    return list(dist.batch_isend_irecv(ops))


def _take_messages(
    part: Callable[[int], BundlePart], buffer: torch.Tensor, rank: int
) -> torch.Tensor:
    """The buffer that a rank receives, if all ranks run in this process."""
    found = [local_tensors.local_of(buffer, rank).new_empty(0)]
    for peer, n in zip(part(rank).peers, part(rank).receives):
        if n:
            theirs = part(peer)
            at = theirs.peers.index(rank)
            start = sum(theirs.sends[:at])
            found.append(local_tensors.local_of(buffer, peer).narrow(0, start, n))
    return torch.cat(found)

"""The buffers of an exchange from rank to rank: in one all-to-all of a group, or in one batch of
point-to-point messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced import (
    collective_ops,
    dispatch_modes,
    local_tensors,
    process_groups,
)
from cute_sharding.dtensor.run.executor import all_to_all
from cute_sharding.dtensor.run.packing import WIRE
from cute_sharding.dtensor.run.ranks import on_each_rank
from cute_sharding.exchange import BundlePart, Part
from cute_sharding.exchange.bundle import among

_B = TypeVar("_B")
_F = TypeVar("_F")
# Whom a rank sends how much to, and who it: a part in one exchange, or in those of many tensors.
Peers: TypeAlias = "Part | BundlePart"


def exchange_buffers(
    part: Callable[[int], Peers],
    buffer: torch.Tensor,
    local: torch.Tensor,
    group: Any | None,
    mesh: Any,
) -> torch.Tensor:
    """What a rank gets for its buffer: :func:`started`, and waited for."""
    return started(part, buffer, local, group, mesh)()


def started(
    part: Callable[[int], Peers],
    buffer: torch.Tensor,
    local: torch.Tensor,
    group: Any | None,
    mesh: Any,
    tag: int = 0,
) -> Callable[[], torch.Tensor]:
    """Send a buffer; what is returned waits for what a rank gets for it, message by message in the
    order of its peers, ascending.

    Args:
        local: a tensor of the dtype of which the parts count elements.
        group: one that has all ranks which call; None: point to point, under ``tag``.
    """
    if group is not None:
        ranks = dist.get_process_group_ranks(group)

        def in_group(rank: int) -> Peers:
            return among(part(rank), ranks)

        received = all_to_all(in_group, buffer, local, group, mesh, async_op=True)
        return partial(_waited, [received], [buffer], [])
    width = 1 if local.dtype in WIRE else local.element_size()
    if dispatch_modes.local_tensor_mode() is not None:
        found = on_each_rank(lambda rank, _: _taken(part, buffer, rank, width), buffer)
        return lambda: found
    return _point_to_point(part(process_groups.this_rank()), buffer, width, tag)


def in_flight(
    buckets: Iterable[_B],
    start: Callable[[_B], _F],
    land: Callable[[_B, _F], None],
    follows_at_once: Callable[[_B], bool],
) -> None:
    """Buckets one behind the other: each is packed and sent (``start``), then waited for and
    unpacked (``land``). One that ``follows_at_once`` is sent before the one in front is waited for.
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


def _waited(received: list[torch.Tensor], read: list[torch.Tensor], works: list[Any]) -> Any:
    """What was received, once it is there. It and what is read until then are let go here."""
    for work in works:
        work.wait()
    result = collective_ops.waited(received.pop())
    works.clear()
    read.clear()
    return result


def sealed(part: Peers, buffer: torch.Tensor, seal: bytes, width: int) -> torch.Tensor:
    """The send buffer with the seal in front of each message. ``width``: the buffer's elements for
    one of the tensor.
    """
    if any(part.sends):
        buffer = buffer.contiguous()
        flat, mark = buffer.view(torch.uint8), _bytes(seal, buffer.device)
        for start in _starts(part.sends, width * buffer.element_size()):
            flat[start : start + len(seal)] = mark
    return buffer


def is_sealed(part: Peers, received: torch.Tensor, seal: bytes, width: int) -> bool:
    """Whether all that a rank was sent has that seal."""
    if not any(part.receives):
        return True
    flat, mark = received.view(torch.uint8), _bytes(seal, received.device)
    starts = _starts(part.receives, width * received.element_size())
    return bool(torch.stack([flat[s : s + len(seal)] for s in starts]).eq(mark).all())


def _bytes(seal: bytes, device: Any) -> torch.Tensor:
    return torch.tensor(list(seal), dtype=torch.uint8, device=device)


def _starts(sizes: Sequence[int], width: int) -> list[int]:
    """Where in a buffer the messages begin, in bytes."""
    return [s for s, n in zip(accumulate((n * width for n in sizes), initial=0), sizes) if n]


def _point_to_point(
    part: Peers, buffer: torch.Tensor, width: int, tag: int
) -> Callable[[], torch.Tensor]:
    given, received = buffer.contiguous(), buffer.new_empty(sum(part.receives) * width)
    letters = []
    for is_sent, flat, sizes in ((True, given, part.sends), (False, received, part.receives)):
        starts = accumulate((n * width for n in sizes), initial=0)
        for peer, start, n in zip(part.peers, starts, sizes):
            if n:
                letters.append(Letter(flat.narrow(0, start, n * width), peer, is_sent))
    return partial(_waited, [received], [given], posted(letters, tag=tag))


class Letter(NamedTuple):
    """A contiguous tensor that is sent to a rank, or written to with what that sends."""

    tensor: torch.Tensor
    peer: int
    is_sent: bool


def posted(letters: Sequence[Letter], group: Any | None = None, tag: int = 0) -> list[Any]:
    """One batch of point-to-point messages. Between two ranks they go in the order of the letters.

    Returns:
        What to wait for: for each of the letters, or one for all. Each once: gloo's second wait
            for a message does not end.
    """
    if not letters or local_tensors.is_imagined(letters[0].tensor):
        return []
    ops = [
        dist.P2POp(dist.isend if is_sent else dist.irecv, x, peer, group, tag)
        for x, peer, is_sent in letters
    ]
    return list(dist.batch_isend_irecv(ops))


def _taken(
    part: Callable[[int], Peers], buffer: torch.Tensor, rank: int, width: int
) -> torch.Tensor:
    """What a rank gets where all ranks are in this process."""
    found = [local_tensors.local_of(buffer, rank).new_empty(0)]
    for peer, n in zip(part(rank).peers, part(rank).receives):
        if n:
            theirs = part(peer)
            at = theirs.peers.index(rank)
            start = sum(theirs.sends[:at]) * width
            found.append(local_tensors.local_of(buffer, peer).narrow(0, start, n * width))
    return torch.cat(found)

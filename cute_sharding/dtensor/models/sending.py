"""The buffers of a bundle on their way: started here, and waited for where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced import collective_ops, local_tensors
from cute_sharding.dtensor.run.executor import all_to_all
from cute_sharding.exchange import BundlePart


def start(
    part: BundlePart, buffer: torch.Tensor, group: Any | None, mesh: Any, tag: int
) -> Callable[[], torch.Tensor]:
    """Send a buffer of bytes; what is returned waits for what is received, message by message in
    the order of the peers. ``group``: one that has all ranks of the meshes; None: point to point,
    under that tag.
    """
    if group is None:
        return _point_to_point(part, buffer, tag)
    ranks = dist.get_process_group_ranks(group)
    sends, receives = (dict(zip(part.peers, n)) for n in (part.sends, part.receives))
    of_group = part._replace(
        peers=tuple(ranks),
        sends=tuple([sends.get(rank, 0) for rank in ranks]),
        receives=tuple([receives.get(rank, 0) for rank in ranks]),
    )
    on_the_way = [all_to_all(lambda _: of_group, buffer, buffer, group, mesh)]
    return partial(_waited, on_the_way, [buffer], [])


def _waited(received: list[torch.Tensor], read: list[torch.Tensor], works: list[Any]) -> Any:
    """What was received, once it is there. It and what is read until then are let go here."""
    for work in works:
        work.wait()
    result = collective_ops.waited(received.pop())
    works.clear()
    read.clear()
    return result


def _point_to_point(part: BundlePart, buffer: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
    received = buffer.new_empty(sum(part.receives))
    ops = []
    if not local_tensors.is_imagined(buffer):
        for send, flat, sizes in ((True, buffer, part.sends), (False, received, part.receives)):
            for peer, at, n in zip(part.peers, accumulate(sizes, initial=0), sizes):
                if n:
                    message = flat.narrow(0, at, n)
                    op = dist.isend if send else dist.irecv
                    ops.append(dist.P2POp(op, message, peer, tag=tag))
    works = list(dist.batch_isend_irecv(ops)) if ops else []
    return partial(_waited, [received], [buffer], works)

"""Compares what ranks exchange before each planned exchange, where a program asks for such checks
by ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

A rank sees only its own spec and local tensor. ``DTensor.from_local`` without a global shape takes
one from the local tensor, so ranks with 70 and 30 rows plan for 140 and for 60 rows. Their
collectives then do not match: some ranks raise an error and others wait, or get undefined values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from cute_sharding.dtensor.replaced import dispatch_modes, process_groups
from cute_sharding.dtensor.run.packing import CHUNKS


class Described(NamedTuple):
    """A tensor as one rank has it.

    Attributes:
        text: its global shape, dtype and placements.
        shape: that of the local tensor.
        is_right: whether this is the shape that ``text`` gives.
    """

    text: str
    shape: tuple[int, ...]
    is_right: bool


def are_compared(mesh: Any) -> bool:
    """Whether ranks compare what they exchange: the same on all ranks."""
    c10d: Any = dist
    return (
        c10d.get_debug_level() == c10d.DebugLevel.DETAIL
        and not dispatch_modes.is_tracing()
        and dispatch_modes.local_tensor_mode() is None
        and not process_groups.is_fake(process_groups.group_of_dim(mesh, 0))
    )


def compare(tensors: Sequence[Described], mesh: Any) -> None:
    """Check that all ranks of the mesh describe the tensors of an exchange alike. One collective
    of objects for each mesh dim, on all ranks of the mesh.

    Raises:
        RuntimeError: some rank describes them otherwise, or has a local tensor of another shape
            than it describes; on all ranks alike.
    """
    every = {process_groups.this_rank(): [*tensors]}
    for m in range(mesh.ndim):
        group = process_groups.group_of_dim(mesh, m)
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, every, group=group)
        every = {rank: said for some in found for rank, said in some.items()}
    (first, expected), *others = sorted(every.items())
    for rank, said in [(first, expected), *others]:
        alike = [x.text for x in said] == [x.text for x in expected]
        if not alike or not all(x.is_right for x in said):
            other, theirs = (first, expected) if rank != first else others[0]
            raise RuntimeError(
                "ranks have different shapes, dtypes or placements for a DTensor, or a local "
                f"tensor of another shape than these give. Rank {other}: {_text(theirs)}. "
                f"Rank {rank}: {_text(said)}. {CHUNKS}"
            )


def _text(said: Sequence[Described]) -> str:
    return "; ".join(f"{x.text}, local shape {x.shape}" for x in said)

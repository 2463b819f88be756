"""What ops gather of a tensor that rules of ours have left cut: once, as torch's view would have.

A view that is free hands on shards where torch's would have gathered, once, for all ops that follow
and for their gradients. An op that needs the whole of it would gather at each use, and its gradient
again, since autograd keeps the shard. So what was gathered is kept for the local tensor that it was
gathered of, and is gone with that: torch's replica lives as long.

Views are given what is kept as well. What is written to them is taken back (:mod:`.copies`), and
then it is gathered anew, for it counts as a write to what it was gathered of.

Whether it is still right must be known alike on every rank, or some would gather alone. So it is
looked for with that one tensor, not with others in the same memory, which may be gone on some ranks
and not on others. What DTensors write is known alike, and what the program writes to all its local
tensors.

A program may use the tensor on several streams of an accelerator, and need not wait on one for what
was gathered on another, of which it knows nothing: that is waited for here. While a CUDA graph is
captured nothing is kept, as it will be there only when the graph is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cute_sharding.dtensor.memory.copies import GATHERED, LIVE, count_of_writes, has_memory
from cute_sharding.dtensor.torch_private import collective_ops, local_tensors, streams
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec

# Of a local tensor, what was gathered of it: beside the tensor and not on it, where it would be
# saved and copied with it.
_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Gathered:
    """A local tensor after a redistribution. It belongs to the tensor that was redistributed.

    Attributes:
        target: the spec that it has.
        moved: the local tensor; None once a DTensor has written to the memory that it was gathered
            of.
    """

    def __init__(self, source: torch.Tensor, target: DTensorSpec, moved: torch.Tensor):
        self.target = target
        self.moved: torch.Tensor | None = moved
        self._count = count_of_writes(source)
        self._stream = streams.current(source.device)
        LIVE.add(id(self))
        weakref.finalize(self, LIVE.discard, id(self))

    def outdate(self) -> None:
        """A DTensor has written to the memory that it was gathered of."""
        self.moved = None

    def if_right(self, source: torch.Tensor, target: DTensorSpec) -> torch.Tensor | None:
        """What was moved, if it is what ``source`` now is, with the placements of ``target``; ready
        for the current stream.
        """
        is_right = self._count == count_of_writes(source) and tuple(
            self.target.placements
        ) == tuple(target.placements)
        if not is_right or self.moved is None:
            return None
        return streams.ready(self.moved, self._stream)


def once(
    local: torch.Tensor, target: DTensorSpec, move: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """What ``move`` makes of the local tensor, or made of it before."""
    source = collective_ops.in_flight(local)
    if not has_memory(source) or streams.is_capturing(source.device):
        return move()
    own = [gathered for gathered in gathered_of(local) if gathered.moved is not None]
    for gathered in own:
        if (kept := gathered.if_right(source, target)) is not None:
            return kept
    moved = move()
    if moved is local:
        return moved
    memory = local_tensors.storage_of(source)
    if not hasattr(memory, GATHERED):
        setattr(memory, GATHERED, weakref.WeakSet())
    gathered = Gathered(source, target, moved)
    getattr(memory, GATHERED).add(gathered)
    _OF[local] = [*own, gathered]
    return moved


def gathered_of(local: torch.Tensor) -> list[Gathered]:
    """What is kept of a local tensor."""
    return _OF.get(local, [])

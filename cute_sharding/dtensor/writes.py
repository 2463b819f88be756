"""In-place ops on views of a DTensor, where the view could not be had without communication: they reach the tensor that was viewed.

A slice of a sharded dim, or a view that redistributes, gives a DTensor that is a view by what autograd says and a copy by where its elements lie: what is written to it would be lost. So each
memory that a view was moved to says where it was moved from, for as long as there is that memory. Whatever then writes to it, by whatever alias (a detached tensor, ``.data``, a view as other
numbers), what it holds is taken back, by the redistribution that leads there. That seldom communicates: what was moved is a replica, mostly, of which each device takes its part.

What was moved twice stays one tensor: copies with the same placements are written to together. One that was made before its source was written to is out of step; to write to it raises.
(A functionalized program, as compilers make them, has no such writes.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from cute_sharding.dtensor import compat
from cute_sharding.dtensor.compat import DTensorSpec, Partial, Replicate
from cute_sharding.dtensor.placements import text
from cute_sharding.dtensor.reading import agree
from cute_sharding.dtensor.redistribute import redistribute_local_tensor

# The copies that there are. Where there are none, no write asks: to ask costs a fortieth of the op.
LIVE: set[int] = set()

_COPY, _COPIES = "_cute_sharding_copy", "_cute_sharding_copies"


class Place:
    """Where a local tensor lies: of each rank at hand its memory, which may go meanwhile, and its type, offset, size and stride there."""

    def __init__(self, local: torch.Tensor):
        self.storage = weakref.ref(compat.storage_of(local))
        self.parts = {rank: (weakref.ref(part.untyped_storage()), part.dtype, part.storage_offset(), part.size(), part.stride()) for rank, part in compat.parts_of(local).items()}

    def tensor(self) -> torch.Tensor | None:
        found = {}
        for rank, (memory, dtype, offset, size, stride) in self.parts.items():
            storage = memory()
            if storage is None:
                return None
            with compat.no_modes():
                found[rank] = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
        return compat.local_tensor(found)


class Copy:
    """What a view op was given instead of the local tensor of a DTensor.

    Attributes:
        source, spec: the local tensor that was moved, and its spec.
        moved, moved_spec: what it was moved to.
        is_stale: whether a DTensor wrote to the source since, and could not tell this.
    """

    def __init__(self, source: torch.Tensor, spec: DTensorSpec, moved: torch.Tensor, moved_spec: DTensorSpec):
        self.source, self.spec = Place(source), spec
        self.moved, self.moved_spec = Place(moved), moved_spec
        self._counting, self._count = weakref.ref(source), _count(source)
        self._way = [part.untyped_storage() for part in compat.parts_of(source).values()] if hasattr(compat.storage_of(source), _COPY) else []  # kept, if nobody else does: it leads on
        self.is_stale = False
        LIVE.add(id(self))
        weakref.finalize(self, LIVE.discard, id(self))

    def is_out_of_step(self) -> bool:
        """Whether the source was written to since, as far as is known: by DTensor, or by who has the local tensor."""
        counting = self._counting()
        return self.is_stale or (counting is not None and self._count != _count(counting))


def note_copy(source: torch.Tensor, spec: DTensorSpec, moved_spec: DTensorSpec, moved: torch.Tensor) -> None:
    """Take note of a view that moves data: of the local tensor ``source`` it has become ``moved``."""
    source, moved = compat.in_flight(source), compat.in_flight(moved)
    if compat.is_tracing() or any(compat.is_imagined(tensor) or compat.is_wrapper(tensor) for tensor in (source, moved)) or compat.share_memory(source, moved):
        return
    copy = Copy(source, spec, moved, moved_spec)
    setattr(compat.storage_of(moved), _COPY, copy)
    memory = compat.storage_of(source)
    if not hasattr(memory, _COPIES):
        setattr(memory, _COPIES, weakref.WeakSet())
    getattr(memory, _COPIES).add(copy)


def reach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What ``op`` has written, also in what the tensors that it wrote to were moved from.

    Raises:
        RuntimeError: such a tensor is out of step with what it was moved from, or what is pending there cannot be said.
    """
    first = args[0] if args else None
    outputs = [kwargs.get(argument.name) for argument in op._schema.arguments if argument.is_out]
    tensor: Any
    for tensor in outputs or (first if isinstance(first, (list, tuple)) else [first]):
        if compat.is_dtensor(tensor) and not compat.is_imagined(tensor._local_tensor) and not compat.is_tracing():
            memory = compat.storage_of(compat.in_flight(tensor._local_tensor))
            for copy in _ways(memory):
                _check(op, tensor, copy)
            _written(memory)


def take_back(tensor: Any, wrote: torch.Tensor, spec: DTensorSpec | None) -> None:
    """What an op wrote to a copy of ``tensor``, a local tensor under ``spec``, in ``tensor`` itself; None: the tensor was pending, and is that copy from now on.

    Raises:
        RuntimeError: such a tensor is a view of another, which would stay pending.
    """
    memory = compat.storage_of(compat.in_flight(tensor._local_tensor))
    if spec is not None:
        tensor._local_tensor.copy_(redistribute_local_tensor(wrote, spec, tensor._spec, counted=False))
    elif getattr(tensor, "_base", None) is not None or hasattr(memory, _COPY):
        raise RuntimeError(
            f"what is pending in a view of shape {tuple(tensor.shape)} and placements {text(tensor.placements)} has to be finished to write to it, and what it views would stay pending. "
            f"Redistribute that first, to {[Replicate()] * tensor.device_mesh.ndim!r}, or take the op that gives a new tensor"
        )
    else:
        _outdate(memory)
        tensor._local_tensor = wrote


def _count(local: torch.Tensor) -> int | None:
    """How often a plain tensor was written to, or its views; None where torch does not count. (DTensor's own writes it does not count there.)"""
    return None if isinstance(local, compat.LocalTensor) or local.is_inference() else local._version


def _ways(memory: Any) -> Iterator[Copy]:
    """The copies on the way from that memory to the tensor that was moved first."""
    while memory is not None and hasattr(memory, _COPY):
        yield getattr(memory, _COPY)
        memory = getattr(memory, _COPY).source.storage()


def _check(op: Any, tensor: Any, copy: Copy) -> None:
    spec, moved = copy.spec, copy.moved_spec
    if copy.source.tensor() is None:
        return
    if copy.is_out_of_step():
        raise RuntimeError(
            f"{compat.name_of(op)} writes to a view of shape {tuple(tensor.shape)} and placements {text(tensor.placements)} that is a copy of what it views, a DTensor of shape {tuple(spec.shape)} and "
            f"placements {text(spec.placements)}, which was written to after the view was taken: the view does not have what was written. Take the view again, after that write; or redistribute what it views "
            f"first, to placements under which the view moves nothing, such as {[Replicate()] * spec.mesh.ndim!r}"
        )
    pending = [tuple([p if isinstance(p, Partial) else None for p in some.placements]) for some in (spec, moved)]
    unclear = spec.use_strided_shard_as_shard_order and not agree(spec.shape, spec, spec.placements)
    if pending[0] != pending[1] or unclear:
        raise RuntimeError(
            f"{compat.name_of(op)} writes to a view of shape {tuple(tensor.shape)} and placements {text(tensor.placements)} that is a copy of what it views, a DTensor of shape {tuple(spec.shape)} and placements "
            f"{text(spec.placements)}: the write would be lost. Redistribute that one first, to placements under which the view moves nothing, such as {[Replicate()] * spec.mesh.ndim!r}"
        )


def _written(memory: Any, by: Copy | None = None) -> None:
    """Something was written to ``memory``: its copies are out of step, but for ``by``, from which it was written, and what could be told the same; and its source is told."""
    _outdate(memory, by)
    copy: Copy | None = getattr(memory, _COPY, None)
    source = None if copy is None else copy.source.tensor()
    if copy is None or source is None:
        return
    moved = copy.moved.tensor()
    assert moved is not None
    source.copy_(redistribute_local_tensor(moved, copy.moved_spec, copy.spec, counted=False))
    _written(copy.source.storage(), copy)


def _outdate(memory: Any, by: Copy | None = None) -> None:
    """The copies of what lies there have not what was written to it, but for ``by``, and those that can be told what that one has."""
    told = None if by is None else (by.moved.tensor(), tuple(by.moved_spec.placements))
    for copy in list(getattr(memory, _COPIES, ())):
        if copy is by:
            continue
        moved = copy.moved.tensor()
        if moved is not None and told is not None and not copy.is_stale and tuple(copy.moved_spec.placements) == told[1]:
            moved.copy_(told[0])
        else:
            copy.is_stale = True
        if moved is not None:
            _outdate(copy.moved.storage())

"""In-place ops on views of a DTensor, where the view could not be had without communication: they
reach the tensor that was viewed.

A slice of a sharded dim, or a view that redistributes, gives a DTensor that is a view by what
autograd says and a copy by where its elements lie: what is written to it would be lost. So each
memory that a view was moved to says where it was moved from, for as long as there is that memory.
Whatever then writes to it, by whatever alias (a detached tensor, ``.data``, a view as other
numbers), what it holds is taken back, by the redistribution that leads there. That seldom
communicates: what was moved is a replica, mostly, of which each device takes its part.

What was moved twice stays one tensor: copies with the same placements are written to together. One
that was made before its source was written to is out of step; before it is written to it is brought
up to date. Whether it is out of step is known alike on every rank, so that these redistributions
meet. (A functionalized program, as compilers make them, has no such writes.)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from cute_sharding.dtensor.redistributing.groups import group_of
from cute_sharding.dtensor.redistributing.placements import text
from cute_sharding.dtensor.redistributing.reading import agree
from cute_sharding.dtensor.redistributing.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.torch_private import (
    collective_ops,
    dispatch,
    dispatch_modes,
    local_tensors,
    op_schemas,
    registry,
    tensor_specs,
)
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec, Partial, Replicate

# The copies that there are. Where there are none, no write asks: to ask costs a fortieth of the op.
LIVE: set[int] = set()

_COPY, _COPIES = "_cute_sharding_copy", "_cute_sharding_copies"
# Set on a memory: what was gathered of tensors that lie there, each with a flag ``is_stale``.
GATHERED = "_cute_sharding_gathered"


class Copy:
    """What a view op was given instead of the local tensor of a DTensor. It belongs to the memory
    of what was moved, and is gone with it; what it was moved from stays till then.

    Attributes:
        source, spec: the local tensor that was moved, and its spec.
        spec_of_moved: what it was moved to.
        is_stale: whether a DTensor wrote to the source since, and could not tell this.
    """

    def __init__(
        self,
        source: torch.Tensor,
        spec: DTensorSpec,
        spec_of_moved: DTensorSpec,
        moved: torch.Tensor,
    ):
        self.source, self.spec, self.spec_of_moved = source, spec, spec_of_moved
        # Where it lies, but not the tensor itself, whose memory would then be for ever.
        self._parts = {
            rank: (
                weakref.ref(part.untyped_storage()),
                part.dtype,
                part.storage_offset(),
                part.size(),
                part.stride(),
            )
            for rank, part in local_tensors.parts_of(moved).items()
        }
        self._count = count_of_writes(source)
        self.is_stale = False
        LIVE.add(id(self))
        weakref.finalize(self, LIVE.discard, id(self))

    def moved(self) -> torch.Tensor | None:
        """The local tensor that it was moved to, whole; None where it is gone."""
        found = {}
        for rank, (memory, dtype, offset, size, stride) in self._parts.items():
            storage = memory()
            if storage is None:
                return None
            with dispatch_modes.no_modes():
                found[rank] = torch.empty(0, dtype=dtype, device=storage.device).set_(
                    storage, offset, size, stride
                )
        return local_tensors.local_tensor(found)

    def is_like(self, other: Copy) -> bool:
        """Whether the same was moved to the same placements."""
        lie = [
            [
                (part.storage_offset(), part.size(), part.stride())
                for part in local_tensors.parts_of(copy.source).values()
            ]
            for copy in (self, other)
        ]
        return (
            lie[0] == lie[1]
            and self.spec.shape == other.spec.shape
            and tuple(self.spec_of_moved.placements) == tuple(other.spec_of_moved.placements)
        )

    def refresh(self) -> None:
        """Move what the source now has."""
        moved = self.moved()
        if moved is not None:
            moved.copy_(
                redistribute_local_tensor(self.source, self.spec, self.spec_of_moved, counted=False)
            )
        self.is_stale = False

    def check(self, op: Any, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: what is written to the copy cannot be taken to the source.
        """
        spec = self.spec
        is_what = (
            f"{registry.name_of(op)} writes to a view of shape {tuple(tensor.shape)} and "
            f"placements {text(tensor.placements)} that is a copy of what it views, a DTensor "
            f"of shape {tuple(spec.shape)} and placements {text(spec.placements)}"
        )
        if self._count != count_of_writes(self.source):
            raise RuntimeError(
                f"{is_what}, whose local tensor was written to after the view was taken: the view "
                "does not have what was written. Take the view again, after that write."
            )
        if spec.use_strided_shard_as_shard_order and not agree(spec.shape, spec, spec.placements):
            raise RuntimeError(
                f"{is_what}: the write would be lost. Redistribute that one first, to placements "
                f"under which the view moves nothing, such as {[Replicate()] * spec.mesh.ndim!r}"
            )


class MovedCopy(Copy):
    """What a movement op gave that is a view on a plain tensor, and here a copy: rows of it came
    from other devices. Nothing is taken back.
    """

    def __init__(self, source: torch.Tensor, spec: DTensorSpec, moved: torch.Tensor, name: str):
        super().__init__(source, spec, spec, moved)
        self._name = name

    def is_like(self, other: Copy) -> bool:
        """No two are."""
        return False

    def check(self, op: Any, tensor: Any) -> None:
        """
        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{registry.name_of(op)} writes in place to what {self._name} has made of a DTensor of "
            f"shape {tuple(self.spec.shape)} with placements {text(self.spec.placements)}. On a "
            "plain tensor that is a view; here it is a copy, as rows of it came from other "
            "devices, and that DTensor would not have what is written. Write to .clone() of it, "
            "or make a new tensor, with torch.where or torch.slice_scatter, say."
        )


def note_movement(source: torch.Tensor, spec: DTensorSpec, moved: torch.Tensor, name: str) -> None:
    """Take note that the op of that name has made the local tensor ``moved`` of ``source``."""
    source, moved = collective_ops.in_flight(source), collective_ops.in_flight(moved)
    if (
        not dispatch_modes.is_tracing()
        and has_memory(source)
        and has_memory(moved)
        and not local_tensors.share_memory(source, moved)
    ):
        _linked(MovedCopy(source, spec, moved, name), source, moved)


def note_copy(
    source: torch.Tensor, spec: DTensorSpec, spec_of_moved: DTensorSpec, moved: torch.Tensor
) -> None:
    """Take note of a view that moves data: of the local tensor ``source`` it has become
    ``moved``.
    """
    source, moved = collective_ops.in_flight(source), collective_ops.in_flight(moved)
    if (
        dispatch_modes.is_tracing()
        or not (has_memory(source) and has_memory(moved))
        or local_tensors.share_memory(source, moved)
    ):
        return
    _linked(Copy(source, spec, spec_of_moved, moved), source, moved)


def _linked(copy: Copy, source: torch.Tensor, moved: torch.Tensor) -> None:
    setattr(local_tensors.storage_of(moved), _COPY, copy)
    memory = local_tensors.storage_of(source)
    if not hasattr(memory, _COPIES):
        setattr(memory, _COPIES, weakref.WeakSet())
    getattr(memory, _COPIES).add(copy)


def reach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What ``op`` has written, also in what the tensors that it wrote to were moved from.

    A copy that is out of step is brought up to date first, and what was written to it is written
    again.

    Raises:
        RuntimeError: what was written cannot be taken there; or is drawn at random, and cannot be
            drawn again.
    """
    if dispatch_modes.is_tracing():
        return
    written = [
        tensor for tensor in _written_by(op, args, kwargs) if has_memory(tensor._local_tensor)
    ]
    for tensor in written:
        for copy in _way_back(_memory(tensor)):
            copy.check(op, tensor)
    again = _are_out_of_step([_memory(tensor) for tensor in written])
    for tensor in written:
        if not again or not _way_back(_memory(tensor)):
            _written(_memory(tensor))
    if again:
        _write_again(op, args, kwargs)


def _are_out_of_step(memories: Sequence[Any]) -> bool:
    """Whether some of what was written to was written to before the source was, or several have one
    source: each then has its own part of what was written.
    """
    ways = {
        id(memory): [
            id(memory),
            *(id(local_tensors.storage_of(copy.source)) for copy in _way_back(memory)),
        ]
        for memory in memories
    }
    passed = [place for way in ways.values() for place in way]
    return any(map(_is_stale, memories)) or (
        len(ways) > 1
        and any(
            len(way) > 1 and any(passed.count(place) > 1 for place in way) for way in ways.values()
        )
    )


def _write_again(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Bring the copies among the arguments up to date, and write to those again that the op writes
    to, one after the other.
    """
    several = args[0] if args and isinstance(args[0], (list, tuple)) else None
    outputs = [argument for argument in op._schema.arguments if argument.is_out]
    if (
        torch.Tag.nondeterministic_seeded in op.tags
        or len(outputs) > 1
        or (several is not None and outputs)
    ):
        raise RuntimeError(
            f"{registry.name_of(op)} writes to views that are copies of what they view, and were "
            "taken before that was written to, or are several of one tensor. Take them again, "
            "after that write, and write to "
            "one at a time."
        )
    for leaf in local_tensors.leaves(args, kwargs):
        if tensor_specs.is_dtensor(leaf) and has_memory(leaf._local_tensor):
            for copy in reversed(_way_back(_memory(leaf))):
                copy.refresh()
    if several is None:
        op(*args, **kwargs)
        return
    for i, tensor in enumerate(several):
        if _way_back(_memory(tensor)):
            op(
                *[
                    arg[i : i + 1]
                    if isinstance(arg, (list, tuple)) and len(arg) == len(several)
                    else arg
                    for arg in args
                ],
                **kwargs,
            )


def take_back(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moved: dispatch.Moved
) -> list[DTensorSpec]:
    """What an op wrote to copies of DTensors, in these; the specs of what it writes to.

    A tensor that was pending, and had to be finished to be written to, is the copy from now on.
    Where others share its memory, as what it views does or a detached alias, it stays where it is
    and pending: one device has all of the sum, and the others nothing.

    Args:
        moved: by id of a local tensor, what the op was given instead, and its spec.
    """
    written = _written_by(op, args, kwargs)
    for tensor in written:
        wrote, spec = moved.get(id(tensor._local_tensor), (tensor._local_tensor, tensor._spec))
        if tuple(spec.placements) == tuple(tensor._spec.placements):
            continue
        finished = any(
            isinstance(p, Partial) and not isinstance(q, Partial)
            for p, q in zip(tensor._spec.placements, spec.placements)
        )
        if (
            finished
            and wrote is not tensor._local_tensor
            and not _on_any_rank(tensor, _is_shared(tensor))
        ):
            tensor._local_tensor, tensor._spec = wrote, spec
        else:
            # What came as out= was written to where it lies, where that is as long.
            tensor._local_tensor.copy_(
                redistribute_local_tensor(
                    wrote.clone() if wrote is tensor._local_tensor else wrote,
                    spec,
                    tensor._spec,
                    counted=False,
                )
            )
    return [tensor._spec for tensor in written]


def _is_shared(tensor: Any) -> bool:
    """Whether others see what is written to the tensor: what it is a view of, or was moved from, or
    what is a view of it.
    """
    local = collective_ops.in_flight(tensor._local_tensor)
    if getattr(tensor, "_base", None) is not None or not has_memory(local):
        return getattr(tensor, "_base", None) is not None
    memory = local_tensors.storage_of(local)
    return (
        hasattr(memory, _COPY)
        or len(getattr(memory, _COPIES, ())) > 0
        or local_tensors.is_shared(local)
    )


def _on_any_rank(tensor: Any, is_so: bool) -> bool:
    """Whether it is so on some rank of the mesh, by a tiny all-reduce: who still holds what, ranks
    do not know of one another, and placements must be the same on all.
    """
    local = tensor._local_tensor
    if local_tensors.is_imagined(local) or dispatch_modes.local_tensor_mode() is not None:
        return is_so
    flag = torch.tensor([is_so], dtype=torch.int32, device=local.device)
    for m, n in enumerate(tensor.device_mesh.shape):
        if n > 1:
            flag = collective_ops.waited(
                collective_ops.all_reduce(flag, "max", group_of(tensor.device_mesh, (m,)))
            )
    return bool(flag.item())


def _written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The DTensors that the op writes to."""
    found = [
        kwargs.get(argument.name, args[i] if i < len(args) else None)
        for i, argument in enumerate(op._schema.arguments)
        if op_schemas.is_written(op, argument)
    ]
    return [leaf for leaf in local_tensors.leaves(found) if tensor_specs.is_dtensor(leaf)]


def count_of_writes(local: torch.Tensor) -> int | None:
    """How often a plain tensor was written to, or its views; None where torch does not count.
    (DTensor's own writes it does not count there.)
    """
    return (
        None
        if isinstance(local, local_tensors.LocalTensor) or local.is_inference()
        else local._version
    )


def has_memory(local: torch.Tensor) -> bool:
    """Whether the local tensor lies in memory as strides say; not on meta, sparse, or wrapped in
    another.
    """
    return (
        not local_tensors.is_imagined(local)
        and not local_tensors.is_wrapper(local)
        and local.layout is torch.strided
    )


def _memory(tensor: Any) -> Any:
    return local_tensors.storage_of(collective_ops.in_flight(tensor._local_tensor))


def _way_back(memory: Any) -> list[Copy]:
    """The copies on the way from that memory to the tensor that was moved first."""
    found = []
    while (copy := getattr(memory, _COPY, None)) is not None:
        found.append(copy)
        memory = local_tensors.storage_of(copy.source)
    return found


def _is_stale(memory: Any) -> bool:
    return any(copy.is_stale for copy in _way_back(memory))


def _written(memory: Any, by: Copy | None = None) -> None:
    """Something was written to ``memory``: its copies are out of step, but for ``by``, from which
    it was written, and what could be told the same; and its source is told.
    """
    _outdate(memory, by)
    copy: Copy | None = getattr(memory, _COPY, None)
    moved = None if copy is None else copy.moved()
    if copy is not None and moved is not None:
        copy.source.copy_(
            redistribute_local_tensor(moved, copy.spec_of_moved, copy.spec, counted=False)
        )
        _written(local_tensors.storage_of(copy.source), copy)


def _outdate(memory: Any, by: Copy | None = None) -> None:
    """The copies of what lies there have not what was written to it, but for ``by``, and those that
    can be told what that one has.
    """
    told = None if by is None else by.moved()
    for gathered in getattr(memory, GATHERED, ()):
        gathered.is_stale = True
    for copy in list(getattr(memory, _COPIES, ())):
        moved = copy.moved()
        if copy is by or moved is None:
            continue
        if by is not None and told is not None and not copy.is_stale and copy.is_like(by):
            moved.copy_(told)
        else:
            copy.is_stale = True
        _outdate(local_tensors.storage_of(moved))

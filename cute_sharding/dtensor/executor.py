"""Running the steps of a plan on local tensors, with DTensor's functional collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding.dtensor import compat
from cute_sharding.dtensor.compat import waited
from cute_sharding.dtensor.ranks import copies_natively, group_of, ints_on_each_rank, on_each_rank, peers, places, spans, true_on_each_rank
from cute_sharding.redistribution.chains import Device
from cute_sharding.redistribution.copies import Copy, flat
from cute_sharding.redistribution.exchange import Exchange
from cute_sharding.redistribution.reduction import Reduction
from cute_sharding.redistribution.step import Step, Transfer

# What every backend can move. Moving needs no arithmetic, so other dtypes travel as bytes.
WIRE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8})


def run(steps: Sequence[Step], local: torch.Tensor, mesh: Any, *, async_op: bool = False) -> torch.Tensor:
    """Take the local tensor of this rank through ``steps``. Where it has more dims than they say, its elements are blocks of the shape of the rest.

    With ``async_op``, what the last collective brings is returned unwaited, if it is the result as it lies.
    """
    for step in steps:
        local = waited(local)
        if isinstance(step, Reduction):
            local = _reduce(step, local, mesh)
        else:
            assert isinstance(step, Exchange)
            local = _exchange(step, local, mesh)
    return local if async_op else waited(local)


def _exchange(step: Exchange, local: torch.Tensor, mesh: Any) -> torch.Tensor:
    if not step.dims:
        return on_each_rank(lambda rank, x: _keep(_alone(step, places(mesh, rank)[rank]), x, alias=False), local)
    group = group_of(mesh, step.dims)
    target: torch.Tensor | None = None
    for turn in range(step.rounds):
        target = _exchange_once(step, turn, local, mesh, group, target)
    assert target is not None
    return target


def _exchange_once(step: Exchange, turn: int, local: torch.Tensor, mesh: Any, group: Any, target: torch.Tensor | None) -> torch.Tensor:
    """One round, into ``target`` where an earlier one has made it."""
    gathers = step.gathers and step.rounds == 1 and spans(group, mesh, step.dims)

    @cache
    def part(rank: int) -> Transfer:
        return _transfer(step, places(mesh, rank)[rank], peers(group, mesh, step.dims, rank), gathers, turn)

    # What a gather brings lies the same on all ranks of the group, so all of them decide alike.
    if gathers and not copies_natively(group, mesh) and not true_on_each_rank(lambda rank: part(rank).unpacks is None):
        gathers = False
        part.cache_clear()

    buffer = on_each_rank(lambda rank, x: _to_wire(_pack(part(rank), x)), local)
    received = compat.all_gather(buffer, group) if gathers else _all_to_all(part, buffer, local, group, mesh)
    del buffer
    if not true_on_each_rank(lambda rank: part(rank).unpacks is None):
        received = waited(received)
    into = () if target is None else (target,)
    return on_each_rank(lambda rank, got, x, *out: _unpack(part(rank), _from_wire(got, x.dtype), x, *out), received, local, *into)


def _all_to_all(part: Callable[[int], Transfer], buffer: torch.Tensor, local: torch.Tensor, group: Any, mesh: Any) -> torch.Tensor:
    width = 1 if local.dtype in WIRE or buffer.ndim > 1 else local.element_size()
    receives = ints_on_each_rank(lambda rank: [n * width for n in part(rank).receives])
    sends = ints_on_each_rank(lambda rank: [n * width for n in part(rank).sends])
    if compat.backend_name(group, mesh.device_type) == "fake" and compat.local_tensor_mode() is None and not any(sends) and any(receives):
        # The fake backend of dry runs refuses this, where a rank has nothing to give; it moves nothing anyway.
        at = dist.get_rank(group)
        sends[at], receives[at] = 1, receives[at] + 1
        got = waited(compat.all_to_all(buffer.new_zeros((1, *buffer.shape[1:])), receives, sends, group))
        return got[1:]
    return compat.all_to_all(buffer, receives, sends, group)


def _reduce(step: Reduction, local: torch.Tensor, mesh: Any) -> torch.Tensor:
    # A larger group would make every reduction an exchange of all contributions.
    group = group_of(mesh, step.dims, exact=True)

    @cache
    def part(rank: int) -> Transfer:
        return _transfer(step, places(mesh, rank)[rank], peers(group, mesh, step.dims, rank))

    if not step.scatters:
        # Of what its source has, a device keeps its target; all of the group keep the same.
        kept = on_each_rank(lambda rank, x: _keep(_alone(step, places(mesh, rank)[rank]), x, alias=True), local)
        reduced = compat.all_reduce(kept, step.op, group)
    elif step.even and copies_natively(group, mesh):
        scattered = compat.reduce_scatter(on_each_rank(lambda rank, x: _pack(part(rank), x), local), step.op, group)
        reduced = on_each_rank(lambda rank, got: _shaped(got, part(rank).target_shape), scattered)
    else:
        # Blocks of different sizes: everyone sends its contributions, and the receiver reduces them.
        buffer = on_each_rank(lambda rank, x: _to_wire(_pack(part(rank), x)), local)
        received = waited(_all_to_all(part, buffer, local, group, mesh))
        reduced = on_each_rank(lambda rank, got: _REDUCE[step.op](_shaped(_from_wire(got, local.dtype), (step.parts, *part(rank).target_shape))), received)
    if step.divisor == 1:
        return reduced
    reduced = waited(reduced)
    return reduced / step.divisor if reduced.is_floating_point() or reduced.is_complex() else torch.div(reduced, step.divisor, rounding_mode="trunc")


def _bitwise(op: Any) -> Any:
    def reduce(stacked: torch.Tensor) -> torch.Tensor:
        result = stacked[0]
        for contribution in stacked[1:]:
            result = op(result, contribution)
        return result

    return reduce


_REDUCE = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "band": _bitwise(torch.bitwise_and),
    "bor": _bitwise(torch.bitwise_or),
    "bxor": _bitwise(torch.bitwise_xor),
}


# -- one rank's part ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 12)
def _transfer(step: Step, device: Device, among: tuple[Device | None, ...], gathers: bool = False, turn: int = 0) -> Transfer:
    if isinstance(step, Exchange):
        return step.gathering(device, [peer for peer in among if peer is not None]) if gathers else step.transfer(device, among, turn)
    return step.transfer(device, among)


@lru_cache(maxsize=1 << 12)
def _alone(step: Step, device: Device) -> tuple[Transfer, tuple[Copy, ...]]:
    """A device's transfer with itself alone, and the copies from its source to its target."""
    return step.transfer(device, (device,)), step.kept_by(device)


def _checked(part: Transfer, local: torch.Tensor) -> torch.Tensor:
    """The local tensor in the shape that the plan expects, its values as they lie in memory."""
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    if tuple(local.shape[: len(part.source_shape)]) == part.source_shape:
        return local
    if local.numel() == 0 == prod(part.source_shape) or _without_ones(local.shape) == _without_ones(part.source_shape):
        return local.reshape(part.source_shape)  # torch's in-place squeeze leaves such tensors
    raise RuntimeError(
        f"this rank's local tensor has shape {tuple(local.shape)}, and by the DTensor's global shape and placements it is {part.source_shape}. "
        "Give DTensor.from_local the global shape and stride where sizes do not divide"
    )


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def _pack(part: Transfer, local: torch.Tensor) -> torch.Tensor:
    """The send buffer: flat, of elements or blocks."""
    local = _checked(part, local)
    rest = local.shape[len(part.source_shape) :]
    if part.packs is None:
        return local.contiguous().view(prod(part.source_shape), *rest)
    buffer = local.new_empty((sum(part.sends), *rest))
    for copy in part.packs:
        _copy(copy, local, buffer)
    return buffer


def _unpack(part: Transfer, received: torch.Tensor, local: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    """The target, from what was received and what this rank keeps; or more of it into ``target``."""
    if part.unpacks is None:
        return _shaped(received, part.target_shape)
    if target is None:
        target = local.new_empty((*part.target_shape, *received.shape[1:]))
    for copy in part.unpacks:
        _copy(copy, received, target)
    for copy in part.own:
        _copy(copy, local, target)
    return target


def _keep(copies: tuple[Transfer, tuple[Copy, ...]], local: torch.Tensor, *, alias: bool) -> torch.Tensor:
    """What this rank keeps of its own, in the memory order of its own. All of it, where that is what it keeps, as it is if ``alias``."""
    part, own = copies
    local = _checked(part, local)
    if part.packs is None and part.unpacks is None and part.source_shape == part.target_shape:
        return local if alias else local.clone()
    if local.ndim > len(part.target_shape):
        target = local.new_empty((*part.target_shape, *local.shape[len(part.target_shape) :]))
    else:
        # Dims in the order of their strides, as clone() has them.
        given, strides, below = local.stride(), [0] * local.ndim, 1
        for dim in sorted(range(local.ndim), key=lambda dim: (given[dim], -dim)):
            strides[dim] = below
            below *= max(part.target_shape[dim], 1)
        target = local.new_empty_strided(part.target_shape, strides)
    for copy in own:
        _copy(copy, local, target)
    return target


def _copy(copy: Copy, x: torch.Tensor, y: torch.Tensor) -> None:
    _strided(y, copy.sizes, copy.y, copy.dy).copy_(_strided(x, copy.sizes, copy.x, copy.dx))


def _strided(tensor: torch.Tensor, sizes: tuple[int, ...], start: tuple[int, ...], steps: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    strides, rest = tensor.stride(), len(start)
    return tensor.as_strided((*sizes, *tensor.shape[rest:]), [*(flat(step, strides[:rest]) for step in steps), *strides[rest:]], tensor.storage_offset() + flat(start, strides[:rest]))


def _shaped(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A flat buffer of elements or blocks as a tensor of them."""
    return buffer.view(*shape, *buffer.shape[1:])


def _to_wire(buffer: torch.Tensor) -> torch.Tensor:
    return buffer if buffer.dtype in WIRE else buffer.view(torch.uint8)


def _from_wire(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return buffer if buffer.dtype == dtype else buffer.view(dtype)

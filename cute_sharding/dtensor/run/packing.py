"""One rank's part in a step: what it keeps, what it packs into messages, and where it puts what it
gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.compiled.library import after
from cute_sharding.dtensor.replaced import dispatch_modes, symints
from cute_sharding.dtensor.run.order import memory_order
from cute_sharding.dtensor.run.ranks import peers, place
from cute_sharding.redistribution.copies import Copy, fills, flat
from cute_sharding.redistribution.exchange import Exchange
from cute_sharding.redistribution.step import Step, Transfer

# What every backend can move. Moving needs no arithmetic, so other dtypes travel as bytes.
WIRE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)


@lru_cache(maxsize=1 << 12)
def transfer_of(step: Step, mesh: Any, rank: int, gathers: bool = False, turn: int = 0) -> Transfer:
    device, among = place(mesh, rank), peers(mesh, step.mesh_dims, rank)
    if isinstance(step, Exchange):
        return step.gathering(device, among) if gathers else step.transfer(device, among, turn)
    return step.transfer(device, among)


@lru_cache(maxsize=1 << 12)
def alone(step: Step, mesh: Any, rank: int) -> tuple[Transfer, tuple[Copy, ...]]:
    """A device's transfer with itself alone, and the copies from its source to its target."""
    device = place(mesh, rank)
    return step.transfer(device, (device,)), step.kept_by(device)


class OtherShape(RuntimeError):
    """A local tensor is not of the shape that its spec gives it. Nothing has been sent."""


def checked(part: Transfer, local: torch.Tensor) -> torch.Tensor:
    """The local tensor in the shape that the plan expects, its values as they lie in memory. Sizes
    that are symbols are not looked at.
    """
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    if (
        symints.is_symbolic(tuple(local.shape))
        or tuple(local.shape[: len(part.source_shape)]) == part.source_shape
    ):
        return local
    if local.numel() == 0 == prod(part.source_shape) or _without_ones(local.shape) == _without_ones(
        part.source_shape
    ):
        return local.reshape(part.source_shape)  # torch's in-place squeeze leaves such tensors
    raise OtherShape(
        f"this rank's local tensor has shape {tuple(local.shape)}, and by the DTensor's global "
        f"shape and placements it is {part.source_shape}. "
        "Give DTensor.from_local the global shape and stride where sizes do not divide"
    )


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def pack(part: Transfer, local: torch.Tensor) -> torch.Tensor:
    """The send buffer."""
    local = checked(part, local)
    if part.packs is None:
        return local.contiguous().view(-1)
    if fills(part.packs, (sum(part.sends),)):
        return read(local, part.packs[0]).reshape(-1)
    buffer = local.new_empty(sum(part.sends))
    for copy in part.packs:
        write(copy, local, buffer)
    return buffer


def packed_of(part: Any, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The send buffer of several operands, by the ``packs`` and ``sends`` of ``part``."""
    total = sum(part.sends)
    whole = [(x, some) for x, some in zip(operands, part.packs) if some]
    if len(whole) == 1 and len(whole[0][1]) == 1 and prod(whole[0][1][0].sizes) == total:
        return read(whole[0][0], *whole[0][1]).reshape(-1)
    buffer = operands[0].new_empty(total)
    for x, some in whole:
        for copy in some:
            write(copy, x, buffer)
    return buffer


def unpack(
    part: Transfer, received: torch.Tensor, local: torch.Tensor, target: torch.Tensor | None = None
) -> torch.Tensor:
    """The target, from what was received and what this rank keeps; or more of it into
    ``target``.
    """
    if part.unpacks is None:
        return received.view(part.target_shape)
    if target is None and not part.own and fills(part.unpacks, part.target_shape):
        return (
            read(received, part.unpacks[0])
            .clone(memory_format=torch.contiguous_format)
            .view(part.target_shape)
        )
    if target is None:
        target = local.new_empty(part.target_shape)
    for copy in part.unpacks:
        write(copy, received, target)
    if part.own:
        local = checked(part, local)
    for copy in part.own:
        write(copy, local, target)
    return target


def keep(
    copies: tuple[Transfer, tuple[Copy, ...]], local: torch.Tensor, *, alias: bool
) -> torch.Tensor:
    """What this rank keeps of its own, in the memory order of its own. All of it, where that is
    what it keeps, as it is if ``alias``.
    """
    part, own = copies
    local = checked(part, local)
    if part.packs is None and part.unpacks is None and part.source_shape == part.target_shape:
        return local if alias else local.clone()
    if (
        local.ndim == len(part.target_shape)
        and fills(own, part.target_shape)
        and local.is_contiguous()
    ):
        return (
            read(local, own[0]).clone(memory_format=torch.contiguous_format).view(part.target_shape)
        )
    if local.ndim > len(part.target_shape):
        target = local.new_empty((*part.target_shape, *local.shape[len(part.target_shape) :]))
    else:
        strides, below = [0] * local.ndim, 1
        for dim in reversed(memory_order(part.target_shape, local.stride())):
            strides[dim] = below
            below *= max(part.target_shape[dim], 1)
        target = local.new_empty_strided(part.target_shape, strides)
    for copy in own:
        write(copy, local, target)
    return after(target, local) if dispatch_modes.is_tracing() and not own else target


def write(copy: Copy, x: torch.Tensor, y: torch.Tensor, *, add: bool = False) -> None:
    """Between tensors of which ``y`` is ours, as it was made: so we know how it lies. Of ``x`` we
    do only where nothing is compiled, as a compiler lays out what it computes as it likes.
    """
    into = _strided(y, copy.sizes, copy.y, copy.dy)
    _ = into.add_(read(x, copy)) if add else into.copy_(read(x, copy))


def read(x: torch.Tensor, copy: Copy) -> torch.Tensor:
    """What is copied, a view of ``x``."""
    return (
        _taken(x, copy.sizes, copy.x, copy.dx)
        if dispatch_modes.is_tracing()
        else _strided(x, copy.sizes, copy.x, copy.dx)
    )


def _strided(
    tensor: torch.Tensor,
    sizes: tuple[int, ...],
    start: tuple[int, ...],
    steps: tuple[tuple[int, ...], ...],
) -> torch.Tensor:
    strides, rest = tensor.stride(), len(start)
    lying = (
        _lying.__wrapped__ if symints.is_symbolic(strides) else _lying
    )  # symbols cannot be looked up
    stride, offset = lying(strides, start, steps)
    return tensor.as_strided(
        (*sizes, *tensor.shape[rest:]), stride, tensor.storage_offset() + offset
    )


@lru_cache(maxsize=1 << 12)
def _lying(
    strides: tuple[int, ...], start: tuple[int, ...], steps: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], int]:
    """The strides of what lies at such a place and with such steps in a tensor of ``strides``, and
    how far it begins from that.
    """
    rest = len(start)
    return (*(flat(step, strides[:rest]) for step in steps), *strides[rest:]), flat(
        start, strides[:rest]
    )


def _taken(
    tensor: torch.Tensor,
    sizes: tuple[int, ...],
    start: tuple[int, ...],
    steps: tuple[tuple[int, ...], ...],
) -> torch.Tensor:
    """:func:`_strided`, by views of the rows of each dim and not of the memory behind them."""
    for i, step in enumerate(steps):
        if sum(rows != 0 for rows in step) > 1:  # across several dims: one by one
            without = (*sizes[:i], *sizes[i + 1 :]), (*steps[:i], *steps[i + 1 :])
            turns = [tuple([a + k * b for a, b in zip(start, step)]) for k in range(sizes[i])]
            return torch.stack([_taken(tensor, without[0], turn, without[1]) for turn in turns], i)
    axes = list(
        range(tensor.ndim)
    )  # what each axis stands for: a dim of the tensor, or a loop, counted from below
    for d, first in enumerate(start):
        loops = sorted((-step[d], i) for i, step in enumerate(steps) if step[d])
        reach = [
            1 + sum((sizes[i] - 1) * -rows for rows, i in loops[k:]) for k in range(len(loops) + 1)
        ]
        tensor = tensor.narrow(axes.index(d), first, reach[0])
        for (rows, i), inner in zip(loops, reach[1:]):
            at = axes.index(d)
            tensor = tensor.unfold(at, inner, -rows)
            axes[at] = -1 - i
            axes.append(d)
        tensor = tensor.select(axes.index(d), 0)
        axes.remove(d)
    for i, step in enumerate(steps):
        if not any(step):  # the same again, for several devices
            tensor = tensor.unsqueeze(-1).expand(*tensor.shape, sizes[i])
            axes.append(-1 - i)
    return tensor.permute(
        [axes.index(-1 - i) for i in range(len(sizes))]
        + [i for i, axis in enumerate(axes) if axis >= len(start)]
    )


def to_wire(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.dtype in WIRE:
        return buffer
    # A single element is contiguous with any stride; as bytes it is not.
    return (
        buffer if buffer.stride(-1) == 1 else buffer.clone(memory_format=torch.contiguous_format)
    ).view(torch.uint8)


def from_wire(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return buffer if buffer.dtype == dtype else buffer.view(dtype)


# -- blocks of rows of one dim, made equal ---------------------------------------------------------


def padded(x: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """``x`` with zeros behind it, up to that many rows."""
    missing = rows - x.shape[dim]
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x


def in_blocks(x: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """The blocks of rows of ``dim``, one behind the other in a new first dim; the last ones filled
    with zeros.
    """
    rows = -(-x.shape[dim] // parts)
    if not any(n != 1 for n in x.shape[:dim]):
        return (
            padded(x, dim, parts * rows).unflatten(dim, (parts, rows)).movedim(dim, 0).contiguous()
        )
    blocks = x.new_zeros((parts, *x.shape[:dim], rows, *x.shape[dim + 1 :]))
    for into, of in _whole_and_rest(blocks.movedim(0, dim), x, dim, rows):
        into.copy_(of)
    return blocks


def joined(blocks: torch.Tensor, dim: int, parts: int, shape: Sequence[int]) -> torch.Tensor:
    """Blocks, one behind the other in the first dim, as a tensor of that shape: their rows in
    ``dim``, without what was added.
    """
    rows = -(-shape[dim] // parts)
    apart = blocks.view(parts, *shape[:dim], rows, *shape[dim + 1 :])
    if not any(n != 1 for n in shape[:dim]):
        return apart.view(*shape[:dim], parts * rows, *shape[dim + 1 :]).narrow(dim, 0, shape[dim])
    whole = blocks.new_empty(tuple(shape))
    for of, into in _whole_and_rest(apart.movedim(0, dim), whole, dim, rows):
        into.copy_(of)
    return whole


def _whole_and_rest(
    blocks: torch.Tensor, tensor: torch.Tensor, dim: int, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the blocks, which lie in ``dim`` with their rows behind, and of the tensor, that are
    the same elements: of all whole blocks, and of the one that is not.
    """
    whole, rest = divmod(tensor.shape[dim], rows) if rows else (0, 0)
    yield (
        blocks.narrow(dim, 0, whole),
        tensor.narrow(dim, 0, whole * rows).unflatten(dim, (whole, rows)),
    )
    if rest:
        yield blocks.select(dim, whole).narrow(dim, 0, rest), tensor.narrow(dim, whole * rows, rest)

"""One rank's part in a step: what it keeps, what it packs into messages, and where it unpacks what
it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import dispatch_modes, process_groups, symints
from cute_sharding.dtensor.run.ranks import numbers, on_each_rank
from cute_sharding.exchange import Part
from cute_sharding.exchange.all_to_all import AllToAll
from cute_sharding.exchange.copies import Copy, flat
from cute_sharding.exchange.pieces import Joined
from cute_sharding.exchange.step import Step

# The dtypes that every backend can move. Other dtypes travel as bytes.
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


@remembered
def parts_of(step: Step, mesh: Any, gathers: bool = False) -> Callable[[int], Part]:
    """A function for each rank's part in a step, which computes it on the first call."""

    def part(rank: int) -> Part:
        mine, among = numbers(mesh, rank, step.mesh_dims)
        if gathers and isinstance(step, AllToAll):
            return step.gathering(mine, among)
        return step.transfer(mine, among)

    return cache(part)


@remembered
def part_alone(step: Step, mesh: Any, rank: int) -> Part:
    """The part of a device that neither sends nor receives: only what it keeps."""
    mine, alone = numbers(mesh, rank)
    part, own = step.transfer(mine, alone), ((0, 0, step.kept_by(mine)),)
    return replace(part, peers=(), sends=(), receives=(), packs=((),), own=own, unpacks=((),))


CHUNKS = (
    "A dim is divided as by torch.chunk: ceil(rows / ranks) rows on the first ranks, and the other "
    "rows on the last ones. Give the global shape to DTensor.from_local, and move rows between "
    "ranks first if they are divided otherwise"
)


class OtherShape(RuntimeError):
    """A local tensor does not have the shape that its spec gives. Nothing has been sent."""


def check_shape(step: Step, local: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The local tensor in the shape that the first ``step`` of a plan expects, without conj and neg
    bits. Symbolic sizes are not checked.
    """
    if (
        type(local) is torch.Tensor
        and local.shape == _source_on(step, mesh, process_groups.this_rank())
        and not (local.is_conj() or local.is_neg())
    ):
        return local  # almost always
    return on_each_rank(
        lambda rank, x: in_shape(x.resolve_conj().resolve_neg(), _source_on(step, mesh, rank)),
        local,
    )


@remembered
def _source_on(step: Step, mesh: Any, rank: int) -> tuple[int, ...]:
    source, _ = step.ends
    return source.shape_on(numbers(mesh, rank)[0])


def in_shape(local: torch.Tensor, expected: tuple[int, ...], of: str = "") -> torch.Tensor:
    """A local tensor (of the tensor named ``of``) in the shape that its spec gives.

    Raises:
        OtherShape: it has another shape.
    """
    shape = local.shape
    if symints.is_symbolic(*shape) or shape == expected or shape[: len(expected)] == expected:
        return local
    is_empty = local.numel() == 0 == prod(expected)
    if is_empty or _without_ones(local.shape) == _without_ones(expected):
        return local.reshape(expected)  # an in-place squeeze by torch leaves such tensors
    named = f" of {of!r}" if of else ""
    raise OtherShape(
        f"this rank's local tensor{named} has shape {tuple(local.shape)}, but the DTensor's "
        f"global shape and placements give the shape {expected}. {CHUNKS}. "
        "DTensor.from_local(..., run_check=True) raises this on all ranks"
    )


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def pack(part: Part, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The send buffer."""
    if not dispatch_modes.is_tracing():
        return pack_as(part, operands, part.joined(*[x.stride() for x in operands])[-1])
    if None not in part.packs and part.sent is not None and len(part.sent) == 1:
        ((i, copy),) = part.sent
        return read(operands[i or 0], copy).reshape(-1)
    return pack_as(part, operands, None)


def pack_as(part: Part, operands: Sequence[torch.Tensor], pieces: Joined | None) -> torch.Tensor:
    """The send buffer; made of ``pieces`` of the operands if these are given."""
    if None in part.packs:
        return operands[0].contiguous().view(-1)
    if pieces is not None:
        flat = concatenate(pieces, operands, operands[0]).contiguous()
        return flat if pieces.shape is None else flat.view(pieces.shape)
    buffer = operands[0].new_empty(sum(part.sends))
    for x, copies in zip(operands, part.packs):
        for copy in copies or ():
            write(copy, x, buffer)
    return buffer


def concatenate(
    pieces: Joined, operands: Sequence[torch.Tensor], received: torch.Tensor
) -> torch.Tensor:
    """Pieces one behind the other; a view for a single piece."""
    views = []
    for of, sizes, strides, first in pieces.pieces:
        x = received if of is None else operands[of]
        views.append(x.as_strided(sizes, strides, x.storage_offset() + first))
    return torch.cat(views, pieces.dim) if len(views) > 1 else views[0]


def own_view(part: Part, k: int, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A result that is one copy from this rank's own operand, as a view of that if possible;
    otherwise None.
    """
    whole = part.whole[k]
    if whole is None:
        return None
    shape, own = part.target_shape(k), read(operands[whole[0]], whole[1])
    return own if own.shape == shape else own.reshape(shape)


def unpack(
    part: Part,
    k: int,
    received: torch.Tensor,
    operands: Sequence[torch.Tensor],
    *,
    into: torch.Tensor | None = None,
    fill: Any = 0,
    adds: bool = False,
) -> torch.Tensor:
    """A result, from the receive buffer and the parts that this rank keeps of the operands; with
    ``into``, written to an existing tensor. (torch does not copy what is in place there.)
    """
    shape, copies = part.target_shape(k), part.unpacks[k]
    if copies is None:
        return received.view(shape)
    if into is None:
        whole = _make_result(part, k, received, operands)
        if whole is not None:
            return whole
        like = operands[0]
        into = like.new_full(shape, fill) if part.filled[k] else like.new_empty(shape)
    for i, copy in part.kept(k):
        write(copy, operands[i], into, add=adds)
    for copy in copies:
        write(copy, received, into, add=adds)
    return into


def _make_result(
    part: Part, k: int, received: torch.Tensor, operands: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """A result that is pieces one behind the other, in memory of its own; otherwise None."""
    some = part.made[k]
    if some is None:
        return None
    if not dispatch_modes.is_tracing():
        pieces = part.joined(*[x.stride() for x in operands])[k]
        return pieces and make_of_pieces(pieces, received, operands, torch.contiguous_format)
    if len(some) > 1:
        return None
    ((i, copy),) = some
    own = read(received if i is None else operands[i], copy)
    return own.clone(memory_format=torch.contiguous_format).view(part.target_shape(k))


def make_of_pieces(
    pieces: Joined,
    received: torch.Tensor,
    operands: Sequence[torch.Tensor],
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Pieces one behind the other, in memory of their own: row-major if there are several; a single
    one in ``memory_format``.
    """
    whole = concatenate(pieces, operands, received)
    if len(pieces.pieces) == 1:
        whole = whole.clone(memory_format=memory_format)
    else:
        whole = whole.contiguous()  # torch.cat keeps channels last
    return whole if pieces.shape is None else whole.reshape(pieces.shape)


def keep(part: Part, local: torch.Tensor, *, alias: bool) -> torch.Tensor:
    """The part of its local tensor that this rank keeps. If it is all, the tensor itself with
    ``alias``; if it is one copy, in the memory order of the local tensor.
    """
    shape = part.target_shape()
    if part.source_shape() == shape and part.are_whole[0]:
        return local if alias else local.clone()
    whole, behind = part.whole[0], local.shape[len(shape) :]
    if whole is not None:
        own = read(local, whole[1])
        if whole[1].sizes == shape:
            return own.clone()
        return own.clone(memory_format=torch.contiguous_format).view((*shape, *behind))
    if not part.kept():  # no rows; in a graph made of the operand, as on other ranks
        return local.reshape(-1)[:0].reshape((*shape, *behind))
    target = local.new_empty((*shape, *behind))
    for _, copy in part.kept():
        write(copy, local, target)
    return target


def write(copy: Copy, x: torch.Tensor, y: torch.Tensor, *, add: bool = False) -> None:
    """Copy from ``x`` to ``y``, a tensor that we made, so its strides are known. Those of ``x`` are
    known only outside of compiled code, since a compiler may choose any layout.
    """
    into = _strided(y, copy.sizes, copy.y, copy.dy)
    _ = into.add_(read(x, copy)) if add else into.copy_(read(x, copy))


def read(x: torch.Tensor, copy: Copy) -> torch.Tensor:
    """The elements that are copied, as a view of ``x``; a copy if they go backward, since torch has
    no negative strides.
    """
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
    try:
        stride, offset, is_backward = _lying(strides, start, steps)
    except TypeError:  # the cache cannot look up symbols
        stride, offset, is_backward = _lying.__wrapped__(strides, start, steps)
    shape, first = (*sizes, *tensor.shape[rest:]), tensor.storage_offset() + offset
    if is_backward:
        return _turned(tensor, shape, stride, int(first))
    return tensor.as_strided(shape, stride, first)


@remembered
def _lying(
    strides: tuple[int, ...], start: tuple[int, ...], steps: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], int, bool]:
    """For elements at ``start`` and with ``steps`` in a tensor of ``strides``: their strides, their
    offset, and whether they go backward.
    """
    rest = len(start)
    stride = (*(flat(step, strides[:rest]) for step in steps), *strides[rest:])
    is_backward = any(rows < 0 for step in steps for rows in step)
    return stride, flat(start, strides[:rest]), is_backward


# The dtype in which elements of so many bytes are flipped: torch has no flip of some dtypes.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _turned(
    tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], first: int
) -> torch.Tensor:
    """The elements at these strides, of which some are negative: read forward, and flipped."""
    backward = [i for i, step in enumerate(stride) if step < 0]
    first += sum((shape[i] - 1) * stride[i] for i in backward)
    found = tensor.as_strided(shape, tuple(map(abs, stride)), first)
    word = _WORDS.get(tensor.element_size(), tensor.dtype)
    return found.view(word).flip(backward).view(tensor.dtype)


def _taken(
    tensor: torch.Tensor,
    sizes: tuple[int, ...],
    start: tuple[int, ...],
    steps: tuple[tuple[int, ...], ...],
) -> torch.Tensor:
    """:func:`_strided`, made of views of the rows of each dim and not of the memory behind them."""
    for i, step in enumerate(steps):
        if sum(rows != 0 for rows in step) > 1:  # across several dims: one by one
            without = (*sizes[:i], *sizes[i + 1 :]), (*steps[:i], *steps[i + 1 :])
            turns = [tuple([a + k * b for a, b in zip(start, step)]) for k in range(sizes[i])]
            return torch.stack([_taken(tensor, without[0], turn, without[1]) for turn in turns], i)
    axes = list(
        range(tensor.ndim)
    )  # what each axis is: a dim of the tensor, or a loop, as -1 - number of the loop
    for d, first in enumerate(start):
        loops = sorted((-step[d], i) for i, step in enumerate(steps) if step[d])
        reach = [
            1 + sum((sizes[i] - 1) * -rows for rows, i in loops[k:]) for k in range(len(loops) + 1)
        ]
        tensor = tensor.narrow(axes.index(d), first, reach[0])
        for (rows, i), inner in zip(loops[:-1], reach[1:]):
            at = axes.index(d)
            tensor = tensor.unfold(at, inner, -rows)
            axes[at] = -1 - i
            axes.append(d)
        at = axes.index(d)
        if loops:
            ((rows, i),) = loops[-1:]
            tensor = (
                tensor if rows == -1 else tensor[(slice(None),) * at + (slice(None, None, -rows),)]
            )
            axes[at] = -1 - i
        else:
            tensor = tensor.select(at, 0)
            axes.pop(at)
    for i, step in enumerate(steps):
        if not any(step):  # the same elements again, for several devices
            tensor = tensor.unsqueeze(-1).expand(*tensor.shape, sizes[i])
            axes.append(-1 - i)
    return tensor.permute(
        [axes.index(-1 - i) for i in range(len(sizes))]
        + [i for i, axis in enumerate(axes) if axis >= len(start)]
    )


def to_wire(buffer: torch.Tensor) -> torch.Tensor:
    return buffer if buffer.dtype in WIRE else as_bytes(buffer)


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    # A single element is contiguous with any stride; as bytes it is not.
    return (
        buffer if buffer.stride(-1) == 1 else buffer.clone(memory_format=torch.contiguous_format)
    ).view(torch.uint8)


def from_wire(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return buffer if buffer.dtype == dtype else buffer.view(dtype)


# -- blocks of rows of one dim, made equal ---------------------------------------------------------


def pad_rows(x: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """``x``, padded with zeros behind it to this number of rows."""
    missing = rows - x.shape[dim]
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x


def in_blocks(x: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """The blocks of rows of ``dim``, one behind the other in a new first dim; the last ones padded
    with zeros.
    """
    rows = -(-x.shape[dim] // parts)
    if not any(n != 1 for n in x.shape[:dim]):
        return (
            pad_rows(x, dim, parts * rows)
            .unflatten(dim, (parts, rows))
            .movedim(dim, 0)
            .contiguous()
        )
    blocks = x.new_zeros((parts, *x.shape[:dim], rows, *x.shape[dim + 1 :]))
    for into, of in _whole_and_rest(blocks.movedim(0, dim), x, dim, rows):
        into.copy_(of)
    return blocks


def join_blocks(blocks: torch.Tensor, dim: int, parts: int, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of this shape whose rows of ``dim`` are blocks, one behind the other in the first
    dim, without padding.
    """
    rows = -(-shape[dim] // parts)
    apart = blocks.view(parts, *shape[:dim], rows, *shape[dim + 1 :])
    if not any(n != 1 for n in shape[:dim]):
        together = apart.reshape(*shape[:dim], parts * rows, *shape[dim + 1 :])
        return together.narrow(dim, 0, shape[dim])
    whole = blocks.new_empty(tuple(shape))
    for of, into in _whole_and_rest(apart.movedim(0, dim), whole, dim, rows):
        into.copy_(of)
    return whole


def _whole_and_rest(
    blocks: torch.Tensor, tensor: torch.Tensor, dim: int, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views with the same elements, of the blocks (in ``dim``, their rows behind it) and
    of the tensor: first all whole blocks, then the last one if it is not whole.
    """
    whole, rest = divmod(tensor.shape[dim], rows) if rows else (0, 0)
    yield (
        blocks.narrow(dim, 0, whole),
        tensor.narrow(dim, 0, whole * rows).unflatten(dim, (whole, rows)),
    )
    if rest:
        yield blocks.select(dim, whole).narrow(dim, 0, rest), tensor.narrow(dim, whole * rows, rest)

"""One rank's part in a step: what it keeps, what it packs into messages, how buffers are sent, and
where it unpacks what it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import communication, dispatch_modes, local_tensors, symints
from cute_sharding.dtensor.replaced.tensor_specs import TensorMeta
from cute_sharding.dtensor.run.groups import ints_on_each_rank, numbers, on_each_rank, only_rank
from cute_sharding.exchange import BundlePart, Part
from cute_sharding.exchange.bundle import part_among
from cute_sharding.exchange.flow import Copy, flat
from cute_sharding.exchange.part import Joined
from cute_sharding.exchange.step import AllToAll, Step
from cute_sharding.layout.layout import row_major

# -- order -----------------------------------------------------------------------------------------
# Lays out local tensors by the strides of their DTensor, on every rank.
#
# The global strides decide whether a view is legal, but the view then runs on the local tensors. A
# collective's result is row-major, whatever the global strides are, and torch leaves it so.

# The row-major order, by the number of dims; no tensor has more.
_ROWS = tuple([tuple(range(count)) for count in range(65)])


def lay_out(local: torch.Tensor, meta: Any) -> torch.Tensor:
    """The local tensor without gaps, its dims in the memory order of the whole, whose TensorMeta is
    ``meta``: itself if it is laid out like this, and else a copy.
    """
    return lie_in(local, order_of(meta))


def lie_in(local: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The local tensor without gaps, its dims in this order, as from :func:`order_of`: itself if it
    is laid out like this or has another number of dims, and else a copy.
    """
    if order is None or len(order) != local.ndim:
        return local
    if type(local) is torch.Tensor or dispatch_modes.local_tensor_mode() is None:
        lies = communication.in_flight(local)
        if (lies if order == _ROWS[len(order)] else lies.permute(order)).is_contiguous():
            return local
    back = sorted(range(len(order)), key=order.__getitem__)
    return on_each_rank(
        lambda _, x: x.permute(order).contiguous().permute(back), communication.wait_for(local)
    )


def order_of(meta: Any) -> tuple[int, ...] | None:
    """The dims from the outermost in memory to the innermost; None if the TensorMeta is None, or a
    symbolic size has no value yet.

    For symbolic strides it is the order of the numbers at hand. Other sizes have another order only
    if one of them is 0 or 1, and no symbol is.
    """
    if meta is None:
        return None
    try:
        return memory_order(meta.shape, meta.stride)
    except TypeError:  # the cache cannot look up symbols
        numbers = symints.numbers_at_hand((tuple(meta.shape), tuple(meta.stride)))
    return None if numbers is None else memory_order(*numbers)


@remembered
def memory_order(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[int, ...]:
    """The dims from the outermost to the innermost, as ``clone()`` orders them (infer_dense_strides
    of aten/src/ATen/ExpandUtils.cpp), and pointwise ops with several operands
    (reorder_dimensions of TensorIterator.cpp). Two dims are compared by stride, then by size; the
    first operand that tells them apart decides. Expanded dims, of stride 0, keep their place.

    >>> memory_order((12, 8), (1, 12)), memory_order((4, 8), (0, 1))
    ((1, 0), (0, 1))
    >>> memory_order((4, 8), (0, 1), (1, 4))
    (1, 0)
    """
    order = list(reversed(range(len(sizes))))
    for last in range(1, len(order)):
        at = last
        for before in reversed(range(last)):
            inner, dim = order[before], order[at]
            if (found := _compared(inner, dim, sizes, strides)) > 0:
                order[before], order[at] = dim, inner
                at = before
            elif found < 0:
                break
    return tuple(reversed(order))


def _compared(inner: int, dim: int, sizes: Sequence[int], operands: Sequence[Sequence[int]]) -> int:
    """Below 0 if ``inner`` lies within ``dim``, above 0 for the reverse, 0 if undecided."""
    for strides in operands:
        if strides[inner] and strides[dim]:
            if strides[inner] != strides[dim]:
                return -1 if strides[inner] < strides[dim] else 1
            if sizes[inner] > sizes[dim]:
                return 1
    return 0


def lies_row_by_row(meta: TensorMeta) -> bool:
    """Whether the tensor is row-major without gaps."""
    rows = row_major(tuple(meta.shape))
    return all(n == 1 or a == b for n, a, b in zip(meta.shape, meta.stride, rows))


def lying_apart(meta: TensorMeta) -> TensorMeta:
    """The TensorMeta of a copy: the same, unless elements share memory, as overlapping windows do;
    then with strides in the same order under which they do not. A view of such windows may be legal
    with their own strides, but not with those of a copy.

    >>> meta = TensorMeta(torch.Size((5, 2)), (1, 1), torch.float32)
    >>> lying_apart(meta).stride
    (2, 1)
    """
    strides, step = list(meta.stride), 1
    for d in reversed(memory_order(tuple(meta.shape), tuple(meta.stride))):
        if meta.shape[d] > 1:
            strides[d] = max(strides[d], step)
            step = strides[d] * meta.shape[d]
    if 0 in meta.stride or tuple(strides) == tuple(meta.stride):
        return meta
    return TensorMeta(meta.shape, tuple(strides), meta.dtype)


# -- packing ---------------------------------------------------------------------------------------
# One rank's part in a step: what it keeps, what it packs into messages, and where it unpacks what
# it receives.

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
        and local.shape == _source_on(step, mesh, communication.this_rank())
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
    into = begin(part, k, operands, into=into, fill=fill, adds=adds)
    complete(part, k, received, into, adds=adds)
    return into


def begin(
    part: Part,
    k: int,
    operands: Sequence[torch.Tensor],
    *,
    into: torch.Tensor | None = None,
    fill: Any = 0,
    adds: bool = False,
) -> torch.Tensor:
    """A result with the parts that this rank keeps of the operands, before anything has arrived;
    with ``into``, written to an existing tensor.
    """
    if into is None:
        shape, like = part.target_shape(k), operands[0]
        into = like.new_full(shape, fill) if part.filled[k] else like.new_empty(shape)
    for i, copy in part.kept(k):
        write(copy, operands[i], into, add=adds)
    return into


def complete(
    part: Part, k: int, received: torch.Tensor, into: torch.Tensor, *, adds: bool = False
) -> None:
    """Write what has arrived to a result that was begun."""
    for copy in part.unpacks[k] or ():
        write(copy, received, into, add=adds)


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
    stride = (*[flat(step, strides[:rest]) for step in steps], *strides[rest:])
    is_backward = min([rows for step in steps for rows in step], default=0) < 0
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
    if dtype is torch.bool:  # of which Inductor's code for CPUs does not compile a view
        return buffer.to(dtype)
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


# -- messages --------------------------------------------------------------------------------------
# Sends packed buffers in an exchange: in one all-to-all of a group, or in one batch of
# point-to-point messages.

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
        return communication.all_gather(buffer, group, async_op=async_op)
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
    if group is not None and into is not None and not communication.is_fake(group):
        mine = part(communication.this_rank())
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
        wait = _point_to_point(part(communication.this_rank()), buffer, tag, into)
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
        and communication.is_fake(group)
    ):
        # The fake backend of dry runs refuses calls in which a rank sends nothing: send it
        # something; it moves nothing anyway.
        at = dist.get_rank(group)
        sends[at], receives[at] = width, receives[at] + width
        given = buffer.new_zeros(width)
        got = communication.all_to_all(given, receives, sends, group)
        return got[width:].clone()  # a view as another dtype needs an aligned start
    return communication.all_to_all(buffer, receives, sends, group, async_op=async_op)


def _wait(received: list[torch.Tensor], read: list[torch.Tensor], works: list[Any]) -> Any:
    """Wait for a received buffer; it and those that were read until then are kept no longer."""
    for work in works:
        work.wait()
    result = communication.wait_for(received.pop())
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

"""One rank's part in an exchange: strided copies into a send buffer, the peers' messages in it, and
strided copies out of the receive buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.exchange.flow import (
    Copy,
    LinkFlow,
    LinkMessage,
    Message,
    Own,
    Vector,
    as_it_lies,
    fills,
    flat,
    fold,
    in_place,
    minus,
    run_of,
)
from cute_sharding.exchange.placed import Placed
from cute_sharding.layout import Layout, LayoutError, coalesce, composition
from cute_sharding.layout.layout import row_major
from cute_sharding.sharding.rows import Device

# -- pieces ----------------------------------------------------------------------------------------
# Tensors that are concatenations of pieces of other tensors: send buffers and results.
#
# Copies are given by rows of dims, whatever the memory layout. By the strides of a memory each is a
# layout. If copies fill a tensor one after the other, they are a concatenation along a dim,
# provided that each composes with a whole number of its rows.

# The most pieces of a concatenation: to find one of more takes longer than it saves.
MOST = 64
# Copies in order, each with its operand; None: from the receive buffer.
InOrder: TypeAlias = "tuple[tuple[int | None, Copy], ...]"


class StridedPiece(NamedTuple):
    """Elements of a tensor in their wanted order, by the strides of its memory.

    Attributes:
        of: the number of the operand; None: the receive buffer.
        sizes, strides: loops, in elements.
        first: the first element, counted from the tensor's first one.
    """

    of: int | None
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int


class Joined(NamedTuple):
    """A tensor that is pieces one behind the other.

    Attributes:
        pieces: what is concatenated.
        dim: along which dim.
        shape: the shape to view the concatenation in; None: it has its shape.
    """

    pieces: tuple[StridedPiece, ...]
    dim: int
    shape: tuple[int, ...] | None


def in_order(copies: Sequence[tuple[int | None, Copy]], shape: tuple[int, ...]) -> InOrder | None:
    """The copies in the order in which they fill a tensor y of that shape from its first element to
    its last; None: they do not, or are more than :data:`MOST`.

    >>> rows = [(0, Copy((3,), (), (), (3,), ((1,),))), (1, Copy((3,), (), (), (0,), ((1,),)))]
    >>> [of for of, _ in in_order(rows, (6,)) or ()], in_order(rows, (7,))
    ([1, 0], None)
    """
    if len(copies) > MOST:
        return None
    strides, begun = row_major(shape), []
    for of, copy in copies:
        start = run_of([copy.flipped], strides)
        if start is None:
            return None
        begun.append((start, of, copy))
    at, found = 0, []
    for start, of, copy in sorted(begun, key=lambda each: each[0]):
        if start != at:
            return None
        found.append((of, copy))
        at += prod(copy.sizes)
    return tuple(found) if at == prod(shape) > 0 else None


def join_copies(
    some: InOrder, strides: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> Joined | None:
    """The concatenation of copies that are in order in a tensor of that shape, by the strides of
    the operands. None: it is none, as a copy goes backward, or their inner loops differ.

    >>> rows = Copy((2, 4), (1, 0), ((1, 0), (0, 1)), (0, 0), ((1, 0), (0, 1)))
    >>> join_copies(((0, rows),), [(6, 1)], (2, 4)).pieces
    (StridedPiece(of=0, sizes=(2, 4), strides=(6, 1), first=6),)
    """
    found = []
    for of, copy in some:
        by = (1,) if of is None else strides[of]
        if len(by) != len(copy.x) or any(rows < 0 for step in copy.dx for rows in step):
            return None
        layout = coalesce(Layout(copy.sizes, tuple([flat(step, by) for step in copy.dx])))
        found.append((of, layout, flat(copy.x, by)))
    dim = next((d for d, n in enumerate(shape) if n > 1), 0)
    inner = max([tuple([n for n, _ in layout.leaves[1:]]) for _, layout, _ in found], key=len)
    for ones, rest, seen in (((1,) * dim, shape[dim + 1 :], None), ((), inner, shape)):
        every = [_piece(of, layout, first, ones, rest) for of, layout, first in found]
        pieces = tuple([piece for piece in every if piece is not None])
        if len(pieces) == len(every):
            return Joined(pieces, len(ones), seen if shape else shape)
    return None


def _piece(
    of: int | None, layout: Layout, first: int, ones: tuple[int, ...], inner: tuple[int, ...]
) -> StridedPiece | None:
    """A layout as a piece with the sizes (``ones``, count, ``inner``); None: it is not one."""
    count, rest = divmod(layout.size, prod(inner))
    sizes = (*ones, count, *inner)
    try:
        found = None if rest else composition(layout, Layout(sizes))
    except LayoutError:
        return None
    if found is None or found.shape != sizes:
        return None
    strides, below = [], 1
    for n, step in zip(reversed(sizes), reversed(found.stride)):
        strides.append(
            below if n == 1 else step
        )  # any stride is right for one row: this is that of a contiguous torch tensor
        below = strides[-1] * n
    return StridedPiece(of, sizes, tuple(reversed(strides)), first)


# -- part ------------------------------------------------------------------------------------------
# One rank's part in an exchange: strided copies into a send buffer, the peers' messages in it, and
# strided copies out of the receive buffer.

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One rank's part in an exchange.

    Attributes:
        peers: the order of the messages.
        sends, receives: elements to and from each peer.
        packs: for each operand, copies into the send buffer; None: the operand, if contiguous, is
            the send buffer.
        own: (operand, result, copies from the one to the other). Constants of a relation are
            operands of one element, after the others.
        unpacks: for each result, copies out of the receive buffer; for sums one list for each
            message, since they are added. None: the receive buffer is the result.
        target_shapes: the rank's local shape of each result, as the exchange numbers its rows; for
            windows of the rows that they are made of, each once. None: it is not on the mesh.
        filled: for each result, whether it has rows that nothing is copied to.
        source_shapes: the local shapes of operands, where they are needed.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows, columns = (Placed.of(Sharding((4, 6), (2,), (Shard(d),))) for d in (0, 1))
    >>> part: Part = Exchange(identity((4, 6)), (rows,), (columns,)).part(1)
    >>> part.sends, part.target_shape()
    ((6,), (4, 3))
    """

    peers: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    packs: tuple[tuple[Copy, ...] | None, ...]
    own: tuple[Own, ...]
    unpacks: tuple[tuple[Copy, ...] | None, ...]
    target_shapes: tuple[Shape | None, ...]
    filled: tuple[bool, ...]
    source_shapes: tuple[Shape | None, ...] = ()

    def source_shape(self, i: int = 0) -> Shape:
        """The local shape of an operand on a rank of its mesh."""
        shape = self.source_shapes[i]
        assert shape is not None
        return shape

    def target_shape(self, k: int = 0) -> Shape:
        """The local shape of a result on a rank of its mesh."""
        shape = self.target_shapes[k]
        assert shape is not None
        return shape

    def kept(self, k: int = 0) -> list[tuple[int, Copy]]:
        """The copies to a result that need no message: (operand, copy)."""
        return [(i, copy) for i, onto, copies in self.own if onto == k for copy in copies]

    @cached_property
    def sent(self) -> InOrder | None:
        """The copies that make up the send buffer one behind the other; None if they do not."""
        some = [(i, copy) for i, copies in enumerate(self.packs) for copy in copies or ()]
        return in_order(some, (sum(self.sends),))

    @cached_property
    def made(self) -> tuple[InOrder | None, ...]:
        """For each result, the copies that make up all of it one behind the other; None if they do
        not.
        """
        return tuple(
            [
                None
                if shape is None or self.filled[k]
                else in_order(
                    [*self.kept(k), *[(None, copy) for copy in self.unpacks[k] or ()]], shape
                )
                for k, shape in enumerate(self.target_shapes)
            ]
        )

    @cached_property
    def whole(self) -> tuple[tuple[int, Copy] | None, ...]:
        """For each result that is one copy of an operand: (operand, copy); None for other results,
        and if it is received.
        """
        found: list[tuple[int, Copy] | None] = []
        for some in self.made:
            i, copy = some[0] if some and len(some) == 1 else (None, None)
            found.append(None if i is None or copy is None else (i, copy))
        return tuple(found)

    @cached_property
    def joined(self) -> Callable[..., tuple[Joined | None, ...]]:
        """A function of the operands' strides: the pieces of each result, and last those of the
        send buffer; None for what is not pieces one behind the other.
        """
        return lru_cache(maxsize=1 << 5)(self._joined)

    def _joined(self, *strides: tuple[int, ...]) -> tuple[Joined | None, ...]:
        shapes = (*self.target_shapes, (sum(self.sends),))
        return tuple(
            [
                join_copies(some, strides, shape) if some and shape else None
                for some, shape in zip((*self.made, self.sent), shapes)
            ]
        )

    @cached_property
    def are_whole(self) -> tuple[bool, ...]:
        """For each result, whether it is one operand, unchanged."""
        return tuple(
            [
                shape is None or 0 in shape or (own is not None and fills((own[1].flipped,), shape))
                for shape, own in zip(self.target_shapes, self.whole)
            ]
        )

    @property
    def peak_elements(self) -> int:
        """The most elements that are alive at once: the operands, and two of send buffer, receive
        buffer and results.
        """
        source, target = (
            sum(prod(shape) for shape in shapes if shape is not None)
            for shapes in (self.source_shapes, self.target_shapes)
        )
        sending = 0 if None in self.packs else sum(self.sends)
        taking = 0 if None in self.unpacks else target
        return source + sum(self.receives) + max(sending, taking)


class Buffer(NamedTuple):
    """Messages one after the other in a flat buffer.

    Attributes:
        sizes: of each peer's message.
        copies: for each tensor, the copies into the buffer, or out of it.
    """

    sizes: tuple[int, ...]
    copies: tuple[tuple[Copy, ...], ...]


def one_by_one(
    messages: Sequence[Message],
    peers: Sequence[int],
    tensors: int,
    *,
    into: bool,
    adds: bool = False,
) -> Buffer:
    """A buffer of messages in the order of ``peers``; ``into``: those that the tensors receive."""
    order = {peer: at for at, peer in enumerate(peers)}
    sizes, placed, at = [0] * len(order), [], 0
    for message in sorted(messages, key=lambda message: order[message.peer]):
        placed.append((message, at))
        sizes[order[message.peer]] += message.size
        at += message.size
    return Buffer(tuple(sizes), copies_of(placed, tensors, into=into, adds=adds))


def copies_of(
    placed: Iterable[tuple[Message, int]], tensors: int, *, into: bool, adds: bool = False
) -> tuple[tuple[Copy, ...], ...]:
    """For each tensor, the copies of messages that start at these places of a buffer. With
    ``adds``, elements that reach the same row are added up, so each message keeps its own copies.
    """
    found: list[list[Copy]] = [[] for _ in range(tensors)]
    for message, at in placed:
        for tensor, some in (message.out_of if into else message.into)(at):
            found[tensor] += fold([*some]) if adds else some
    return tuple([tuple(some if adds else fold(some)) for some in found])


def part_of(
    kept: Sequence[Own],
    buffers: tuple[Buffer, Buffer],
    shapes: tuple[Sequence[Shape | None], Sequence[Shape | None]],
    peers: Sequence[int],
    *,
    adds: bool,
) -> Part:
    """The part of a rank, from what it keeps, its send and receive buffers, and the local shapes of
    operands and results. ``adds``: elements that reach the same row are added up.
    """
    sending, receiving = buffers
    filled = []
    for k, shape in enumerate(shapes[1]):
        own = [copy for _, result, some in kept if result == k for copy in some]
        copied = sum(prod(copy.sizes) for copy in (*receiving.copies[k], *own))
        filled.append(shape is not None and (adds or copied < prod(shape)))
    return Part(
        tuple(peers),
        sending.sizes,
        receiving.sizes,
        sending.copies,
        tuple(kept),
        receiving.copies,
        tuple(shapes[1]),
        tuple(filled),
        tuple(shapes[0]),
    )


def as_blocks(
    messages: Iterable[tuple[Iterable[Copy], Shape]], tensor: Shape
) -> tuple[tuple[int, ...], tuple[Copy, ...] | None]:
    """Copies out of a tensor as one block for each peer, row-major in the block's own shape: the
    sizes of the blocks, and the copies; None: the tensor itself is the buffer.
    """
    sizes: list[int] = []
    copies: list[Copy] = []
    for some, shape in messages:
        copies += [as_it_lies(copy, shape, sum(sizes)) for copy in some]
        sizes.append(prod(shape))
    free = sum(sizes) == prod(tensor) and in_place(copies, row_major(tensor))
    return tuple(sizes), None if free else tuple(fold(copies))


def part_of_one(
    peers: Sequence[int],
    sending: tuple[tuple[int, ...], tuple[Copy, ...] | None],
    receiving: tuple[tuple[int, ...], tuple[Copy, ...] | None],
    shapes: tuple[Shape, Shape],
    own: tuple[Copy, ...] | None = None,
) -> Part:
    """The part with one operand and one complete result, from the sizes of messages and the copies;
    copies of None: the operand is the send buffer, or the receive buffer is the result.
    """
    return Part(
        tuple(peers),
        sending[0],
        receiving[0],
        (sending[1],),
        () if own is None else ((0, 0, own),),
        (receiving[1],),
        shapes[1:],
        (False,),
        shapes[:1],
    )


def as_they_lie(
    whole: tuple[Buffer, Buffer], kept: int, shapes: tuple[Shape, Shape]
) -> tuple[bool, bool]:
    """Whether the operand itself can be the send buffer, and the receive buffer the result. That
    saves copies, but the ``kept`` elements then travel along, as in the buffers ``whole``. It is
    done if a rank keeps less than would be copied, and memory suffices.
    """
    sending, receiving = whole
    sent, got = sum(sending.sizes), sum(receiving.sizes)
    alone = len(sending.sizes) == 1
    pack_free = (alone or 2 * kept < sent) and _lies_as(sending, shapes[0], into=False)
    unpack_free = (alone or 2 * kept < got) and _lies_as(receiving, shapes[1], into=True)
    if unpack_free and not pack_free and sent > max(prod(shapes[0]), got):
        unpack_free = alone
    return pack_free, unpack_free


def _lies_as(buffer: Buffer, shape: Shape, *, into: bool) -> bool:
    """Whether the contiguous elements of a tensor of that shape are the buffer."""
    copies = buffer.copies[0]
    return sum(buffer.sizes) == prod(shape) and in_place(
        [copy.flipped for copy in copies] if into else copies, row_major(shape)
    )


# -- all peers -------------------------------------------------------------------------------------
# The messages between a device and all its peers as a few strided copies, however many peers there
# are.
#
# A cut makes consecutive blocks of the rows of a dim. Except for the last ones, which are shorter,
# block q + 1 is block q, moved by one step. So if a device has all rows of a dim, its messages to
# consecutive peers are one message with one more mode, the peer. The first two of them give the
# step, in the tensor and in the buffer.


@remembered
def edges(n: int, split_factor: int, parts: int) -> tuple[int, ...] | None:
    """The first devices of ranges, among ``parts`` devices that hold blocks of ``n`` rows: within a
    range, each device's rows are those of the device before, moved by one step; and the end. None
    if blocks of whole pieces and of the last piece have different sizes, so their distance changes.

    >>> edges(10, 1, 4)  # 3, 3, 3 and 1
    (0, 3, 4)
    """
    if n == 0:
        return 0, parts
    piece = -(-n // split_factor)
    lengths = [length for length in (piece, n % piece) if length]
    blocks = [-(-length // parts) for length in lengths]
    found = {0, parts}
    for length, block in zip(lengths, blocks):
        short = length // block  # the first device without a whole block
        found |= {edge for edge in (short, short + 1) if edge < parts}
    for first, stop in pairwise(sorted(found)):
        steps = {block for length, block in zip(lengths, blocks) if first * block < length}
        if len(steps) > 1 and stop - first > 1:
            return None
    return tuple(sorted(found))


def _edges_on(m: int, mine: Placed, theirs: Placed) -> tuple[int, ...] | None:
    """The edges on a mesh dim on which peers differ. None if they are not known: other mesh dims
    also cut the tensor dim that it cuts, or the device does not have all of its rows.
    """
    parts = theirs.mesh.sizes[m]
    for n, own, chain in zip(theirs.shape, mine.chains, theirs.chains):
        for k, factor in chain:
            if k == m:
                return None if own or len(chain) > 1 else edges(n, factor, parts)
    return 0, parts


def messages_at_once(
    flow: LinkFlow, device: Device, dims: Sequence[int], *, into: bool, with_own: bool
) -> Buffer | None:
    """The messages between a device and all that differ from it on the mesh dims ``dims``, in the
    order of their places; None if no layout describes them.

    Args:
        flow: on one mesh, without windows or other forms of rows.
        into: messages that the device receives; else those that it sends.
        with_own: whether the rows that it keeps count as a message to itself.
    """
    mine, theirs = (flow.target, flow.source) if into else (flow.source, flow.target)
    parts = [mine.mesh.sizes[m] for m in dims]
    ranges = []
    for m in dims:
        found = _edges_on(m, mine, theirs)
        if found is None:
            return None
        apart = set() if with_own else {device[m], device[m] + 1}
        ranges.append([*pairwise(sorted({*found, *apart}))])

    def message(at: Sequence[int]) -> LinkMessage:
        other = dict(zip(dims, at))
        peer = tuple([other.get(m, k) for m, k in enumerate(device)])
        return flow.of_devices(*((peer, device) if into else (device, peer)))

    boxes = [*product(*ranges)]
    firsts = [message([first for first, _ in box]) for box in boxes]
    sizes = [0] * prod(parts)
    for box, first in zip(boxes, firsts):
        is_own = all(at == device[m] for m, (at, _) in zip(dims, box))
        size = first.size if with_own or not is_own else 0
        for number in _numbers(box, parts) if size else ():
            sizes[number] = size
    starts = [0, *accumulate(sizes)]
    copies: list[Copy] = []
    for box, first in zip(boxes, firsts):
        corner = [at for at, _ in box]
        (number,) = _numbers([(at, at + 1) for at in corner], parts)
        if not sizes[number]:
            continue
        outer: list[tuple[int, Vector, Vector]] = []
        for i, (at, stop) in enumerate(box):
            if stop - at > 1:
                following = message([*corner[:i], at + 1, *corner[i + 1 :]])
                x, beyond = (_x(each, into=into) for each in (first, following))
                step = prod(parts[i + 1 :])
                outer.append(
                    (stop - at, minus(beyond, x), (starts[number + step] - starts[number],))
                )
        copies += _looped(first, outer, starts[number], into=into)
    return Buffer(tuple(sizes), (tuple(fold(copies)),))


def _numbers(box: Sequence[tuple[int, int]], parts: Sequence[int]) -> Sequence[int]:
    """The row-major numbers of the peers in a box."""
    numbers: Sequence[int] = [0]
    for (first, stop), n in zip(box, parts):
        numbers = [at * n + k for at in numbers for k in range(first, stop)]
    return numbers


def _x(message: LinkMessage, *, into: bool) -> Vector:
    """The message's first element in the tensor of the device."""
    first = message.copies[0]
    return first.y if into else first.x


def _looped(
    message: LinkMessage, outer: Sequence[tuple[int, Vector, Vector]], at: int, *, into: bool
) -> Iterator[Copy]:
    """A message's copies with outer modes: (size, step in the tensor, step in the buffer)."""
    sides = message.out_of(at) if into else message.into(at)
    for copy in (copy for _, some in sides for copy in some):
        in_tensor, in_buffer = zip(*[(dx, dy) for _, dx, dy in outer]) if outer else ((), ())
        dx, dy = (in_buffer, in_tensor) if into else (in_tensor, in_buffer)
        yield Copy(
            (*[n for n, _, _ in outer], *copy.sizes),
            copy.x,
            (*dx, *copy.dx),
            copy.y,
            (*dy, *copy.dy),
        )

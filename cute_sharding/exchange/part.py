"""One rank's part in an exchange: strided copies into a send buffer, the peers' messages in it, and
strided copies out of the receive buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.copies import Copy, as_it_lies, fills, fold, in_place
from cute_sharding.exchange.flow import Message, Own
from cute_sharding.exchange.pieces import InOrder, Joined, in_order, join_copies
from cute_sharding.layout.layout import row_major

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

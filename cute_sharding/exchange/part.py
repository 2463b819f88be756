"""One rank's part in an exchange: strided copies into a buffer, who gets what of it, and strided
copies out of what is received.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from cute_sharding.exchange.copies import Copy, fills, folded, packed
from cute_sharding.exchange.flow import Message
from cute_sharding.relations.moves import Move

Shape = tuple[int, ...]


class Part(NamedTuple):
    """One rank's part in an exchange.

    Attributes:
        peers: the ranks in whose order messages lie.
        sends, receives: elements to and from each of them.
        packs: for each operand, copies into the send buffer, message by message.
        own: for each operand and result, copies from the one to the other.
        unpacks: for each result, copies out of the receive buffer; of sums those of each message
            by themselves, since they are added.
        target_shapes: of each result what the rank is to hold; of windows, the rows that they are
            made of, each once; None where it is not on the mesh.
        filled: whether each result has rows that nothing is copied to.
    """

    peers: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    packs: tuple[tuple[Copy, ...], ...]
    own: tuple[tuple[int, int, tuple[Copy, ...]], ...]
    unpacks: tuple[tuple[Copy, ...], ...]
    target_shapes: tuple[Shape | None, ...]
    filled: tuple[bool, ...]

    def shape_of(self, k: int) -> Shape:
        """Of a result on a rank of its mesh."""
        shape = self.target_shapes[k]
        assert shape is not None
        return shape

    def is_whole(self, k: int) -> bool:
        """Whether a result is one operand as it lies."""
        shape = self.target_shapes[k]
        own = [copy for _, onto, copies in self.own if onto == k for copy in copies]
        return (
            shape is None
            or 0 in shape
            or (fills(tuple(own), shape) and fills((own[0].flipped,), shape))
        )


def part_of(
    move: Move,
    kept: Sequence[Message],
    sent: Sequence[Message],
    received: Sequence[Message],
    shapes: tuple[Shape | None, ...],
    peers: Sequence[int] | None,
    room: int,
) -> Part:
    """The part of a rank that keeps, sends and receives those messages, and is to hold results of
    those shapes. ``peers`` and ``room`` as in :meth:`.Exchange.part`.
    """
    if peers is None:
        peers = sorted({message.peer for message in (*sent, *received)})
    order = {peer: at for at, peer in enumerate(peers)}
    packs: list[list[Copy]] = [[] for _ in move.inputs]
    unpacks: list[list[list[Copy]]] = [[] for _ in move.outputs]
    sizes = [[0] * len(order), [0] * len(order)]
    for into, messages in enumerate((sent, received)):
        at = 0
        for message in sorted(messages, key=lambda message: order[message.peer]):
            some, start = [], at
            at += room
            for copy in message.copies:
                placed = packed(copy.flipped if into else copy, at)
                some.append(placed.flipped if into else placed)
                at += prod(copy.sizes)
            if into:
                unpacks[message.link.target].append(some)
            else:
                packs[message.link.source] += some
            sizes[into][order[message.peer]] += at - start
    own = [(m.link.source, m.link.target, tuple(folded(m.copies))) for m in kept]
    filled = []
    for k, shape in enumerate(shapes):
        copies = [copy for some in unpacks[k] for copy in some]
        copies += [copy for _, result, some in own if result == k for copy in some]
        copied = sum(prod(copy.sizes) for copy in copies)
        filled.append(shape is not None and (move.adds or copied < prod(shape)))
    return Part(
        tuple(peers),
        tuple(sizes[0]),
        tuple(sizes[1]),
        tuple([tuple(folded(some)) for some in packs]),
        tuple(own),
        tuple([tuple(_unpacked(some, move.adds)) for some in unpacks]),
        shapes,
        tuple(filled),
    )


def _unpacked(by_message: Sequence[Sequence[Copy]], adds: bool) -> list[Copy]:
    """Of a sum, those of each message by themselves: they reach the same rows."""
    if adds:
        return [copy for some in by_message for copy in folded(some)]
    return folded([copy for some in by_message for copy in some])

"""Tensors of one program's names and shapes made of those of another's, from meshes to meshes: a
relation of all results to all operands, run as one exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import prod
from typing import Any, NamedTuple

from cute_sharding._memory import remembered
from cute_sharding._words import counted
from cute_sharding.exchange.bundle import Bundle, BundlePart, Item, own_part, size_of
from cute_sharding.exchange.exchange import Exchange
from cute_sharding.exchange.placed import Placed
from cute_sharding.models.buckets import Bucket, Loads, buckets, peak
from cute_sharding.models.plan import Packed
from cute_sharding.models.tensor import PlacedTensor
from cute_sharding.models.way import Load
from cute_sharding.relations.relation import Piece, Relation, inverse, read_once
from cute_sharding.sharding.rows import count_rows


class NamedTensor(NamedTuple):
    """A tensor of a refit: its name, and how it lies.

    >>> rows = PlacedTensor.of((4, 6), (2,), "S(0)")
    >>> NamedTensor("w", rows).text
    'w (4, 6) float32'
    """

    name: str
    tensor: PlacedTensor

    @property
    def placed(self) -> Placed:
        """Its shape, the mesh, and what cuts its dims."""
        return self.tensor.placed

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return self.tensor.dtype

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.tensor.itemsize

    @property
    def text(self) -> str:
        """Name, shape and dtype."""
        return f"{self.name} {self.placed.shape} {self.dtype}"

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.placed.shape) * self.itemsize

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "shape": list(self.placed.shape),
            "dtype": self.dtype,
            "mesh": list(self.placed.mesh.sizes),
            "ranks": list(self.placed.mesh.ranks),
            "placements": self.placed.placements_text(),
        }


class Member(NamedTuple):
    """Results that are made of operands together, as far as these are sent in one dtype.

    Attributes:
        exchange: what goes where.
        operands: the numbers of its operands among those of the refit; its constants are behind
            them.
        constants: the numbers of these.
        results: those of its results.
        dtype, itemsize: of the elements on their way.
    """

    exchange: Exchange
    operands: tuple[int, ...]
    constants: tuple[int, ...]
    results: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def item(self) -> Item:
        """What goes into a bundle."""
        return Item(self.exchange, self.itemsize)

    def load(self, rank: int) -> Load:
        """What it takes of a rank's memory beside operands and results: buffers."""
        mine = own_part(self.exchange, rank)
        sent, received = (size_of(side) * self.itemsize for side in (mine.sent, mine.taken))
        return Load(0, 0, sent, received, 0, 0, 0, sent + received)


@dataclass(frozen=True, eq=False)
class Refit:
    """Results made of operands.

    Attributes:
        relation: of all results to all operands; it says of every element what it is.
        operands, results: what these are.
        memory_limit: the most bytes that a rank may hold beside them, in buffers; or None.

    Raises:
        ValueError: the buffers of some results, which are made of an operand together, do not keep
            within the limit.

    >>> from cute_sharding.relations.table import relation_of
    >>> half, fused = (PlacedTensor.of((n, 6), (2,), "S(0)") for n in (4, 8))
    >>> cat = relation_of("torch.cat", [(4, 6), (4, 6)], 0)
    >>> gate, up = (NamedTensor(name, half) for name in ("gate", "up"))
    >>> print(Refit(cat, (gate, up), (NamedTensor("gate_up", fused),)))
    refit of 2 tensors to 1, mesh (2,) of ranks 0, 1
      gate_up (8, 6) float32 as [S(0)]: 2 pieces of gate, up
    in all: 1 exchange, a rank receives 48 bytes at the most; 192 bytes of results, all covered
    """

    relation: Relation
    operands: tuple[NamedTensor, ...]
    results: tuple[NamedTensor, ...]
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            _ = self.packed  # or it does not keep within the limit

    # -- what runs ---------------------------------------------------------------------------------

    @cached_property
    def wires(self) -> tuple[tuple[str, int], ...]:
        """The dtype in which each operand is sent, and its itemsize: that of the results made of
        it, where it is one dtype of fewer bytes.
        """
        of: list[set[tuple[str, int]]] = [set() for _ in self.operands]
        for k in self.relation.sources:
            results = [self.results[each.target] for each in self.relation.by_source[k]]
            of[k].update((result.dtype, result.itemsize) for result in results)
        return tuple(
            [wire_of(each.dtype, each.itemsize, some) for each, some in zip(self.operands, of)]
        )

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Results that are made of an operand together, with all their operands: what is needed for
        both is sent once.
        """
        groups: dict[tuple[str, int], list[Piece]] = {}
        constants: list[Piece] = []
        for each in self.relation.pieces:
            if each.source < 0:
                constants.append(each)
            else:
                groups.setdefault(self.wires[each.source], []).append(each)
        if constants:  # which nobody sends: they go with the first
            groups.setdefault(next(iter(groups), ("uint8", 1)), []).extend(constants)
        return tuple(
            [
                _member(self, some, *wire)
                for wire, pieces in groups.items()
                for some in _together(pieces)
            ]
        )

    @cached_property
    def bundle(self) -> Bundle:
        """All that is sent."""
        return Bundle(tuple([each.item for each in self.members]))

    @cached_property
    def packed(self) -> tuple[Packed, ...]:
        """Which of the members go together, in the order in which they run."""
        held_are = "buffers, even if only the results of one source move at a time"
        return tuple(
            [
                Packed(members, Bundle(tuple([self.members[i].item for i in members])), at_once)
                for members, at_once in buckets(self._loads, self.memory_limit, held_are=held_are)
            ]
        )

    @cached_property
    def _loads(self) -> list[Loads]:
        known: dict[Item, Loads] = {}
        for each in self.members:
            if each.item not in known:
                known[each.item] = tuple([each.load(rank) for rank in self.bundle.looked_at])
        return [known[each.item] for each in self.members]

    def parts(self, rank: int) -> tuple[BundlePart, ...]:
        """A rank's part in each bucket, for who would move the bytes by other means: bytes to and
        from each peer; and of each exchange (``packed`` says which of ``members`` are in a bucket,
        and these between which tensors, in which dtype) strided copies from the operands into a
        buffer and out of one into the results, which are contiguous. Steps below 0 go backward.
        Constants are operands of one element behind the others.

        >>> rows, turned = (PlacedTensor.of(shape, (2,), "S(0)") for shape in ((4, 6), (6, 4)))
        >>> from cute_sharding.relations.table import relation_of
        >>> relation = relation_of("torch.transpose", (4, 6), 0, 1)
        >>> refit = Refit(relation, (NamedTensor("w", rows),), (NamedTensor("v", turned),))
        >>> (part,) = refit.parts(0)
        >>> part.peers, part.sends, part.receives
        ((1,), (24,), (24,))
        >>> part.parts[0].packs[0][0]
        Copy(sizes=(2, 3), x=(0, 3), dx=((0, 6), (0, 1)), y=(0,), dy=((3,), (1,)))
        """
        return tuple([each.bundle.part(rank) for each in self.packed])

    # -- how much ----------------------------------------------------------------------------------

    def received_by(self, rank: int) -> int:
        """What a rank receives, in bytes: what it needs and does not hold, each element once."""
        return self.bundle.received_by(rank)

    @cached_property
    def received_bytes(self) -> int:
        """What the busiest rank receives, of those looked at."""
        return max(map(self.received_by, self.bundle.looked_at), default=0)

    @cached_property
    def received_elements(self) -> int:
        """The same in elements, of all dtypes."""
        return max(map(self.elements_received_by, self.bundle.looked_at), default=0)

    def elements_received_by(self, rank: int) -> int:
        """How many elements a rank receives, of all dtypes."""
        return sum(member.exchange.received_by(rank) for member in self.members)

    @property
    def collectives(self) -> int:
        """How many collectives, or batches of messages, it is: one for each that go together, but
        where no rank receives anything.
        """
        return sum(not each.bundle.is_free for each in self.packed)

    @cached_property
    def buffer_bytes(self) -> int:
        """The most that a rank holds at once beside operands and results."""
        found = [Bucket(each.members, each.follows_at_once) for each in self.packed]
        return peak(self._loads, found) if found else 0

    @cached_property
    def said_bytes(self) -> int:
        """Of how many bytes of the results it is said what they are."""
        return sum(self.relation.said(k) * each.itemsize for k, each in enumerate(self.results))

    @property
    def coverage(self) -> float:
        """The share of the results' bytes of which it is said what they are: all, 1.0."""
        total = sum(each.bytes for each in self.results)
        return self.said_bytes / total if total else 1.0

    @cached_property
    def unread(self) -> dict[str, int]:
        """Of operands of which results have not all elements: how many they leave out."""
        found = {}
        for k, operand in enumerate(self.operands):
            read = count_rows(read_once(self.relation.by_source.get(k, ())))
            left = prod(operand.placed.shape) - read
            if left:
                found[operand.name] = left
        return found

    # -- back --------------------------------------------------------------------------------------

    def inverse(self) -> Refit:
        """From the results back to the operands, as they lay. Of an element that results have more
        than once the first is taken.

        Raises:
            ValueError: results have not all elements of the operands.
        """
        if self.unread:
            name, left = next(iter(self.unread.items()))
            raise ValueError(
                f"the refit has no inverse, because the results lack {counted(left, 'element')} of "
                f"the source tensor {name!r}. Add a result with the rest of the tensor, or remove "
                "the tensor from the source"
            )
        back = inverse(self.relation, any_copy=True)
        return Refit(back, self.results, self.operands, self.memory_limit)

    # -- as text and data --------------------------------------------------------------------------

    def _pieces(self, result: int) -> tuple[Piece, ...]:
        return self.relation.by_target.get(result, ())

    def sources_of(self, result: int) -> list[str]:
        """The names of the operands that a result is made of."""
        numbers = dict.fromkeys(e.source for e in self._pieces(result) if e.source >= 0)
        return [self.operands[k].name for k in numbers]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in bytes."""
        return {
            "operands": [each.to_dict() for each in self.operands],
            "results": [
                {
                    **each.to_dict(),
                    "of": self.sources_of(k),
                    "pieces": [str(one) for one in self._pieces(k)],
                }
                for k, each in enumerate(self.results)
            ],
            "sent": [
                {
                    "dtype": dtype,
                    "operands": [
                        operand.name
                        for operand, wire, k in zip(self.operands, self.wires, count())
                        if wire == (dtype, width) and k in self.relation.sources
                    ],
                }
                for dtype, width in dict.fromkeys(self.wires[k] for k in self.relation.sources)
            ],
            "collectives": self.collectives,
            "received_bytes": self.received_bytes,
            "buffer_bytes": self.buffer_bytes,
            "memory_limit": self.memory_limit,
            "most_peers": self.bundle.most_peers,
            "result_bytes": sum(each.bytes for each in self.results),
            "said_bytes": self.said_bytes,
            "unread_elements": dict(self.unread),
        }

    def _repr_html_(self) -> str:
        from cute_sharding._html import of_data

        return of_data(next(self._lines()), self.to_dict())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        meshes = " -> ".join(
            dict.fromkeys(
                ", ".join(dict.fromkeys(str(each.placed.mesh) for each in side))
                for side in (self.operands, self.results)
            )
        )
        yield f"refit of {len(self.operands)} tensors to {len(self.results)}, {meshes}"
        for k, each in enumerate(self.results):
            many, of = len(self._pieces(k)), ", ".join(self.sources_of(k)) or "constants"
            pieces = f"{many} piece{'s' * (many != 1)}"
            yield f"  {each.text} as {each.placed.placements_text()}: {pieces} of {of}"
        for name, left in self.unread.items():
            yield f"  {left:,} elements of {name} are in no result"
        total = sum(each.bytes for each in self.results)
        said = "all covered" if total == self.said_bytes else f"{self.said_bytes:,} covered"
        n = self.collectives
        yield (
            f"in all: {n} exchange{'s' * (n != 1)}, a rank receives {self.received_bytes:,} bytes "
            f"at the most; {total:,} bytes of results, {said}"
        )
        if n > 1:
            yield f"in {n} parts: a rank holds {self.buffer_bytes:,} bytes of buffers at the most"


def wire_of(dtype: str, itemsize: int, results: Collection[tuple[str, int]]) -> tuple[str, int]:
    """The dtype in which a tensor is sent, and its itemsize: that of the results made of it, where
    it is one dtype of fewer bytes.

    >>> wire_of("float32", 4, {("bfloat16", 2)}), wire_of("bfloat16", 2, {("float32", 4)})
    (('bfloat16', 2), ('bfloat16', 2))
    """
    fewer = len(results) == 1 and min(results)[1] < itemsize
    return min(results) if fewer else (dtype, itemsize)


def _together(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in groups: those of one result, and of results that share an operand."""
    group_of: dict[tuple[bool, int], int] = {}
    groups: dict[int, list[Piece]] = {}
    for each in pieces:
        ends = [(True, each.target)] + [(False, each.source)] * (each.source >= 0)
        met = sorted({group_of[end] for end in ends if end in group_of})
        group, *others = met or [len(group_of)]
        for other in others:
            groups[group] += groups.pop(other)
            group_of.update({end: group for end, g in group_of.items() if g == other})
        groups.setdefault(group, []).append(each)
        group_of.update(dict.fromkeys(ends, group))
    return list(groups.values())


def _member(refit: Refit, pieces: Sequence[Piece], dtype: str, itemsize: int) -> Member:
    operands = dict.fromkeys(each.source for each in pieces if each.source >= 0)
    constants = dict.fromkeys(-1 - each.source for each in pieces if each.source < 0)
    results = dict.fromkeys(sorted({each.target for each in pieces}))
    numbers = {k: i for i, k in enumerate(operands)}
    numbers.update({-1 - c: -1 - i for i, c in enumerate(constants)})
    onto = {k: i for i, k in enumerate(results)}
    whole = refit.relation
    relation = Relation(
        tuple([whole.inputs[k] for k in operands]),
        tuple([whole.outputs[k] for k in results]),
        tuple([e._replace(source=numbers[e.source], target=onto[e.target]) for e in pieces]),
        tuple([whole.constants[c] for c in constants]),
    )
    sources = tuple([refit.operands[k].placed for k in operands])
    targets = tuple([refit.results[k].placed for k in results])
    exchange = _exchange_of(relation, sources, targets)
    return Member(exchange, (*operands,), (*constants,), (*results,), dtype, itemsize)


@remembered
def _exchange_of(
    relation: Relation, sources: tuple[Placed, ...], targets: tuple[Placed, ...]
) -> Exchange:
    """One for all of one form: the layers of a model."""
    return Exchange(relation, sources, targets)

"""Tensors of one program's names and shapes made of those of another's, from meshes to meshes: a
relation of all results to all operands, run as one exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from cute_sharding.exchange.by_pieces import PieceExchange
from cute_sharding.exchange.members import Member, part_of
from cute_sharding.exchange.part import Part
from cute_sharding.exchange.placed import Placed
from cute_sharding.relations.elements import read_once
from cute_sharding.relations.piece import Piece
from cute_sharding.relations.relation import Relation, inverse
from cute_sharding.sharding.meeting import count_rows


class Named(NamedTuple):
    """A tensor of a refit: its name, how it lies, and its dtype.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows = Placed.of(Sharding((4, 6), (2,), (Shard(0),)))
    >>> Named("w", rows, "float32", 4).text
    'w (4, 6) float32'
    """

    name: str
    placed: Placed
    dtype: str
    itemsize: int

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


class Sent(NamedTuple):
    """What is sent of one dtype.

    Attributes:
        dtype, itemsize: of the elements.
        operands: the numbers of the operands, and of constants.
    """

    dtype: str
    itemsize: int
    operands: frozenset[int]


@dataclass(frozen=True, eq=False)
class Refit:
    """Results made of operands.

    Attributes:
        relation: of all results to all operands; it says of every element what it is.
        operands, results: what these are.

    >>> from cute_sharding.movement import of_move
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> half, fused = (Placed.of(Sharding((n, 6), (2,), (Shard(0),))) for n in (4, 8))
    >>> cat = of_move("torch.cat", [(4, 6), (4, 6)], 0)
    >>> gate, up = (Named(name, half, "float32", 4) for name in ("gate", "up"))
    >>> print(Refit(cat, (gate, up), (Named("gate_up", fused, "float32", 4),)))
    refit of 2 tensors to 1, mesh (2,) of ranks 0, 1
      gate_up (8, 6) float32 as [S(0)]: 2 pieces of gate, up
    in all: 1 exchange, a rank receives 48 bytes at the most; 192 bytes of results, all said
    """

    relation: Relation
    operands: tuple[Named, ...]
    results: tuple[Named, ...]

    # -- what runs ---------------------------------------------------------------------------------

    @cached_property
    def _by_result(self) -> tuple[tuple[Piece, ...], ...]:
        found: list[list[Piece]] = [[] for _ in self.results]
        for each in self.relation.pieces:
            found[each.target].append(each)
        return tuple(map(tuple, found))

    @cached_property
    def wires(self) -> tuple[tuple[str, int], ...]:
        """The dtype in which each operand is sent, and its itemsize: that of the results made of
        it, where it is one dtype of fewer bytes.
        """
        of: list[set[tuple[str, int]]] = [set() for _ in self.operands]
        for result, pieces in zip(self.results, self._by_result):
            for k in {each.source for each in pieces if each.source >= 0}:
                of[k].add((result.dtype, result.itemsize))
        found = []
        for operand, dtypes in zip(self.operands, of):
            own = operand.dtype, operand.itemsize
            fewer = len(dtypes) == 1 and min(dtypes)[1] < own[1]
            found.append(min(dtypes) if fewer else own)
        return tuple(found)

    @cached_property
    def sent(self) -> tuple[Sent, ...]:
        """What is sent, dtype by dtype; constants go with the first."""
        used = sorted({*self.relation.sources})
        dtypes = dict.fromkeys(self.wires[k] for k in used) or {("", 1): None}
        constants = [len(self.operands) + i for i in range(len(self.relation.constants))]
        found = []
        for dtype in dtypes:
            some = [k for k in used if self.wires[k] == dtype]
            found.append(Sent(*dtype, frozenset([*some, *constants])))
            constants = []
        return tuple(found)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Results that are made of an operand together, with all their operands: what is needed for
        both is sent once. Those of one form share an exchange.
        """
        return tuple(map(self._member, self._together()))

    def _together(self) -> list[list[int]]:
        """Results in groups, by the operands that they share."""
        group_of: dict[int, int] = {}
        groups: dict[int, list[int]] = {}
        for result, pieces in enumerate(self._by_result):
            operands = {each.source for each in pieces if each.source >= 0}
            joined = sorted({group_of[k] for k in operands if k in group_of})
            group = joined[0] if joined else result
            groups.setdefault(group, [])
            for other in joined[1:]:
                groups[group] += groups.pop(other)
            groups[group].append(result)
            members = {*joined}
            group_of.update({k: group for k, g in group_of.items() if g in members})
            group_of.update(dict.fromkeys(operands, group))
        return [sorted(some) for some in groups.values()]

    def _member(self, results: Sequence[int]) -> Member:
        numbers: dict[int, int] = {}
        constants: dict[int, int] = {}
        pieces = []
        for onto, result in enumerate(results):
            for each in self._by_result[result]:
                if each.source >= 0:
                    source = numbers.setdefault(each.source, len(numbers))
                else:
                    source = -1 - constants.setdefault(-1 - each.source, len(constants))
                pieces.append(each._replace(source=source, target=onto))
        relation = Relation(
            tuple([self.relation.inputs[k] for k in numbers]),
            tuple([self.relation.outputs[k] for k in results]),
            tuple(pieces),
            tuple([self.relation.constants[c] for c in constants]),
        )
        sources = tuple([self.operands[k].placed for k in numbers])
        targets = tuple([self.results[k].placed for k in results])
        behind = [len(self.operands) + c for c in constants]
        exchange = _exchange_of(relation, sources, targets)
        return Member(exchange, (*numbers, *behind), tuple(results))

    def part(self, sent: Sent, rank: int) -> Part:
        """A rank's part, of what is sent of one dtype."""
        return part_of(self.members, rank, sent.operands)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all meshes, ascending."""
        return tuple(sorted({rank for mesh in self._meshes for rank in mesh.ranks}))

    @property
    def _meshes(self) -> list[Any]:
        every = (*self.operands, *self.results)
        return [*dict.fromkeys(each.placed.mesh for each in every)]

    @cached_property
    def looked_at(self) -> tuple[int, ...]:
        """The ranks that stand for all."""
        return tuple(sorted({rank for m in self.members for rank in m.exchange.looked_at}))

    @cached_property
    def most_peers(self) -> int:
        """With how many others a rank exchanges messages, at the most, of those looked at."""
        most = 0
        for rank in self.looked_at:
            shares = (
                share.peer
                for member in self.members
                for some in (member.exchange.sent, member.exchange.taken)
                for share in some(rank)
            )
            most = max(most, len({*shares}))
        return most

    # -- how much ----------------------------------------------------------------------------------

    def received_by(self, rank: int) -> int:
        """What a rank receives, in bytes: what it needs and does not hold, each element once."""
        return sum(
            elements * self.wires[member.operand(k)][1]
            for member in self.members
            for k, elements in member.exchange.received_of(rank)
        )

    @cached_property
    def received_bytes(self) -> int:
        """What the busiest rank receives, of those looked at."""
        return max(map(self.received_by, self.looked_at), default=0)

    @cached_property
    def received_elements(self) -> int:
        """The same in elements, of all dtypes."""
        return max(map(self.elements_received_by, self.looked_at), default=0)

    def elements_received_by(self, rank: int) -> int:
        """How many elements a rank receives, of all dtypes."""
        return sum(member.exchange.received_by(rank) for member in self.members)

    @cached_property
    def is_free(self) -> bool:
        """Whether no rank receives anything."""
        return all(member.exchange.is_free for member in self.members)

    @property
    def collectives(self) -> int:
        """How many collectives, or batches of messages, it is: one, or none."""
        return int(not self.is_free)

    @cached_property
    def said_bytes(self) -> int:
        """Of how many bytes of the results it is said what they are."""
        return sum(self.relation.said(k) * each.itemsize for k, each in enumerate(self.results))

    @cached_property
    def unread(self) -> dict[str, int]:
        """Of operands of which results have not all elements: how many they leave out."""
        found = {}
        read: list[list[Piece]] = [[] for _ in self.operands]
        for each in self.relation.pieces:
            if each.source >= 0:
                read[each.source].append(each)
        for operand, pieces in zip(self.operands, read):
            left = prod(operand.placed.shape) - count_rows(read_once(pieces))
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
                f"no inverse: {left} elements of {name!r} are in no result, so that nothing says "
                "what they are. Give a result that has them, or leave the tensor out of the source"
            )
        back = inverse(self.relation, any_copy=True)
        return replace(self, relation=back, operands=self.results, results=self.operands)

    # -- as text and data --------------------------------------------------------------------------

    def _sources(self, result: int) -> list[str]:
        numbers = dict.fromkeys(e.source for e in self._by_result[result] if e.source >= 0)
        return [self.operands[k].name for k in numbers]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: sizes in bytes."""
        return {
            "operands": [each.to_dict() for each in self.operands],
            "results": [
                {
                    **each.to_dict(),
                    "of": self._sources(k),
                    "pieces": [str(one) for one in self._by_result[k]],
                }
                for k, each in enumerate(self.results)
            ],
            "sent": [
                {
                    "dtype": sent.dtype,
                    "operands": [
                        self.operands[k].name for k in sorted(sent.operands) if k < self._constants
                    ],
                }
                for sent in self.sent
            ],
            "collectives": self.collectives,
            "received_bytes": self.received_bytes,
            "most_peers": self.most_peers,
            "result_bytes": sum(each.bytes for each in self.results),
            "said_bytes": self.said_bytes,
            "unread_elements": dict(self.unread),
        }

    @property
    def _constants(self) -> int:
        """The number of the first constant."""
        return len(self.operands)

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
            many, of = len(self._by_result[k]), ", ".join(self._sources(k)) or "constants"
            pieces = f"{many} piece{'s' * (many != 1)}"
            yield f"  {each.text} as {each.placed.placements_text()}: {pieces} of {of}"
        for name, left in self.unread.items():
            yield f"  {left:,} elements of {name} are in no result"
        total = sum(each.bytes for each in self.results)
        said = "all said" if total == self.said_bytes else f"{self.said_bytes:,} said"
        n = self.collectives
        yield (
            f"in all: {n} exchange{'s' * (n != 1)}, a rank receives {self.received_bytes:,} bytes "
            f"at the most; {total:,} bytes of results, {said}"
        )


@lru_cache(maxsize=1 << 10)
def _exchange_of(
    relation: Relation, sources: tuple[Placed, ...], targets: tuple[Placed, ...]
) -> PieceExchange:
    """One for all of one form: the layers of a model."""
    return PieceExchange(relation, sources, targets)

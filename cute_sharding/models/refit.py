"""Tensors of one program's names and shapes made of those of another's, from meshes to meshes: a
relation of all results to all operands, run as one exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from cute_sharding._memory import remembered
from cute_sharding._words import counted
from cute_sharding.exchange import Item
from cute_sharding.exchange.exchange import Exchange
from cute_sharding.exchange.placed import Placed
from cute_sharding.models.buckets import Bucket, Load, buckets, peak
from cute_sharding.models.plan import Member, PackedPlan
from cute_sharding.models.tensor import PlacedTensor, wire_of
from cute_sharding.relations.relation import Piece, Relation, inverse, read_once
from cute_sharding.sharding.rows import count_rows


@dataclass(frozen=True, eq=False)
class Refit(PackedPlan):
    """Results made of operands, tensors of other names and shapes.

    Attributes:
        relation: of all results to all operands; it says of every element what it is.
        operands, results: what these are.
        memory_limit: the most bytes that a rank may hold beside them, in buffers; or None.

    Raises:
        ValueError: the buffers of some results, which are made of an operand together, do not keep
            within the limit.

    >>> from cute_sharding.relations.table import relation_of
    >>> gate, up, fused = (
    ...     PlacedTensor.of((n, 6), (2,), "S(0)", name=name)
    ...     for name, n in (("gate", 4), ("up", 4), ("gate_up", 8))
    ... )
    >>> cat = relation_of("torch.cat", [(4, 6), (4, 6)], 0)
    >>> print(Refit(cat, (gate, up), (fused,)))
    refit of 2 tensors to 1, mesh (2,) of ranks 0, 1
      gate_up (8, 6) float32 as [S(0)]: 2 pieces of gate, up
    in all: 1 exchange, a rank receives 48 bytes at the most; 192 bytes of results, all covered
    """

    relation: Relation
    operands: tuple[PlacedTensor, ...]
    results: tuple[PlacedTensor, ...]
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            _ = self.packed  # or it does not keep within the limit

    @property
    def targets(self) -> tuple[PlacedTensor, ...]:
        return self.results

    # -- what runs ---------------------------------------------------------------------------------

    @cached_property
    def wires(self) -> tuple[str, ...]:
        """The dtype in which each operand is sent."""
        return tuple(
            [
                wire_of(each.dtype, {self.results[one.target].dtype for one in self.made_of(k)})
                for k, each in enumerate(self.operands)
            ]
        )

    def made_of(self, operand: int) -> tuple[Piece, ...]:
        """The pieces of results that are made of an operand."""
        return self.relation.by_source.get(operand, ())

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Results that are made of an operand together, with all their operands: what is needed for
        both is sent once.
        """
        groups: dict[str, list[Piece]] = {}
        constants: list[Piece] = []
        for each in self.relation.pieces:
            if each.source < 0:
                constants.append(each)
            else:
                groups.setdefault(self.wires[each.source], []).append(each)
        if constants:  # which nobody sends: they go with the first
            groups.setdefault(next(iter(groups), "uint8"), []).extend(constants)
        return tuple(
            [
                _member(self, some, wire)
                for wire, pieces in groups.items()
                for some in _together(pieces)
            ]
        )

    @cached_property
    def packed(self) -> tuple[Bucket, ...]:
        """Which of the members go together, in the order in which they run."""
        held_are = "buffers, even if only the results of one source move at a time"
        return self._bundled(buckets(self._loads, self.memory_limit, held_are=held_are))

    @cached_property
    def _loads(self) -> list[tuple[Load, ...]]:
        """Of each member what it takes of ranks' memory beside operands and results: buffers."""
        known: dict[Item, tuple[Load, ...]] = {}
        for item in self.bundle.items:
            if item not in known:
                every = [item.moved(rank) for rank in self.looked_at]
                loads = [Load(sent=out, received=got, moved=out + got) for out, got in every]
                known[item] = tuple(loads)
        return [known[item] for item in self.bundle.items]

    # -- how much ----------------------------------------------------------------------------------

    @cached_property
    def received_bytes(self) -> int:
        """What the busiest rank receives, of those looked at."""
        return self.bundle.received_bytes

    @cached_property
    def buffer_bytes(self) -> int:
        """The most that a rank holds at once beside operands and results."""
        return peak(self._loads, self.packed) if self.packed else 0

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
            read = count_rows(read_once(self.made_of(k)))
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
        sources = self.relation.sources
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
                    "operands": [self.operands[k].name for k in sources if self.wires[k] == dtype],
                }
                for dtype in dict.fromkeys(self.wires[k] for k in sources)
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
            pieces, of = counted(len(self._pieces(k)), "piece"), ", ".join(self.sources_of(k))
            which = f"{each.name} {each.placed.shape} {each.dtype}"
            yield f"  {which} as {each.placements}: {pieces} of {of or 'constants'}"
        for name, left in self.unread.items():
            yield f"  {left:,} elements of {name} are in no result"
        total = sum(each.bytes for each in self.results)
        said = "all covered" if total == self.said_bytes else f"{self.said_bytes:,} covered"
        n = self.collectives
        yield (
            f"in all: {counted(n, 'exchange')}, a rank receives {self.received_bytes:,} bytes "
            f"at the most; {total:,} bytes of results, {said}"
        )
        if n > 1:
            yield f"in {n} parts: a rank holds {self.buffer_bytes:,} bytes of buffers at the most"


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


def _member(refit: Refit, pieces: Sequence[Piece], dtype: str) -> Member:
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
    return Member(exchange, dtype, (*operands,), (*results,), relation.constants)


@remembered
def _exchange_of(
    relation: Relation, sources: tuple[Placed, ...], targets: tuple[Placed, ...]
) -> Exchange:
    """One for all of one form: the layers of a model."""
    return Exchange(relation, sources, targets)

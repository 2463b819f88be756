"""A plan to load a checkpoint: who reads which of its chunks, what goes from reader to reader, and
how much of it at a time.

What ranks have read is a relation's operands: of each tensor, and each rank that reads some of it,
one flat tensor on that rank alone. The results are the tensors that are loaded, on any meshes. So
each part of a load is a refit (:mod:`cute_sharding.models.refit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from cute_sharding._memory import remembered
from cute_sharding.exchange.bundle import own_part
from cute_sharding.exchange.flow import Copy, run_of
from cute_sharding.exchange.placed import Mesh, Placed
from cute_sharding.exchange.plan import MemoryLimitError
from cute_sharding.layout.layout import row_major
from cute_sharding.models.buckets import LEAST, MOST, SHARE
from cute_sharding.models.refit import Refit
from cute_sharding.models.stored import Chunk, Needs, Read, Shape, Stored, needs_of
from cute_sharding.models.tensor import PlacedTensor, itemsize_of, wire_of
from cute_sharding.relations.relation import Piece, Relation, through


class Unit(NamedTuple):
    """A chunk that is read.

    Attributes:
        stored, chunk: the number of the tensor, and of the chunk in it.
        reader: the rank that reads it.
        needs: of the ranks that need some of it, how many elements.
    """

    stored: int
    chunk: int
    reader: int
    needs: Needs

    @property
    def is_kept(self) -> bool:
        """Whether nobody needs any of it but who reads it."""
        return self.needs.keys() <= {self.reader}


class LoadPart(NamedTuple):
    """A part of a load: what is read and exchanged together.

    Attributes:
        reads: what is read; the operands of ``refit``, in their order.
        refit: from what is read to the tensors that are loaded.
        results: the numbers of these.
    """

    reads: tuple[Read, ...]
    refit: Refit
    results: tuple[int, ...]

    def in_place(self, rank: int) -> dict[int, tuple[int, int]]:
        """Of what a rank reads, what is all a run of one of its results: by the number of the read,
        that of the result in ``refit``, and where in it the run begins.
        """
        found: dict[int, tuple[int, int]] = {}
        for member in self.refit.members:
            part = own_part(member.exchange, rank).part
            for i, k, copies in part.own:
                if i < len(member.operands):
                    read, result = member.operands[i], member.results[k]
                    start = _start_of_all(copies, part.source_shape(i), part.target_shape(k))
                    alike = self.refit.operands[read].dtype == self.refit.results[result].dtype
                    if start is not None and alike:
                        found.setdefault(read, (result, start))
        return found

    def copies(self, rank: int) -> int:
        """To how many results a rank copies what it reads, counted for each that is read."""
        return sum(len(own_part(each.exchange, rank).part.own) for each in self.refit.members)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """What a load reads and exchanges.

    Attributes:
        stored: the tensors of the checkpoint.
        relation: of all results to them.
        results: how the tensors lie that are loaded.
        ranks: those that read.
        memory_limit: the most bytes that a rank may hold beside the results, or None.

    Raises:
        MemoryLimitError: not even one chunk by itself keeps within the limit.

    >>> from cute_sharding.models.stored import Chunk
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> halves = Chunk((0, 0), (2, 6)), Chunk((2, 0), (2, 6))
    >>> columns = Placed.of(Sharding((4, 6), (2,), (Shard(1),)))
    >>> stored = Stored("w", (4, 6), "float32", halves)
    >>> wanted = PlacedTensor(columns, name="w")
    >>> plan = LoadPlan((stored,), Relation.same((4, 6)), (wanted,), (0, 1))
    >>> plan.read_by, plan.part(0).refit.received_by(0)  # the half of it that 1 has read
    ({0: 48, 1: 48}, 24)
    """

    stored: tuple[Stored, ...]
    relation: Relation
    results: tuple[PlacedTensor, ...]
    ranks: tuple[int, ...]
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        _ = self.many  # or there is none

    # -- who reads what ----------------------------------------------------------------------------

    @cached_property
    def _widths(self) -> dict[int, int]:
        """How many bytes an element of each tensor has on its way."""
        return {
            k: itemsize_of(wire_of(each.dtype, {self.results[one.target].dtype for one in some}))
            for k, each in enumerate(self.stored)
            if (some := self.relation.by_source.get(k))
        }

    @cached_property
    def _pieces(self) -> dict[int, tuple[tuple[Piece, ...], list[int]]]:
        """What results are of each tensor, numbered as if there were no others, and their numbers:
        so layers that are alike are looked at once.
        """
        found = {}
        for k, some in self.relation.by_source.items():
            targets = list(dict.fromkeys(one.target for one in some))
            pieces = [one._replace(source=0, target=targets.index(one.target)) for one in some]
            found[k] = tuple(pieces), targets
        return found

    def _needs(self, k: int) -> tuple[Needs, ...]:
        """Of each chunk of a tensor."""
        pieces, targets = self._pieces[k]
        return needs_of(self.stored[k], pieces, [self.results[t].placed for t in targets])

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The chunks that some rank needs, with who reads them: of ranks that have not read more
        than others until then, to an eighth of what a rank reads in all, the one that needs most of
        it.
        """
        order = sorted([k for k in self.relation.by_source if k >= 0])
        wanted = [(k, i, needs) for k in order for i, needs in enumerate(self._needs(k)) if needs]
        slack = sum(self.stored[k].bytes_of(i) for k, i, _ in wanted) // SHARE
        read, total = dict.fromkeys(self.ranks, 0), 0
        found = []
        for k, i, needs in wanted:
            size, reader = self.stored[k].bytes_of(i), self.stored[k].reader
            if reader is None:
                few = [r for r, n in read.items() if n * len(read) <= total + slack]
                reader = max(few, key=lambda r: (needs.get(r, 0), -read[r]))
                read[reader] += size
                total += size
            found.append(Unit(k, i, reader, needs))
        return tuple(found)

    @cached_property
    def read_by(self) -> dict[int, int]:
        """What each rank reads, in bytes."""
        found = dict.fromkeys(self.ranks, 0)
        for each in self.units:
            size = self.stored[each.stored].bytes_of(each.chunk)
            found[each.reader] = found.get(each.reader, 0) + size
        return found

    # -- how much at a time ------------------------------------------------------------------------

    @cached_property
    def _together(self) -> list[list[Unit]]:
        """As many units as keep within the limit."""
        most = self.memory_limit
        if most is None:
            # Of what a rank has read it sends about as much, and gets as much.
            most = min(max(3 * max(self.read_by.values(), default=0) // SHARE, LEAST), MOST)
        found: list[list[Unit]] = []
        held = _Held()
        for unit in self.units:
            sizes = self.stored[unit.stored].bytes_of(unit.chunk), self._widths[unit.stored]
            held.add(unit, *sizes)
            if not found or held.peak > most:
                held = _Held()
                held.add(unit, *sizes)
                self._check(unit, held.peak)
                found.append([])
            found[-1].append(unit)
        return found or [[]]

    def _check(self, unit: Unit, peak: int) -> None:
        """Raises:
        MemoryLimitError: a chunk by itself takes more than the limit.
        """
        if self.memory_limit is not None and peak > self.memory_limit:
            stored = self.stored[unit.stored]
            raise MemoryLimitError(
                f"memory_limit={self.memory_limit} is too small: a chunk of {stored.name!r} has "
                f"{stored.bytes_of(unit.chunk)} bytes, and a rank needs {peak} bytes to read, send "
                "and receive the whole chunk. Raise the limit",
                limit=self.memory_limit,
                least=peak,
            )

    # -- the parts ---------------------------------------------------------------------------------

    @property
    def many(self) -> int:
        """How many parts there are: one at the least."""
        return len(self._together)

    def part(self, number: int) -> LoadPart:
        """What ranks exchange in one of them, the same on all; it is made now. Constants of the
        relation are set in the last.
        """
        units = [unit for unit in self._together[number] if not unit.is_kept]
        return self._part(units, is_last=number + 1 == self.many)

    def kept(self, number: int, rank: int) -> LoadPart:
        """What a rank reads in it that no other needs. Only that rank has to know."""
        units = [u for u in self._together[number] if u.is_kept and u.reader == rank]
        return self._part(units, is_last=False)

    def begun(self, number: int) -> set[int]:
        """The results to which it brings something, on any rank."""
        stored = {unit.stored for unit in self._together[number]}
        is_last = number + 1 == self.many
        every = self.relation.by_source.items()
        some = [pieces for k, pieces in every if k in stored or (k < 0 and is_last)]
        return {one.target for pieces in some for one in pieces}

    def _part(self, units: Sequence[Unit], *, is_last: bool) -> LoadPart:
        found: dict[tuple[int, int], list[int]] = {}
        for unit in units:
            found.setdefault((unit.stored, unit.reader), []).append(unit.chunk)
        reads = tuple([Read(self.stored[k], r, tuple(some)) for (k, r), some in found.items()])
        operands = [_on_rank(sum(x.sizes), x.reader, x.of.dtype, x.of.name) for x in reads]
        operands = operands or [_on_rank(0, self.ranks[0], "uint8")]
        pieces: list[Piece] = []
        for i, (each, (k, _)) in enumerate(zip(reads, found)):
            some, targets = self._pieces[k]
            some = _of_chunks(each.of.shape, each.of.chunks, each.chunks, some)
            pieces += [one._replace(source=i, target=targets[one.target]) for one in some]
        if is_last:
            pieces += [one for k, some in self.relation.by_source.items() if k < 0 for one in some]
        results = sorted({one.target for one in pieces})
        numbers = {t: i for i, t in enumerate(results)}
        relation = Relation(
            tuple([each.placed.shape for each in operands]),
            tuple([self.relation.outputs[t] for t in results]),
            tuple([one._replace(target=numbers[one.target]) for one in pieces]),
            self.relation.constants if is_last else (),
        )
        made = tuple([self.results[t] for t in results])
        return LoadPart(reads, Refit(relation, tuple(operands), made), tuple(results))

    @cached_property
    def finished(self) -> tuple[tuple[int, ...], ...]:
        """Of each part the results that are there with it, wholly; those without elements with the
        first.
        """
        last = dict.fromkeys(range(len(self.results)), 0)
        for number in range(self.many):
            last.update(dict.fromkeys(self.begun(number), number))
        found: list[list[int]] = [[] for _ in range(self.many)]
        for t, number in last.items():
            found[number].append(t)
        return tuple(map(tuple, found))


class _Held:
    """What ranks hold of units that go together, in bytes.

    Attributes:
        peak: what the rank holds that holds most: what it has read, and its buffers; or what
            storage has of a chunk, before there are any.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._read: Counter[int] = Counter()
        self._moved: Counter[int] = Counter()
        self._largest: Counter[int] = Counter()

    def add(self, unit: Unit, size: int, width: int) -> None:
        """A unit of ``size`` bytes, of elements that have ``width`` on their way."""
        reader = unit.reader
        self._read[reader] += size
        self._largest[reader] = max(self._largest[reader], size)
        for rank, elements in unit.needs.items():
            if rank != reader:
                self._moved[rank] += elements * width
                self._moved[reader] += elements * width
        for rank in {*unit.needs, reader}:
            buffers = max(self._moved[rank], self._largest[rank])
            self.peak = max(self.peak, self._read[rank] + buffers)


@remembered
def _of_chunks(
    shape: Shape, chunks: tuple[Chunk, ...], read: tuple[int, ...], pieces: tuple[Piece, ...]
) -> tuple[Piece, ...]:
    """What results are of some of a tensor's chunks, one behind the other."""
    return tuple(through(Stored("", shape, "", chunks).pieces(read), pieces))


def _start_of_all(copies: Sequence[Copy], source: Shape, target: Shape) -> int | None:
    """Where in a target the source begins, if the copies are all of it as it lies; else None."""
    if sum(prod(copy.sizes) for copy in copies) != prod(source):
        return None
    if run_of(copies, row_major(source)) != 0:
        return None
    return run_of([copy.flipped for copy in copies], row_major(target))


def _on_rank(size: int, rank: int, dtype: str, name: str = "") -> PlacedTensor:
    """A flat tensor that one rank has."""
    return PlacedTensor(Placed((size,), Mesh((1,), (rank,)), ((),)), dtype, name=name)

"""The flow through a relation by pieces, from an operand to all results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.exchange.flow import Copy, Flow, Own, Vector
from cute_sharding.exchange.placed import Mesh, Placed
from cute_sharding.relations.relation import Piece, Relation, piece, read_once, through
from cute_sharding.sharding.rows import Device, Run, count_rows, span

# -- wants -----------------------------------------------------------------------------------------
# The elements of a relation's operands that ranks need for their results, and which ranks have
# equal needs.

# The coordinates of a rank on each mesh with results, on the mesh dims that cut a result.
Wanting: TypeAlias = "tuple[tuple[int, ...] | None, ...]"


@dataclass(frozen=True, eq=False)
class Wants:
    """The needs of ranks for the operands of a relation whose results are placed as ``targets``.

    >>> from cute_sharding.relations.table import relation_of
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> fused = Placed.of(Sharding((8, 6), (2,), (Shard(0),)), (1, 2))
    >>> wants = Wants(relation_of("torch.cat", [(4, 6), (4, 6)], 0), (fused,))
    >>> wants.takers, wants.of(wants.wanting(2), 0)
    ({((0,),): [1], ((1,),): [2]}, ())
    """

    relation: Relation
    targets: tuple[Placed, ...]

    @cached_property
    def _cuts(self) -> dict[Mesh, list[int]]:
        """For each mesh with results, the mesh dims that cut some result."""
        found: dict[Mesh, set[int]] = {}
        for target in self.targets:
            found.setdefault(target.mesh, set()).update(target.cut)
        return {mesh: sorted(dims) for mesh, dims in found.items()}

    def wanting(self, rank: int) -> Wanting:
        """The rank's key: ranks with equal keys have equal needs."""
        found = []
        for mesh, dims in self._cuts.items():
            device = mesh.coordinates(rank)
            found.append(None if device is None else tuple([device[m] for m in dims]))
        return tuple(found)

    @cached_property
    def takers(self) -> dict[Wanting, list[int]]:
        """The ranks with each key, ascending."""
        found: dict[Wanting, list[int]] = {}
        for rank in sorted({rank for target in self.targets for rank in target.mesh.ranks}):
            found.setdefault(self.wanting(rank), []).append(rank)
        return found

    @cached_property
    def _locals(self) -> dict[Wanting, list[Piece]]:
        return {}

    @cached_property
    def _of(self) -> dict[tuple[Wanting, int], tuple[Piece, ...]]:
        return {}

    def of(self, wanting: Wanting, operand: int) -> tuple[Piece, ...]:
        """The elements of an operand that ranks with this key need: from these to places of their
        results. Constants are operands with negative numbers.
        """
        if wanting not in self.takers:
            return ()
        key = wanting, operand
        if key not in self._of:
            if wanting not in self._locals:
                self._locals[wanting] = self._held(self.takers[wanting][0])
            self._of[key] = through(self.relation.by_source.get(operand, ()), self._locals[wanting])
        return self._of[key]

    def _held(self, rank: int) -> list[Piece]:
        """The part of the results that a rank needs, from their elements to its places."""
        return [
            each.turned._replace(source=t, target=t)
            for t, placed in enumerate(self.targets)
            if (device := placed.mesh.coordinates(rank)) is not None
            for each in placed.pieces(device)
        ]


# -- by pieces -------------------------------------------------------------------------------------
# The flow through a relation by pieces, from an operand to all results.
#
# The elements of an operand that a rank needs are a relation, from the operand to the rank's
# results; the elements that ranks hold are a relation too, and their composition is what the rank
# receives from these ranks (``cute_sharding.relations``). Each of its elements is sent once,
# however often it is needed: by a cat of a tensor with itself, a repeat, or several results.
#
# The *place* of an element is its row-major number in the local tensor. So a run that starts in the
# middle of a row is one run of places, and one copy of a contiguous tensor.


class FastDim(NamedTuple):
    """The dim of a contiguous tensor of ``dims`` dims in which consecutive elements have stride 1:
    the last with more than one row. (torch ignores the strides of the dims behind it.)

    >>> line_of((4, 3, 1)), line_of(())
    (FastDim(dims=3, at=1), FastDim(dims=0, at=0))
    """

    dims: int
    at: int


BUFFER = FastDim(1, 0)


@remembered
def line_of(shape: tuple[int, ...]) -> FastDim:
    """The line of a local tensor of that shape."""
    return FastDim(len(shape), max([d for d, n in enumerate(shape) if n > 1], default=0))


def copy_between(one: Piece, source: FastDim, target: FastDim) -> Copy:
    """A piece from places to places as a copy between contiguous tensors, or buffers. It counts all
    elements in one dim, past the end of its rows.

    >>> copy_between(piece(0, 0, 4, 0, [(5, 1, 1)]), line_of((4, 3)), BUFFER)  # elements 4 to 8
    Copy(sizes=(5,), x=(0, 4), dx=((0, 1),), y=(0,), dy=((1,),))
    """
    return Copy(
        tuple([n for n, _, _ in one.modes]),
        _vector_on(source, one.x),
        tuple([_vector_on(source, dx) for _, dx, _ in one.modes]),
        _vector_on(target, one.y),
        tuple([_vector_on(target, dy) for _, _, dy in one.modes]),
    )


def _vector_on(line: FastDim, place: int) -> Vector:
    return tuple([place if d == line.at else 0 for d in range(line.dims)])


@dataclass(frozen=True, eq=False)
class SharedBox:
    """The elements that ranks with equal needs receive from ranks that hold the same. It keeps the
    copies of its parts: tensors of one form are packed alike.

    Attributes:
        pieces: from places of the operand's local tensor to places of the results'.
        runs: the places in the operand, each once.
        size: their number.
    """

    pieces: tuple[Piece, ...]
    runs: tuple[Run, ...]
    size: int

    @cached_property
    def into(self) -> Callable[[int, int, FastDim], Sequence[Copy]]:
        """The copies of some elements, by their numbers, from a local tensor to a buffer."""
        return cache(self._into)

    def _into(self, first: int, stop: int, line: FastDim) -> Sequence[Copy]:
        numbered = number_elements(span(self.runs, first, stop))
        return [copy_between(each, line, BUFFER) for each in numbered]

    @cached_property
    def out_of(self) -> Callable[[int, int, tuple[FastDim, ...]], Sequence[tuple[int, Copy]]]:
        """The copies from a buffer, each with its result. An element may go to several places."""
        return cache(self._out_of)

    def _out_of(
        self, first: int, stop: int, lines: tuple[FastDim, ...]
    ) -> Sequence[tuple[int, Copy]]:
        numbered = number_elements(span(self.runs, first, stop))
        pieces = through([each.turned for each in numbered], self.pieces)
        return [
            (
                each.target,
                copy_between(each._replace(source=0, target=0), BUFFER, lines[each.target]),
            )
            for each in pieces
        ]


class Share(NamedTuple):
    """The elements of one operand that one rank sends another: part of a box.

    Attributes:
        peer: the other rank.
        operand: its number.
        box, first, stop: the elements, by their number in the box.
        lines: the lines of the sender's local tensor, or of the receiver's results, in which places
            are counted.
    """

    peer: int
    operand: int
    box: SharedBox
    first: int
    stop: int
    lines: tuple[FastDim, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.first

    def to(self, peer: int) -> Share:
        """See :meth:`.flow.Message.to`."""
        return self._replace(peer=peer)

    def share(self, first: int, stop: int, parts: int) -> Share | None:
        """See :meth:`.flow.Message.share`; exact to the element."""
        low, high = self.first + max(first, 0), min(self.first + stop, self.stop)
        return self._replace(first=low, stop=high) if low < high else None

    def into(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """See :meth:`.flow.Message.into`."""
        some = self.box.into(self.first, self.stop, self.lines[0])
        yield self.operand, [each._replace(y=(each.y[0] + at,)) for each in some]

    def out_of(self, at: int) -> Iterable[tuple[int, Sequence[Copy]]]:
        """See :meth:`.flow.Message.out_of`."""
        for target, copy in self.box.out_of(self.first, self.stop, self.lines):
            yield target, [copy._replace(x=(copy.x[0] + at,))]


def number_elements(runs: Sequence[Run]) -> list[Piece]:
    """From the elements of runs to their numbers, one run after the other."""
    found, first = [], 0
    for run in runs:
        below = run.length
        modes = [(run.length, 1, 1)]
        for n, dx, _ in reversed(run.loops):
            modes.append((n, dx, below))
            below *= n
        found.append(piece(0, 0, run.x, first, modes))
        first += run.size
    return found


def flows_of(
    relation: Relation, sources: Sequence[Placed], targets: tuple[Placed, ...], ranks: Sequence[int]
) -> tuple[Flow[Any], ...]:
    """The flows from each operand to all results. Each constant is an operand too: of one element,
    after the others, and held by all ranks.
    """
    wants = Wants(relation, targets)
    constant = Placed((1,), Mesh((len(ranks),), ranks), ((),))
    constants = [constant] * len(relation.constants)
    operands = [*enumerate(sources), *zip(count(-1, -1), constants)]
    return tuple([PieceFlow(i, number, x, wants) for i, (number, x) in enumerate(operands)])


@dataclass(frozen=True, eq=False)
class PieceFlow(Flow[Share]):
    """The flow from an operand placed as ``source`` to the results of ``wants``.

    Attributes:
        operand: its number.
        number: the number by which pieces name it.
        wants: which rank needs what of it, through the relation.
    """

    operand: int
    number: int
    source: Placed
    wants: Wants

    @cached_property
    def _boxes(self) -> dict[tuple[Device, Wanting], SharedBox]:
        return {}

    def _box(self, holder: Device, wanting: Wanting) -> SharedBox:
        """The elements that ranks with these needs receive from ranks that hold the same."""
        key = holder, wanting
        if key not in self._boxes:
            wanted = self.wants.of(wanting, self.number)
            has = self.source.pieces(holder) if wanted else ()
            pieces = through([each._replace(target=self.number) for each in has], wanted)
            runs = tuple(read_once(pieces))
            self._boxes[key] = SharedBox(pieces, runs, count_rows(runs))
        return self._boxes[key]

    def between(self, holder: Device, rank: int) -> Share | None:
        box = self._box(self.source.class_of(holder), self.wants.wanting(rank))
        return Share(rank, self.operand, box, 0, box.size, self._lines(rank)) if box.size else None

    def _takers(self, holder: Device) -> Iterator[tuple[list[int], Share]]:
        holder = self.source.class_of(holder)
        lines = (line_of(self.source.shape_of(holder)),)
        for wanting, takers in self.wants.takers.items():
            box = self._box(holder, wanting)
            if box.size:
                yield takers, Share(takers[0], self.operand, box, 0, box.size, lines)

    def _givers(self, rank: int) -> Iterator[tuple[Device, Share]]:
        wanting = self.wants.wanting(rank)
        if self.wants.of(wanting, self.number):
            for holder in self.source.classes:
                found = self.between(holder, rank)
                if found is not None:
                    yield holder, found

    def _lines(self, rank: int) -> tuple[FastDim, ...]:
        """The lines in which places of a rank's results are counted."""
        return tuple([line_of(placed.local_shape(rank) or ()) for placed in self.wants.targets])

    def own(self, rank: int) -> Iterator[Own]:
        kept = self.kept_by(rank)
        if kept is None:
            return
        line = line_of(self.source.local_shape(rank) or ())
        onto: dict[int, list[Copy]] = {}
        for each in kept.box.pieces:
            copy = copy_between(each, line, kept.lines[each.target])
            onto.setdefault(each.target, []).append(copy)
        for target, copies in onto.items():
            yield self.operand, target, tuple(copies)

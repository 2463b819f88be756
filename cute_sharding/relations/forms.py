"""Maps between a tensor's rows and an exchange's that are not one for one in one dim.

- windows (unfold): row i of window w is row ``w·step + i``. Windows may overlap.
- folds (padding by reflection, by the last row, around the end): row j is row ``a·j + b``, by
  pieces, with a of 1, -1 or 0: several rows may stand for one.
- diagonals: row j is one element, given by its rows in both dims: one mode, whose stride is the
  sum of two.

Each form is written once, as parts: rows of the exchange, and the elements of the tensor's dims
that they are. A device needs or has the union of the exchange rows that its own rows stand for:
each row once, in the order of y. So each row is sent once, and the device repeats or selects rows
before or after the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from cute_sharding.layout.layout import row_major
from cute_sharding.relations.devices import local
from cute_sharding.relations.elements import read_once
from cute_sharding.relations.piece import Piece, join_pieces, ladders, meet, piece
from cute_sharding.sharding.meeting import Chain, Run, Runs, join, rows_held

# The first row of the exchange, and its element as rows of the tensor's dims; then the modes:
# (size, step in the exchange, steps in these dims).
Part: TypeAlias = "tuple[int, tuple[int, ...], list[tuple[int, int, tuple[int, ...]]]]"


class Window(NamedTuple):
    """Row i of ``across``, in row w of the dim, is row ``w·step + i`` of the exchange.

    >>> Window(across=1, size=4, step=2).held((5, 4), (((1, 2, 0),), ()))  # of windows 0 to 2
    (Run(x=0, y=0, loops=(), length=8),)
    """

    across: int
    size: int
    step: int

    def parts(self, windows: int) -> list[Part]:
        """The parts of ``windows`` windows."""
        return [(0, (0, 0), [(windows, self.step, (1, 0)), (self.size, 1, (0, 1))])]

    def held(self, n: tuple[int, ...], chains: tuple[Chain, ...]) -> Runs:
        """The rows that a device has, ascending; without overlap it stores window after window."""
        windows, within = map(rows_held, n, chains)
        if any(part.reach > self.step for part in within):
            return _each_once(self, n, chains)
        count, found = sum(part.size for part in within), []
        for some in windows:
            loops = [
                (k, dx * self.step, dy * count) for k, dx, dy in (*some.loops, (some.length, 1, 1))
            ]
            around = tuple([loop for loop in loops if loop[0] > 1])
            for part in within:
                first, at = some.x * self.step + part.x, some.y * count + part.y
                found.append(Run(first, at, (*around, *part.loops), part.length))
        return tuple(join(found))

    def evenly(self, windows: Runs, within: Runs) -> int | None:
        """The distance between the starts of a device's windows if it stores their rows once each,
        from row 0 on, and the rows of each window together; None if the distances differ.
        """
        if not within or max(run.reach for run in within) <= self.step:
            return sum(run.size for run in within)
        if len(within) > 1 or within[0].loops or len(windows) != 1:
            return None
        (some,), (part,) = windows, within
        if not some.loops:
            return min(self.step, part.length)
        if len(some.loops) == 1 and some.length == 1:
            return min(some.loops[0][1] * self.step, part.length)
        return None

    def is_view(self, windows: Runs, within: Runs) -> bool:
        """Whether a device's windows are a view of its rows."""
        return self.evenly(windows, within) is not None


class Fold(NamedTuple):
    """Row j of the dim is row ``a·j + b`` of the exchange, for start <= j < stop.

    Attributes:
        pieces: (start, stop, a, b), one after the other.

    >>> reflected = Fold(((0, 2, -1, 2), (2, 6, 1, -2)))  # two rows before the first of four
    >>> reflected.held((6,), (((1, 2, 0),),))  # rows 2 and 1, and row 0
    (Run(x=0, y=0, loops=(), length=3),)
    """

    pieces: tuple[tuple[int, int, int, int], ...]

    def parts(self, _: int) -> list[Part]:
        """The pieces as parts."""
        return [
            (a * start + b, (start,), [(stop - start, a, (1,))])
            for start, stop, a, b in self.pieces
        ]

    def held(self, n: tuple[int, ...], chains: tuple[Chain, ...]) -> Runs:
        """The exchange rows that a device's rows stand for."""
        return _each_once(self, n, chains)

    def is_view(self, found: Runs) -> bool:
        """False: a fold is always a copy."""
        return False


class Diagonal(NamedTuple):
    """Row j of the exchange is row ``j + down`` of the dim and row ``j + right`` of ``across``.

    >>> Diagonal(across=1, down=0, right=1, length=4).held((5, 5), (((1, 2, 1),), ()))  # (3, 4)
    (Run(x=3, y=0, loops=(), length=1),)
    """

    across: int
    down: int
    right: int
    length: int

    def parts(self, _: int) -> list[Part]:
        """The diagonal as one part."""
        return [(0, (self.down, self.right), [(self.length, 1, (1, 1))])]

    def held(self, n: tuple[int, ...], chains: tuple[Chain, ...]) -> Runs:
        """The elements of which a device has both the row and the column."""
        return _each_once(self, n, chains)

    def is_view(self, rows: Runs, columns: Runs) -> bool:
        """Whether the device's elements are a diagonal of its local tensor."""
        return all(len(some) <= 1 and not any(r.loops for r in some) for some in (rows, columns))


Form: TypeAlias = "Window | Fold | Diagonal"


def pieces_of(form: Form, rows: int, strides: Sequence[int], stride: int = 1) -> Iterator[Piece]:
    """Pieces from the rows of an exchange, ``stride`` elements apart, to the elements of a tensor
    whose dims have ``strides``; the form's first dim has ``rows`` rows.
    """

    def at(vector: Sequence[int]) -> int:
        return sum([k * step for k, step in zip(vector, strides)])

    for x, y, modes in form.parts(rows):
        if all(n > 0 for n, _, _ in modes):
            steps = [(n, dx * stride, at(dy)) for n, dx, dy in modes]
            yield piece(0, 0, x * stride, at(y), steps)


def _each_once(form: Form, n: tuple[int, ...], chains: tuple[Chain, ...]) -> Runs:
    """The exchange rows that a device has or needs, each once even if several of its own rows stand
    for it; y numbers them one after the other.
    """
    wanted = [each.turned for each in local(n, chains)]
    parts = pieces_of(form, n[0], row_major(n))
    union = read_once(some for one in parts for other in wanted for some in meet(one, other))
    pieces = [piece(0, 0, run.x, run.x, [*run.loops, (run.length, 1, 1)]) for run in union]
    result, at = [], 0
    for run in sorted(
        some.run for one in join_pieces(pieces) for some in ladders(one.x, 0, one.modes)
    ):
        result.append(run._replace(y=at))
        at += run.size
    return tuple(join(result))

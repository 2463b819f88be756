"""The dims of an op's operands and results, by name, as einsum and einops write them: ``m k, k n ->
m n``.

An op's result on some rows of a dim may depend on those rows alone (the dim is *free*: the results
have it as well), on all rows through a sum or a maximum that can be finished later (*contracted*:
only the operands have it), on all rows through a small *state* that an associative function
combines (*folded*), or on all rows in another way (*whole*). So

- a free dim carries any cut, Shard or _StridedShard of any split factor, even or not, from the
  operands to the results: each device computes its own rows;
- a cut of a contracted dim leaves a reduction pending in the results;
- a cut of a folded dim stays: each device folds its rows to a state, as the maximum and the sum of
  a softmax, the devices combine their states, and each finishes its own rows;
- a whole dim must not be cut.

No op needs a rule of its own for strided or uneven shards.

A pattern has names between spaces, tensors between commas, and

- ``[d]``: a whole dim,
- ``(d)``: a folded dim; ``(d*4)``: one with a state for each four of its rows,
- ``{d}``: a dim of which the op takes or writes one row for each number in an index, the next
  operand (of several such dims, one index each). If the results have it, each device writes those
  of its rows that are named; else it gives the rows that it has, and nothing for others,
- ``...``: all dims that have no name, the same for all tensors, counted from the right and of size
  1 or not, as in broadcasting; ``[...]``: whole,
- ``d*2-1:3``: a dim of which row ``j`` of ``d`` reads 3 rows, from row ``2·j - 1`` on (rows before
  the first and after the last are padding), as a pool or a convolution does. ``d`` may be cut if
  each device's windows follow on one another, or none overlap. A device then gets the rows that its
  windows read: its own and a *halo*. If a result has such a dim, each row of ``d`` adds to these
  rows, and what a device adds to rows of others goes to them. ``d*4`` is short for ``d*4:4``:
  windows side by side. Numbers may be fractions, rounded down for each row,
- ``1``: a dim of size 1,
- ``0``: a dim of no rows, of a result that an op gives only sometimes,
- ``+`` before a tensor: a term that is added to the result. It is pending if the result is,
- ``=`` before a tensor: the op reads only its sizes, as gradients of pools do with the pool's
  operand. Nothing of it has to be received,
- ``_``: a tensor of any dims that the op gets and does not read. It keeps its placements. As a
  result: a tensor with none of the operands' elements (the state of a random generator): each
  device has its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding._words import counted

ONE, NONE, UNREAD = "1", "0", "_"

# Reductions that may stay pending through a linear op; and through an op that only copies elements
# or fills in zeros, which commutes with all of them.
LINEAR = ("sum", "avg")
COPIED = (*LINEAR, "product", "max", "min", "band", "bor", "bxor")
FILLED = ("avg", "max", "min", "band", "bor")  # reductions of equal values to that value


class Linear(NamedTuple):
    """The operands whose pending reductions may stay pending: reducing the results gives the same
    as reducing these operands first.

    Attributes:
        operands: by position; None: all.
        kept: the reductions for which this holds.
        together: it holds only if the reduction is pending in all of these operands.
        alone: only if nothing else of these changes: a gathered operand is more to reduce later.

    >>> from cute_sharding.propagation import Operand, assign
    >>> flip, greatest = parse("[m] n -> [m] n", (2,)), Operand((8, 8), ("max",))
    >>> assign(flip, [greatest], (4,), linear=(0,)).results  # as of sums, by themselves
    ((None,),)
    >>> assign(flip, [greatest], (4,), linear=Linear((0,), ("max",))).results
    (('max',),)
    """

    operands: tuple[int, ...] | None = ()
    kept: tuple[str, ...] = LINEAR
    together: bool = False
    alone: bool = False


# For ops that copy elements and through which torch keeps pending reductions. Through others, such
# as triangles, torch does not, and the program's next op may need the finished value.
COPIES = Linear((0,), COPIED, alone=True)
COPIES_ALL = Linear(None, COPIED, alone=True, together=True)


# The reduction that combines a state over folded names, or "gather": each device gets the states of
# all. It has one number for each row of the first operand with folded dims; or, with a result's
# position, for each element of this result.
State: TypeAlias = "str | tuple[str, int]"


class Folding(NamedTuple):
    """How an op folds the rows of a dim.

    Attributes:
        name: of the function that folds and finishes (dtensor/run/folds/).
        states: in order.
        indexed: with each number of a state travels the number of its row.
        exact: the op compares numbers and computes none: it folds integers as well.
        least: the bytes of a state's number, at least.
        turns: how often the gradient turns the rows around, which sends each.
        rows: the names, beside the folded ones, of which the functions must know which rows a
            device has. Their shards may move to other dims, as those of whole dims may.
    """

    name: str = ""
    states: tuple[State, ...] = ()
    indexed: bool = False
    exact: bool = False
    least: int = 4
    turns: int = 0
    rows: frozenset[str] = frozenset()

    def itemsize(self, of_operand: int) -> int:
        """The bytes of a state's number, for an operand whose numbers have so many."""
        number = max(of_operand, self.least)
        return 2 * number if self.indexed else number


NOT_FOLDED = Folding()


class Reads(NamedTuple):
    """Row j of a name reads ``size`` rows of a dim, from row ``step * j + first`` on. These may be
    fractions: the row is then rounded down.

    >>> str(Reads(size=3, step=2, first=-1)), str(Reads(size=4, step=4))
    ('*2-1:3', '*4')
    >>> str(Reads(2, Fraction(1, 2), Fraction(-1, 4)))  # interpolated between twice as many rows
    '*1/2-1/4:2'
    """

    size: int
    step: int | Fraction
    first: int | Fraction = 0

    def __str__(self) -> str:
        first = f"{'+' * (self.first > 0)}{self.first}" if self.first else ""
        return f"*{self.step}" if self.are_tiles else f"*{self.step}{first}:{self.size}"

    @property
    def are_tiles(self) -> bool:
        """Whether the rows of the name read rows side by side, from the first on."""
        return self.size == self.step and not self.first

    @property
    def overlap(self) -> bool:
        """Whether consecutive rows read some of the same, or may."""
        return self.size > self.step or not isinstance(self.step, int)


_NUMBER = r"\d+(?:/\d+)?"
_READS = re.compile(rf"(.+)\*({_NUMBER})(?:([+-]{_NUMBER})?:(\d+))?")


def _number(text: str) -> int | Fraction:
    return Fraction(text) if "/" in text else int(text)


class Signature(NamedTuple):
    """An op on tensors with given numbers of dims.

    Attributes:
        operands: for each operand, the names of its dims.
        results: the same for the results.
        whole: the names that no mesh dim may cut.
        picked: the names of which an index takes or writes rows.
        added: the operands, by position, that are terms of a sum.
        unread: the operands that the op does not read.
        sized: the operands of which it reads only the sizes.
        folded: the names over whose rows states are combined.
        halos: the dims of operands and results of which each row of their name reads some rows, or
            to which it adds some: (position, with results after the operands; dim; which).
        grouped: the folded dims of operands and results that have several rows for each row of
            their name: (position, dim, rows).

    >>> softmax = Signature((("b", "x"),), (("b", "x"),), whole=frozenset("x"))
    >>> print(softmax)
    b [x] -> b [x]
    """

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    whole: frozenset[str] = frozenset()
    added: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    sized: frozenset[int] = frozenset()
    picked: frozenset[str] = frozenset()
    folded: frozenset[str] = frozenset()
    halos: frozenset[tuple[int, int, Reads]] = frozenset()
    grouped: frozenset[tuple[int, int, int]] = frozenset()

    @property
    def in_groups(self) -> frozenset[str]:
        """The names for each row of which some tensor folds several rows."""
        tensors = (*self.operands, *self.results)
        return frozenset(tensors[i][d] for i, d, _ in self.grouped)

    def per_row(self, shapes: Sequence[Sequence[Any] | None], first: int = 0) -> list[list[Any]]:
        """For tensors of these shapes, the first at position ``first``, how many rows their names
        have; 0 where a dim does not consist of whole groups.
        """
        found = [list(shape or ()) for shape in shapes]
        for i, d, rows in self.grouped:
            if 0 <= i - first < len(found) and d < len(found[i - first]):
                n = found[i - first][d]
                found[i - first][d] = 0 if n % rows else n // rows
        return found

    @property
    def in_halos(self) -> dict[str, list[Reads]]:
        """The names of which rows read several, or add to several, of some tensor's dim."""
        tensors, found = (*self.operands, *self.results), dict[str, list[Reads]]()
        for i, d, reads in self.halos:
            found.setdefault(tensors[i][d], []).append(reads)
        return found

    def read_by(self, i: int) -> dict[int, Reads]:
        """For dims of a tensor, results after operands, which rows a row of the name reads."""
        return {d: reads for k, d, reads in self.halos if k == i}

    def sizes(self, shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """How many rows each name has, for operands of these shapes.

        Raises:
            ValueError: the operands do not fit the signature.
        """
        if len(shapes) != len(self.operands) or any(
            len(shape) != len(names) for shape, names in zip(shapes, self.operands)
        ):
            raise ValueError(
                f"operands of shapes {list(map(tuple, shapes))} do not fit the signature {self}"
            )
        found: dict[str, Any] = {}
        tiles: dict[str, Any] = {}
        for i, (shape, names) in enumerate(zip(self.per_row(shapes), self.operands)):
            read = self.read_by(i)
            for d, (n, name) in enumerate(zip(shape, names)):
                if d not in read:
                    if name not in found or found[name] == 1:
                        found[name] = n
                elif read[d].are_tiles:
                    tiles[name] = n // read[d].step
        return {**tiles, **found}

    def fitted(self, shapes: Sequence[Sequence[Any]]) -> Signature:
        """The signature for operands of these shapes. A dim of size 1 beside a longer one is
        broadcast and gets no name, if it is one of ``...`` or of a term that is added. Any other
        name with different sizes is whole: for example, an index with one row picks a row and is
        not repeated.
        """
        sizes = self.sizes(shapes)
        whole, operands = set(self.whole), []
        for i, (shape, names) in enumerate(zip(self.per_row(shapes), self.operands)):
            fitted, read = [], self.read_by(i)
            for d, (n, name) in enumerate(zip(shape, names)):
                if d in read:
                    fitted.append(name)
                    continue
                broadcast = n == 1 != sizes[name] and (name.startswith("...") or i in self.added)
                if n != sizes[name] and not broadcast:
                    whole.add(name)
                fitted.append(ONE if broadcast else name)
            operands.append(tuple(fitted))
        return self._replace(operands=tuple(operands), whole=frozenset(whole))

    def gives(
        self, shapes: Sequence[Sequence[Any]], results: Sequence[Sequence[Any] | None]
    ) -> bool:
        """Whether operands of ``shapes`` give results of these shapes: each name that is not whole
        has as many rows in the results as in the operands.
        """
        sizes, whole = self.sizes(shapes), self.fitted(shapes).whole
        if len(results) != len(self.results):
            return False
        free = {(i - len(self.operands), d) for i, d, _ in self.halos}
        return all(
            shape is None
            or names == (UNREAD,)
            or (
                len(shape) == len(names)
                and all(
                    name in whole
                    or name == ONE
                    or (k, d) in free
                    or n == (0 if name == NONE else sizes.get(name, n))
                    for d, (n, name) in enumerate(zip(shape, names))
                )
            )
            for k, (shape, names) in enumerate(zip(self._per_row_of(results), self.results))
        )

    def _per_row_of(self, results: Sequence[Sequence[Any] | None]) -> list[list[Any] | None]:
        rows = self.per_row(results, len(self.operands))
        return [None if shape is None else n for shape, n in zip(results, rows)]

    def contracted(self, name: str) -> bool:
        """Whether some result does not have the name, and a cut leaves it pending."""
        return name not in self.folded and any(
            name not in names for names in self.results if NONE not in names and names != (UNREAD,)
        )

    @property
    def of_fold(self) -> int:
        """The position of the first operand with folded dims; its rows have the states."""
        return next(i for i, names in enumerate(self.operands) if not self.folded.isdisjoint(names))

    def without_folds(self, others: frozenset[str] = frozenset()) -> Signature:
        """The signature whose folded names, and ``others``, are whole."""
        return self._replace(whole=self.whole | self.folded | others, folded=frozenset())

    def without_halos(self, names: Collection[str]) -> Signature:
        """The signature for which these names, of which rows read several, are whole, and so are
        the dims that they read.
        """
        if self.in_halos.keys().isdisjoint(names):
            return self
        read = {(i, d) for i, d, _ in self.halos}

        def renamed(i: int, dims: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(
                [
                    f"x.{name}" if name in names and (i, d) in read else name
                    for d, name in enumerate(dims)
                ]
            )

        tensors, count = (*self.operands, *self.results), len(self.operands)
        every = tuple([renamed(i, dims) for i, dims in enumerate(tensors)])
        whole = {x for name in self.in_halos if name in names for x in (name, f"x.{name}")}
        return self._replace(
            operands=every[:count],
            results=every[count:],
            whole=self.whole | whole,
            halos=frozenset(
                [each for each in self.halos if tensors[each[0]][each[1]] not in names]
            ),
        )

    def __str__(self) -> str:
        read = {(i, d): reads for i, d, reads in self.halos}
        rows = {(i, d): rows for i, d, rows in self.grouped}

        def text(i: int, names: tuple[str, ...]) -> str:
            return " ".join(
                said(name, rows.get((i, d), 0), read.get((i, d), ""))
                for d, name in enumerate(names)
            )

        def said(name: str, rows: int, reads: Reads | str) -> str:
            if name in self.whole:
                return f"[{name}]"
            if name in self.folded:
                return f"({name}*{rows})" if rows else f"({name})"
            return f"{{{name}}}" if name in self.picked else f"{name}{reads}"

        signs = {**dict.fromkeys(self.added, "+"), **dict.fromkeys(self.sized, "=")}
        operands = [
            UNREAD if i in self.unread else signs.get(i, "") + text(i, names)
            for i, names in enumerate(self.operands)
        ]
        results = [text(len(operands) + i, names) for i, names in enumerate(self.results)]
        return f"{', '.join(operands)} -> {', '.join(results)}"


@remembered
def parse(pattern: str, ndims: tuple[int, ...], results: int | None = None) -> Signature:
    """The signature of ``pattern``, for operands with these numbers of dims. If the pattern has one
    result and the op returns a list of such results, ``results`` is their number.

    >>> print(parse("b m k, k n -> b m n", (3, 2)))
    b m k, k n -> b m n

    Raises:
        ValueError: this is not a pattern, or it has another number of operands or dims.
    """
    before, after = _sides(pattern)
    marked: dict[str, set[str]] = {"[": set(), "{": set(), "(": set()}
    operands = [part.split() for part in before.split(",")] if before.strip() or ndims else []
    signs = _without_signs(operands)
    unread = frozenset(i for i, names in enumerate(operands) if names == [UNREAD])
    for i in unread & frozenset(range(len(ndims))):
        operands[i] = [f"{UNREAD}{i}.{k}" for k in range(ndims[i])]  # names of this operand alone
    most = _most_without_names(pattern, operands, ndims)

    grouped: set[tuple[int, int, int]] = set()
    halos: set[tuple[int, int, Reads]] = set()

    def expanded(i: int, names: Sequence[str], count: int) -> tuple[str, ...]:
        result: list[str] = []
        for name in names:
            if found := _READS.fullmatch(name):
                name, step, first, size = found.groups()
                reads = Reads(int(size or step), _number(step), _number(first or "0"))
                halos.add((i, len(result), reads))
            bare, several, rows = _bare(name).partition("*")
            if several:
                grouped.add((i, len(result), int(rows)))
            named = [f"...{k}" for k in range(count, 0, -1)] if bare == "..." else [bare]
            result += named
            if name[0] in marked:
                marked[name[0]].update(named)
        return tuple(result)

    read = [
        expanded(i, names, ndim - sum(_bare(name) != "..." for name in names))
        for i, (names, ndim) in enumerate(zip(operands, ndims))
    ]
    given = [part.split() for part in after.split(",")]
    if results is not None and len(given) == 1:
        given *= results
    outs = [expanded(i, names, most) for i, names in enumerate(given, len(read))]
    return Signature(
        tuple(read),
        tuple(outs),
        frozenset(marked["["] - {ONE}),
        frozenset(signs["+"]),
        unread,
        frozenset(signs["="]),
        frozenset(marked["{"]),
        frozenset(marked["("] - {ONE}),
        frozenset(halos),
        frozenset(grouped),
    )


def _sides(pattern: str) -> tuple[str, str]:
    before, arrow, after = pattern.partition("->")
    if not arrow:
        raise ValueError(f"the signature {pattern!r} has no ->")
    return before, after


def _without_signs(operands: list[list[str]]) -> dict[str, set[int]]:
    """Take the signs off the operands, and say which had each."""
    signs: dict[str, set[int]] = {"+": set(), "=": set()}
    for i, names in enumerate(operands):
        if names and (sign := names[0][0]) in signs:
            signs[sign].add(i)
            names[:1] = names[0][1:].split()  # no name if there was only the sign
    return signs


def _most_without_names(
    pattern: str, operands: Sequence[Sequence[str]], ndims: Sequence[int]
) -> int:
    """The greatest number of dims of an operand that ``...`` stands for.

    Raises:
        ValueError: an operand has more or fewer dims than the pattern names, or there are more or
            fewer operands.
    """
    if len(operands) != len(ndims):
        raise ValueError(
            f"the signature {pattern!r} has {counted(len(operands), 'operand')}, but the number of "
            f"given operands is {len(ndims)}"
        )
    most = 0
    for names, ndim in zip(operands, ndims):
        rest = ndim - sum(_bare(name) != "..." for name in names)
        if rest < 0 or (rest and "..." not in map(_bare, names)):
            raise ValueError(
                f"an operand of {counted(ndim, 'dim')} does not fit the dim names "
                f"{' '.join(names)!r} in the signature {pattern!r}"
            )
        most = max(most, rest if "..." in map(_bare, names) else 0)
    return most


def _bare(name: str) -> str:
    return name[1:-1] if name[:1] + name[-1:] in ("[]", "{}", "()") else name

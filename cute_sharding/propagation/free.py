"""Placements of a result for which nothing is received.

As for views (carry.py) mesh dims are decided from left to right. If placements are free, so
is each prefix of them: what the devices with the same first t coordinates need together is what
they hold together. So a cut that is not free by itself, after those before it, is given up at once,
and no combination of cuts is looked at of which some part is not free.

What one mesh dim of M devices can be is read off the rows that its first two devices may not have
(those of the result that come from other devices). A cut in pieces of p rows gives device 0 the
blocks of ``ceil(p / M)`` rows at 0, p, 2p ..., and device 1 those behind them. Device 0 has row 0
whatever the cut; so its first block ends where its forbidden rows begin, at the latest; it does not
end within those of device 1, whose block begins there; and a piece ends, M blocks on or up to M - 1
rows earlier, where device 0 may begin again. That leaves one piece where rows have one owner each,
as in a view. It leaves several where rows are replicated, or filled in: then the longest and
shortest are tried, and those between as long as they are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange import Exchange
from cute_sharding.propagation.solver import Budget, carried
from cute_sharding.relations.forms import Diagonal, Fold, Window
from cute_sharding.relations.moves import Link, Move
from cute_sharding.relations.rows import Rows, between, held_rows, needed_rows
from cute_sharding.sharding.chains import Chains, Cut, Device, chain_of, chains_of
from cute_sharding.sharding.meeting import Run, Runs, count_rows, meet_on_x, rows_held

Cuts: TypeAlias = "tuple[Cut, ...]"
Interval: TypeAlias = "tuple[int, int]"

# Cuts that are tried, of all mesh dims together; pieces and blocks where several would do; and
# intervals of rows that are looked at.
MOST, FEW, INTERVALS = 256, 16, 12


def free_cuts(
    move: Move, mesh: tuple[int, ...], sources: tuple[Chains, ...], own: Cuts, open_dims: list[int]
) -> Cuts | None:
    """The cuts, one for each mesh dim, of the one result of ``move`` for which nothing is received;
    None: none were found.

    Args:
        sources: how the operands are cut.
        own: the operand's own cuts, in the dims of the result.
        open_dims: the mesh dims that may cut the result otherwise.
    """
    search = _Search(move, mesh, sources, own, frozenset(open_dims))
    return next(search.found(), None)


class _Search(NamedTuple):
    move: Move
    mesh: tuple[int, ...]
    sources: tuple[Chains, ...]
    own: Cuts
    open: frozenset[int]

    def found(self) -> Iterator[Cuts]:
        def options(decided: Cuts, _: bool) -> Iterable[Cut]:
            m = len(decided)
            return self._options(decided) if m in self.open else [self.own[m]]

        def carry(decided: Cuts, _: bool, cut: Cut) -> bool | None:
            is_alone = self.mesh[len(decided)] == 1
            return True if is_alone or self._is_free((*decided, cut)) else None

        for cuts, _ in carried(len(self.mesh), options, carry, True, Budget(MOST)):
            yield cuts

    def _until(self, chains: Chains, m: int) -> Chains:
        """The cuts of the mesh dims up to ``m``."""
        return tuple([tuple([cut for cut in chain if cut[0] <= m]) for chain in chains])

    def _is_free(self, decided: Cuts) -> bool:
        sources = tuple([self._until(chains, len(decided) - 1) for chains in self.sources])
        targets = (self._target(decided),)
        return Exchange.on_mesh(self.move, self.mesh, sources, targets).looks_free

    def _target(self, decided: Cuts) -> Chains:
        return chains_of(decided, len(self.move.outputs[0]), self.mesh)

    # -- what a mesh dim can be --------------------------------------------------------------------

    def _options(self, decided: Cuts) -> Iterator[Cut]:
        """Cuts of one more mesh dim that what its first devices have does not rule out."""
        m = len(decided)
        if self.own[m] is not None:
            yield self.own[m]
        shape, target = self.move.outputs[0], self._target(decided)
        if not any(True for _ in shape):
            yield None
            return
        first = (0,) * len(self.mesh)
        for d in self._dims(m):
            rows = count_rows(rows_held(shape[d], chain_of(target[d], self.mesh, first)))
            forbidden = [self._forbidden(d, target, m, k) for k in (0, 1)]
            for factor in islice(_split_factors(rows, self.mesh[m], *forbidden), FEW * 2):
                yield d, factor
        yield None
        # All on the first device.
        yield min((max(n, 1), d) for d, n in enumerate(shape))[::-1]

    def _dims(self, m: int) -> list[int]:
        """The dims that take rows from where the mesh dim cuts an operand, before all others."""
        cut = {
            d
            for link in self.move.links
            for source, target in link.pairs
            if any(mm == m for dim in source.dims for mm, _ in self.sources[link.source][dim])
            for d in target.dims
        }
        return sorted(range(len(self.move.outputs[0])), key=lambda d: (d not in cut, d))

    def _forbidden(self, d: int, target: Chains, m: int, k: int) -> list[Interval]:
        """The first rows of dim ``d`` that device k of the mesh dim lacks, of those that the first
        devices of the mesh dims before it are to have, numbered as these have them.
        """
        first = (0,) * len(self.mesh)
        device = tuple([k if mm == m else 0 for mm in range(len(self.mesh))])
        lacking: list[Interval] = []
        for link in self.move.links:
            sources = self._until(self.sources[link.source], m)
            lacking += self._lacking(link, d, sources, target, device)
        have = rows_held(self.move.outputs[0][d], chain_of(target[d], self.mesh, first))
        there = meet_on_x([Run(a, a, (), b - a) for a, b in _merged(lacking)], have)
        return _first_intervals([run.flipped() for run in there])[0]

    def _lacking(
        self, link: Link, d: int, sources: Chains, target: Chains, device: Device
    ) -> list[Interval]:
        """The first rows of dim ``d`` that the device lacks through one link."""
        shape, onto = self.move.inputs[link.source], self.move.outputs[0]
        first = (0,) * len(self.mesh)
        has_others, found = True, None
        for source, rows in link.pairs:
            of = tuple([shape[e] for e in source.dims])
            n = tuple([onto[e] for e in rows.dims])
            had = tuple([chain_of(sources[e], self.mesh, device) for e in source.dims])
            wanted = tuple([chain_of(target[e], self.mesh, first) for e in rows.dims])
            need, have = needed_rows(source, of, rows, n, wanted), held_rows(source, of, had)
            if not need:
                return []
            if d in rows.dims:
                found = rows, _lacks(need, have, rows.backward), need
            elif count_rows(between(source, of, had, rows, n, wanted)) < count_rows(need):
                has_others = False
        if found is None:
            return [] if has_others else [(0, onto[d])]
        rows, lacks, need = found
        if not has_others:
            lacks = _lacks(need, (), rows.backward)
        windows: Runs = ()
        if isinstance(rows.form, Window) and d != rows.dim:
            assert rows.dim is not None
            windows = rows_held(onto[rows.dim], chain_of(target[rows.dim], self.mesh, first))
        return [row for a, b in lacks for row in _of_dim(rows, d, onto[d], windows, a, b)]


def _lacks(need: Runs, have: Runs, backward: bool) -> list[Interval]:
    """The first intervals of x of the one that are not among those of the other; backward: the
    last.
    """
    if backward:
        need, have = (tuple([run._replace(x=-run.reach) for run in some]) for some in (need, have))
    (wanted, until), (there, horizon) = _first_intervals(need), _first_intervals(have)
    if horizon is not None:
        until = horizon if until is None else min(until, horizon)
    found = []
    for a, b in wanted:
        b = b if until is None else min(b, until)
        for start, stop in there:
            if a < min(start, b):
                found.append((a, min(start, b)))
            a = max(a, stop) if start < b else a
        if a < b:
            found.append((a, b))
    return [(-b, -a) for a, b in found] if backward else found


def _of_dim(rows: Rows, d: int, n: int, windows: Runs, a: int, b: int) -> Iterator[Interval]:
    """The rows of a tensor's dim that those of the exchange from a to b, exclusive, are; those
    within windows, of these.
    """
    match rows.form:
        case Window(_, size, step) if d == rows.dim:
            yield max(-(-(a - size + 1) // step), 0), min((b - 1) // step + 1, n)
        case Window(_, size, step):
            some = max(-(-(a - size + 1) // step), 0), (b - 1) // step + 1
            there = meet_on_x(windows, [Run(some[0], some[0], (), some[1] - some[0])])
            for w, until in _first_intervals([run.flipped() for run in there])[0]:
                for each in range(w, min(until, w + FEW)):
                    yield max(a - each * step, 0), min(b - each * step, n)
        case Fold(pieces):
            for start, stop, sign, at in pieces:
                first, last = (a - at, b - at) if sign > 0 else (at - b + 1, at - a + 1)
                if sign == 0 and a <= at < b:
                    first, last = start, stop
                if max(first, start) < min(last, stop):
                    yield max(first, start), min(last, stop)
        case Diagonal(_, down, right):
            first = down if d == rows.dim else right
            yield a + first, b + first
        case _:
            runs = [Run(a, a, (), b - a)] if rows.runs is None else []
            for run in runs or meet_on_x([Run(a, a, (), b - a)], rows.runs or ()):
                for start, stop in _first_intervals([run.flipped()])[0]:
                    yield (n - stop, n - start) if rows.backward else (start, stop)


def _first_intervals(runs: Iterable[Run]) -> tuple[list[Interval], int | None]:
    """The first intervals of x, those that touch as one, and up to where they are all; None: they
    are all.
    """
    found: list[Interval] = []
    until: int | None = None
    for run in runs:
        turns = list(islice(_turns(run), INTERVALS + 1))
        if len(turns) > INTERVALS:
            end = turns[-1][0]
            until = end if until is None else min(until, end)
        found += turns
    return _merged(
        [(a, b if until is None else min(b, until)) for a, b in found if until is None or a < until]
    ), until


def _turns(run: Run) -> Iterator[Interval]:
    if not run.loops:
        yield run.x, run.x + run.length
    else:
        for i in range(run.loops[0][0]):
            yield from _turns(run.turn(i))


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    result: list[Interval] = []
    for a, b in sorted(intervals):
        if a < b and result and a <= result[-1][1]:
            result[-1] = result[-1][0], max(b, result[-1][1])
        elif a < b:
            result.append((a, b))
    return result


# -- pieces ----------------------------------------------------------------------------------------


def _split_factors(
    n: int, parts: int, first: Sequence[Interval], second: Sequence[Interval]
) -> Iterator[int]:
    """Split factors that leave ``n`` rows so that the first two of ``parts`` devices have none of
    the rows that are forbidden to them, as far as the first pieces tell.
    """
    if n == 0 or (first and first[0][0] == 0):
        return
    longest = min(first[0][0] if first else n, -(-n // parts))
    for block in _chosen(_but(1, longest + 1, second)):
        pieces = range(max(parts * (block - 1) + 1, 1), min(parts * block, n) + 1)
        for piece in _chosen(_but(pieces.start, pieces.stop, first)):
            factor = -(-n // piece)
            if -(-n // factor) == piece and _fits(n, piece, block, parts, first, second):
                yield factor
                if piece > 1 and factor != (most := -(-n // (piece - 1)) - 1):
                    yield most


def _fits(
    n: int,
    piece: int,
    block: int,
    parts: int,
    first: Sequence[Interval],
    second: Sequence[Interval],
) -> bool:
    """Whether the first blocks of the two devices have none of the rows."""
    again = -(-min(piece, n - piece) // parts) if n > piece else 0
    return not (
        _reaches(second, block, min(2 * block, piece))
        or _reaches(first, piece, piece + again)
        or _reaches(second, piece + again, min(piece + 2 * again, n, 2 * piece))
    )


def _reaches(rows: Sequence[Interval], start: int, stop: int) -> bool:
    return any(a < stop and b > start for a, b in rows) and start < stop


def _but(start: int, stop: int, rows: Sequence[Interval]) -> list[Interval]:
    """The numbers from start to stop, exclusive, that are not among the rows."""
    found = []
    for a, b in rows:
        if start < min(a, stop):
            found.append((start, min(a, stop)))
        start = max(start, b)
    return [*found, (start, stop)] if start < stop else found


def _chosen(intervals: Sequence[Interval]) -> Iterator[int]:
    """Numbers of intervals, from the largest on: all where they are few, else some from either
    end.
    """
    for a, b in reversed(intervals):
        if b - a <= FEW:
            yield from range(b - 1, a - 1, -1)
        else:
            yield from range(b - 1, b - 1 - FEW // 2, -1)
            yield from range(a, a + FEW // 2)

"""Which placements the results of a movement op have.

Mesh dims that cut no dim that the op touches stay as they are. Of the others, in this order:

1. the operand's own placements, if nothing has to be received for them;
2. free placements: what each device holds of the mapped rows is then what they say. As for views
   (views/carry.py), mesh dims are decided from left to right, and each can be read off what its
   first device holds: where its first block ends, and where it begins again;
3. of the operand's own, plain shards and replicas, those for which the fewest elements are
   received; then those that hold least; then those closest to the operand's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from math import gcd
from typing import NamedTuple, TypeAlias

from cute_sharding.movement.exchange import Movement
from cute_sharding.movement.moves import Link, Move
from cute_sharding.movement.rows import between
from cute_sharding.redistribution.chains import Chains, chains_of, up_to
from cute_sharding.redistribution.cost import most_local
from cute_sharding.redistribution.meeting import Run
from cute_sharding.views import Cut

Cuts: TypeAlias = "tuple[Cut, ...]"

# Combinations of placements that are weighed, at the most.
MOST = 512


class Choice(NamedTuple):
    """The cuts of each result, one for each mesh dim, and the movement that leads there.

    >>> isinstance(chosen(Move((), (), ()), (), ()), Choice)
    False
    """

    cuts: tuple[Cuts, ...]
    movement: Movement


@lru_cache(maxsize=1 << 12)
def chosen(
    move: Move, cuts: tuple[Cuts, ...], mesh: tuple[int, ...], *, anyway: bool = False
) -> Choice | None:
    """The cuts of the results of ``move``; None where no mesh dim cuts what the op touches, so that
    it is nothing but the op on each device; or then, too, if ``anyway``.

    Args:
        cuts: of each operand (tensor dim, split factor) or None for each mesh dim.

    >>> from cute_sharding.movement import BY_OP
    >>> chunk = BY_OP["torch.split"].move((4, 12), 6, 1)
    >>> fused = chosen(chunk, (((1, 2),),), (2,))  # queries and keys in one
    >>> fused.cuts, fused.movement.received_elements
    ((((1, 1),), ((1, 1),)), 0)
    """
    question = _Question(move, cuts, mesh)
    if not question.open and not anyway:
        return None
    own = question.of_all(question.own)
    if own.movement.received_elements == 0:
        return own
    return question.free() or question.cheapest()


class _Question:
    """What has to be decided.

    Attributes:
        open: the mesh dims that cut what the op touches, or on which the operands differ.
        own: the operand's cuts, of each result in its dims; of several operands, of the one that
            has most cuts.
    """

    def __init__(self, move: Move, cuts: tuple[Cuts, ...], mesh: tuple[int, ...]) -> None:
        self.move, self.mesh = move, mesh
        self.given = cuts
        self.sources = tuple(
            [chains_of(c, len(x), mesh) for c, x in zip(cuts, move.inputs, strict=True)]
        )
        wide = [m for m, n in enumerate(mesh) if n > 1]
        self.open = [
            m
            for m in wide
            if any(
                (cut := c[m]) is not None and cut[0] in move.touched(i) for i, c in enumerate(cuts)
            )
            or len({self._mapped(link, m) for link in move.links if link.target == 0}) > 1
        ]
        self.own = [self._own(k) for k in range(len(move.outputs))]

    def _mapped(self, link: Link, m: int) -> Cut:
        """A cut of the operand, in the dims of the result; None where that has no such dim."""
        cut = self.given[link.source][m]
        d = None if cut is None else self.move.home(link).get(cut[0])
        return None if cut is None or d is None else (d, cut[1])

    def _own(self, k: int) -> Cuts:
        links = [link for link in self.move.links if link.target == k]
        if not links:
            return (None,) * len(self.mesh)
        return max(
            [tuple([self._mapped(link, m) for m in range(len(self.mesh))]) for link in links],
            key=lambda cuts: sum(cut is not None for cut in cuts),
        )

    def of_all(self, cuts: Sequence[Cuts]) -> Choice:
        targets = tuple(
            [chains_of(c, len(x), self.mesh) for c, x in zip(cuts, self.move.outputs, strict=True)]
        )
        return Choice(tuple(cuts), Movement(self.move, self.mesh, self.sources, targets))

    # -- free --------------------------------------------------------------------------------------

    def free(self) -> Choice | None:
        """Placements for which nothing is received, of every result; None: of some there are
        none.
        """
        found = []
        for k in range(len(self.move.outputs)):
            cuts = self._free_of(k)
            if cuts is None:
                return None
            found.append(cuts)
        return self.of_all(found)

    def _free_of(self, k: int) -> Cuts | None:
        links = [link for link in self.move.links if link.target == k]
        alone = replace(
            self.move,
            outputs=(self.move.outputs[k],),
            links=tuple([link._replace(target=0) for link in links]),
        )
        question = _Alone(alone, self.mesh, self.sources, self.own[k], self.open)
        for cuts in islice(question.candidates(), MOST):
            targets = (chains_of(cuts, len(alone.outputs[0]), self.mesh),)
            if Movement(alone, self.mesh, self.sources, targets).received_elements == 0:
                return cuts
        return None

    # -- cheapest ----------------------------------------------------------------------------------

    def cheapest(self) -> Choice:
        """The same mesh dims cut the same dims of all results."""
        ndim = min(map(len, self.move.outputs))
        options: list[list[Cut]] = []
        for m in range(len(self.mesh)):
            if m not in self.open:
                options.append([self.own[0][m]])
                continue
            mapped = [self._mapped(link, m) for link in self.move.links]
            found = [cut for cut in mapped if cut is not None]
            found += [(d, 1) for d, _ in found] or [(d, 1) for d in range(ndim)]
            options.append([*dict.fromkeys(found), None])
        best: Choice | None = None
        least: tuple[int, ...] = ()
        for cuts in islice(product(*options), MOST):
            choice = self.of_all([cuts] * len(self.move.outputs))
            key = (
                choice.movement.received_elements,
                sum(
                    most_local(shape, chains, self.mesh)
                    for shape, chains in zip(self.move.outputs, choice.movement.targets)
                ),
                sum(a != b for a, b in zip(cuts, self.own[0])),
            )
            if best is None or key < least:
                best, least = choice, key
        assert best is not None
        return best


class _Alone:
    """One result: which cuts may be free."""

    def __init__(
        self,
        move: Move,
        mesh: tuple[int, ...],
        sources: tuple[Chains, ...],
        own: Cuts,
        open_dims: Sequence[int],
    ) -> None:
        self.move, self.mesh, self.sources, self.own, self.open = (
            move,
            mesh,
            sources,
            own,
            open_dims,
        )

    def candidates(self, decided: Cuts = ()) -> Iterator[Cuts]:
        """Cuts of the result, mesh dim by mesh dim from the left."""
        m = len(decided)
        if m == len(self.mesh):
            yield decided
            return
        options = [self.own[m]] if m not in self.open else self._read(decided, m)
        for cut in dict.fromkeys(options):
            yield from self.candidates((*decided, cut))

    def _read(self, decided: Cuts, m: int) -> list[Cut]:
        """What the mesh dim can be, by what its first device has of what is left: the operand's own
        cut; the split factors that begin anew where it does; or, where it has all, any that give it
        all.
        """
        result: list[Cut] = [self.own[m]]
        shape = self.move.outputs[0]
        prefix = chains_of((*decided, *(None,) * (len(self.mesh) - m)), len(shape), self.mesh)
        dims = set()
        for link in self.move.links:
            for source, target in link.pairs:
                if source.dim is None or target.dim is None:
                    continue
                if up_to(self.sources[link.source][source.dim], m) is not None:
                    dims.add(target.dim)
        for d in sorted(dims):
            rows = most_local((shape[d],), (prefix[d],), self.mesh)
            first, second = (self._of_device(d, prefix, m, k) for k in (0, 1))
            pieces = _pieces(first, second, self.mesh[m])
            result += [(d, max(-(-rows // piece), 1)) for piece in pieces]
            result.append((d, 1))
        # All on the first device of the mesh dim.
        result += [(d, max(n, 1)) for d, n in sorted(enumerate(shape), key=lambda item: item[1])][
            :1
        ]
        return result

    def _of_device(self, d: int, prefix: Chains, m: int, k: int) -> list[tuple[int, int]]:
        """The first intervals of rows that device k of the mesh dim has, of those that the mesh
        dims before it leave to their first devices.
        """
        found = []
        wanted = tuple([(f, self.mesh[mm], 0) for mm, f in prefix[d]])
        for link in self.move.links:
            for source, target in link.pairs:
                if target.dim != d or source.dim is None:
                    continue
                chain = self.sources[link.source][source.dim]
                cut = up_to(chain, m)
                if cut is None:
                    cut = tuple([each for each in chain if each[0] < m])
                had = tuple([(f, self.mesh[mm], k if mm == m else 0) for mm, f in cut])
                of, n = self.move.inputs[link.source][source.dim], self.move.outputs[0][d]
                window = target.window
                if window is not None:
                    target = target._replace(window=None)
                    n = (n - 1) * window.step + window.size if n else 0
                runs = [r.flipped() for r in between(source, of, had, target, n, wanted)]
                if window is not None:
                    runs = [r for run in runs for r in _windows_in(run, window.size, window.step)]
                found += runs
        return _first_intervals(found)


def _windows_in(run: Run, size: int, step: int) -> list[Run]:
    """The windows that begin in the first intervals of a run, as runs of x."""
    return [
        Run(-(-a // step), 0, (), max((b - size) // step + 1 - -(-a // step), 0))
        for a, b in _first_intervals([run])
        if (b - size) // step + 1 > -(-a // step)
    ]


def _first_intervals(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """The first intervals of x, those that touch as one."""
    found = []
    for run in runs:
        turns = [(run.x, run.x + run.length)]
        for _, dx, _ in reversed(run.loops):
            turns += [(a + dx, b + dx) for a, b in turns]
        found += turns[:4]
    result: list[tuple[int, int]] = []
    for a, b in sorted(found):
        if result and a <= result[-1][1]:
            result[-1] = result[-1][0], max(b, result[-1][1])
        else:
            result.append((a, b))
    return result


def _pieces(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]], parts: int
) -> list[int]:
    """How long a piece may be of which the first two devices have these rows, and nobody may care
    about others: the first begins again after each, where the second has had its block.
    """
    found = []
    starts = [a for a, _ in first]
    if starts:
        found += [b - starts[0] for b in starts[1:2]]
        found += [starts[0], gcd(*starts), (first[0][1] - starts[0]) * parts, first[0][1] * parts]
    if second:
        found.append(second[0][0] * parts)
        if starts:
            found.append(second[0][0] - (first[0][1] - starts[0]))
    return [piece for piece in dict.fromkeys(found) if piece > 0]

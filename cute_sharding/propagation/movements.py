"""Which placements the results of a movement op have: free ones, or the cheapest; and ops of
several steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.exchange import Exchange
from cute_sharding.exchange.flow import missed
from cute_sharding.exchange.placed import most_local
from cute_sharding.propagation.solver import Budget, Cost, carried, least, split_factors
from cute_sharding.propagation.views import carry
from cute_sharding.relations.moves import Link, Move, Shape
from cute_sharding.relations.table.row import ByDimMap, RowStep
from cute_sharding.sharding.rows import (
    Chains,
    Cut,
    chains_of,
    chains_on,
    count_rows,
    rows_held,
)

# -- free ------------------------------------------------------------------------------------------
# Placements of the results of a movement for which nothing is received.
#
# As for views (carry.py) mesh dims are decided from left to right. If placements are free, each
# prefix of them is free too: the rows that the devices with the same first t coordinates need
# together are those that they hold together. So a cut that is not free after the cuts before it is
# dropped at once, and no combination is examined that has a part that is not free.
#
# A mesh dim may cut the result's dims whose rows come from the operand's dim that it cuts, by any
# split factor; with most factors the first two devices already lack rows, and these are dropped.

Cuts: TypeAlias = "tuple[Cut, ...]"

# How many cuts are tried, over all mesh dims; up to how many rows all split factors are tried.
MOST, EVERY = 256, 64


class FreeCuts(NamedTuple):
    """The search for cuts, one for each mesh dim, of the one result of ``move``, for which nothing
    is received.

    Attributes:
        sources: how the operands are cut.
        own: the operand's own cuts, in the result's dims.
        open: the mesh dims that may cut the result in another way.
    """

    move: Move
    mesh: tuple[int, ...]
    sources: tuple[Chains, ...]
    own: Cuts
    open: frozenset[int]

    def first(self) -> Cuts | None:
        """The first free cuts that are found; None: there are none."""

        def options(decided: Cuts, _: bool) -> Iterable[Cut]:
            m = len(decided)
            return self._options(decided) if m in self.open else [self.own[m]]

        def carry(decided: Cuts, _: bool, cut: Cut) -> bool | None:
            is_alone = self.mesh[len(decided)] == 1
            return True if is_alone or self._is_free((*decided, cut)) else None

        found = carried(len(self.mesh), options, carry, True, Budget(MOST))
        return next((cuts for cuts, _ in found), None)

    def _is_free(self, decided: Cuts) -> bool:
        sources = self._sources(len(decided))
        return Exchange.on_mesh(self.move, self.mesh, sources, (self._target(decided),)).looks_free

    def _sources(self, count: int) -> tuple[Chains, ...]:
        """How the first ``count`` mesh dims cut the operands."""
        return tuple(
            [
                tuple([tuple([cut for cut in chain if cut[0] < count]) for chain in chains])
                for chains in self.sources
            ]
        )

    def _target(self, decided: Cuts) -> Chains:
        return chains_of(decided, len(self.move.outputs[0]), self.mesh)

    def _options(self, decided: Cuts) -> Iterator[Cut]:
        """Cuts of one more mesh dim for which the first devices already have what they need."""
        m, shape, target = len(decided), self.move.outputs[0], self._target(decided)
        inputs = self.move.inputs
        if self.own[m] is not None:
            yield self.own[m]
        firsts = [tuple([k if mm == m else 0 for mm in range(len(self.mesh))]) for k in (0, 1)]
        sources = self._sources(m + 1)
        had = [[chains_on(c, self.mesh, device) for c in sources] for device in firsts]
        held = chains_on(target, self.mesh, firsts[0])
        for d, used in self._dims(m) if shape else ():
            rows = count_rows(rows_held(shape[d], held[d]))
            for factor in split_factors(rows, used, EVERY):
                wanted = self._target((*decided, (d, factor)))
                if not any(
                    missed(link, inputs[link.source], have[link.source], shape, wants)
                    for device, have in zip(firsts, had)
                    for wants in (chains_on(wanted, self.mesh, device),)
                    for link in self.move.links
                ):
                    yield d, factor
        yield None
        if shape:  # all on the first device
            yield min((max(n, 1), d) for d, n in enumerate(shape))[::-1]

    def _dims(self, m: int) -> list[tuple[int, tuple[int, ...]]]:
        """The dims that take rows from the dim that the mesh dim cuts, each with the split factors
        that give pieces as long as the operand's.
        """
        shape, found = self.move.outputs[0], dict[int, list[int]]()
        for source, _, pairs in self.move.links:
            for one, other in pairs:
                for dim in one.dims:
                    for mm, factor in self.sources[source][dim]:
                        piece = max(-(-self.move.inputs[source][dim] // factor), 1)
                        for d in other.dims if mm == m else ():
                            pieces = [-(-shape[d] // piece), max(shape[d] // piece, 1)]
                            found.setdefault(d, []).extend([factor, *pieces])
        return [(d, tuple(used)) for d, used in sorted(found.items())]


# -- choose ----------------------------------------------------------------------------------------
# Which placements the results of a movement op have.
#
# Mesh dims that cut no dim that the op touches stay as they are. Mesh dims on which every result
# would have fewer rows than devices, while the operand has enough, replicate the results: a shard
# of so few rows cannot be broadcast, and it would be gathered at each use. torch replicates too,
# and only these rows are received. For other mesh dims we take the first of these that applies:
#
# 1. the operand's own placements, if nothing has to be received for them;
# 2. free placements: they describe what each device already holds of the mapped rows
#    (``movements``);
# 3. of the operand's own placements, plain shards and replicas, those that receive the fewest
#    elements; then those that hold the fewest; then those closest to the operand's;
# 4. if fewer elements are received then: the touched dims are gathered, and mesh dims on which the
#    operand is replicated cut the result; the best of all of these. Only mesh dims that the caller
#    names may do so.


class Choice(NamedTuple):
    """The cuts of each result, one for each mesh dim, and the exchange that leads there.

    >>> from cute_sharding.relations.table import BY_OP
    >>> found = chosen(BY_OP["torch.flip"].move((4,), [0]), (((0, 1),),), (2,))
    >>> isinstance(found, Choice), found.exchange.received_elements
    (True, 2)
    """

    cuts: tuple[Cuts, ...]
    exchange: Exchange


@remembered
def chosen(
    move: Move,
    cuts: tuple[Cuts, ...],
    mesh: tuple[int, ...],
    *,
    anyway: bool = False,
    spare: tuple[int, ...] = (),
) -> Choice | None:
    """The cuts of the results of ``move``; None where no mesh dim cuts what the op touches, so that
    each device just runs the op on its local tensors (with ``anyway`` the cuts then too).

    Args:
        cuts: for each operand, (tensor dim, split factor) or None for each mesh dim.
        spare: mesh dims that cut no operand and may cut the results, if fewer elements are received
            then. Mesh dims with a pending reduction must not be among them.

    >>> from cute_sharding.relations.table import BY_OP
    >>> chunk = BY_OP["torch.split"].move((4, 12), 6, 1)
    >>> fused = chosen(chunk, (((1, 2),),), (2,))  # queries and keys in one
    >>> fused.cuts, fused.exchange.received_elements
    ((((1, 1),), ((1, 1),)), 0)
    >>> column = BY_OP["Tensor.__getitem__"].move((64, 32), 1, 0, 1)
    >>> chosen(column, (((1, 1),),), (4,)).cuts  # one column for four devices
    ((None,),)
    """
    question = ShardedMove(move, cuts, mesh)
    if not question.open and not anyway:
        return None
    question.replicate_few_rows()
    own = question.to(question.own)
    if own.exchange.received_elements == 0:
        return own
    return question.free() or question.cheapest(spare)


class ShardedMove:
    """A movement of sharded operands: the mesh dims to be decided, and the operand's cuts in each
    result's dims. Devices that differ only on mesh dims that are not ``open`` exchange nothing.

    Attributes:
        open: the mesh dims that cut what the op touches, or on which the operands differ.
        own: for each result, the operand's cuts in the result's dims; of several operands, those of
            the one with the most cuts.
        few: those of ``open`` that are to replicate the results.

    >>> from cute_sharding.relations.table import BY_OP
    >>> roll = ShardedMove(BY_OP["torch.roll"].move((8, 4), 2, 0), (((0, 1), (1, 1)),), (2, 2))
    >>> roll.open, roll.own
    ([0], [((0, 1), (1, 1))])
    >>> roll.to(roll.own).exchange.received_elements
    4
    """

    few: frozenset[int] = frozenset()

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
        """The operand's cut in the dims of the result; None if the result has no such dim."""
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

    def replicate_few_rows(self) -> None:
        """Let mesh dims replicate the results if the operand's own cuts would leave each result
        fewer rows than devices.
        """
        self.few = frozenset([m for m in self.open if self._leaves_few_rows(m)])
        self.own = [
            tuple([None if m in self.few else cut for m, cut in enumerate(own)]) for own in self.own
        ]

    def _leaves_few_rows(self, m: int) -> bool:
        for own, shape in zip(self.own, self.move.outputs):
            cut = own[m]
            if cut is None or 0 in shape:
                return False
            dim = cut[0]
            parts = prod([n for n, c in zip(self.mesh, own) if c is not None and c[0] == dim])
            had = [
                self.move.inputs[i][given[0]]
                for i, given in enumerate([cuts[m] for cuts in self.given])
                if given is not None
            ]
            if shape[dim] >= parts or min(had, default=0) < parts:
                return False
        return True

    def to(self, cuts: Sequence[Cuts]) -> Choice:
        """The choice of these cuts of the results, however much has to be received for them."""
        targets = tuple(
            [chains_of(c, len(x), self.mesh) for c, x in zip(cuts, self.move.outputs, strict=True)]
        )
        return Choice(tuple(cuts), Exchange.on_mesh(self.move, self.mesh, self.sources, targets))

    # -- free --------------------------------------------------------------------------------------

    def free(self) -> Choice | None:
        """Placements of all results for which nothing is received; None if some result has no such
        placements.
        """
        found = []
        for k in range(len(self.move.outputs)):
            cuts = self._free_of(k)
            if cuts is None:
                return None
            found.append(cuts)
        return self.to(found)

    def _free_of(self, k: int) -> Cuts | None:
        undecided = frozenset(self.open) - self.few
        move = self.move.of_result(k)
        return FreeCuts(move, self.mesh, self.sources, self.own[k], undecided).first()

    # -- cheapest ----------------------------------------------------------------------------------

    def cheapest(self, spare: Sequence[int] = ()) -> Choice:
        """The cheapest choice in which a mesh dim cuts the same dim of all results."""
        options = [self._options(m) for m in range(len(self.mesh))]
        cost, best = self._best(options)
        spare = [m for m in spare if self.mesh[m] > 1 and options[m] == [None]]
        if not spare:
            return best
        plain = self._plain()

        def cut(options: Sequence[Sequence[Cut]]) -> tuple[Cost, Choice]:
            return self._best([[None, *plain] if m in spare else c for m, c in enumerate(options)])

        instead = cut([[None] if m in self.open else some for m, some in enumerate(options)])
        if instead[0].received >= cost.received:
            return best
        return min(instead, cut(options), key=itemgetter(0))[1]

    def _options(self, m: int) -> list[Cut]:
        """The result's cuts to compare for a mesh dim that is not spare."""
        if m not in self.open or m in self.few:
            return [self.own[0][m]]
        mapped = [self._mapped(link, m) for link in self.move.links]
        found = [cut for cut in mapped if cut is not None]
        found += [(d, 1) for d, _ in found] or self._plain()
        return [*dict.fromkeys(found), None]

    def _plain(self) -> list[tuple[int, int]]:
        """Plain shards of each dim that all results have."""
        return [(d, 1) for d in range(min(map(len, self.move.outputs)))]

    def _best(self, options: Sequence[Sequence[Cut]]) -> tuple[Cost, Choice]:
        """The choice of least cost, of one option for each mesh dim."""
        return least(options, self._weighed, [some[-1] for some in options])

    def _weighed(self, cuts: Cuts) -> tuple[Cost, Choice]:
        """The cost: what the busiest device receives and holds, and how many mesh dims change."""
        choice = self.to([cuts] * len(self.move.outputs))
        held = [most_local(x.shape, x.chains, self.mesh) for x in choice.exchange.targets]
        changed = sum(a != b for a, b in zip(cuts, self.own[0]))
        return Cost(choice.exchange.received_elements, held=sum(held), changed=changed), choice


# -- steps -----------------------------------------------------------------------------------------
# Ops made of several steps. Each step is decided from the cuts that the step before it leaves: a
# view carries them, a movement receives what is missing. The cut of a mesh dim that some view
# cannot carry is dropped before the first step.


class PlacedView(NamedTuple):
    """A view between sharded tensors.

    Attributes:
        step: the step.
        shape, cuts: the shape of its result, and the cuts.
    """

    step: RowStep
    shape: Shape
    cuts: Cuts


class Way(NamedTuple):
    """How an op of rows is carried out.

    Attributes:
        given: the cuts that each operand must have.
        shapes, results: the shape of each result, and its cuts.
        steps: each on the results of the one before it: a view, or an exchange.
    """

    given: tuple[Cuts, ...]
    shapes: tuple[Shape, ...]
    results: tuple[Cuts, ...]
    steps: tuple[PlacedView | Exchange, ...]

    @property
    def exchanges(self) -> list[Exchange]:
        return [step for step in self.steps if isinstance(step, Exchange)]


def place_steps(
    steps: Sequence[RowStep],
    shape: Shape,
    cuts: Cuts,
    mesh: tuple[int, ...],
    *,
    spare: tuple[int, ...] = (),
) -> Way | None:
    """The way of an op of several steps; None: some step has no map.

    ``spare``: mesh dims that may cut a step's result though they do not cut the operand.
    """
    found: list[PlacedView | Exchange] = []
    x, now = shape, cuts
    for step in steps:
        if isinstance(step.row, ByDimMap):
            view = step.row.view(x, *step.args)
            carried = carry(view, now, mesh)
            if carried.blocked is not None:
                return place_steps(
                    steps, shape, _given_up(cuts, carried.blocked), mesh, spare=spare
                )
            x, now = tuple(view.output_shape), carried.cuts
            found.append(PlacedView(step, x, now))
        else:
            move = step.row.move(x, *step.args)
            choice = move and chosen(move, (now,), mesh, anyway=True, spare=spare)
            if not move or not choice:
                return None
            (x,), (now,) = move.outputs, choice.cuts
            found.append(choice.exchange)
    return Way((cuts,), (x,), (now,), tuple(found))


def _given_up(cuts: Cuts, m: int) -> Cuts:
    """The cuts without mesh dim ``m``'s; without any if that cut came from an earlier step."""
    if cuts[m] is None:
        return (None,) * len(cuts)
    return (*cuts[:m], None, *cuts[m + 1 :])

"""Which placements the results of a movement op have.

Mesh dims that cut no dim that the op touches stay as they are. Mesh dims on which every result
would have fewer rows than devices, while the operand has enough, replicate the results: a shard of
so few rows cannot be broadcast, and it would be gathered at each use. torch replicates too, and
only these rows are received. For other mesh dims we take the first of these that applies:

1. the operand's own placements, if nothing has to be received for them;
2. free placements: they describe what each device already holds of the mapped rows (:mod:`.free`);
3. of the operand's own placements, plain shards and replicas, those that receive the fewest
   elements; then those that hold the fewest; then those closest to the operand's;
4. if fewer elements are received then: the touched dims are gathered, and mesh dims on which the
   operand is replicated cut the result; the best of all of these. Only mesh dims that the caller
   names may do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import itemgetter
from typing import NamedTuple

from cute_sharding._memory import remembered
from cute_sharding.exchange import Exchange
from cute_sharding.exchange.cost import most_local
from cute_sharding.propagation.free import Cuts, FreeCuts
from cute_sharding.propagation.solver import Cost, least
from cute_sharding.relations.moves import Link, Move
from cute_sharding.sharding.chains import Cut, chains_of


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

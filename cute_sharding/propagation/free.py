"""Placements of the results of a movement for which nothing is received.

As for views (carry.py) mesh dims are decided from left to right. If placements are free, each
prefix of them is free too: the rows that the devices with the same first t coordinates need
together are those that they hold together. So a cut that is not free after the cuts before it is
dropped at once, and no combination is examined that has a part that is not free.

A mesh dim may cut the result's dims whose rows come from the operand's dim that it cuts, by any
split factor; with most factors the first two devices already lack rows, and these are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from cute_sharding.exchange import Exchange
from cute_sharding.exchange.by_links import missed
from cute_sharding.propagation.solver import Budget, carried, split_factors
from cute_sharding.relations.moves import Move
from cute_sharding.sharding.chains import Chains, Cut, Device, chain_of, chains_of
from cute_sharding.sharding.meeting import Chain, count_rows, rows_held

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
        had = [[self._on(chains, device) for chains in sources] for device in firsts]
        for d, used in self._dims(m) if shape else ():
            rows = count_rows(rows_held(shape[d], chain_of(target[d], self.mesh, firsts[0])))
            for factor in split_factors(rows, used, EVERY):
                wanted = self._target((*decided, (d, factor)))
                if not any(
                    missed(link, inputs[link.source], have[link.source], shape, wants)
                    for device, have in zip(firsts, had)
                    for wants in (self._on(wanted, device),)
                    for link in self.move.links
                ):
                    yield d, factor
        yield None
        if shape:  # all on the first device
            yield min((max(n, 1), d) for d, n in enumerate(shape))[::-1]

    def _on(self, chains: Chains, device: Device) -> tuple[Chain, ...]:
        return tuple([chain_of(chain, self.mesh, device) for chain in chains])

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

"""Ops made of several steps. Each step is decided from the cuts that the step before it leaves: a
view carries them, a movement receives what is missing. The cut of a mesh dim that some view cannot
carry is dropped before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cute_sharding.exchange import Exchange
from cute_sharding.propagation.carry import carry
from cute_sharding.propagation.choose import chosen
from cute_sharding.propagation.free import Cuts
from cute_sharding.relations.moves import Shape
from cute_sharding.relations.table.row import ByDimMap, RowStep


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

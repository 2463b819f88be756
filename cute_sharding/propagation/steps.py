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
from cute_sharding.relations.table.row import ByDimMap, Step


class Placed(NamedTuple):
    """A step between sharded tensors.

    Attributes:
        step: the step.
        shape, cuts: the shape of its result, and the cuts.
        exchange: the exchange that it needs; None: the step is a view.
    """

    step: Step
    shape: Shape
    cuts: Cuts
    exchange: Exchange | None


def place_steps(
    steps: Sequence[Step],
    shape: Shape,
    cuts: Cuts,
    mesh: tuple[int, ...],
    *,
    spare: tuple[int, ...] = (),
) -> tuple[Cuts, list[Placed]] | None:
    """The cuts that the operand must have, and the steps from there; None: some step has no map.

    ``spare``: mesh dims that may cut a step's result though they do not cut the operand.
    """
    found: list[Placed] = []
    x, now = shape, cuts
    for step in steps:
        if isinstance(step.row, ByDimMap):
            view = step.row.view(x, *step.args)
            carried = carry(view, now, mesh)
            if carried.blocked is not None:
                return place_steps(
                    steps, shape, _given_up(cuts, carried.blocked), mesh, spare=spare
                )
            found.append(Placed(step, tuple(view.output_shape), tuple(carried.cuts), None))
        else:
            move = step.row.move(x, *step.args)
            choice = move and chosen(move, (now,), mesh, anyway=True, spare=spare)
            if not move or not choice:
                return None
            found.append(Placed(step, move.outputs[0], choice.cuts[0], choice.exchange))
        x, now = found[-1].shape, found[-1].cuts
    return cuts, found


def _given_up(cuts: Cuts, m: int) -> Cuts:
    """The cuts without mesh dim ``m``'s; without any if that cut came from an earlier step."""
    if cuts[m] is None:
        return (None,) * len(cuts)
    return (*cuts[:m], None, *cuts[m + 1 :])

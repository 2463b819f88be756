"""Ops that are several steps: each is decided from the cuts that the one before it leaves. Views
carry them; of a movement what is missing is received. A mesh dim that a view cannot carry is given
up before the first step.
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
        shape, cuts: of what comes of it.
        exchange: None: a view.
    """

    step: Step
    shape: Shape
    cuts: Cuts
    exchange: Exchange | None


def placed(
    steps: Sequence[Step],
    shape: Shape,
    cuts: Cuts,
    mesh: tuple[int, ...],
    *,
    spare: tuple[int, ...] = (),
) -> tuple[Cuts, list[Placed]] | None:
    """The cuts that the operand is to have, and the steps from there; None: a step has no map.

    ``spare``: mesh dims that may cut what comes of a step though they do not cut the operand.
    """
    found: list[Placed] = []
    x, now = shape, cuts
    for step in steps:
        if isinstance(step.row, ByDimMap):
            view = step.row.view(x, *step.args)
            carried = carry(view, now, mesh)
            if carried.blocked is not None:
                return placed(steps, shape, _given_up(cuts, carried.blocked), mesh, spare=spare)
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
    """Without the cut of a mesh dim; without any, where it came of a step before."""
    if cuts[m] is None:
        return (None,) * len(cuts)
    return (*cuts[:m], None, *cuts[m + 1 :])

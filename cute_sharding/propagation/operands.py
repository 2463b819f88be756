"""The operands of an op, and the cost of bringing them to other placements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from cute_sharding._memory import remembered
from cute_sharding.exchange.collectives import of_blocks
from cute_sharding.exchange.cost import local_elements, received_elements
from cute_sharding.exchange.network import Chosen, Network
from cute_sharding.exchange.plan import Held, received_by
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.sharding.chains import Cut, chains_of

# What one mesh dim does to one tensor: a cut; the op of a pending reduction; or None, where all
# devices have the same.
Part: TypeAlias = "Cut | str"


class Operand(NamedTuple):
    """An operand of an op: its global shape, and what each mesh dim does to it.

    Attributes:
        shape: in elements.
        parts: for each mesh dim a cut, (dim, split factor); the op of a pending reduction, such as
            "sum"; or None, where all devices have the same.
        itemsize: of an element, in bytes, or relative to that of other operands.

    >>> Operand((8, 8), ((0, 1), "sum")).parts  # Shard(0) on one mesh dim, Partial on the other
    ((0, 1), 'sum')
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    itemsize: int = 1


def cuts_of(parts: Sequence[Part]) -> tuple[Cut, ...]:
    """The cuts, with None for pending reductions."""
    return tuple([None if isinstance(part, str) else part for part in parts])


@remembered
def received_for(
    operand: Operand, target: tuple[Part, ...], mesh: tuple[int, ...], chosen: Chosen = None
) -> int:
    """How many elements the busiest device receives when an operand is redistributed to ``target``,
    by the plan that would run if process groups over several mesh dims existed. (If the cost
    depended on the groups, it would change with ``prepare_groups``; DTensor caches answers.) A
    replicated tensor becomes a pending one for nothing. ``chosen``: the network, if it is not the
    default.

    >>> received_for(Operand((8, 8), ((1, 1),)), (None,), (4,))
    48
    """
    if operand.parts == target:
        return 0
    finished = [
        m
        for m, (part, wanted) in enumerate(zip(operand.parts, target))
        if isinstance(part, str) and part != wanted and mesh[m] > 1
    ]
    network = Network.of_programs(mesh, chosen)
    if not finished and network.is_flat:  # one exchange of what is missing
        return received_elements(operand.shape, cuts_of(operand.parts), cuts_of(target), mesh)
    ndim = len(operand.shape)
    kept = tuple(
        [m for m, part in enumerate(operand.parts) if isinstance(part, str) and m not in finished]
    )
    held = Held(
        chains_of(cuts_of(operand.parts), ndim, mesh),
        tuple([(m, str(operand.parts[m])) for m in finished]),
        kept,
    )
    wanted = chains_of(cuts_of(target), ndim, mesh)
    return received_by(plan_steps(operand.shape, mesh, held, wanted, network))


@remembered
def owed_for(shape: tuple[int, ...], parts: tuple[Part, ...], mesh: tuple[int, ...]) -> int:
    """The least that each device will have to receive for what is pending of a tensor: its block,
    of each other device, as in a reduce-scatter.

    >>> owed_for((8, 8), ("sum",), (4,)), owed_for((8, 8), ((0, 1), "sum"), (2, 4))
    (48, 24)
    """
    devices = prod([n for part, n in zip(parts, mesh) if isinstance(part, str)])
    if devices == 1:
        return 0
    return of_blocks(devices, -(-local_elements(shape, cuts_of(parts), mesh) // devices))

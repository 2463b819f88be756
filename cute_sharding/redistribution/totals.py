"""What all devices together receive in a step. (What the busiest receives is the step's own
``received_elements``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from cute_sharding.exchange.cost import DEVICES, devices_of
from cute_sharding.redistribution.all_to_all import AllToAll
from cute_sharding.redistribution.reduction import Reduction
from cute_sharding.redistribution.step import Step


def received_by_all(steps: Sequence[Step]) -> int:
    """The elements that the devices receive together, padding included.

    On meshes of more than 64 devices each is taken to receive as much as the busiest.

    >>> gather = AllToAll((5,), (4,), source=(((0, 1),),), target=((),))  # 2, 2, 1 and 0 rows
    >>> gather.received_elements, received_by_all([gather])
    (5, 15)
    """
    return sum(_of_step(step) for step in steps if step.communicates)


def _of_step(step: Step) -> int:
    devices = list(product(*map(range, step.mesh)))
    if len(devices) > DEVICES:
        return len(devices) * step.received_elements
    assert isinstance(step, (AllToAll, Reduction))
    if step.padded and step.along is not None:
        # Blocks are those of the target of a reduce-scatter, and those of the source of a gather.
        chains = step.target if isinstance(step, Reduction) else step.source
        held = {device: prod(step.local_shape(chains, device)) for device in devices}
        groups = [step.slice_of(device, step.dims) for device in devices]
        return sum((len(group) - 1) * max(held[peer] for peer in group) for group in groups)
    if isinstance(step, Reduction):
        shares = sum(prod(step.local_shape(step.target, device)) for device in devices)
        times = step.parts - 1
        return times * shares if step.scatters else -(-2 * times * shares // step.parts)
    found = devices_of(step.shape, step.source, step.target, step.mesh)
    # Devices that differ on mesh dims that cut nothing are looked at once.
    return sum(wanted - kept for wanted, kept in found) * len(devices) // len(found)

"""Redistribution on layouts alone: which placements to choose, the steps that lead there, and what
they cost. Imports no torch.

- :mod:`.meeting`, :mod:`.digits`: which rows two devices have in common; of two, and of all at
  once.
- :mod:`.exchange`, :mod:`.reduction`: the steps, and one device's part in them as strided copies
  (:mod:`.copies`).
- :mod:`.planner`, :mod:`.candidates`: the steps from one sharding to another, and the ways among
  which they are chosen.
- :mod:`.plan`, :mod:`.network`: the plan that they make, and its time.
- :mod:`.search`, :mod:`.cost`: the cheapest placements that make a view free.
"""

from cute_sharding.redistribution.cost import local_elements, received_elements
from cute_sharding.redistribution.exchange import Exchange
from cute_sharding.redistribution.network import Link, Network
from cute_sharding.redistribution.plan import RedistributionPlan
from cute_sharding.redistribution.reduction import Reduction
from cute_sharding.redistribution.search import Target, free_targets
from cute_sharding.redistribution.step import Step

__all__ = [
    "Exchange",
    "Link",
    "Network",
    "RedistributionPlan",
    "Reduction",
    "Step",
    "Target",
    "free_targets",
    "local_elements",
    "received_elements",
]

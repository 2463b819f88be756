"""Redistribution on layouts alone: which placements to choose, the steps that lead there, and what
they cost. Imports no torch.

What goes where is an exchange (:mod:`cute_sharding.exchange`); here it is planned.

Steps:

- :mod:`.step`: what a step is, from one sharding on a mesh to another.
- :mod:`.all_to_all`, :mod:`.reduction`: the two kinds; :mod:`.native`: those of them that are a
  collective of one whole tensor dim.

Choices:

- :mod:`.network`: what a collective takes, in seconds: latency, and time for each element.
- :mod:`.planner`, :mod:`.candidates`, :mod:`.routes`: the steps from one sharding to another; the
  ways among which they are chosen; ways that stay in the process groups there are.
- :mod:`.plan`: the plan that they make, and its time; :mod:`.meshes`: of a tensor that goes to
  another mesh.
"""

from cute_sharding.exchange.cost import local_elements, received_elements
from cute_sharding.redistribution.all_to_all import AllToAll
from cute_sharding.redistribution.meshes import ExchangePlan, plan_exchange
from cute_sharding.redistribution.network import Link, Network
from cute_sharding.redistribution.plan import RedistributionPlan
from cute_sharding.redistribution.reduction import Reduction
from cute_sharding.redistribution.step import Step

__all__ = [
    "AllToAll",
    "ExchangePlan",
    "Link",
    "Network",
    "RedistributionPlan",
    "Reduction",
    "Step",
    "local_elements",
    "plan_exchange",
    "received_elements",
]

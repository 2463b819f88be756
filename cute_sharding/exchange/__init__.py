"""What goes from rank to rank for a relation between shardings on any meshes, and the plan by which
it does. Imports no torch.

- :mod:`.placed`: a tensor on the ranks of a device mesh.
- :mod:`.cost`: the elements that ranks of one mesh hold and receive; :mod:`.collectives`: those of
  one collective.
- :mod:`.meetings`: on which devices of the one there is something of the other.
- :mod:`.flow`: which rank sends what to whom, each element once; :mod:`.by_links`: dim by dim, from
  one operand to one result; :mod:`.by_pieces`, :mod:`.wants`: through a relation by pieces.
- :mod:`.exchange`: of a relation, from all operands to all results.
- :mod:`.part`, :mod:`.copies`, :mod:`.all_peers`: one rank's part, as strided copies.
- :mod:`.slices`: a part that is a slice of what a rank has.
- :mod:`.bundle`, :mod:`.alone`: the exchanges of many tensors in one.

A redistribution is the exchange of the relation that changes nothing, and what is to be reduced:

- :mod:`.step`: what a plan is made of; :mod:`.all_to_all`, :mod:`.reduction`: the two kinds on one
  mesh; :mod:`.native`: those of them that are a collective of one whole tensor dim.
- :mod:`.network`: what a collective takes, in seconds: latency, and time for each element.
- :mod:`.foreign`: reductions that others run, and where they stand among the steps.
- :mod:`.planner`, :mod:`.candidates`, :mod:`.routes`: the steps from one sharding to another; the
  ways among which they are chosen; ways that stay in the process groups there are.
- :mod:`.plan`: the plan that they make, and its time; :mod:`.meshes`: of a tensor that goes to
  another mesh.
"""

from cute_sharding.exchange.all_to_all import AllToAll
from cute_sharding.exchange.bundle import Bundle, BundlePart, Item
from cute_sharding.exchange.cost import local_elements, received_elements
from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.meshes import ExchangePlan, plan_exchange
from cute_sharding.exchange.network import Link, Network
from cute_sharding.exchange.part import Part
from cute_sharding.exchange.placed import Mesh, Placed
from cute_sharding.exchange.plan import RedistributionPlan
from cute_sharding.exchange.reduction import Reduction
from cute_sharding.exchange.step import Step

__all__ = [
    "AllToAll",
    "Bundle",
    "BundlePart",
    "Exchange",
    "ExchangePlan",
    "Item",
    "Link",
    "Mesh",
    "Network",
    "Part",
    "Placed",
    "RedistributionPlan",
    "Reduction",
    "Step",
    "identity",
    "local_elements",
    "plan_exchange",
    "received_elements",
]

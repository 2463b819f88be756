"""Plans and computes the exchange of elements between ranks, through a relation, between shardings
on any meshes. Imports no torch.

- :mod:`.placed`: a tensor on the ranks of a device mesh.
- :mod:`.cost`: the elements that ranks of one mesh hold and receive; :mod:`.collectives`: those of
  one collective.
- :mod:`.meetings`: which devices of one side have rows that a device of the other side has.
- :mod:`.flow`: which rank sends what to whom, each element once; :mod:`.by_links`: dim by dim, from
  one operand to one result; :mod:`.by_pieces`, :mod:`.wants`: through a relation by pieces.
- :mod:`.exchange`: the exchange of a relation, from all operands to all results.
- :mod:`.part`, :mod:`.copies`, :mod:`.all_peers`: one rank's part, as strided copies.
- :mod:`.slices`: results that are slices of each rank's local tensor.
- :mod:`.bundle`, :mod:`.alone`: the exchanges of many tensors in one.

A redistribution is an exchange of the identity relation, and reductions of what is pending:

- :mod:`.step`: the parts of a plan; :mod:`.all_to_all`, :mod:`.reduction`: the two kinds on one
  mesh; :mod:`.native`: those that are one collective of a whole tensor dim.
- :mod:`.network`: the time of a collective, in seconds: latency, and time for each element.
- :mod:`.foreign`: reductions by placements' own methods, and their place among the steps.
- :mod:`.planner`, :mod:`.candidates`, :mod:`.routes`: the search for steps from one sharding to
  another; the ways that it compares; ways within the existing process groups.
- :mod:`.plan`: a plan of steps, and its time; :mod:`.meshes`: a plan for a tensor that goes to
  another mesh.
"""

from cute_sharding.exchange.bundle import Bundle, BundlePart, Item
from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.network import Link, Network
from cute_sharding.exchange.part import Part
from cute_sharding.exchange.placed import Mesh, Placed, local_elements, received_elements
from cute_sharding.exchange.plan import MemoryLimitError, RedistributionPlan
from cute_sharding.exchange.step import AllToAll, Reduction, Step

__all__ = [
    "AllToAll",
    "Bundle",
    "BundlePart",
    "Exchange",
    "Item",
    "Link",
    "MemoryLimitError",
    "Mesh",
    "Network",
    "Part",
    "Placed",
    "RedistributionPlan",
    "Reduction",
    "Step",
    "identity",
    "local_elements",
    "received_elements",
]

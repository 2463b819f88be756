"""Plans and computes the exchange of elements between ranks, through a relation, between shardings
on any meshes. Imports no torch.

- :mod:`.placed`: a tensor on the ranks of a device mesh, and what ranks miss of it.
- :mod:`.flow`: which rank sends what to whom, each element once: dim by dim, from one operand to
  one result; :mod:`.by_pieces`: through a relation by pieces.
- :mod:`.exchange`: the exchange of a relation, from all operands to all results.
- :mod:`.part`: one rank's part, as strided copies.
- :mod:`.bundle`: the exchanges of many tensors in one.

A redistribution is an exchange of the identity relation, and reductions of what is pending:

- :mod:`.step`: the parts of a plan on one mesh, all-to-alls and reductions, and which of them are
  one collective of a whole tensor dim; the elements that a rank receives in a collective.
- :mod:`.network`: the time of a collective, in seconds: latency, and time for each element.
- :mod:`.foreign`: reductions by placements' own methods, and their place among the steps.
- :mod:`.planner`: the search for steps from one sharding to another, within the existing process
  groups.
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

"""What goes from rank to rank for a relation between shardings on any meshes. Imports no torch.

- :mod:`.placed`: a tensor on the ranks of a device mesh.
- :mod:`.meetings`: on which devices of the one there is something of the other.
- :mod:`.exchange`: who sends what to whom, each element once; one rank's part, as strided copies.
- :mod:`.bundle`: the exchanges of many tensors in one.
- :mod:`.plan`: what is finished before, and what all of it takes.
"""

from cute_sharding.exchange.bundle import Bundle, BundlePart, Item
from cute_sharding.exchange.exchange import Exchange, Part, identity
from cute_sharding.exchange.placed import Mesh, Placed
from cute_sharding.exchange.plan import ExchangePlan, plan_exchange

__all__ = [
    "Bundle",
    "BundlePart",
    "Exchange",
    "ExchangePlan",
    "Item",
    "Mesh",
    "Part",
    "Placed",
    "identity",
    "plan_exchange",
]

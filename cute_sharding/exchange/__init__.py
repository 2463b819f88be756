"""What goes from rank to rank for a relation between shardings on any meshes. Imports no torch.

- :mod:`.placed`: a tensor on the ranks of a device mesh.
- :mod:`.cost`: the elements that ranks of one mesh hold and receive.
- :mod:`.meetings`, :mod:`.takers`: on which devices of the one there is something of the other.
- :mod:`.flow`: which rank sends what to whom, each element once, dim by dim, from one operand to
  one result.
- :mod:`.exchange`: of a relation, from all operands to all results.
- :mod:`.part`, :mod:`.copies`, :mod:`.all_peers`: one rank's part, as strided copies.
- :mod:`.holders`, :mod:`.wants`, :mod:`.by_pieces`: the flow of a relation by pieces, between all
  of them.
- :mod:`.bundle`: the exchanges of many tensors in one.
"""

from cute_sharding.exchange.bundle import Bundle, BundlePart, Item
from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.part import Part
from cute_sharding.exchange.placed import Mesh, Placed

__all__ = ["Bundle", "BundlePart", "Exchange", "Item", "Mesh", "Part", "Placed", "identity"]

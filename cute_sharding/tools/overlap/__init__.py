"""How communication and computation of a graph overlap: ``overlap``. No torch is imported until it
is called.

- :mod:`.overlaps`: ``overlap``; :mod:`.values`: the plain values that it gives
- :mod:`.device`: how fast a device computes

This imports torch:

- :mod:`.simulation`: a simulated run of a graph
"""

from cute_sharding.tools.overlap.overlaps import overlap
from cute_sharding.tools.overlap.values import Overlap

__all__ = ["Overlap", "overlap"]

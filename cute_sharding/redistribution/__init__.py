"""Choosing placements and what it costs to reach them. Imports no torch."""

from cute_sharding.redistribution.cost import local_elements, received_elements
from cute_sharding.redistribution.search import Target, free_targets

__all__ = ["Target", "free_targets", "local_elements", "received_elements"]

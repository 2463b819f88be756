"""A tensor's distribution as a layout: placements -> thread-value layout -> placements. Imports no
torch.
"""

from cute_sharding.sharding.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    format_placements,
    parse_placements,
)
from cute_sharding.sharding.sharding import Sharding

__all__ = [
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "format_placements",
    "parse_placements",
]

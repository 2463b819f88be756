"""A tensor's distribution as a layout: placements -> thread-value layout -> placements
(:mod:`.sharding`). The rows that a device holds, as strided runs (:mod:`.rows`) and boxes
(:mod:`.boxes`), and the digits of a row number that cuts fix (:mod:`.digits`). No torch.
"""

from cute_sharding.sharding.boxes import Box, intersection
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
    "Box",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Sharding",
    "format_placements",
    "intersection",
    "parse_placements",
]

"""A tensor's distribution as a layout: placements -> thread-value layout -> placements; and
the rows that a device holds, as strided runs (:mod:`.meeting`) and boxes of them (:mod:`.boxes`),
and the digits that mesh dims fix (:mod:`.digits`) of its cuts (:mod:`.chains`). Imports no torch.
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

"""Movement ops on DTensors: slices, splits, rolls, pads and windows of sharded dims.

Local tensors are read, and new ones made; nothing of torch is touched here, and nothing of a
DTensor is changed.
"""

from cute_sharding.dtensor.movement.propagate import movement_first
from cute_sharding.dtensor.movement.splits import SPLITS, slices_together

__all__ = ["SPLITS", "movement_first", "slices_together"]

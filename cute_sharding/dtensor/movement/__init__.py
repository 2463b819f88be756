"""Movement ops on DTensors: slices, splits, rolls, pads and windows of sharded dims.

Local tensors are read, and new ones made; nothing of torch is touched here, and nothing of a
DTensor is changed.
"""

from cute_sharding.dtensor.movement.propagate import movement_first

__all__ = ["movement_first"]

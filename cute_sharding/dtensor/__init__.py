"""The DTensor adapter: registers the rules, and says what they answered. The only folder that
imports torch.

Rooms, each of which says what may be touched there. Imports run downward, from the last to the
first:

- :mod:`.bookkeeping`: settings, counts, the log
- :mod:`.torch_private`: torch's private names, and what of torch is replaced
- :mod:`.compiled`: sizes that are symbols
- :mod:`.redistributing`: plans, run
- :mod:`.view_propagation`: what rules of views answer
- :mod:`.memory`: writes to copies; checkpoints
- :mod:`.movement`: slices, splits, rolls, pads and windows of sharded dims
- :mod:`.ops`: ops beside views
- :mod:`.switch`: on and off
- :mod:`.reports`: plans without data; whether it works
"""

# First: a torch that is too old is refused by name, and not by what it lacks.
from cute_sharding.dtensor.bookkeeping import versions  # noqa: F401
from cute_sharding.dtensor.redistributing.groups import prepare_groups
from cute_sharding.dtensor.reports.plan import plan_redistribution
from cute_sharding.dtensor.reports.stats import reset_stats, stats
from cute_sharding.dtensor.switch.adapter import disable, enable, enabled, is_enabled, settings
from cute_sharding.dtensor.view_propagation.propagate import propagate_shape_and_sharding

__all__ = [
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "plan_redistribution",
    "prepare_groups",
    "propagate_shape_and_sharding",
    "reset_stats",
    "settings",
    "stats",
]

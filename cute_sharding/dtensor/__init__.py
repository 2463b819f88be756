"""The DTensor adapter: registers the rules, and says what they answered. The only folder that
imports torch.
"""

# First: a torch that is too old is refused by name, and not by what it lacks.
from cute_sharding.dtensor import versions  # noqa: F401
from cute_sharding.dtensor.adapter import disable, enable, enabled, is_enabled, settings
from cute_sharding.dtensor.groups import prepare_groups
from cute_sharding.dtensor.plan import plan_redistribution
from cute_sharding.dtensor.propagate import propagate_shape_and_sharding
from cute_sharding.dtensor.stats import reset_stats, stats

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

"""The DTensor adapter: registers the rules, and says what they answered. The only folder that
imports torch.

Rooms, each of which says what may be touched there. A room imports only from those above it in this
list. The words are those of docs/glossary.md.

- :mod:`.bookkeeping`: settings, counts, the log
- :mod:`.replaced`: what of torch is replaced, and its private names; answers in its form
- :mod:`.compiled`: sizes that are symbols
- :mod:`.run`: redistributions: plans, run
- :mod:`.models`: many tensors at once
- :mod:`.door`: from specs to how tensors lie
- :mod:`.refit`: a model's weights as another program's, on any meshes
- :mod:`.fixes`: torch's bugs, one row each
- :mod:`.extras`: writes to copies; checkpoints, state dicts, pictures
- :mod:`.movement`: slices, splits, rolls, pads and windows of sharded dims
- :mod:`.decide`: who answers for an op, and with what
- :mod:`.switch`: on and off
- :mod:`.reports`: plans without data; whether it works
- :mod:`.profile`: what a program sends, line by line
- :mod:`.estimate`: a dry run, in a process of its own
"""

# First: a torch that is too old is refused by name, and not by what it lacks.
from cute_sharding.dtensor.bookkeeping import versions  # noqa: F401
from cute_sharding.dtensor.decide.view_placements import propagate_shape_and_sharding
from cute_sharding.dtensor.door.held import local_boxes
from cute_sharding.dtensor.models.plan import plan_reshard
from cute_sharding.dtensor.models.reshard import reshard
from cute_sharding.dtensor.profile import no_communication
from cute_sharding.dtensor.refit.plan import RefitPlan, plan_refit
from cute_sharding.dtensor.reports.plan import plan_redistribution
from cute_sharding.dtensor.reports.stats import reset_stats, stats
from cute_sharding.dtensor.run.any_mesh import redistribute
from cute_sharding.dtensor.run.groups import prepare_groups
from cute_sharding.dtensor.run.specs import Spec
from cute_sharding.dtensor.switch.adapter import disable, enable, enabled, is_enabled, settings

__all__ = [
    "RefitPlan",
    "Spec",
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "local_boxes",
    "no_communication",
    "plan_redistribution",
    "plan_refit",
    "plan_reshard",
    "prepare_groups",
    "propagate_shape_and_sharding",
    "redistribute",
    "reset_stats",
    "reshard",
    "settings",
    "stats",
]

"""The DTensor adapter: registers the rules, and runs what they answer.

Each room says what may be touched in it. A room imports only from those above it in this list.
docs/how-it-works.md ("Words") explains the words.

- :mod:`.bookkeeping`: settings, counts, the log
- :mod:`.replaced`: what of torch is replaced, and its private names
- :mod:`.compiled`: symbolic sizes
- :mod:`.run`: runs redistributions and movements
- :mod:`.models`: redistributes many tensors at once
- :mod:`.door`: converts specs to the terms of the layout algebra
- :mod:`.refit`: a model's weights as another program needs them, on any meshes
- :mod:`.checkpoints`: loads checkpoints into tensors on any meshes
- :mod:`.fixes`: torch's bugs, one row each
- :mod:`.extras`: checkpoints and state dicts; copies of a DTensor; functions with fixed placements
- :mod:`.decide`: how each op is answered
- :mod:`.programs`: whole steps, planned
- :mod:`.switch`: on and off
"""

import importlib
import typing

# First, so that a torch that is too old is refused by version, not by a missing name.
from cute_sharding.dtensor.bookkeeping import versions  # noqa: F401
from cute_sharding.dtensor.switch.adapter import disable, enable, enabled, is_enabled, settings

if typing.TYPE_CHECKING:
    from cute_sharding.dtensor.checkpoints.load import Loaded, load_checkpoint
    from cute_sharding.dtensor.decide.views import propagate_shape_and_sharding
    from cute_sharding.dtensor.door.held import local_boxes
    from cute_sharding.dtensor.models.reshard import plan_reshard, reshard
    from cute_sharding.dtensor.programs.planned import planned
    from cute_sharding.dtensor.refit.plan import RefitPlan, plan_refit
    from cute_sharding.dtensor.refit.transfer import TransferPlan, plan_load
    from cute_sharding.dtensor.run.any_mesh import redistribute
    from cute_sharding.dtensor.run.groups import prepare_groups
    from cute_sharding.dtensor.run.plan import plan_redistribution
    from cute_sharding.dtensor.run.specs import Spec

__all__ = [
    "Loaded",
    "RefitPlan",
    "Spec",
    "TransferPlan",
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "load_checkpoint",
    "local_boxes",
    "plan_load",
    "plan_redistribution",
    "plan_refit",
    "plan_reshard",
    "planned",
    "prepare_groups",
    "propagate_shape_and_sharding",
    "redistribute",
    "reshard",
    "settings",
]

# Names that a program may never use: imported on first use.
_WHERE = {
    "Loaded": "checkpoints.load",
    "load_checkpoint": "checkpoints.load",
    "propagate_shape_and_sharding": "decide.views",
    "local_boxes": "door.held",
    "plan_reshard": "models.reshard",
    "reshard": "models.reshard",
    "planned": "programs.planned",
    "RefitPlan": "refit.plan",
    "plan_refit": "refit.plan",
    "TransferPlan": "refit.transfer",
    "plan_load": "refit.transfer",
    "redistribute": "run.any_mesh",
    "plan_redistribution": "run.plan",
    "prepare_groups": "run.groups",
    "Spec": "run.specs",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'cute_sharding.dtensor' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

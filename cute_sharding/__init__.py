"""Exact sharding propagation and redistribution for PyTorch DTensor, by CuTe layout algebra.

- :mod:`cute_sharding.layout`: the algebra.
- :mod:`cute_sharding.sharding`: a tensor's distribution as a layout, and back.
- :mod:`cute_sharding.relations`: what ops say of their operands and results, in one table: views
  as layouts, slices and windows as maps of rows, others by the names of dims.
- :mod:`cute_sharding.propagation`: placements carried through them.
- :mod:`cute_sharding.exchange`: from a sharding on one mesh to one on any other.
- :mod:`cute_sharding.models`: many tensors at once.
- :mod:`cute_sharding.programs`: whole programs, and the plan that no op could choose alone.
- :mod:`cute_sharding.dtensor`: the adapter of torch's DTensor.
- :mod:`cute_sharding.tools`: what people look at: pictures of all that, what a program sends line
  by line, what a step would receive and hold, and the command line.

Promised are the names in the ``__all__`` of this package and of :mod:`cute_sharding.layout`, the
values that their functions take and return, the flags, and the command line. All other packages are
internal: their names are documented, with examples, and may change with any release. Versions are
semantic from 0.2.0 on (https://semver.org): promised names change their meaning, or go, with a new
major version, or before 1.0 a new minor one.

In a program: ``enable()``, ``disable()``, ``with enabled(): ...``, ``stats()``,
``with profile() as p: ...``, ``with no_communication(): ...``,
``plan_redistribution(...)``, ``redistribute(tensor, mesh, placements)``,
``reshard(state, placements, mesh)``, ``load_checkpoint(state, path)``,
``plan_refit(generator, source, target)``, ``plan_load(load, into, source)``,
``local_boxes(tensor)``, ``prepare_groups(mesh)``,
``draw(...)``, ``explain(...)``, ``estimate(step, mesh)``, ``overlap(compiled, ...)``,
``plan_step(step, mesh)``, ``with planned(plan): ...``. Or no code at all:
``USE_CUTE_VIEW_PROPAGATION=1``, ``USE_CUTE_REDISTRIBUTION=1`` and ``USE_CUTE_MOVEMENT=1``.
"""

import typing
import warnings

if typing.TYPE_CHECKING:
    from cute_sharding.dtensor import (
        Loaded,
        RefitPlan,
        Spec,
        TransferPlan,
        disable,
        enable,
        enabled,
        is_enabled,
        load_checkpoint,
        local_boxes,
        plan_load,
        plan_redistribution,
        plan_refit,
        plan_reshard,
        planned,
        prepare_groups,
        redistribute,
        reshard,
        settings,
    )
    from cute_sharding.programs.plan import StepPlan
    from cute_sharding.sharding import Box, intersection
    from cute_sharding.tools.drawing import draw
    from cute_sharding.tools.estimate import estimate
    from cute_sharding.tools.explain import explain
    from cute_sharding.tools.overlap import Overlap, overlap
    from cute_sharding.tools.profile import Profile, profile
    from cute_sharding.tools.profile.refusing import no_communication
    from cute_sharding.tools.stats import stats
    from cute_sharding.tools.steps.plan_step import plan_step

__version__ = "0.2.0"
__all__ = [
    "Box",
    "Loaded",
    "Overlap",
    "Profile",
    "RefitPlan",
    "Spec",
    "StepPlan",
    "TransferPlan",
    "disable",
    "draw",
    "enable",
    "enabled",
    "estimate",
    "explain",
    "intersection",
    "is_enabled",
    "load_checkpoint",
    "local_boxes",
    "no_communication",
    "overlap",
    "plan_load",
    "plan_redistribution",
    "plan_refit",
    "plan_reshard",
    "plan_step",
    "planned",
    "prepare_groups",
    "profile",
    "redistribute",
    "reshard",
    "settings",
    "stats",
]


def __getattr__(name: str) -> typing.Any:
    # The adapter imports torch; the algebra must not. So names are looked up when they are first
    # used. Pictures and boxes need no torch.
    if name == "draw":
        from cute_sharding.tools.drawing import draw

        return draw
    if name == "estimate":
        from cute_sharding.tools.estimate import estimate

        return estimate
    if name == "explain":
        from cute_sharding.tools.explain import explain

        return explain
    if name in ("Overlap", "overlap"):
        from cute_sharding.tools import overlap as overlap_room

        return getattr(overlap_room, name)
    if name in ("Profile", "profile"):
        from cute_sharding.tools import profile as room

        return getattr(room, name)
    if name == "no_communication":
        from cute_sharding.tools.profile.refusing import no_communication

        return no_communication
    if name == "plan_step":
        from cute_sharding.tools.steps.plan_step import plan_step

        return plan_step
    if name == "StepPlan":
        from cute_sharding.programs.plan import StepPlan

        return StepPlan
    if name == "stats":
        from cute_sharding.tools.stats import stats

        return stats
    if name in ("Box", "intersection"):
        from cute_sharding import sharding

        return getattr(sharding, name)
    if name in __all__:
        from cute_sharding import dtensor

        return getattr(dtensor, name)
    if name == "reset_stats":
        warnings.warn(
            "cute_sharding.reset_stats() will be removed in version 0.3: call "
            "cute_sharding.stats(reset=True)",
            DeprecationWarning,
            stacklevel=2,
        )
        return lambda: __getattr__("stats")(reset=True)
    raise AttributeError(f"module 'cute_sharding' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

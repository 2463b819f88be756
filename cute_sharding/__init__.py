"""Exact sharding propagation and redistribution for PyTorch DTensor, by CuTe layout algebra.

- :mod:`cute_sharding.layout`: the algebra.
- :mod:`cute_sharding.sharding`: a tensor's distribution as a layout, and back.
- :mod:`cute_sharding.relations`: what ops say of their operands and results, in one table: views
  as layouts, slices and windows as maps of rows, others by the names of dims.
- :mod:`cute_sharding.propagation`: placements carried through them.
- :mod:`cute_sharding.exchange`: from a sharding on one mesh to one on any other.
- :mod:`cute_sharding.models`: many tensors at once.
- :mod:`cute_sharding.estimates`: what a step would receive and hold.
- :mod:`cute_sharding.dtensor`: the adapter, the only part that imports torch.
- :mod:`cute_sharding.drawing`: pictures of all that.
- :mod:`cute_sharding.profiling`: what a program sends, line by line.

Promised are the names in the ``__all__`` of this package and of :mod:`cute_sharding.layout`, the
values that their functions take and return, the flags, and the command line. All other packages are
internal: their names are documented, with examples, and may change with any release. Versions are
semantic from 0.2.0 on (https://semver.org): promised names change their meaning, or go, with a new
major version, or before 1.0 a new minor one.

In a program: ``enable()``, ``disable()``, ``with enabled(): ...``, ``stats()``,
``with profile() as p: ...``, ``with no_communication(): ...``,
``plan_redistribution(...)``, ``redistribute(tensor, mesh, placements)``,
``reshard(state, placements, mesh)``, ``load_checkpoint(state, path)``,
``plan_refit(generator, source, target)``, ``local_boxes(tensor)``, ``prepare_groups(mesh)``,
``draw(...)``, ``explain(...)``, ``estimate(step, mesh)``. Or no code at all:
``USE_CUTE_VIEW_PROPAGATION=1``, ``USE_CUTE_REDISTRIBUTION=1`` and ``USE_CUTE_MOVEMENT=1``.
"""

import typing
import warnings

if typing.TYPE_CHECKING:
    from cute_sharding.cli.explained import explain
    from cute_sharding.drawing import draw
    from cute_sharding.dtensor import (
        Loaded,
        RefitPlan,
        Spec,
        disable,
        enable,
        enabled,
        is_enabled,
        load_checkpoint,
        local_boxes,
        no_communication,
        plan_redistribution,
        plan_refit,
        plan_reshard,
        prepare_groups,
        redistribute,
        reshard,
        settings,
        stats,
    )
    from cute_sharding.estimates import estimate
    from cute_sharding.sharding import Box, intersection
    from cute_sharding.showing import Profile, profile

__version__ = "0.2.0"
__all__ = [
    "Box",
    "Loaded",
    "Profile",
    "RefitPlan",
    "Spec",
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
    "plan_redistribution",
    "plan_refit",
    "plan_reshard",
    "prepare_groups",
    "profile",
    "redistribute",
    "reshard",
    "settings",
    "stats",
]


def __getattr__(name: str) -> typing.Any:
    # The adapter imports torch; the algebra must not. So the names of the adapter are looked up
    # when they are first used. Pictures and boxes need no torch.
    if name == "draw":
        from cute_sharding.drawing import draw

        return draw
    if name == "estimate":
        from cute_sharding.estimates import estimate

        return estimate
    if name == "explain":
        from cute_sharding.cli.explained import explain

        return explain
    if name in ("Profile", "profile"):
        from cute_sharding import showing

        return getattr(showing, name)
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

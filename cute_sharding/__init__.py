"""Exact sharding propagation and redistribution for PyTorch DTensor, by CuTe layout algebra.

- :mod:`cute_sharding.layout`: the algebra.
- :mod:`cute_sharding.sharding`: a tensor's distribution as a layout, and back.
- :mod:`cute_sharding.views`: view ops as layouts, and placements carried through them.
- :mod:`cute_sharding.redistribution`: plans from one sharding to another.
- :mod:`cute_sharding.dtensor`: the adapter, the only part that imports torch.

In a program: ``enable()``, ``disable()``, ``with enabled(): ...``, ``stats()``,
``plan_redistribution(...)``, ``prepare_groups(mesh)``. Or no code at all:
``USE_CUTE_VIEW_PROPAGATION=1`` and ``USE_CUTE_REDISTRIBUTION=1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_sharding.dtensor import (
        disable,
        enable,
        enabled,
        is_enabled,
        plan_redistribution,
        prepare_groups,
        reset_stats,
        settings,
        stats,
    )

__version__ = "0.2.0"
__all__ = [
    "disable",
    "enable",
    "enabled",
    "is_enabled",
    "plan_redistribution",
    "prepare_groups",
    "reset_stats",
    "settings",
    "stats",
]


def __getattr__(name: str) -> Any:
    # The adapter imports torch; the algebra must not. So the names of the adapter are looked up
    # when they are first used.
    if name in __all__:
        from cute_sharding import dtensor

        return getattr(dtensor, name)
    raise AttributeError(f"module 'cute_sharding' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Log lines about redistributions: how each runs, and which process group is missing.

They are the same on all ranks, so the first rank of the mesh writes them for all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from cute_sharding._words import counted
from cute_sharding.dtensor.bookkeeping.stats import logger
from cute_sharding.dtensor.bookkeeping.telling import is_new
from cute_sharding.dtensor.replaced import process_groups
from cute_sharding.dtensor.replaced.tensor_specs import Placement
from cute_sharding.dtensor.run.placements import text
from cute_sharding.exchange.plan import RedistributionPlan, collectives, received_by
from cute_sharding.exchange.step import Step

Placements = Sequence[Placement]


def say_redistributed(
    mesh: Any,
    shape: tuple[int, ...],
    before: Placements,
    after: Placements,
    plan: RedistributionPlan | None,
    *,
    among: int = 1,
) -> None:
    """Log once, at level INFO, for a mesh, a shape and placements. ``plan``: None for torch's own
    steps. ``among``: the number of tensors that share the collectives.
    """
    if not logger.isEnabledFor(logging.INFO) or not process_groups.is_first_rank(mesh):
        return
    sizes = tuple(mesh.shape)
    what = f"redistribute: {shape} {text(before)} -> {text(after)} on mesh {sizes}"
    if plan is None:
        how = "left to torch's own steps"
    elif not plan.collectives:
        how = "nothing is sent"
    else:
        n = plan.collectives
        shared = f", shared by {among} tensors" if among > 1 else ""
        how = (
            f"{n} collective{'s' * (n != 1)}{shared}, each device receives up to "
            f"{plan.received_elements} elements"
        )
    if is_new((mesh, what, how)):
        logger.info("%s: %s", what, how)


def say_what_is_missing(
    mesh: Any,
    missing: tuple[tuple[int, ...], ...],
    before: Placements,
    after: Placements,
    plan: RedistributionPlan,
    best: Sequence[Step],
) -> None:
    """Warn once for each set of mesh dims."""
    if not process_groups.is_first_rank(mesh) or not is_new((mesh, missing)):
        return
    names, dims = mesh.mesh_dim_names, missing[0]
    flatten = f" or mesh[{', '.join(repr(names[m]) for m in dims)}]._flatten()" if names else ""
    logger.warning(
        "redistribution of a tensor of shape %s on mesh %s from %s to %s takes %s, "
        "and each device receives %d elements. With one process group for the mesh dims %s, the "
        "redistribution would take %s, and each device would receive %d elements. "
        "First call cute_sharding.prepare_groups(mesh)%s on all ranks. (The first rank of the "
        "mesh logs this message once for these mesh dims.)",
        *(plan.shape, plan.mesh, text(before), text(after)),
        *(counted(plan.collectives, "collective"), plan.received_elements),
        " and ".join(map(str, missing)),
        *(counted(collectives(best), "collective"), received_by(best), flatten),
    )

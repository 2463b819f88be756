"""The patches there are, in their order."""

from __future__ import annotations

from upstream.bugs.convolutions import PATCH as CONVOLUTIONS
from upstream.bugs.global_sizes import PATCH as GLOBAL_SIZES
from upstream.bugs.group_names import PATCH as GROUP_NAMES
from upstream.bugs.logsumexp import PATCH as LOGSUMEXP
from upstream.bugs.mean_losses import PATCH as MEAN_LOSSES
from upstream.bugs.strided_checkpoints import PATCH as STRIDED_CHECKPOINTS
from upstream.exchange_redistribution.patch import PATCH as EXCHANGE_REDISTRIBUTION
from upstream.stack import Patch
from upstream.symbolic_sizes.patch import PATCH as SYMBOLIC_SIZES
from upstream.view_propagation.patch import PATCH as VIEW_PROPAGATION

STACK: tuple[Patch, ...] = (VIEW_PROPAGATION, SYMBOLIC_SIZES, EXCHANGE_REDISTRIBUTION)

# Each by itself, on torch as it is.
BUGS: tuple[Patch, ...] = (
    MEAN_LOSSES,
    CONVOLUTIONS,
    STRIDED_CHECKPOINTS,
    GROUP_NAMES,
    GLOBAL_SIZES,
    LOGSUMEXP,
)

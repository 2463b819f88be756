"""The patches there are, in their order."""

from __future__ import annotations

from upstream.stack import Patch
from upstream.view_propagation.patch import PATCH as VIEW_PROPAGATION

STACK: tuple[Patch, ...] = (VIEW_PROPAGATION,)

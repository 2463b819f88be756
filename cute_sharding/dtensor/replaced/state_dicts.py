"""Checkpoints and state dicts (torch/distributed/checkpoint,
torch/distributed/_state_dict_utils.py).

DTensor methods that describe what a rank holds may be replaced, and functions of modules once the
program imports them; all are put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed, Patch

__all__ = ["install_state"]


def install_state(
    installed: Installed,
    methods: dict[Patch, Callable[[Any], Any]],
    distribute: Callable[[Any], Any],
) -> None:
    """Replace each method by ``methods[row](torch's)``, and likewise the function that distributes
    state dicts, once a program imports it.
    """
    for row, wrap in methods.items():
        installed.replace(row, wrap)
    installed.once_imported(
        patches.STATE_DICTS, lambda: installed.replace(patches.STATE_DICTS, distribute)
    )

"""Checkpoints, state dicts and pictures (torch/distributed/checkpoint,
torch/distributed/_state_dict_utils.py, torch/distributed/tensor/debug).

DTensor methods that describe what a rank holds may be replaced, and functions of modules once the
program imports them; all are put back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed, Patch, calling

__all__ = ["install_state"]


def install_state(
    installed: Installed,
    methods: dict[Patch, Callable[[Any], Any]],
    distribute: Callable[[Any], Any],
    visualization: Callable[..., Any],
) -> None:
    """Replace each method by ``methods[row](torch's)``, and likewise the functions that distribute
    state dicts and draw pictures, once a program imports these.
    """

    def pictures() -> None:
        module: Any = sys.modules[patches.PICTURES.module]

        def ours(stock: Callable[..., Any]) -> Callable[..., Any]:
            return visualization(stock, module._create_table, module._create_rich_table)

        installed.replace(patches.PICTURES, calling(ours, patches.PICTURES))

    for row, wrap in methods.items():
        installed.replace(row, wrap)
    installed.once_imported(
        patches.STATE_DICTS, lambda: installed.replace(patches.STATE_DICTS, distribute)
    )
    installed.once_imported(patches.PICTURES, pictures)

"""Modules under fully_shard, which manage their parameters themselves
(torch/distributed/fsdp/_fully_shard): a parameter's memory is part of a buffer that collectives
read, and the parameter is not read again. It may be written to, but not replaced.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed._composable_state import _module_state_mapping

__all__ = ["kept_parameters", "put_back"]


def put_back(module: torch.nn.Module) -> None:
    """Have a module that is under fully_shard, or part of such a module, hold its sharded
    parameters, and not the ones that were gathered for a forward.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    parts = {*module.modules()}
    for each in list(_module_state_mapping):
        if isinstance(each, fsdp.FSDPModule) and not parts.isdisjoint(each.modules()):
            each.reshard()


def kept_parameters() -> frozenset[int]:
    """The ids of the parameters of all modules under fully_shard, sharded or gathered."""
    return frozenset(
        id(parameter)
        for state in list(_module_state_mapping.values())
        for group in getattr(state(), "_fsdp_param_groups", ())
        for each in group.fsdp_params
        for parameter in (each.sharded_param, getattr(each, "_unsharded_param", None))
    )

"""Modes (torch/utils/_python_dispatch.py, _debug_mode; torch/distributed/_local_tensor): whether
what runs is traced, or runs as all ranks in this process.

Asked and entered here; no mode that the program is in is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey, _TorchDispatchModeKey
from torch.compiler import is_dynamo_compiling
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed._local_tensor import (
    LocalTensorMode,
    enabled_local_tensor_mode,
    get_local_tensor_mode_list,
)
from torch.fx.traceback import annotate
from torch.utils._debug_mode import get_active_debug_mode as active_debug_mode
from torch.utils._python_dispatch import _detect_infra_mode, _disable_current_modes

__all__ = [
    "OF_THIS_RANK",
    "active_debug_mode",
    "all_ranks",
    "fake_mode",
    "is_tracing",
    "keep_while_traced",
    "local_tensor_mode",
    "no_modes",
    "of_this_rank",
    "start_group",
]

_mode, _is_on = torch._C._get_dispatch_mode, torch._C._dispatch_tls_is_dispatch_key_included
_FAKE, _PROXY = _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY
_PYTHON_DISPATCHER, _PRE_DISPATCH = DispatchKey.PythonDispatcher, DispatchKey.PreDispatch

_NOTHING = nullcontext()

# What marks nodes of a graph that another rank's graph has not, or with other numbers.
OF_THIS_RANK = "cute_sharding: of this rank"


def is_tracing() -> bool:
    """Whether what runs now becomes part of a graph: what torch's ``_are_we_tracing`` says, for a
    third of its time. An op asks about ten times, and torch looks up each key by name, and asks
    for modes before dispatch one by one: where there is one, the key PreDispatch is on.
    """
    return (
        is_dynamo_compiling()
        or _mode(_FAKE) is not None
        or _mode(_PROXY) is not None
        or _is_on(_PYTHON_DISPATCHER)
        or (_is_on(_PRE_DISPATCH) and bool(_are_we_tracing()))
    )


def fake_mode() -> Any | None:
    """The mode by which what runs now runs on tensors without elements, as where torch asks itself
    for the shape of a result; None where there is none.
    """
    return _mode(_FAKE)


def keep_while_traced(value: Any) -> None:
    """Keep a value for as long as the graph is traced that AOTAutograd traces now."""
    mode = _detect_infra_mode(_TorchDispatchModeKey.FUNCTIONAL)
    if mode is not None:
        mode.__dict__.setdefault("_cute_sharding_kept", []).append(value)


def of_this_rank() -> Any:
    """A context in which the nodes of a graph that is traced are marked as this rank's own: its
    rows, its sizes, its peers.
    """
    return annotate({OF_THIS_RANK: True}) if is_tracing() else _NOTHING


def no_modes() -> Any:
    """Outside of tracing, for what is not to become part of the graph."""
    return _disable_current_modes()


def local_tensor_mode() -> Any | None:
    """The mode that runs every rank in this process, if it is on."""
    return enabled_local_tensor_mode() if get_local_tensor_mode_list() else None


def start_group(rank: int, world: int) -> None:
    """Start a process group in which this process is that rank, and the others are made up."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


@contextmanager
def all_ranks(world: int) -> Iterator[None]:
    """Every rank of a world runs in this process inside the ``with`` block, each op on the tensors
    of all. Makes a process group that communicates with nobody, where there is none.
    """
    made = not dist.is_initialized()
    if made:
        start_group(0, world)
    try:
        with LocalTensorMode(world):
            yield
    finally:
        if made:
            dist.destroy_process_group()

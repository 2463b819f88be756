"""Modes (torch/utils/_python_dispatch.py, _debug_mode; torch/distributed/_local_tensor): whether
the program is traced, or all ranks run in this process.

Modes are read and entered here; the program's own modes are not changed.
"""

from __future__ import annotations

import sys
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
    "OF_EACH_RANK",
    "OF_THIS_RANK",
    "active_debug_mode",
    "all_ranks",
    "below_autograd",
    "eagerly",
    "fake_mode",
    "is_tracing",
    "keep_while_traced",
    "local_tensor_mode",
    "no_modes",
    "of_each_rank",
    "of_this_rank",
    "start_group",
]

_mode, _is_on = torch._C._get_dispatch_mode, torch._C._dispatch_tls_is_dispatch_key_included
_FAKE, _PROXY = _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY
_PYTHON_DISPATCHER, _PRE_DISPATCH = DispatchKey.PythonDispatcher, DispatchKey.PreDispatch

_NOTHING = nullcontext()

# Marks nodes of a graph that other ranks' graphs lack, or have with other numbers; and those of
# them that other ranks have too, with the same shapes.
OF_THIS_RANK = "cute_sharding: of this rank"
OF_EACH_RANK = "cute_sharding: of each rank"


def is_tracing() -> bool:
    """Whether what runs now becomes part of a graph: the result of torch's ``_are_we_tracing`` in a
    third of its time. An op calls this about ten times, and torch looks up each key by name, and
    modes before dispatch one by one: if there is one, the key PreDispatch is on.
    """
    return (
        is_dynamo_compiling()
        or _mode(_FAKE) is not None
        or _mode(_PROXY) is not None
        or _is_on(_PYTHON_DISPATCHER)
        or (_is_on(_PRE_DISPATCH) and bool(_are_we_tracing()))
    )


def fake_mode() -> Any | None:
    """The current mode for tensors without elements, as when torch computes the shape of a result;
    None without one.
    """
    return _mode(_FAKE)


def keep_while_traced(value: Any) -> None:
    """Keep a value alive while AOTAutograd traces the current graph."""
    mode = _detect_infra_mode(_TorchDispatchModeKey.FUNCTIONAL)
    if mode is not None:
        mode.__dict__.setdefault("_cute_sharding_kept", []).append(value)


def of_this_rank() -> Any:
    """A context that marks the nodes of a traced graph as this rank's own: they depend on its rows,
    its sizes or its peers.
    """
    return annotate({OF_THIS_RANK: True}) if is_tracing() else _NOTHING


def of_each_rank() -> Any:
    """A context that marks the nodes of a traced graph as those of all ranks: they may have other
    numbers, such as where a slice begins, but each rank has the same nodes in the same shapes.
    """
    return annotate({OF_EACH_RANK: True}) if is_tracing() else _NOTHING


def below_autograd() -> Any:
    """A context in which ops run as a mode or a tensor class calls them: autograd does not record
    them, and composite ones arrive whole.
    """
    return torch._C._AutoDispatchBelowAutograd()


def no_modes() -> Any:
    """A context outside of tracing, for what must not become part of the graph."""
    return _disable_current_modes()


def local_tensor_mode() -> Any | None:
    """The mode that runs every rank in this process, if it is on."""
    return enabled_local_tensor_mode() if get_local_tensor_mode_list() else None


def start_group(rank: int, world: int) -> None:
    """Start a process group in which this process is ``rank``, and other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


@contextmanager
def all_ranks(world: int) -> Iterator[None]:
    """Run every rank of a world in this process inside the ``with`` block, each op on all ranks'
    tensors. Without a process group, makes one that communicates with nobody.
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


def eagerly() -> Any:
    """A context in which compiled functions run op by op."""
    has_compiled = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()

"""Functional collectives (torch/distributed/_functional_collectives.py): those that a
redistribution uses, and waiting for their results.

They are called here, and none is replaced.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol

from cute_sharding.dtensor.replaced.dispatch_modes import (
    is_tracing,
    local_tensor_mode,
    of_this_rank,
)

__all__ = [
    "OURS",
    "WAIT",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "communicates",
    "in_flight",
    "reduce_scatter",
    "wait_for",
    "waited_in_graph",
]

# torch's functional collectives, waited for; with ``async_op`` the result may not have arrived, and
# has to be :func:`wait_for` for. Eagerly they are called below autograd: redistribution is an
# autograd function of its own, and torch's autograd kernels for them, which are Python, take the
# host twice as long as the collective itself.

_c10d: Any = torch.ops._c10d_functional
WAIT = _c10d.wait_tensor.default
_below_autograd = torch._C._AutoDispatchBelowAutograd


def all_to_all(
    buffer: torch.Tensor,
    receives: list[Any],
    sends: list[Any],
    group: Any,
    *,
    async_op: bool = False,
) -> torch.Tensor:
    if not _is_plain(buffer):
        with of_this_rank():
            result = funcol.all_to_all_single(buffer, receives, sends, group)
        return result if async_op else wait_for(result)
    with _below_autograd():
        return _result_of(
            _c10d.all_to_all_single.default(buffer, receives, sends, group.group_name), async_op
        )


def all_gather(
    tensor: torch.Tensor, group: Any, dim: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    if not _is_plain(tensor):
        result = funcol.all_gather_single(tensor, dim, group)
        return result if async_op else wait_for(result)
    parts, outer = group.size(), tensor.shape[:dim]
    with _below_autograd():
        blocks: torch.Tensor = _c10d.all_gather_into_tensor.default(tensor, parts, group.group_name)
        if prod(outer) == 1:
            whole = (*outer, parts * tensor.shape[dim], *tensor.shape[dim + 1 :])
            return _result_of(blocks.view(whole) if dim else blocks, async_op)
        return torch.cat(waited_in_graph(blocks).chunk(parts), dim)


def reduce_scatter(
    tensor: torch.Tensor, op: str, group: Any, dim: int = 0, *, async_op: bool = False
) -> torch.Tensor:
    if dim or not _is_plain(tensor):
        result = funcol.reduce_scatter_single(tensor, op, dim, group)
        return result if async_op else wait_for(result)
    with _below_autograd():
        return _result_of(
            _c10d.reduce_scatter_tensor.default(tensor, op.lower(), group.size(), group.group_name),
            async_op,
        )


def all_reduce(
    tensor: torch.Tensor, op: str, group: Any, *, async_op: bool = False
) -> torch.Tensor:
    if not _is_plain(tensor):
        result = funcol.all_reduce(tensor, op, group)
        return result if async_op else wait_for(result)
    with _below_autograd():
        return _result_of(_c10d.all_reduce.default(tensor, op.lower(), group.group_name), async_op)


def _result_of(result: torch.Tensor, async_op: bool) -> torch.Tensor:
    """The result of a plain collective that has started."""
    return funcol.AsyncCollectiveTensor(result) if async_op else waited_in_graph(result)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the program is neither traced nor run as all ranks in one process, and autograd does
    not record the tensor.
    """
    return not (
        is_tracing()
        or local_tensor_mode() is not None
        or (tensor.requires_grad and torch.is_grad_enabled())
    )


# Our ops that communicate (run/in_graphs.py); and the ops in torch's libraries of collectives that
# do not.
OURS = ("exchange",)
_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


def communicates(op: Any) -> bool:
    """Whether an op starts a collective: one of torch's, or one of ours."""
    if op.namespace == "cute_sharding":
        return op._opname in OURS
    return op.namespace in ("_c10d_functional", "_dtensor") and op._opname not in _NO_COLLECTIVES


def waited_in_graph(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind torch's op that waits, as in a graph after a collective: no compiler
    removes that op. Eagerly it waits for a plain tensor, but not for one that is :func:`in_flight`.
    """
    result: torch.Tensor = WAIT(tensor)
    return result


def in_flight(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a collective writes to, which may not have ended."""
    return tensor.elem if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor after the collective that writes to it has ended; any other tensor at once. While
    a graph is traced, torch's collectives have added the op that waits themselves.
    """
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor

"""What loss_parallel is given: torch's losses over a cut vocabulary take logits whose other cuts
are plain shards, and targets that are cut as these are; and no smoothing of labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.stats import count
from cute_sharding.dtensor.replaced import dispatch, registry
from cute_sharding.dtensor.replaced.tensor_specs import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
    is_dtensor,
)
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor

# Where the logits stand among the arguments of a loss, and after them its targets.
_LOGITS = {
    "_log_softmax.default": 0,
    "nll_loss_forward.default": 0,
    "nll_loss2d_forward.default": 0,
    "nll_loss_backward.default": 1,
    "nll_loss2d_backward.default": 1,
}


def loss_handler(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for torch's function: logits and targets that it would refuse are brought to
    where it can go on.
    """

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = registry.name_of(op)
        at = _LOGITS.get(name)
        if at is None or not is_dtensor(args[at]):
            return stock(op, args, kwargs)
        before, logits = args, _brought(args[at], _plain(args[at].placements))
        args = (*args[:at], logits, *args[at + 1 :])
        if not name.startswith("_log") and is_dtensor(args[at + 1]):
            wanted = _of_targets(args[at])
            args = (*args[: at + 1], _brought(args[at + 1], wanted), *args[at + 2 :])
        if any(a is not b for a, b in zip(before, args)):
            count(name, "gate")
        return stock(op, args, kwargs)

    return handler


def without_smoothing(run: Callable[..., Any]) -> Callable[..., Any]:
    """``masked_fill_`` of something pending, which smoothing of labels has between log_softmax and
    the loss: loss_parallel has the gradient of the one in that of the other, and gives no other
    right.
    """

    def refusing(*args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            RuntimeError: loss_parallel is in force.
        """
        if torch.ops.aten.nll_loss_forward.default not in registry.op_handlers():
            return run(*args, **kwargs)
        raise RuntimeError(
            "masked_fill_ of a Partial within loss_parallel: F.cross_entropy with "
            "label_smoothing would have a wrong gradient there. Take it outside of loss_parallel, "
            "or without label_smoothing."
        )

    return refusing


def _plain(placements: tuple[Placement, ...]) -> list[Placement]:
    return [Replicate() if isinstance(p, StridedShard) else p for p in placements]


def _of_targets(logits: Any) -> list[Placement]:
    """The logits' cuts, without the dim of classes."""
    classes = 1 if logits.ndim > 1 else 0
    return [
        Shard(p.dim - (p.dim > classes))
        if isinstance(p, Shard) and p.dim != classes
        else Replicate()
        for p in logits.placements
    ]


def _brought(tensor: Any, placements: list[Placement]) -> Any:
    if tuple(placements) == tuple(tensor.placements):
        return tensor
    return dispatch.with_placements(tensor, placements, redistribute_local_tensor)

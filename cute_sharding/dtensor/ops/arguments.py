"""What ops are given of tensors that only rules of ours have cut: gathered once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_sharding.dtensor.memory.gathered import once
from cute_sharding.dtensor.torch_private import answers, dispatch_modes, op_schemas, symints
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec


def may_be_kept(op: Any, copied: bool) -> bool:
    """Whether what the op is given may be given to another op later: it does not write to it, and
    gives a view of it only where note is taken of the copy. Then what is written to the view is
    taken back to what it was gathered of (memory/copies.py), and that is no longer given.
    """
    return not any(
        op_schemas.is_written(op, argument) or (argument.alias_info is not None and not copied)
        for argument in op._schema.arguments
    )


def given(
    local: torch.Tensor,
    spec: DTensorSpec,
    target: DTensorSpec,
    move: Callable[[torch.Tensor, DTensorSpec, DTensorSpec], torch.Tensor],
) -> torch.Tensor:
    """What ``move`` makes of the local tensor that an op is to be given, or has made of it for an
    op before.
    """
    if (
        not answers.is_marked(spec)
        or dispatch_modes.is_tracing()
        or symints.is_symbolic(tuple(spec.shape))
    ):
        return move(local, spec, target)
    return once(local, target, lambda: move(local, spec, target))

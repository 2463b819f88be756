"""What ops are given of tensors that only rules of ours have cut: gathered once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_sharding.dtensor.memory.gathered import once
from cute_sharding.dtensor.torch_private import answers, dispatch_modes, symints
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec


def may_be_kept(op: Any) -> bool:
    """Whether what the op is given may be given to another op later: it neither writes to it nor
    gives a view of it.
    """
    return all(argument.alias_info is None for argument in op._schema.arguments)


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

"""What some kernels want of local tensors beside their values, where these come of a redistribution
and not of torch's own preparations for one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from cute_sharding.dtensor.torch_private import answers
from cute_sharding.dtensor.torch_private.op_schemas import OpSchema
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec

# The kernel loads so many bytes at a time, and torch looks at every stride but the last
# (aten/src/ATen/native/transformers/cuda/attention.cu).
_BYTES = 16


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask where its rows begin at addresses that the memory-efficient kernel can load from:
    longer in memory than it is, as ``F.scaled_dot_product_attention`` has it on one device.
    """
    step = max(_BYTES // mask.element_size(), 1)
    if mask.stride(-1) == 1 and all(stride % step == 0 for stride in mask.stride()[:-1]):
        return mask
    n = mask.shape[-1]
    return F.pad(mask, (0, -n % step))[..., :n]


def _with_mask_at(place: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    return lambda args: [*args[:place], _aligned(args[place]), *args[place + 1 :]]


# By op: the argument that is a mask.
_MASKS = {
    "_scaled_dot_product_efficient_attention.default": 3,
    "_scaled_dot_product_efficient_attention_backward.default": 4,
}
_PREPARED = {name: _with_mask_at(place) for name, place in _MASKS.items()}


def prepared(name: str, schema: OpSchema, found: Any) -> Any:
    """The answer for the op, with its local arguments as its kernel wants them."""
    if name not in _MASKS or not isinstance(schema.args_schema[_MASKS[name]], DTensorSpec):
        return found
    return answers.prepared(found, schema, _PREPARED[name])

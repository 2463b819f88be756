"""What some kernels want of local arguments beside the values of tensors: that a mask lies as they
load it, where it comes of a redistribution and not of torch's own preparations for one device; that
sizes they are told are those of the local tensors; and a tensor of which they read the sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from cute_sharding.dtensor.torch_private import answers
from cute_sharding.dtensor.torch_private.answers import Prepare
from cute_sharding.dtensor.torch_private.op_schemas import OpSchema
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec
from cute_sharding.ops.signature import Signature
from cute_sharding.ops.table import BY_OVERLOAD

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


def _with_mask_at(place: int) -> Prepare:
    return lambda args: [*args[:place], _aligned(args[place]), *args[place + 1 :]]


_FORMATS = (torch.channels_last, torch.channels_last_3d)


def _format(x: torch.Tensor) -> torch.memory_format:
    """The memory format in which a kernel takes the tensor and others beside it."""
    if x.ndim in (4, 5) and not x.is_contiguous():
        found = _FORMATS[x.ndim - 4]
        if x.is_contiguous(memory_format=found):
            return found
    return torch.contiguous_format


def _of_images(tensors: int, number: int) -> Prepare:
    """The number of images that is told is that of the first tensors, not of what all devices have.

    And these lie in one memory format: kernels trust that autograd has seen to it, which asks the
    strides of the whole, and after a redistribution these are not those of the local tensor.
    """

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        x = args[tensors - 1]
        lie = _format(x) if x.device.type in ("cpu", "xpu") else torch.contiguous_format
        first = [y.contiguous(memory_format=lie) for y in args[:tensors]]
        return [*first, *args[tensors:number], x.shape[0], *args[number + 1 :]]

    return prepare


def _with_leading_of(tensor: int, sizes: int) -> Prepare:
    """The sizes of images and channels that are told are those of the tensor."""
    return lambda args: [
        *args[:sizes],
        [*args[tensor].shape[:2], *args[sizes][2:]],
        *args[sizes + 1 :],
    ]


# By op: the argument that is a mask.
_MASKS = {
    "_scaled_dot_product_efficient_attention.default": 3,
    "_scaled_dot_product_efficient_attention_backward.default": 4,
}
# Ops that are told sizes, which are global, beside tensors, which are local.
_TOLD = {
    "native_group_norm.default": _of_images(1, 3),
    "native_group_norm_backward.default": _of_images(2, 5),
    **dict.fromkeys(
        [name for name in BY_OVERLOAD if "upsample" in name and "_backward" in name],
        _with_leading_of(0, 2),
    ),
}
_PREPARED = {**{name: _with_mask_at(place) for name, place in _MASKS.items()}, **_TOLD}


def prepared(name: str, schema: OpSchema, found: Any) -> Any:
    """The answer for the op, with its local arguments as its kernel wants them."""
    if name not in _PREPARED or (
        name in _MASKS and not isinstance(schema.args_schema[_MASKS[name]], DTensorSpec)
    ):
        return found
    return answers.prepared(found, schema, _PREPARED[name])


def in_their_place(
    found: Any, schema: OpSchema, signature: Signature, operands: Sequence[int]
) -> Any:
    """The answer, where those ``operands`` are not moved, as the op reads their sizes alone: it is
    given others of the sizes that it needs, with nothing in them.
    """
    if not operands:
        return found
    specs = [(at, arg) for at, arg in enumerate(schema.args_schema) if isinstance(arg, DTensorSpec)]
    places = [at for at, _ in specs]
    read = [i for i in range(len(specs)) if i not in signature.sized | signature.unread]

    def size(args: Sequence[Any], i: int, d: int) -> Any:
        name = signature.operands[i][d]
        local = [
            args[places[k]].shape[signature.operands[k].index(name)]
            for k in read
            if name in signature.operands[k]
        ]
        return local[0] if local else specs[i][1].shape[d]

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        given = list(args)
        for i in operands:
            sizes = [size(args, i, d) for d in range(len(signature.operands[i]))]
            old = args[places[i]]
            given[places[i]] = old.new_empty(sizes).contiguous(memory_format=_format(old))
        return given

    return answers.prepared(found, schema, prepare)

"""What some kernels want of local arguments beside the values of tensors.

A mask that lies as they load it, where it comes of a redistribution and not of torch's own
preparations for one device; images and matrices that lie as autograd has found of the whole; sizes
that are those of the local tensors; a tensor of which they read the sizes alone; of the gradient of
a mean what their own elements have of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.answer.answers import Prepare
from cute_sharding.dtensor.decide.shares import share
from cute_sharding.dtensor.door.cuts import is_sharded
from cute_sharding.dtensor.replaced import op_schemas, symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.relations.signature import Signature
from cute_sharding.relations.table import ROWS
from cute_sharding.relations.table.kernels import (
    AlignedMask,
    Channels,
    Images,
    Kernel,
    LeadingSizes,
    Matrices,
    MeanGradient,
)

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


def _with_channels_of(tensor: int, sizes: int) -> Prepare:
    """The sizes of a bias that are told, if there is one, are those of the tensor's channels. A
    kernel does not read them, and what stands for it where nothing is computed does.
    """

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        told = args[sizes] and [args[tensor].shape[1]]
        return [*args[:sizes], told, *args[sizes + 1 :]]

    return prepare


def _as_said(schema: OpSchema) -> Prepare | None:
    """Matrices that lie row by row if torch says so of the whole, and else do not: the kernel
    factorizes what lies in memory, the matrix or its transpose, and the gradient asks the strides
    of the whole which of them it was.
    """
    spec: Any = schema.args_schema[0]
    if not isinstance(spec, DTensorSpec) or spec.tensor_meta is None:
        return None
    rows = _is_contiguous(spec.shape, spec.tensor_meta.stride)

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        matrices, *others = args
        if rows:
            return [matrices.contiguous(), *others]
        if matrices.is_contiguous():
            return [matrices.mT.contiguous().mT, *others]
        return args

    return prepare


def _is_contiguous(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    expected: Any = 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        if not symints.is_truly(n == 1):
            if symints.is_truly(stride != expected):
                return False
            expected = expected * n
    return True


_SUM = 2  # torch's number of this reduction, of losses


def _of_mean(schema: OpSchema, at: int) -> Prepare | None:
    """Of the gradient of a mean loss, whose reduction is argument ``at``: of a share of the
    gradient. The kernel divides by the number of elements of its second argument, also where that
    is broadcast: by that of a device's own, and not of all.
    """
    given, specs = schema.args_schema, op_schemas.specs_of(schema)
    if (given[at] if len(given) > at else 1) != 1 or not any(map(is_sharded, specs)):
        return None
    x: Any = given[1]
    n = prod(x.shape)

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        gradient, own, *others = args
        counted = (gradient * share(own.numel(), n, own)).to(gradient.dtype)
        prepared = [counted, own, *others]
        if any(type(size) is int and size == 0 for size in own.shape):
            prepared[at] = _SUM  # of no elements as well, and traced without a division by 0
        return prepared

    return prepare


def _prepare(kernel: Kernel, schema: OpSchema) -> Prepare | None:
    match kernel:
        case AlignedMask(at):
            is_given = isinstance(schema.args_schema[at], DTensorSpec)
            return _with_mask_at(at) if is_given else None
        case Images(tensors, number):
            return _of_images(tensors, number)
        case LeadingSizes(of, sizes):
            return _with_leading_of(of, sizes)
        case Channels(of, sizes):
            return _with_channels_of(of, sizes)
        case Matrices():
            return _as_said(schema)
        case MeanGradient(reduction):
            return _of_mean(schema, reduction)


def with_kernel_arguments(name: str, schema: OpSchema, found: Any) -> Any:
    """The answer for the op, with its local arguments as its kernel wants them."""
    row = ROWS.get(name)
    if row is None or row.kernel is None:
        return found
    prepare = _prepare(row.kernel, found.redistribute_schema or schema)
    return found if prepare is None else answers.saying(found, schema, prepare=prepare)


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

    return answers.saying(found, schema, prepare=prepare)

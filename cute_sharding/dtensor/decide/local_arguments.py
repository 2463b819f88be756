"""Local arguments in the form that kernels expect.

After a redistribution, masks need aligned rows (torch's own preparation is for one device), and
images and matrices need the memory format that autograd has found for the whole tensor. A tensor
that is read as another dtype needs rows of whole elements. Sizes are those of the local tensors. An
operand of which only the sizes are read is an empty tensor. In the gradient of a mean, each device
counts by its share of the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from cute_sharding.dtensor.decide.shares import share
from cute_sharding.dtensor.door.cuts import is_sharded
from cute_sharding.dtensor.replaced import op_schemas, symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.op_plan import Prepare
from cute_sharding.layout.layout import row_major
from cute_sharding.relations.signature import Signature
from cute_sharding.relations.table import ROWS
from cute_sharding.relations.table.kernels import (
    AlignedMask,
    Bits,
    Images,
    Kernel,
    Matrices,
    MeanGradient,
    Sizes,
    SizesBeside,
)

# The kernel loads this many bytes at a time, and torch checks every stride but the last
# (aten/src/ATen/native/transformers/cuda/attention.cu).
_BYTES = 16


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask, with rows at addresses from which the memory-efficient kernel can load: rows are
    padded in memory, as ``F.scaled_dot_product_attention`` does on one device.
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
    """The memory format that a kernel uses for the tensor and for those beside it."""
    if x.ndim in (4, 5) and not x.is_contiguous():
        found = _FORMATS[x.ndim - 4]
        if x.is_contiguous(memory_format=found):
            return found
    return torch.contiguous_format


def _of_images(tensors: int, number: int) -> Prepare:
    """Set the number of images to that of the local tensors, not of all devices together.

    And give the first ``tensors`` one memory format. Kernels rely on autograd for this; it looks at
    the strides of the whole, and after a redistribution the local tensor may have others.
    """

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        x = args[tensors - 1]
        lie = _format(x) if x.device.type in ("cpu", "xpu") else torch.contiguous_format
        first = [y.contiguous(memory_format=lie) for y in args[:tensors]]
        return [*first, *args[tensors:number], x.shape[0], *args[number + 1 :]]

    return prepare


def _with_sizes_of(tensor: int, sizes: int, dims: Sequence[int]) -> Prepare:
    """Set the first of the sizes, if there are any, to those of the local tensor in these dims. (A
    kernel may not read them, but the function that replaces it for empty tensors does.)
    """

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        own = [args[tensor].shape[d] for d in dims]
        told = args[sizes] and [*own, *args[sizes][len(dims) :]]
        return [*args[:sizes], told, *args[sizes + 1 :]]

    return prepare


def _with_sizes_beside(tensor: int, sizes: int, dim: int) -> Prepare:
    """Set the sizes to those of the local tensor, but for the dim that argument ``dim`` names."""

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        whole = args[sizes]
        own = list(args[tensor].shape[: len(whole)])
        own[args[dim]] = whole[args[dim]]
        return [*args[:sizes], own, *args[sizes + 1 :]]

    return prepare


def _as_said(schema: OpSchema) -> Prepare | None:
    """Lay out local matrices by rows if and only if the whole is contiguous. The kernel factorizes
    the matrix or its transpose, whichever is row-major in memory, and the gradient finds out from
    the strides of the whole which of the two it was.
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


def _in_whole_elements(args: Sequence[Any]) -> Sequence[Any]:
    """Lay out the local tensor so that it can be read as a dtype of another size, as the whole can.
    torch checks every stride, also of dims of one row, which an exchange leaves as its buffer has
    them, and of empty tensors; the memory then stays the same.
    """
    x, dtype = args
    k = max(dtype.itemsize // x.dtype.itemsize, 1)
    *others, last = x.stride() or (1,)
    if last == 1 and all(step % k == 0 for step in (*others, x.storage_offset())):
        return args
    x = x.contiguous()
    x = x.clone() if x.storage_offset() % k else x
    *rows, n = x.shape
    return x.as_strided(x.shape, row_major((*rows, n or k))), dtype


def _of_mean(schema: OpSchema, at: int) -> Prepare | None:
    """For the gradient of a mean loss (argument ``at`` is its reduction): scale the gradient by the
    device's share. The kernel divides by the number of elements of its second argument, even if the
    first is broadcast; locally these are the device's elements, not all.
    """
    given, specs = schema.args_schema, op_schemas.specs_of(schema)
    if not op_schemas.is_mean(schema, at) or not any(map(is_sharded, specs)):
        return None
    x: Any = given[1]
    n = prod(x.shape)

    def prepare(args: Sequence[Any]) -> Sequence[Any]:
        gradient, own, *others = args
        counted = (gradient * share(own.numel(), n, own)).to(gradient.dtype)
        prepared = [counted, own, *others]
        if any(type(size) is int and size == 0 for size in own.shape):
            # A sum gives the same, and neither op nor trace divides by 0.
            return op_schemas.args_of_sum(schema.op, prepared, at)
        return prepared

    return prepare


def _prepare(kernel: Kernel, schema: OpSchema) -> Prepare | None:
    match kernel:
        case AlignedMask(at):
            is_given = isinstance(schema.args_schema[at], DTensorSpec)
            return _with_mask_at(at) if is_given else None
        case Images(tensors, number):
            return _of_images(tensors, number)
        case Sizes(of, sizes, dims):
            return _with_sizes_of(of, sizes, dims)
        case SizesBeside(of, sizes, dim):
            return _with_sizes_beside(of, sizes, dim)
        case Matrices():
            return _as_said(schema)
        case Bits():
            given: Any = schema.args_schema
            before, after = given[0].tensor_meta.dtype, given[1]
            return None if before.itemsize == after.itemsize else _in_whole_elements
        case MeanGradient(reduction):
            return _of_mean(schema, reduction)


def for_kernel(name: str, wanted: OpSchema) -> Prepare | None:
    """Brings the local arguments of the op, on the specs that it runs on, to the form that its
    kernel expects; None if they have it.
    """
    row = ROWS.get(name)
    return None if row is None or row.kernel is None else _prepare(row.kernel, wanted)


def in_their_place(
    schema: OpSchema, signature: Signature, operands: Sequence[int]
) -> Prepare | None:
    """If these ``operands`` are not moved because the op reads only their sizes: puts empty tensors
    of the local sizes that it needs in their place.
    """
    if not operands:
        return None
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

    return prepare

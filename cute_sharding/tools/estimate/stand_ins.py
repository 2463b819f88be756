"""Stand-ins for devices that do not exist: tensors without memory, and the kernels and collectives
of GPUs. They are used only in the process of a dry run, which ends with the run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cute_sharding.dtensor.replaced.communication import WAIT
from cute_sharding.dtensor.replaced.dispatch_modes import below_autograd, fake_mode
from cute_sharding.dtensor.replaced.local_tensors import FakeTensor, FakeTensorMode, leaves
from cute_sharding.dtensor.replaced.observing import TAKING_APART, Observer, kind_of
from cute_sharding.dtensor.replaced.op_schemas import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

_DEVICE = torch.ops.prim.device.default
_RANGE = torch.ops.aten.arange

# The errors of torch if an op reads elements of a tensor without elements.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


class Fakes(Observer):
    """Tensors that are made inside the ``with`` block have shapes but no memory and no elements.
    Existing tensors do not change.

    A program that runs under torch's own mode for such tensors looks as if a compiler traced it. So
    the mode is on only while a tensor is made. Ops on such tensors find the mode without help.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._named = self.mode.fake_tensor_converter.meta_converter.tensor_memo

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is WAIT:  # which returns its argument, and would make another tensor here
            return args[0]
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # others have an attribute
            return args[0].fake_device
        is_made = not (fake_mode() or tensors_in((args, kwargs)))
        if not is_made or _is_of_torch(func, kwargs, sys._getframe(1)):
            result = func(*args, **kwargs)
        else:
            with self.mode:
                result = func(*args, **kwargs)
        # torch keeps a weak reference to each tensor that it has made, and does not convert a
        # module whose parameters have one.
        self._named.clear()
        return result


def _is_of_torch(func: Any, kwargs: Any, frame: Any) -> bool:
    """Whether DTensor makes a tensor for itself, and not for the program: ranks of a mesh and
    offsets of shards, whose numbers DTensor reads, and operands without memory, on which DTensor
    decomposes an op to find a rule.
    """
    if func.overloadpacket is _RANGE:
        return _is_made_by("torch.distributed.", frame)
    is_on_meta = str(kwargs.get("device")) == "meta"
    return is_on_meta and _is_made_by(TAKING_APART, frame)


def _is_made_by(modules: str, frame: Any) -> bool:
    """Whether the innermost function of the program or of the given functions is one of the given
    functions.
    """
    while frame is not None:
        kind = kind_of(frame)
        if kind.is_own or kind.called[0].startswith(modules):
            return not kind.is_own
        frame = frame.f_back
    return False


class GpuKernels(TorchFunctionMode):
    """The kernels that torch runs on a GPU if it chooses by the kind of device: one kernel each for
    attention and for RMS norms. (On a CPU, torch decomposes both, or runs kernels for which
    DTensor has no rule.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in (torch.rms_norm, torch.nn.functional.rms_norm):
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    return _RmsNorm.apply(input, normalized_shape, weight, eps)


class _RmsNorm(torch.autograd.Function):
    """The kernel of a GPU, and its gradient. On other devices autograd takes the op apart before a
    DTensor sees it.
    """

    @staticmethod
    def forward(ctx: Any, input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
        aten = torch.ops.aten
        with below_autograd():
            result, scales = aten._fused_rms_norm(input, normalized_shape, weight, eps)
        ctx.normalized_shape = normalized_shape
        ctx.save_for_backward(input, scales, weight)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, scales, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        aten = torch.ops.aten
        with below_autograd():
            of_input, of_weight = aten._fused_rms_norm_backward(
                gradients[0], input, ctx.normalized_shape, scales, weight, wanted
            )
        return of_input, None, of_weight, None


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """FlashAttention for half precision without a mask, as torch chooses it; otherwise the
    memory-efficient kernel, which repeats the heads of keys.
    """
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa:
        heads = query.size(-3)
        key, value = (x.repeat_interleave(heads // x.size(-3), -3) for x in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            attn_mask.logical_not(), float("-inf")
        )
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


@contextmanager
def on_gpus() -> Iterator[None]:
    """What torch does on GPUs alone. It has kernels of their own. It redistributes shards of one
    dim to shards of another dim by an all-to-all; on a mesh of CPUs, it would gather the tensor,
    because old releases of gloo had no all-to-all. And optimizers update all weights in one op,
    unless the program chooses otherwise.
    """
    with (
        GpuKernels(),
        _replaced("torch.distributed.tensor.placement_types", "shard_dim_alltoall", _exchange),
        _replaced("torch.optim.optimizer", "_get_foreach_kernels_supported_devices", _devices),
    ):
        yield


def _exchange(x: Any, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
    name = mesh.get_group(mesh_dim).group_name
    ops: Any = torch.ops
    return ops._dtensor.shard_dim_alltoall(x, gather_dim, shard_dim, name)


def _devices() -> list[str]:
    """Those whose tensors stand for tensors on GPUs."""
    return ["cpu"]


@contextmanager
def _replaced(module: str, name: str, function: Any) -> Iterator[None]:
    found: Any = importlib.import_module(module)
    stock = getattr(found, name)
    setattr(found, name, function)
    try:
        yield
    finally:
        setattr(found, name, stock)

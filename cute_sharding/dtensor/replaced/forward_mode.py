"""Forward mode (``torch.func.jvp``, ``jacfwd``, ``hessian``, ``make_dual``), in which autograd
computes with each tensor its tangent (torch/csrc/autograd/autograd_meta.cpp).

Two things keep DTensors out of it. An operand without a tangent gets one of zeros, made of sizes
alone (``_efficientzerotensor``): a plain tensor, which DTensor refuses. Zeros are the same on all
ranks, so beside DTensors they become replicas here, by kernels at the dispatch key ZeroTensor,
which only such zeros have. And autograd asks whether a tangent lies in memory as its tensor does:
for DTensors that is a question of placements. Where they differ, autograd copies the tangent, and
so redistributes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _functorch as functorch
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed
from cute_sharding.dtensor.replaced.registry import overload
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Shard,
    StridedShard,
    TensorMeta,
    as_replica,
)

__all__ = ["install_forward_mode"]

_KEY = "ZeroTensor"


def install_forward_mode(installed: Installed) -> None:
    """Have DTensors take part in forward mode. The kernels are made when a program first enters it:
    they are several hundred.
    """
    aten = torch.ops.aten
    zeros_like = aten._new_zeros_with_same_feature_meta.default
    handlers = {aten._has_same_storage_numel.default: _lies_alike, zeros_like: _zeros_like}
    installed.put(patches.HANDLERS, handlers)
    to_make = [True]

    def entering(stock: Callable[..., Any]) -> Callable[..., Any]:
        def enter_dual_level() -> Any:
            if to_make and not torch.compiler.is_compiling():
                to_make.clear()
                with warnings.catch_warnings():  # torch says that a kernel is replaced
                    warnings.simplefilter("ignore")
                    library = _kernels()
                installed.note(patches.ZERO_TENSORS, _KEY, library._destroy)
            return stock()

        return enter_dual_level

    installed.replace(patches.DUAL_LEVELS, entering)


def _kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    batched = torch.ops.aten._has_same_storage_numel.default
    library.impl(batched, _batches_lie_alike, "FuncTorchBatched", allow_override=True)
    for op in _ops_on_several_tensors():
        has_own = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _KEY)
        passes = has_own and torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(
            op.name(), _KEY
        )
        stock = torch.library.get_kernel(op, _KEY) if has_own and not passes else None
        kernel = partial(_with_zeros, op, stock, passes)
        library.impl(op, kernel, _KEY, with_keyset=True, allow_override=True)
    return library


@cache
def _ops_on_several_tensors() -> tuple[Any, ...]:
    """The ops of aten that have their own formula of autograd, of two tensors or more."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not has_kernel(name, "Autograd"):
            continue
        if has_kernel(name, "CompositeImplicitAutograd"):
            continue
        base, _, kind = name.removeprefix("aten::").partition(".")
        op: Any = overload(f"{base}.{kind or 'default'}")
        if op is None or any(argument.is_out for argument in op._schema.arguments):
            continue
        types = [str(argument.type) for argument in op._schema.arguments]
        if sum("Tensor" in each for each in types) > 1 or "List[Tensor]" in types:
            found.append(op)
    return tuple(found)


def _with_zeros(
    op: Any, stock: Any, passes: bool, keys: DispatchKeySet, *args: Any, **kwargs: Any
) -> Any:
    """``stock`` is torch's kernel of the op for zeros; without one, torch fills memory with them,
    or ``passes`` them on as they are.
    """
    # torch gives a number in the place of a tensor as a Python number.
    of_tensors = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    args = tuple(
        [
            torch.tensor(x) if is_tensor and isinstance(x, int | float) else x
            for x, is_tensor in zip(args, of_tensors)
        ]
    )
    leaves = tree_leaves((args, kwargs))
    mesh = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
    if mesh is None and stock is not None:
        return stock.call_boxed(keys, *args, **kwargs)

    def filled(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x._is_zerotensor():
            return x
        zeros = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
        return zeros if mesh is None else as_replica(zeros, mesh)

    if mesh is not None or not passes:
        args, kwargs = tree_map(filled, (args, kwargs))
    return op.redispatch(keys.remove(DispatchKey.ZeroTensor), *args, **kwargs)


def _lies_alike(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tangent has the placements of its tensor: the answer is the same on all ranks. Then
    the rules of views treat both alike, as autograd requires of them.
    """
    tangent, primal = args
    if not (isinstance(tangent, DTensor) and isinstance(primal, DTensor)):
        return False
    one, other = tangent._spec, primal._spec
    return bool(one.mesh == other.mesh and one.placements == other.placements)


def _batches_lie_alike(tangent: torch.Tensor, primal: torch.Tensor) -> bool:
    """The same under vmap, where torch always says yes: here of one batch of tangents."""
    at = functorch.maybe_get_bdim(tangent)
    one, other = _inner(tangent), _inner(primal)
    if not (isinstance(one, DTensor) and isinstance(other, DTensor)):
        return True
    if at < 0 or one.ndim != other.ndim + 1:
        return True
    return bool(one._spec.placements == _beside(other._spec, 1, at))


def _inner(x: torch.Tensor) -> torch.Tensor:
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def _zeros_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros that lie as a tensor, with the first dims of a tangent before its own under vmap."""
    tangent, primal = args
    count = kwargs.get("self_num_batch_dims", 0)
    spec, local = primal._spec, primal._local_tensor
    batch = tuple(tangent.shape[:count])
    like = local.expand(*batch, *local.shape) if count else local
    shape = torch.Size((*batch, *primal.shape))
    stride = make_contiguous_strides_for(shape) if count else primal.stride()
    placements = _beside(spec, count)
    zeros = torch.zeros_like(like, dtype=tangent.dtype)
    meta = TensorMeta(shape, stride, tangent.dtype)
    return DTensor(zeros, DTensorSpec(spec.mesh, placements, meta), requires_grad=False)


def _beside(spec: DTensorSpec, count: int, at: int = 0) -> tuple[Any, ...]:
    """The placements of a tensor's dims, with ``count`` others before dim ``at``."""
    placements = []
    for p in spec.placements:
        if isinstance(p, StridedShard):
            p = StridedShard(p.dim + count * (p.dim >= at), split_factor=p.split_factor)
        elif isinstance(p, Shard):
            p = Shard(p.dim + count * (p.dim >= at))
        placements.append(p)
    return tuple(placements)

"""Forward mode (``torch.func.jvp``, ``jacfwd``, ``hessian``, ``make_dual``), in which autograd
computes the tangent of each result together with the result
(torch/csrc/autograd/autograd_meta.cpp).

Three things keep DTensors out of it:

- For an operand without a tangent, autograd makes one of zeros, of sizes alone
  (``_efficientzerotensor``): a plain tensor, which DTensor refuses. Such zeros are the same on each
  rank. Here they are :class:`_Zeros`, which become replicas where they meet a DTensor. The kernel
  that makes them has a dispatch key that Python's ``torch.zeros`` and the like never have, so they
  are never tensors of a program.
- Autograd asks whether a tangent lies in memory as its tensor does, so that a view of the one is
  also a view of the other. DTensors of one mesh, shape and strides do, whatever their placements: a
  view is a view of the global tensor.
- A view of a tensor under ``torch.func`` is repeated on the tangent by its offset in memory, and a
  DTensor has none. So views are repeated as the ops that they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.dispatch_modes import no_modes
from cute_sharding.dtensor.replaced.op_schemas import name_of
from cute_sharding.dtensor.replaced.patch import Installed
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Shard,
    StridedShard,
    TensorMeta,
    as_replica,
)

__all__ = ["install_forward_mode"]

_ZEROS: Any = torch.ops.aten._efficientzerotensor.default
_KEY = "ADInplaceOrView"
_LIES_ALIKE: Any = torch.ops.aten._has_same_storage_numel.default
_ZEROS_LIKE: Any = torch.ops.aten._new_zeros_with_same_feature_meta.default


def install_forward_mode(installed: Installed) -> None:
    """Have DTensors take part in forward mode."""
    installed.put(patches.HANDLERS, {_LIES_ALIKE: _lies_alike, _ZEROS_LIKE: _zeros_like})
    installed.replace(patches.LEVEL_ENTERED, _entering)
    installed.replace(patches.LEVEL_LEFT, _leaving)

    def kernel(
        keys: DispatchKeySet,
        size: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Any:
        if forward_ad._current_level >= 0 and dist.is_available() and dist.is_initialized():
            return _Zeros(_of_torch(size, dtype, device))
        options = {"dtype": dtype, "layout": layout, "device": device, "pin_memory": pin_memory}
        return _ZEROS.redispatch(keys.remove(DispatchKey.ADInplaceOrView), size, **options)

    library = torch.library.Library("aten", "IMPL")
    library.impl(_ZEROS, kernel, _KEY, with_keyset=True)
    installed.note(patches.COMPOSITES, f"aten/{name_of(_ZEROS)}/{_KEY}", library._destroy)


# -- zeros -----------------------------------------------------------------------------------------


class _Zeros(DTensor):
    """A tensor that autograd made of sizes alone, or of other such tensors: a replica on whatever
    mesh the DTensors have that it meets. (torch asks a subclass of DTensor first.)

    Attributes:
        _local_tensor: it, as torch makes it: a zero without memory, or a plain tensor.
    """

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Any:
        if local.ndim:
            made = torch.Tensor._make_wrapper_subclass(
                cls, local.shape, strides=local.stride(), dtype=local.dtype, device=local.device
            )
        else:  # torch reads it if it stands for a Python number
            with torch._C._DisableFuncTorch(), no_modes():
                number = torch.zeros((), dtype=local.dtype, device=local.device)
                made = torch.Tensor._make_subclass(cls, number)
        made._local_tensor = local
        return made

    def __init__(self, local: torch.Tensor) -> None:
        """Do nothing: all is done where it is made."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"zeros of shape {tuple(self.shape)} that autograd made"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _LIES_ALIKE:
            return False  # autograd then copies the zeros
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        beside = next((x for x in given if type(x) is DTensor), None)
        if beside is None:
            args, kwargs = tree_map(
                lambda x: x._local_tensor if type(x) is cls else x, (args, kwargs)
            )
            with torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ZeroTensor, False):
                found = func(*args, **kwargs)
            is_ours = all(type(x) is cls for x in given)
            return tree_map(lambda x: cls(x) if _is_tensor(x) and is_ours else x, found)
        zeros = _product(func, args, kwargs, given, beside)
        if zeros is not None:
            return cls(zeros)

        def as_operand(x: Any) -> Any:
            if type(x) is not cls:
                return x
            local = x._local_tensor
            if local._is_zerotensor():
                local = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
            return as_replica(local, beside.device_mesh)

        args, kwargs = tree_map(as_operand, (args, kwargs))
        return func(*args, **kwargs)


def _product(func: Any, args: Any, kwargs: Any, given: list[Any], beside: DTensor) -> Any:
    """The result if torch says that it is zero whatever the DTensors hold, as a product is (also
    one with an infinity); else None. torch says so by what it makes of tensors without memory.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ZeroTensor"):
        return None

    def stand_in(x: Any) -> Any:
        if type(x) is _Zeros and x._local_tensor._is_zerotensor():
            return _of_torch(x.shape, x.dtype, "meta")
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if _is_tensor(x) else x

    made, keywords = tree_map(stand_in, (args, kwargs))
    if not any(type(x) is _Zeros for x in given):  # torch passes it as a Python number
        declared = zip(made, func._schema.arguments)
        made = [
            _of_torch((), torch.result_type(beside._local_tensor, x), "meta")
            if str(argument.type) == "Tensor" and not _is_tensor(x)
            else x
            for x, argument in declared
        ]
    with torch._C._SetExcludeDispatchKeyGuard(DispatchKey.ZeroTensor, False):
        found = func(*made, **keywords)
    if not _is_tensor(found) or not (type(found) is _Zeros or found._is_zerotensor()):
        return None
    return _of_torch(found.shape, found.dtype, beside.device)


def _of_torch(size: Any, dtype: Any, device: Any) -> torch.Tensor:
    """torch's own zeros without memory."""
    above = torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.ADInplaceOrView))
    with torch._C._DisableFuncTorch(), above:
        return torch._efficientzerotensor(size, dtype=dtype, device=device)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


# -- tangents and their tensors --------------------------------------------------------------------


def _lies_alike(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tangent and its tensor are DTensors of one mesh: the answer of each rank. (torch
    compares shapes and strides itself.) Otherwise torch copies the tangent, which raises for a
    plain tangent of a DTensor.
    """
    tangent, primal = args
    both = isinstance(tangent, DTensor) and isinstance(primal, DTensor)
    return bool(both and tangent._spec.mesh == primal._spec.mesh)


def _zeros_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros that lie as a tensor; under vmap, with the first dims of a tangent before its own."""
    tangent, primal = args
    count = kwargs.get("self_num_batch_dims", 0)
    batch = tuple(tangent.shape[:count])
    mine = tangent._local_tensor if isinstance(tangent, DTensor) else tangent
    lies = primal._local_tensor if isinstance(primal, DTensor) else primal
    zeros = op(mine.new_empty(()).expand(batch), lies, self_num_batch_dims=count)
    if not isinstance(primal, DTensor):
        return zeros
    spec, strides = primal._spec, list(primal.stride())
    step = 1 + sum((n - 1) * stride for n, stride in zip(primal.shape, strides))
    for n in reversed(batch):
        strides.insert(0, step)
        step *= n
    meta = TensorMeta(torch.Size((*batch, *primal.shape)), tuple(strides), tangent.dtype)
    placements = tuple([_behind(p, count) for p in spec.placements])
    return DTensor(zeros, DTensorSpec(spec.mesh, placements, meta), requires_grad=False)


def _behind(p: Any, count: int) -> Any:
    """A placement of a tensor's dims, as that of one with ``count`` other dims before them."""
    if isinstance(p, StridedShard):
        return StridedShard(p.dim + count, split_factor=p.split_factor)
    return Shard(p.dim + count) if isinstance(p, Shard) else p


# -- views -----------------------------------------------------------------------------------------


def _entering(stock: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(self: Any) -> Any:
        level = stock(self)
        self._views_were_replayed = torch._C._is_view_replay_enabled()
        torch._C._set_view_replay_enabled(True)
        return level

    return __enter__


def _leaving(stock: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        torch._C._set_view_replay_enabled(self._views_were_replayed)
        stock(self, exc_type, exc_value, traceback)

    return __exit__

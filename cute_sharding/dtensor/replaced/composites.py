"""Ops that torch decomposes before DTensor sees them (C++ kernels CompositeImplicitAutograd): lets
a function answer the ops of a decomposition.

Only tensors of Python classes have the dispatch key PythonTLSSnapshot, which comes before
autograd's. torch has one kernel there for all ops (aten/src/ATen/core/PythonFallbackKernel.cpp),
which saves the thread's state and goes on. Another kernel for one op does not affect plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._decomp.decompositions import upsample_compute_output_size
from torch._dispatch.python import no_python_dispatcher
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_leaves

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.observing import current_node
from cute_sharding.dtensor.replaced.op_schemas import name_of, overload
from cute_sharding.dtensor.replaced.patch import Installed
from cute_sharding.dtensor.replaced.tensor_specs import as_replica
from cute_sharding.relations.strided import calls_of_strided

__all__ = ["install_composites", "install_interpolations", "install_makers", "install_strided"]

_KEY = "PythonTLSSnapshot"
# From the arguments of such an op to a function that answers the ops of its decomposition, called
# with each op and its arguments; None: they run as usual.
Answers: TypeAlias = "Callable[[tuple[Any, ...]], Callable[..., Any] | None]"


def install_composites(installed: Installed, names: Iterable[str], answers: Answers) -> None:
    """Have ``answers(arguments)`` answer the ops into which torch decomposes one of these ops for a
    DTensor.
    """
    for op in filter(None, map(overload, names)):
        library = torch.library.Library("aten", "IMPL")
        library.impl(op, partial(_taken_apart, op, answers), _KEY)
        installed.note(patches.COMPOSITES, f"aten/{name_of(op)}/{_KEY}", library._destroy)


def install_makers(installed: Installed, names: Iterable[str]) -> None:
    """Have the tensors that one of these ops makes of numbers be replicas, if all tensors that it
    is called with are DTensors. (DTensor refuses ops on plain tensors, because it cannot know what
    a program means by one. These are equal on each rank, because the op makes them of its arguments
    and of global sizes.)
    """
    for op in filter(None, map(overload, names)):
        library = torch.library.Library("aten", "IMPL")
        library.impl(op, partial(_making, op), _KEY)
        installed.note(patches.COMPOSITES, f"aten/{name_of(op)}/{_KEY}", library._destroy)


def install_strided(installed: Installed, name: str) -> None:
    """Have ``as_strided`` of a DTensor be views that DTensor has rules for, above autograd: their
    gradients are those of ``as_strided``, for which autograd would need the tensor's memory.
    """
    op: Any = overload(name)
    library = torch.library.Library("aten", "IMPL")
    library.impl(op, partial(_strided, op), _KEY, with_keyset=True)
    installed.note(patches.COMPOSITES, f"aten/{name_of(op)}/{_KEY}", library._destroy)


def _strided(
    op: Any, keys: DispatchKeySet, x: Any, size: Any, stride: Any, offset: Any = None
) -> Any:
    """(In a node of autograd, offsets are those of local tensors: there torch's own answers.)"""
    if type(x) is not DTensor or current_node() is not None or is_tracing():
        return op.redispatch(keys.remove(DispatchKey.PythonTLSSnapshot), x, size, stride, offset)
    calls = calls_of_strided(tuple(x.shape), x.stride(), size, stride, offset or 0)
    if calls is None:
        raise RuntimeError(
            f"as_strided(size={tuple(size)}, stride={tuple(stride)}, storage_offset={offset}) of a "
            f"DTensor of shape {tuple(x.shape)} with strides {tuple(x.stride())} is "
            "not a permutation, slice or window of its dims. Call it on the whole tensor, "
            ".full_tensor(), on each rank."
        )
    y = x
    for name, args in calls or ():
        y = getattr(y, name)(*args)
    return y.view(size) if y is x else y


def install_interpolations(installed: Installed, names: Mapping[str, str]) -> None:
    """Have interpolations by scales of a DTensor be the ops that take sizes as well."""
    for name, by_sizes in names.items():
        op: Any = overload(name)
        if op is not None:
            library = torch.library.Library("aten", "IMPL")
            library.impl(op, partial(_interpolated, op, overload(by_sizes)), _KEY, with_keyset=True)
            installed.note(patches.COMPOSITES, f"aten/{name_of(op)}/{_KEY}", library._destroy)


def _interpolated(
    op: Any, by_sizes: Any, keys: DispatchKeySet, x: Any, sizes: Any, *others: Any
) -> Any:
    if type(x) is not DTensor:
        return op.redispatch(keys.remove(DispatchKey.PythonTLSSnapshot), x, sizes, *others)
    *told, scales = others  # told: whether to align corners
    onto = upsample_compute_output_size(x.size(), sizes, scales)
    with no_python_dispatcher():  # in a trace, it would take the op apart above autograd
        return by_sizes(x, onto, *told, *(scales or [None] * len(onto)))


class _Replicas(TorchDispatchMode):
    """Inside, a tensor that is made of numbers is a replica on the mesh."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_made = type(result) is not DTensor and isinstance(result, torch.Tensor)
        if not is_made or torch.Tag.nondeterministic_seeded in func.tags:
            return result
        given = tree_leaves((args, kwargs))
        if any(isinstance(x, torch.Tensor) and x.numel() != 1 for x in given):
            return result
        return as_replica(result, self._mesh)


def _making(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    tensors: list[Any] = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    is_ours = bool(tensors) and all(type(x) is DTensor for x in tensors)
    if not _is_below_autograd():
        with _Replicas(tensors[0].device_mesh) if is_ours else nullcontext():
            return op.decompose(*args, **kwargs)
    if not is_ours:
        return _by_python(op, args, kwargs)
    without = torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.ADInplaceOrView))
    with without, _Replicas(tensors[0].device_mesh):
        return op.decompose(*args, **kwargs)


class _Answered(TorchDispatchMode):
    """Inside, a function answers ops without keyword arguments, below autograd."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else self._answer(func, *args)


def _taken_apart(op: torch._ops.OpOverload, answers: Answers, *args: Any, **kwargs: Any) -> Any:
    is_ours = type(args[0]) is DTensor
    if not _is_below_autograd():
        with _answered(answers, args) if is_ours else nullcontext():
            return op.decompose(*args, **kwargs)
    if not is_ours:
        return _by_python(op, args, kwargs)
    # The op would be met undecomposed otherwise; there, views are made without autograd.
    without = torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.ADInplaceOrView))
    with without, _answered(answers, args):
        return op.decompose(*args, **kwargs)


def _answered(answers: Answers, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    answer = answers(args)
    return nullcontext() if answer is None else _Answered(answer)


def _is_below_autograd() -> bool:
    """Whether autograd's keys are excluded, as in inference mode: torch then does not decompose an
    op for tensors of Python classes.
    """
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    return bool(excluded(DispatchKey.AutogradFunctionality))


def _by_python(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what torch's kernel for tensors of Python classes does: the innermost mode answers, or a
    class of the arguments.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    types = [type(x) for x in tensors if torch._C._dispatch_keys(x).has(DispatchKey.Python)]
    found = NotImplemented
    if _get_current_dispatch_mode() is not None:
        with _pop_mode_temporarily() as mode:
            found = mode.__torch_dispatch__(op, types, args, kwargs)
    for kind in types:
        if found is NotImplemented:
            found = kind.__torch_dispatch__(op, types, args, kwargs)
    return found

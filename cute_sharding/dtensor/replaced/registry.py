"""The sharding propagator's registries and caches
(torch/distributed/tensor/_sharding_prop.py), and torch's own rules in them.

Caches may be cleared here; nothing else of the propagator is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.utils._pytree import tree_map

from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.relations.table import VIEWS

__all__ = [
    "clear_propagation_caches",
    "decomposition",
    "infer_schema_info",
    "is_derived",
    "is_of_the_program",
    "name_of",
    "op_handlers",
    "output_metas",
    "overload",
    "propagation",
    "propagator",
    "propagator_of",
    "registries",
    "schema_info",
    "stock_propagation",
    "tables",
    "takes_local_sizes",
]


def propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def tables() -> tuple[dict, ...]:
    """The propagator's registries, in the order in which it looks up an op."""
    p = propagator()
    return p.op_single_dim_strategy_funcs, p.op_strategy_funcs, p.op_to_rules, p.op_to_schema_info


def overload(name: str) -> torch._ops.OpOverload | None:
    """``torch.ops.aten.<packet>.<overload>``, or None if this torch has no such op."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), which, None)


def schema_info(op: torch._ops.OpOverload) -> Any:
    """torch's schema info for the op: the arguments that its rule depends on, and whether they are
    lists; None without one.
    """
    p = propagator()
    return p.op_to_schema_info.get(op) or p.op_to_schema_info_for_single_dim_strategy.get(op)


def name_of(op: torch._ops.OpOverload) -> str:
    """The inverse of :func:`overload`, for aten ops."""
    return op.name().removeprefix("aten::") + (".default" if op._overloadname == "default" else "")


def is_derived(op: torch._ops.OpOverload) -> bool:
    """Whether torch has no rule for the op, so that it derives one, or raises."""
    return not any(op in table for table in tables()[:3])


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether torch decomposes the op before a DTensor sees it, except where autograd's keys are
    excluded, as in inference mode.
    """
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


def registries() -> tuple[dict, ...]:
    """All that have an entry for an op with a rule or a schema info, torch's or the program's."""
    return *tables(), propagator().op_to_schema_info_for_single_dim_strategy


def infer_schema_info(op: torch._ops.OpOverload) -> None:
    """Give the op the schema info that torch infers for an op without a rule, unless it has one."""
    if schema_info(op) is None:
        propagator().decomp_strategy.ensure_schema_info(op)


def is_of_the_program(op: torch._ops.OpOverload) -> bool:
    """Whether the program has registered a rule for the op, in any of torch's ways, before or after
    the import of this package. torch's own rules are all in one package.
    """
    return any(not _is_torchs(table[op]) for table in tables()[:3] if op in table)


def _is_torchs(rule: Any) -> bool:
    while hasattr(rule, "func"):  # what is registered for one mesh dim, and partials
        rule = rule.func
    return str(getattr(rule, "__module__", "")).startswith(_TORCHS_RULES)


_TORCHS_RULES = _view_ops.__name__.rpartition(".")[0] + "."


def takes_local_sizes(op: torch._ops.OpOverload) -> bool:
    """Whether torch passes the op local sizes that it computes from the output's placements, left
    to right.
    """
    return op in propagator().op_to_shape_and_stride_idx


def clear_propagation_caches() -> None:
    """Clear the Python cache of propagations in all threads (with a fresh cache object), and this
    thread's C++ cache.

    For other threads' C++ caches see :func:`.op_hooks.install_propagation`.
    """
    p = propagator()
    p.propagate_op_sharding = LocalLRUCache(p.propagate_op_sharding_non_cached)
    torch._C._clear_DTensor_sharding_propagator_cache()


def op_handlers() -> dict[Any, Any]:
    """op -> torch's own function, for ops that skip the propagator."""
    return DTensor._op_dispatcher._custom_op_handlers


def output_metas(schema: OpSchema) -> Any:
    """The global shapes, strides and dtypes of the op's results.

    torch runs the op in a FakeTensorMode, which takes most of an op's first run. A view depends on
    sizes and strides alone: run on meta tensors it gives the same.
    """
    if is_tracing() or not _is_view(schema.op):
        return propagator()._propagate_tensor_meta_non_cached(schema)
    with torch._C._DisableTorchDispatch():  # in none of the program's modes
        args, kwargs = tree_map(_on_meta, (tuple(schema.args_schema), dict(schema.kwargs_schema)))
        found = schema.op(*args, **kwargs)
    return _meta_of(found) if isinstance(found, torch.Tensor) else [*map(_meta_of, found)]


@cache
def _is_view(op: torch._ops.OpOverload) -> bool:
    return op._schema._is_view_op() or name_of(op) in VIEWS


def _on_meta(leaf: Any) -> Any:
    meta = leaf.tensor_meta if isinstance(leaf, DTensorSpec) else None
    if meta is None:
        return leaf
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def stock_propagation() -> Callable[[OpSchema], OutputSharding]:
    """torch's own propagation, also while ours is in its place."""
    found = propagator()
    own: Any = type(found).propagate_op_sharding_non_cached
    return partial(own, found)


def propagation() -> Callable[[OpSchema], OutputSharding]:
    """The present propagation, from an op on specs to the placements that it needs and gives."""
    present = propagator().propagate_op_sharding_non_cached

    def propagate(schema: OpSchema) -> OutputSharding:
        p: Any = propagator_of(schema.op)
        return (
            present(schema)
            if p is propagator()
            else type(p).propagate_op_sharding_non_cached(p, schema)
        )

    return propagate


def propagator_of(op: torch._ops.OpOverload) -> Any:
    """The propagator that answers by the program's rule for the op, if it has registered one. torch
    prefers rules for one mesh dim, also its own ones to others of the program: then a copy without.
    """
    p = propagator()
    of_one_dim = p.op_single_dim_strategy_funcs.get(op)
    if of_one_dim is None or not _is_torchs(of_one_dim) or not is_of_the_program(op):
        return p
    other = copy(p)
    other.op_single_dim_strategy_funcs = {}
    return other


def decomposition(op: Any) -> Callable[..., Any] | None:
    """The op as a composition of other ops, from torch's code; None without one."""
    from torch._decomp import decomposition_table

    if op not in decomposition_table and op._can_decompose():
        return op.decompose
    found: Callable[..., Any] | None = decomposition_table.get(op)
    return found

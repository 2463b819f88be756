"""The sharding propagator's registries and caches
(torch/distributed/tensor/_sharding_prop.py), and torch's own rules in them.

Strategies of ops may be replaced here and put back, and caches cleared; nothing else of the
propagator is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpStrategy,
    OutputSharding,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.distributed.tensor.placement_types import Placement

from cute_sharding.dtensor.torch_private import patches
from cute_sharding.dtensor.torch_private.patch import Installed
from cute_sharding.views.dim_map import DimSpec

__all__ = [
    "Registration",
    "clear_propagation_caches",
    "install_strategies",
    "is_derived",
    "name_of",
    "op_handlers",
    "output_metas",
    "overload",
    "propagation",
    "propagator",
    "registration",
    "stock_input_placements",
    "stock_propagate",
    "tables",
    "takes_local_sizes",
    "torch_rule",
    "weighs_all",
]

# torch's own rules: an oracle in the tests, and what a strict view falls back to is asked of it.
stock_propagate = _view_ops.propagate_shape_and_sharding


def propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def tables() -> tuple[dict, ...]:
    """The propagator's registries, in the order in which it looks an op up."""
    p = propagator()
    return p.op_single_dim_strategy_funcs, p.op_strategy_funcs, p.op_to_rules, p.op_to_schema_info


@dataclass(frozen=True)
class Registration:
    """What the propagator's registries hold for one op."""

    op: torch._ops.OpOverload
    entries: tuple[Any, ...]

    @property
    def strategy(self) -> Callable[[OpSchema], OpStrategy] | None:
        """torch's own strategy; None where it has none. Releases differ in which ops have one of a
        single mesh dim, which the propagator expands to the mesh.
        """
        of_one_dim, of_the_mesh = self.entries[:2]
        return of_the_mesh if of_one_dim is None else partial(_on_the_mesh, of_one_dim)


def _on_the_mesh(of_one_dim: Any, schema: OpSchema) -> OpStrategy:
    """What the propagator makes of a strategy of one mesh dim. The shape and stride of the one
    output it puts in itself, afterwards: the input's stand in for them.
    """
    given: Any = schema.args_schema[0]
    mesh, meta = (
        schema.get_mesh_from_args(validate=False),
        given.strategies[0].output_spec.tensor_meta,
    )
    propagation: Any = _sharding_prop
    expanded = propagation._expand_single_dim_strategy_to_mesh(mesh, schema, of_one_dim, meta)
    strategy: Any = expanded(schema.op, schema.args_meta, schema.kwargs_meta)
    return strategy


def torch_rule(rule: Sequence[Any]) -> tuple[Any, ...]:
    """A DimMap in torch's classes, given in torch's or ours; the fields have the same names."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        if isinstance(value, DimSpec):
            kind = getattr(_view_ops, type(value).__name__)
            given: Any = value
            return kind(**{each.name: convert(getattr(given, each.name)) for each in fields(given)})
        return value

    return tuple(map(convert, rule))


def stock_input_placements(stock: Registration, schema: OpSchema) -> tuple[Placement, ...]:
    """The placements that torch's own strategy wants of the op's one input. Raises what the
    strategy raises.
    """
    if stock.strategy is None:
        raise NotImplementedError(f"{stock.op} has no strategy in this torch")
    specs: Any = _sharding_prop._select_min_cost_strategy(stock.strategy(schema)).input_specs
    return tuple(specs[0].placements)


def overload(name: str) -> torch._ops.OpOverload | None:
    """``torch.ops.aten.<packet>.<overload>``, or None where this torch has no such op."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), which, None)


def name_of(op: torch._ops.OpOverload) -> str:
    """The inverse of :func:`overload`, for aten ops."""
    return op.name().removeprefix("aten::") + (".default" if op._overloadname == "default" else "")


def is_derived(op: torch._ops.OpOverload) -> bool:
    """Whether torch has no rule for the op, so that it derives one, or raises."""
    return not any(op in table for table in tables()[:3])


# torch's own, before any of ours takes the place of one.
_OF_ONE_DIM = frozenset(getattr(propagator(), "op_single_dim_strategy_funcs", ()))


def weighs_all(name: str) -> bool:
    """Whether torch chooses among all placements for an op, those of replicas too: it has a rule
    for one mesh dim, and tries what it allows on each (_ops/single_dim_strategy.py). Other rules
    start from the operands' placements.
    """
    return overload(name) in _OF_ONE_DIM


def takes_local_sizes(op: torch._ops.OpOverload) -> bool:
    """Whether torch gives the op's local form sizes that it works out from the output's placements,
    left to right.
    """
    return op in propagator().op_to_shape_and_stride_idx


def registration(op: torch._ops.OpOverload) -> Registration:
    return Registration(op, tuple(table.get(op) for table in tables()))


def install_strategies(
    installed: Installed,
    strategies: Mapping[torch._ops.OpOverload, Callable[[OpSchema], OpStrategy]],
) -> None:
    """Make these the strategies that the propagator finds for their ops.

    C++ caches propagations, in each thread for itself, and a thread cannot clear another's. Their
    keys tell an op whose schema info lists keyword arguments to compare from one whose info lists
    none, as torch's view ops do; so a list, of a name that no call ever passes, keeps our
    propagations apart from torch's in every thread, and torch's are found again once its rules are
    back. It does not keep one setting of ours apart from another.
    """
    p = propagator()

    def info(op: torch._ops.OpOverload) -> RuntimeSchemaInfo:
        stock = (
            p.op_to_schema_info.get(op)
            or p.op_to_schema_info_for_single_dim_strategy.get(op)
            or RuntimeSchemaInfo()
        )
        return RuntimeSchemaInfo(
            stock.static_argnum,
            [*(stock.static_kwargkey or ()), "cute_sharding"],
            stock.needs_pytree,
        )

    infos = {op: info(op) for op in strategies}
    installed.take(patches.STRATEGIES_OF_ONE_DIM, strategies)
    installed.put(patches.STRATEGIES, strategies)
    installed.put(patches.SCHEMA_INFOS, infos)


def clear_propagation_caches() -> None:
    """Forget every cached propagation of the Python cache in all threads (by a fresh cache object),
    and of this thread's C++ cache.

    For the C++ caches of other threads see :func:`install_strategies`.
    """
    p = propagator()
    p.propagate_op_sharding = LocalLRUCache(p.propagate_op_sharding_non_cached)
    torch._C._clear_DTensor_sharding_propagator_cache()


def op_handlers() -> dict[Any, Any]:
    """torch's own functions for ops that are no matter of propagation, by op."""
    return DTensor._op_dispatcher._custom_op_handlers


def output_metas(schema: OpSchema) -> Any:
    """Shape, stride and dtype of what comes of the op, globally."""
    return propagator()._propagate_tensor_meta_non_cached(schema)


def propagation() -> Callable[[OpSchema], OutputSharding]:
    """torch's own way from an op on specs to the placements that it needs and gives."""
    return propagator().propagate_op_sharding_non_cached

"""Ops and their schemas (torch._ops.OpOverload; torch/distributed/tensor/_op_schema.py, _ops):
the arguments of an op, what it writes to, and whether it draws random numbers.

Schemas are only read; one with other specs is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, OutputSharding
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

from cute_sharding.dtensor.replaced.registry import (
    is_derived,
    name_of,
    overload,
    propagator,
    propagator_of,
)
from cute_sharding.dtensor.replaced.tensor_specs import placed_as
from cute_sharding.relations.table import ROWS

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "OpSchema",
    "OutputSharding",
    "args_of_sum",
    "argument",
    "arguments",
    "arguments_with",
    "draws",
    "draws_apart",
    "is_by_mask",
    "is_in_place",
    "is_mean",
    "is_of_lists",
    "is_out",
    "is_pointwise",
    "is_pointwise_on_lists",
    "is_written",
    "keeps_any_cut",
    "new_form",
    "of_sum",
    "place_of",
    "replaced_specs",
    "specs_of",
    "unseen_writers",
    "with_keywords_of_rule",
    "with_specs",
    "writes_unsaid",
    "written",
]


def specs_of(schema: OpSchema) -> list[DTensorSpec]:
    """The specs of all tensors among an op's arguments, in their order."""
    return [
        leaf
        for leaf in tree_leaves((schema.args_schema, schema.kwargs_schema))
        if isinstance(leaf, DTensorSpec)
    ]


def keeps_any_cut(op: torch._ops.OpOverload) -> bool:
    """Whether torch's rule for the op keeps any cut: it does for pointwise ops, for lists of
    tensors, and for ops that draw random numbers. Other ops must not write, since a tensor that is
    written to cannot be redistributed.
    """
    info = propagator().op_single_dim_strategy_funcs.get(op)
    return is_pointwise(op) or (
        info is not None
        and info.allow_uneven_sharding
        and (not op._schema.is_mutable or _strategy_is_of(op, "_random_ops"))
    )


@cache
def is_pointwise(op: torch._ops.OpOverload) -> bool:
    """Whether the op is pointwise for torch, also in place, on lists and with ``out=``."""
    rules = _rules_of_pointwise_ops()
    alike = [op]
    if op._schema.is_mutable and op.namespace == "aten":
        # It has the arguments of one that does not write, and perhaps ``out``.
        wanted = [argument.name for argument in op._schema.arguments if not argument.is_out]
        alike += [
            one
            for one in _namesakes(op)
            if [argument.name for argument in one._schema.arguments] == wanted
        ]
    return any(one in rules or _strategy_is_of(one, "_pointwise_ops") for one in alike)


@cache
def new_form(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The op with the same arguments that returns a new tensor, as ``tril`` for ``tril_``, if torch
    has a rule for it or it has a row here, and the op in place has neither. None otherwise, and for
    views.
    """
    if not is_in_place(op) or not is_derived(op) or name_of(op) in ROWS:
        return None
    return next(
        (
            one
            for one in _namesakes(op)
            if _kinds(one) == _kinds(op)
            and not (one._schema.is_mutable or one._schema._is_view_op())
            and not (is_derived(one) and name_of(one) not in ROWS)
        ),
        None,
    )


@cache
def is_pointwise_on_lists(op: torch._ops.OpOverload) -> bool:
    """Whether the op runs a pointwise op, or a copy, on each element of its lists, and neither
    torch nor this package has a rule for it. (If it takes a tensor of numbers beside the lists,
    torch cannot tell the results' shapes.)
    """
    if (
        not op._opname.startswith("_foreach_")
        or not is_derived(op)
        or name_of(op) in ROWS
        or any(str(argument.type) == "Tensor" for argument in op._schema.arguments)
    ):
        return False
    name = op._opname.removeprefix("_foreach_").removesuffix("_")
    return name == "copy" or any(map(is_pointwise, _overloads(name, f"{name}_")))


def _namesakes(op: torch._ops.OpOverload) -> list[torch._ops.OpOverload]:
    """The overloads of an op of torch's own that writes, and those of the op that does not."""
    return _overloads(op._opname, op._opname.removesuffix("_"))


def _overloads(*names: str) -> list[torch._ops.OpOverload]:
    """All overloads of torch's ops with these names, those of the first name first."""
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return [
        getattr(packet, name)
        for packet in packets
        if packet is not None
        for name in packet.overloads()
    ]


def _kinds(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """The names and types of the op's arguments."""
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _strategy_is_of(op: Any, module: str) -> bool:
    info = propagator().op_single_dim_strategy_funcs.get(op)
    return info is not None and str(getattr(info.func, "__module__", "")).endswith(f".{module}")


@cache
def _rules_of_pointwise_ops() -> frozenset[Any]:
    from torch.distributed.tensor._ops import _pointwise_ops as rules

    everything = {*rules.pointwise_ops, *getattr(rules, "_specially_registered_ops", ())}
    for name in ("linear_pointwise_ops", "partial_preserving_ops"):
        everything |= set(getattr(rules, name, ()))
    return frozenset(everything)


def arguments_with(
    schema: OpSchema, values: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments, with these values (shapes, or other specs) in place of tensors, in the
    order of :func:`specs_of`.
    """
    remaining = iter(values)
    args, kwargs = tree_map(
        lambda leaf: next(remaining) if isinstance(leaf, DTensorSpec) else leaf,
        (tuple(schema.args_schema), dict(schema.kwargs_schema)),
    )
    return args, kwargs


def with_specs(schema: OpSchema, specs: Sequence[DTensorSpec | None]) -> OpSchema:
    """The schema with other specs, in the order of :func:`specs_of`."""
    return OpSchema(schema.op, *arguments_with(schema, specs), schema.schema_info)


def with_keywords_of_rule(found: OutputSharding, schema: OpSchema) -> OutputSharding:
    """torch's answer for ``schema``, with the placements that the rule, torch's or the program's,
    wants of the tensors that are passed by keyword. torch chooses them with those of the positional
    ones, and leaves them out of its answer. (Those of ``out=`` are where results go.)
    """
    tensors = {
        name: spec
        for name, spec in schema.kwargs_schema.items()
        if isinstance(spec, DTensorSpec) and not is_out(schema.op, name)
    }
    chosen = _chosen(schema) if tensors else None
    if chosen is None or chosen.input_specs is None:
        return found
    first = len(specs_of(schema)) - len(tensors)
    wanted = {
        name: tuple(spec.placements)
        for name, spec in zip(tensors, chosen.input_specs[first:])
        if tuple(spec.placements) != tuple(tensors[name].placements)
    }
    if not wanted:
        return found
    given = found.redistribute_schema or schema
    moved = {name: placed_as(tensors[name], placements) for name, placements in wanted.items()}
    kwargs = {**given.kwargs_schema, **moved}
    made = OpSchema(given.op, given.args_schema, kwargs, schema.schema_info)
    return OutputSharding(found.output_spec, made, True, found.use_val_from_redistribute_schema)


def _chosen(schema: OpSchema) -> Any:
    """What torch's propagator chooses of what the op's rule allows: the placements of all tensors;
    None if the rule lists no choices.
    """
    p, op = propagator_of(schema.op), schema.op
    torchs: Any = _sharding_prop
    wrapped = p._wrap_with_op_strategy(schema)
    if op in p.op_single_dim_strategy_funcs:
        rule, metas = (
            p.op_single_dim_strategy_funcs[op],
            p._propagate_tensor_meta_non_cached(schema),
        )
        expand = torchs._expand_single_dim_strategy_to_mesh
        choices = expand(schema.get_mesh_from_args(), wrapped, rule, metas)(
            op, wrapped.args_meta, wrapped.kwargs_meta
        )
    elif op in p.op_strategy_funcs:
        choices = p.op_strategy_funcs[op](wrapped)
    else:
        return None
    if not isinstance(choices, OpStrategy):
        return None
    return torchs._select_min_cost_strategy(choices, schema)


def replaced_specs(
    schema: OpSchema, placements: Callable[[DTensorSpec], Sequence[Placement]]
) -> OpSchema:
    """The schema with other placements for its tensors; strided ones are read in the same way."""
    found = [(spec, tuple(placements(spec))) for spec in specs_of(schema)]
    return with_specs(
        schema,
        [
            spec if wanted == tuple(spec.placements) else placed_as(spec, wanted)
            for spec, wanted in found
        ],
    )


def writes_unsaid(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of arguments that the op writes to although its schema does not say so."""
    row = ROWS.get(name_of(op))
    return () if row is None else row.writes


@cache
def unseen_writers() -> list[torch._ops.OpOverload]:
    """Ops that write to some arguments without torch's dispatcher noticing: it looks for "out" in
    the names of overloads, and otherwise at the first argument.
    """
    by_another_name = []
    every = torch._C._dispatch_get_all_op_names()  # each schema costs more than all names
    names = {*every}
    for full_name in every:
        name, _, which = full_name.removeprefix("aten::").partition(".")
        # An op in place, or one that has an overload with "out", is none itself.
        may_be = which and "out" not in which and not name.endswith("_")
        if may_be and f"{full_name}_out" not in names and full_name.startswith("aten::"):
            schema = torch._C._get_schema(f"aten::{name}", which)
            if schema.is_mutable and any(argument.is_out for argument in schema.arguments):
                by_another_name.append(f"{name}.{which}")
    unsaid = [name for name, row in ROWS.items() if row.writes]
    return [*filter(None, map(overload, (*by_another_name, *unsaid)))]


def is_written(op: torch._ops.OpOverload, argument: Any) -> bool:
    """Whether the op writes to that argument of its schema."""
    return (
        argument.alias_info is not None and argument.alias_info.is_write
    ) or argument.name in writes_unsaid(op)


@cache
def places_written(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """(position, name) of the op's arguments that it writes to."""
    written = [(i, a.name) for i, a in enumerate(op._schema.arguments) if is_written(op, a)]
    return tuple(written)


def argument(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], name: str
) -> Any:
    """The value of the op's argument with this name; None if the op has no such argument, or it is
    not passed.
    """
    place = place_of(op, name)
    if place is None:
        return None
    return args[place] if place < len(args) else kwargs.get(name)


_MEAN, _SUM = 1, 2  # torch's numbers for the reductions of losses


def is_mean(schema: OpSchema, at: int) -> bool:
    """Whether the reduction of a loss, argument ``at``, is a mean; it is by default."""
    return len(schema.args_schema) <= at or schema.args_schema[at] == _MEAN


def args_of_sum(op: torch._ops.OpOverload, args: Sequence[Any], at: int) -> list[Any]:
    """The arguments of the op, with a sum for the reduction of the loss, argument ``at``. (torch
    leaves out last arguments that are as by default.)
    """
    defaults = [declared.default_value for declared in op._schema.arguments[len(args) : at]]
    return [*args[:at], *defaults, _SUM, *args[at + 1 :]]


def of_sum(schema: OpSchema, at: int) -> OpSchema:
    """The schema with a sum for the reduction of the loss, argument ``at``."""
    args = tuple(args_of_sum(schema.op, schema.args_schema, at))
    return OpSchema(schema.op, args, schema.kwargs_schema, schema.schema_info)


@cache
def place_of(op: torch._ops.OpOverload, name: str) -> int | None:
    """The position of the argument with this name; None if the op has none."""
    names = [declared.name for declared in op._schema.arguments]
    return names.index(name) if name in names else None


def arguments(schema: OpSchema) -> list[tuple[bool, list[DTensorSpec | None]]]:
    """The arguments that are tensors or lists of tensors, in the order of :func:`specs_of`:
    (whether the op writes to it, its specs; None for an element of a list that is no DTensor).
    """
    declared = schema.op._schema.arguments
    by_name = {argument.name: argument for argument in declared}
    found = []
    for argument, value in [
        *zip(declared, schema.args_schema),
        *((by_name[name], value) for name, value in schema.kwargs_schema.items()),
    ]:
        leaves = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(leaf, DTensorSpec) for leaf in leaves):
            found.append(
                (
                    is_written(schema.op, argument),
                    [leaf if isinstance(leaf, DTensorSpec) else None for leaf in leaves],
                )
            )
    return found


def written(op: torch._ops.OpOverload, schema: OpSchema) -> list[tuple[str, DTensorSpec]]:
    """The tensors of ``schema`` that the op writes to: (name of the argument, spec). (A batch norm
    that does not train only reads its statistics.)
    """
    args, kwargs = schema.args_schema, schema.kwargs_schema
    if argument(op, args, kwargs, "training") is False:
        return []
    return [
        (declared.name, leaf)
        for declared in op._schema.arguments
        if is_written(op, declared)
        for leaf in tree_leaves(argument(op, args, kwargs, declared.name))
        if isinstance(leaf, DTensorSpec)
    ]


def is_out(op: torch._ops.OpOverload, name: str) -> bool:
    """Whether the argument with this name is one of ``out=``."""
    return any(argument.is_out and argument.name == name for argument in op._schema.arguments)


def draws(op: torch._ops.OpOverload) -> bool:
    """Whether the op draws random numbers. (Attention counts as no: it draws only for dropout.)"""
    return op in DTensor._op_dispatcher._random_ops or (
        torch.Tag.nondeterministic_seeded in op.tags and "attention" not in op._opname
    )


def drawn_in_place() -> list[torch._ops.OpOverload]:
    """Ops that write random numbers into a tensor, of those that torch's dispatcher lists: it runs
    these itself, whatever should run in their place.
    """
    return [op for op in DTensor._op_dispatcher._random_ops if is_in_place(op)]


def draws_apart(op: torch._ops.OpOverload, mesh: Any) -> bool:
    """Whether torch has each rank of the mesh draw numbers for its own part, and all go on alike
    afterwards (torch/distributed/tensor/_random.py: on accelerators, for ops that it lists).
    """
    return op in DTensor._op_dispatcher._random_ops and hasattr(
        getattr(torch, mesh.device_type, None), "set_rng_state"
    )


def is_of_lists(op: torch._ops.OpOverload) -> bool:
    """Whether the op runs on each element of the lists that it is given, by the names that torch's
    propagator looks for.
    """
    return op._opname.startswith(("_foreach_", "_amp_foreach_", "_fused_")) and any(
        isinstance(argument.type, torch.ListType) and "Tensor" in str(argument.type)
        for argument in op._schema.arguments
    )


def is_by_mask(schema: OpSchema) -> bool:
    """Whether some tensor in the op's list of indices is a mask."""
    return any(
        isinstance(leaf, DTensorSpec)
        and leaf.tensor_meta is not None
        and leaf.tensor_meta.dtype in (torch.bool, torch.uint8)
        for leaf in tree_leaves(argument(schema.op, schema.args_schema, {}, "indices"))
    )


def is_in_place(op: torch._ops.OpOverload) -> bool:
    """Whether the op writes to its first argument and returns it, as ``add_`` does."""
    return op._opname.endswith("_") and not op._opname.endswith("__")

"""Ops and their schemas (torch._ops.OpOverload; torch/distributed/tensor/_op_schema.py, _ops), the
propagator's registries and caches, and what tells two calls of an op apart (_sharding_prop.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpStrategy,
    OutputSharding,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.patch import Installed, calling
from cute_sharding.dtensor.replaced.tensor_specs import placed_as
from cute_sharding.relations.table import ROWS, VIEWS

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "OpSchema",
    "OutputSharding",
    "args_of_sum",
    "argument",
    "arguments",
    "arguments_with",
    "clear_propagation_caches",
    "decomposition",
    "draws",
    "draws_apart",
    "infer_schema_info",
    "install_keys",
    "install_propagation",
    "is_by_mask",
    "is_derived",
    "is_in_place",
    "is_mean",
    "is_of_lists",
    "is_of_the_program",
    "is_out",
    "is_pointwise",
    "is_pointwise_on_lists",
    "is_written",
    "keeps_any_cut",
    "name_of",
    "naming",
    "new_form",
    "of_sum",
    "op_handlers",
    "output_metas",
    "overload",
    "place_of",
    "propagation",
    "propagator",
    "propagator_of",
    "registries",
    "replaced_specs",
    "schema_info",
    "specs_of",
    "stock_propagation",
    "tables",
    "takes_local_sizes",
    "unseen_writers",
    "with_keywords_of_rule",
    "with_specs",
    "writes_unsaid",
    "written",
]


# -- keys ------------------------------------------------------------------------------------------
# What tells two calls of an op apart (torch/distributed/tensor/_op_schema.py: RuntimeSchemaInfo).
#
# torch keeps what the propagator answers, in C++ and in Python, under a key of the specs of an op's
# tensors and of those other arguments that the op's schema info names. An argument that the info
# does not name does not count: a call with another value of it gets the answer of the first call.
#
# Schema infos are replaced here, also while programs run; nothing else is.

# A keyword that no call ever passes.
_OURS = "cute_sharding"

# The kinds of arguments by which a rule may decide, beside tensors, which always count. (Others
# cannot be in a key, as C++ cannot hash them: generators, objects of C++ classes.)
_DECIDING = frozenset(
    (
        *("BoolType", "IntType", "SymIntType", "StringType"),
        *("ScalarTypeType", "DeviceObjType", "LayoutType", "MemoryFormatType"),
    )
)
_NUMBERS = frozenset(("FloatType", "NumberType"))


class _Naming(RuntimeSchemaInfo):
    """An info of ours, in place of ``of``: torch's, the program's, or none."""

    of: RuntimeSchemaInfo | None = None


def install_keys(installed: Installed) -> Callable[[OpSchema], OpSchema]:
    """Have every op's schema info name whatever may decide a shape, a stride, a dtype or a
    placement: now for the ops that torch has a rule or an info for, and for any other when it is
    first called. Returns the function that does so for the op of a schema, and that returns the
    schema with our info.

    Our infos name all arguments of the kinds by which a rule may decide: integers, flags, texts,
    dtypes, layouts, devices, and lists of them. A real number is mostly a value that results are
    computed with, as a learning rate is, and may be another in every step. So it is named only
    where a rule may read it: where torch's info names it (the order of a norm), where torch has no
    rule, and where the program has one. (torch counts positional arguments from the first that is
    named, so numbers behind it are named too.)

    C++ keeps a cache for each thread, and a thread cannot clear another's. So our infos of ops that
    have a rule name a keyword that no call ever passes: this keeps our entries apart from torch's
    in every thread, and torch's are found again once its infos are back. (C++ tells an info without
    keywords from one with some, whichever these are. So where torch's names keywords of the op,
    entries are apart only if ours names more.) It does not keep one setting of ours apart from
    another. A rule that torch derives is not derived again for its sake.

    What was answered by one rule does not hold once the program registers another: the op's info is
    then made anew, and this thread's caches are cleared.
    """
    of_one_dim = patches.SCHEMA_INFOS_OF_ONE_DIM.found()

    def put(op: Any, info: RuntimeSchemaInfo) -> None:
        installed.put(patches.SCHEMA_INFOS, {op: info})
        if op in of_one_dim:
            installed.put(patches.SCHEMA_INFOS_OF_ONE_DIM, {op: info})

    def complete(schema: OpSchema) -> OpSchema:
        if isinstance(schema.schema_info, _Naming):
            return schema
        op = schema.op
        info = schema_info(op)
        if not isinstance(info, _Naming):
            # torch does so in an op's first call, whose answer it keeps under a key of the tensors
            # alone. Without any info, once ours is gone, calls would be looked up under that key.
            infer_schema_info(op)
            info = naming(op, info)
            put(op, info)
        return OpSchema(op, schema.args_schema, schema.kwargs_schema, info)

    def registering(stock: Callable[..., None]) -> Callable[..., None]:
        def register(op_overload: Any, *args: Any, **kwargs: Any) -> None:
            stock(op_overload, *args, **kwargs)
            info = schema_info(op_overload)
            put(op_overload, naming(op_overload, info.of if isinstance(info, _Naming) else info))
            clear_propagation_caches()

        return register

    infos = _infos()
    installed.put(patches.SCHEMA_INFOS, infos)
    installed.put(patches.SCHEMA_INFOS_OF_ONE_DIM, {op: infos[op] for op in of_one_dim})
    for patch in (patches.RULES, patches.STRATEGIES, patches.STRATEGIES_OF_ONE_DIM):
        installed.replace(patch, registering)
    return complete


class _Made(NamedTuple):
    """Our infos, and the registries of the propagator that they were made for."""

    registries: tuple[dict[Any, Any], ...]
    infos: dict[Any, RuntimeSchemaInfo]


_made = _Made((), {})


def _infos() -> dict[Any, RuntimeSchemaInfo]:
    """Our infos for all ops that have a rule or an info. They depend on the registries alone, and
    take ten times as long as to see that these are as they were.
    """
    global _made
    found = tuple([registry.copy() for registry in registries()])
    if found != _made.registries:
        ops = set[Any]().union(*found)
        _made = _Made(found, {op: naming(op, schema_info(op)) for op in ops})
    return _made.infos


def naming(op: torch._ops.OpOverload, info: RuntimeSchemaInfo | None) -> RuntimeSchemaInfo:
    """Our info for the op, in place of ``info``."""
    arguments = _arguments(op)
    stock = info or RuntimeSchemaInfo()
    has_rule = not is_derived(op)
    kinds = _DECIDING
    if not has_rule or is_of_the_program(op):
        kinds |= _NUMBERS
    by_place = [i for i, kind in enumerate(arguments.by_place) if kind in kinds]
    keywords = [name for name, kind in arguments.by_name.items() if kind in kinds]
    named = stock.static_kwargkey or ()
    keywords += [
        name for name, kind in arguments.by_name.items() if name in named and kind in _NUMBERS
    ]
    # Without any keyword, C++ would also leave out tensors that are passed by keyword.
    has_keywords = keywords or "TensorType" in arguments.by_name.values()
    is_apart = has_keywords or (has_rule and stock.static_kwargkey is None)
    made = _Naming(
        min([stock.static_argnum, *by_place]),
        [*keywords, _OURS] if is_apart else None,
        info.needs_pytree if info is not None and has_rule else arguments.has_lists,
    )
    made.of = info
    return made


class _Arguments(NamedTuple):
    """The kinds of an op's arguments, of those in lists and options too."""

    by_place: tuple[str, ...]
    by_name: dict[str, str]
    has_lists: bool


@lru_cache(maxsize=1 << 13)
def _arguments(op: torch._ops.OpOverload) -> _Arguments:
    kinds = [(each, *_kind(each.real_type)) for each in op._schema.arguments]
    return _Arguments(
        tuple([kind for each, kind, _ in kinds if not each.kwarg_only]),
        {each.name: kind for each, kind, _ in kinds if each.kwarg_only},
        any(is_list and kind == "TensorType" for _, kind, is_list in kinds),
    )


def _kind(declared: Any) -> tuple[str, bool]:
    """The kind of an argument's type or of its elements, and whether it is a list."""
    is_list = False
    while isinstance(declared, torch.OptionalType | torch.ListType):
        is_list |= isinstance(declared, torch.ListType)
        declared = declared.getElementType()
    return declared.kind(), is_list


# -- op schemas ------------------------------------------------------------------------------------
# Ops and their schemas (torch._ops.OpOverload; torch/distributed/tensor/_op_schema.py, _ops): the
# arguments of an op, what it writes to, and whether it draws random numbers.
#
# Schemas are only read; one with other specs is a new one.


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


# -- registry --------------------------------------------------------------------------------------
# The sharding propagator's registries and caches (torch/distributed/tensor/_sharding_prop.py), and
# torch's own rules in them.
#
# Caches may be cleared here; nothing else of the propagator is changed.


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

    For other threads' C++ caches see :func:`.op_schemas.install_propagation`.
    """
    p = propagator()
    p.propagate_op_sharding = LocalLRUCache(p.propagate_op_sharding_non_cached)
    torch._C._clear_DTensor_sharding_propagator_cache()


def op_handlers() -> dict[Any, Any]:
    """op -> torch's own function, for ops that skip the propagator."""
    return DTensor._op_dispatcher._custom_op_handlers


def output_metas(schema: OpSchema) -> Any:
    """The global shapes, strides and dtypes of the op's results.

    torch runs the op in a FakeTensorMode, which takes most of an op's first run: what it finds is
    remembered. A view depends on sizes and strides alone: run on meta tensors it gives the same.
    """
    if is_tracing():
        return propagator()._propagate_tensor_meta_non_cached(schema)
    if not _is_view(schema.op):
        return _metas(_OnShapes(schema))
    with torch._C._DisableTorchDispatch():  # in none of the program's modes
        args, kwargs = tree_map(_on_meta, (tuple(schema.args_schema), dict(schema.kwargs_schema)))
        found = schema.op(*args, **kwargs)
    return _meta_of(found) if isinstance(found, torch.Tensor) else [*map(_meta_of, found)]


class _OnShapes:
    """A call of an op that is equal to others on tensors of the same shapes, wherever they lie."""

    def __init__(self, schema: OpSchema) -> None:
        given = tree_map(_shape_alone, (tuple(schema.args_schema), dict(schema.kwargs_schema)))
        self.schema, self.key = schema, (schema.op, repr(given), torch.get_default_dtype())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnShapes) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _shape_alone(leaf: Any) -> Any:
    return leaf.tensor_meta if isinstance(leaf, DTensorSpec) else leaf


@remembered
def _metas(call: _OnShapes) -> Any:
    return propagator()._propagate_tensor_meta_non_cached(call.schema)


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


# -- op hooks --------------------------------------------------------------------------------------
# Ops beside views, in propagator and dispatcher (torch/distributed/tensor/_sharding_prop.py,
# _dispatch.py): what is called before torch's rules, and after ops that write.
#
# The propagator's function from specs to placements, functions of single ops and the code of the
# dispatcher's last step may be replaced here, and are put back.


def install_propagation(
    installed: Installed,
    propagate: Callable[[OpSchema], OutputSharding],
    handler: Callable[[Any, Callable[..., Any]], Callable[..., Any]],
    writing: Callable[..., Any],
    others: Mapping[Any, Callable[..., Any]],
    reach: Callable[..., None],
    live: set[Any],
    finished: Callable[..., Any],
) -> None:
    """Make ``propagate`` the propagator's function, for schemas that name what tells calls apart.
    ``handler(op, torch's)`` replaces torch's function for an op that skips the
    propagator. ``writing`` runs ops that write without torch's dispatcher noticing, and
    ``others`` are functions of single ops. While there are ``live`` copies,
    ``reach(op, args, kwargs)`` is called after each op that writes. ``finished(found, op, args,
    kwargs, info)`` may give an op's results in place of what the propagator has ``found`` for it.
    """
    complete = install_keys(installed)
    handlers = op_handlers()
    handled = [overload(name) for name, row in ROWS.items() if row.has_function]
    past = [op for op in handled if op is not None and op in handlers]
    installed.put(patches.HANDLERS, {op: handler(op, handlers[op]) for op in past})
    writers = [*unseen_writers(), *drawn_in_place()]
    installed.put(patches.HANDLERS, dict.fromkeys(writers, writing))
    installed.put(patches.HANDLERS, others)
    installed.replace(patches.PROPAGATION, lambda stock: lambda schema: propagate(complete(schema)))
    installed.replace(patches.FOUND, lambda stock: _finishing(stock, finished))
    installed.replace(patches.TAIL, calling(partial(_reaching, live, reach), patches.TAIL))


def _reaching(
    live: set[Any], reach: Callable[..., None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    """torch's step after an op that writes, after ``reach``."""

    def tail(
        self: Any, op: Any, args: Any, kwargs: Any, mesh: Any, answer: Any, local: Any, *how: Any
    ) -> Any:
        if live and how[0]:  # this rank takes part
            reach(op, args, kwargs)
        return stock(self, op, args, kwargs, mesh, answer, local, *how)

    return tail


def _finishing(stock: Callable[..., Any], finished: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step that asks the propagator. As torch itself does for ops that it decomposes there,
    it may return results: the dispatcher then returns these, and caches nothing.
    """

    def found(
        self: Any, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool
    ) -> Any:
        answer = stock(self, op_call, args, kwargs, op_info, try_cache)
        return finished(answer, op_call, args, kwargs, op_info)

    return found

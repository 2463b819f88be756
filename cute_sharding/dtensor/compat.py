"""Every private name of torch that the adapter uses. A new torch release is this one file to mend.

Supported: torch 2.13 to 2.15.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from math import prod
from textwrap import dedent
from typing import Any, NamedTuple

import torch
import torch.compiler.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    enabled_local_tensor_mode,
    maybe_disable_local_tensor_mode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute, _sharding_prop
from torch.distributed.tensor import placement_types as _placement_types
from torch.distributed.tensor._collective_utils import mesh_scatter
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    RuntimeSchemaInfo,
    StrategyType,
)
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor._ops import single_dim_strategy as _single_dim_strategy
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor._sharding_prop import LocalLRUCache
from torch.distributed.tensor._utils import assert_no_mixed_partial_types as check_no_mixed_partials
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _MaskPartial,
    _StridedShard,
)
from torch.utils._debug_mode import get_active_debug_mode as active_debug_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map

from cute_sharding.dtensor.stats import logger
from cute_sharding.layout.layout import row_major
from cute_sharding.views.dim_map import DimSpec

__all__ = [
    "REDISTRIBUTION_USERS",
    "CollectiveCounter",
    "DTensorSpec",
    "LocalTensor",
    "MaskPartial",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "Partial",
    "Placement",
    "Redistribution",
    "Registration",
    "Replicate",
    "Shard",
    "StridedShard",
    "Tracing",
    "active_debug_mode",
    "all_gather",
    "all_ranks",
    "all_reduce",
    "all_to_all",
    "assert_at_run_time",
    "averages",
    "awaited",
    "backend_name",
    "check_no_mixed_partials",
    "check_shard_order",
    "clear_propagation_caches",
    "decoded_order",
    "decodes_to_shard_order",
    "flattened_mesh",
    "flattenings",
    "forget_compiled_code",
    "generate_redistribute_costs",
    "group_of_dim",
    "group_of_flattened",
    "has_groups",
    "has_shape_env",
    "install_redistribution",
    "install_strategy",
    "is_imagined",
    "is_symbolic",
    "is_tracing",
    "is_wrapper",
    "layout_of",
    "local_int",
    "local_of",
    "local_tensor_mode",
    "name_of",
    "new_groups",
    "no_modes",
    "op_spec",
    "overload",
    "partition_value",
    "rank_lists",
    "redistribution",
    "reduce_scatter",
    "reduce_shard_value",
    "reduce_value",
    "registration",
    "restore",
    "restore_redistribution",
    "settled",
    "settled_spec",
    "shard_order",
    "split_factors",
    "stock_dim_maps",
    "stock_input_placements",
    "stock_propagate",
    "stock_transforms",
    "strided_shard",
    "tag_compiled_graphs",
    "takes_local_sizes",
    "this_rank",
    "torch_rule",
    "unbound_spec",
    "waited",
    "with_shape",
]

StridedShard = _StridedShard
MaskPartial = _MaskPartial
assert_at_run_time = torch._check

# torch's own rules: an oracle in the tests, and what a strict view falls back to is asked of it.
stock_propagate = _view_ops.propagate_shape_and_sharding
stock_dim_maps = _view_ops.dim_maps


def _propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def _tables() -> tuple[dict, ...]:
    """The propagator's registries, in the order in which it looks an op up."""
    p = _propagator()
    return p.op_single_dim_strategy_funcs, p.op_strategy_funcs, p.op_to_rules, p.op_to_schema_info


@dataclass(frozen=True)
class Registration:
    """What the propagator's registries hold for one op: what to put back."""

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
    return not any(op in table for table in _tables()[:3])


def takes_local_sizes(op: torch._ops.OpOverload) -> bool:
    """Whether torch gives the op's local form sizes that it works out from the output's placements,
    left to right.
    """
    return op in _propagator().op_to_shape_and_stride_idx


def registration(op: torch._ops.OpOverload) -> Registration:
    return Registration(op, tuple(table.get(op) for table in _tables()))


def install_strategy(op: torch._ops.OpOverload, strategy: Callable[[OpSchema], OpStrategy]) -> None:
    """Make ``strategy`` the one the propagator finds for ``op``.

    C++ caches propagations, in each thread for itself, and a thread cannot clear another's. Their
    keys tell an op whose schema info lists keyword arguments to compare from one whose info lists
    none, as torch's view ops do; so a list, of a name that no call ever passes, keeps our
    propagations apart from torch's in every thread, and torch's are found again once its rules are
    back. It does not keep one setting of ours apart from another.
    """
    p = _propagator()
    stock = (
        p.op_to_schema_info.get(op)
        or p.op_to_schema_info_for_single_dim_strategy.get(op)
        or RuntimeSchemaInfo()
    )
    for table in _tables():
        table.pop(op, None)
    p.op_strategy_funcs[op] = strategy
    p.op_to_schema_info[op] = RuntimeSchemaInfo(
        stock.static_argnum, [*(stock.static_kwargkey or ()), "cute_sharding"], stock.needs_pytree
    )


def restore(saved: Registration) -> None:
    for table, entry in zip(_tables(), saved.entries, strict=True):
        if entry is None:
            table.pop(saved.op, None)
        else:
            table[saved.op] = entry


def tag_compiled_graphs(tag: str | None) -> None:
    """Keep what torch.compile caches on disk under this tag apart from what it caches without, or
    with another: the graphs differ, and ranks must not mix them.

    None takes the tag away again.
    """
    kept = [
        part
        for part in torch.compiler.config.cache_key_tag.split(" ")
        if part and not part.startswith("cute_sharding:")
    ]
    torch.compiler.config.cache_key_tag = " ".join(
        kept + ([f"cute_sharding:{tag}"] if tag is not None else [])
    )


def clear_propagation_caches() -> None:
    """Forget every cached propagation of the Python cache in all threads (by a fresh cache object),
    and of this thread's C++ cache.

    For the C++ caches of other threads see :func:`install_strategy`.
    """
    p = _propagator()
    p.propagate_op_sharding = LocalLRUCache(p.propagate_op_sharding_non_cached)
    torch._C._clear_DTensor_sharding_propagator_cache()


def forget_compiled_code() -> None:
    """Have torch.compile's programs compiled anew at their next call: what they hold of placements
    is no longer so.
    """
    reset = getattr(sys.modules.get("torch._dynamo"), "reset_code_caches", None)
    if reset is not None:  # half imported, it has compiled nothing yet
        reset()


def is_symbolic(*values: Any) -> bool:
    """Whether a SymInt stands among the values (tracing with dynamic shapes)."""
    for value in values:  # every redistribution asks, several times
        if type(value) is not int and (
            is_symbolic(*value)
            if isinstance(value, (tuple, list))
            else isinstance(value, torch.SymInt)
        ):
            return True
    return False


def split_factors(spec: DTensorSpec) -> list[Any]:
    return [p.split_factor for p in spec.placements if isinstance(p, StridedShard)]


# Whether placements of this torch can hold a SymInt as their split factor, beside the number that
# C++ keeps.
_HOLDS_SYMBOLS = hasattr(_StridedShard, "_split_factor_int")


def strided_shard(dim: int, split_factor: Any) -> Placement:
    """A _StridedShard. Where the split factor is a SymInt, no guard is added yet: :func:`settled`
    adds it where the number is needed.
    """
    if not isinstance(split_factor, torch.SymInt):
        return _StridedShard(dim, split_factor=split_factor)
    if not (_HOLDS_SYMBOLS and Tracing.settles):
        return _StridedShard(dim, split_factor=int(split_factor))
    now: Any = split_factor.node.hint
    placement = _StridedShard(dim, split_factor=now)
    placement._symbolic_split_factor = split_factor
    Tracing.read_numbers()
    return placement


def _number(size: Any) -> int:
    """The value of a SymInt, with a guard that it has it. Of a symbol's exact part, or of a
    product, it is a guard on the symbols, of which torch then knows all.

    (A product alone would leave sizes half known, which turn out to be constants when the backward
    pass is traced: too late for what is to be made of its results.)
    """
    expr = size.node.expr
    if len(expr.free_symbols) > 1 and size.node.has_hint():
        for symbol in sorted(expr.free_symbols, key=str):
            int(size.node.shape_env.create_symintnode(symbol, hint=None))
    if type(expr).__name__ == "FloorDiv" and expr.args[0].is_Symbol and expr.args[1].is_Integer:
        from torch.utils._sympy.functions import Mod

        base, divisor = expr.args
        shape_env = size.node.shape_env
        if Mod(base, divisor) in shape_env.divisible:
            return int(shape_env.create_symintnode(base, hint=None)) // int(divisor)
    return int(size)


def settled(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements with numbers for split factors: where one is a SymInt, a guard says that it
    has the value that it has now.
    """
    if not any(
        isinstance(p, _StridedShard) and isinstance(p.split_factor, torch.SymInt)
        for p in placements
    ):
        return tuple(placements)  # itself: every read of DTensor.placements comes by here
    return tuple(
        [
            _StridedShard(p.dim, split_factor=_number(p.split_factor))
            if isinstance(p, _StridedShard) and isinstance(p.split_factor, torch.SymInt)
            else p
            for p in placements
        ]
    )


def settled_spec(spec: DTensorSpec) -> DTensorSpec:
    if not is_symbolic(*split_factors(spec)):
        return spec
    return DTensorSpec(
        spec.mesh,
        settled(spec.placements),
        spec.tensor_meta,
        spec.shard_order,
        spec.use_strided_shard_as_shard_order,
    )


def with_shape(spec: DTensorSpec, shape: Sequence[int]) -> DTensorSpec:
    """The spec of a tensor of another shape."""
    meta = TensorMeta(
        torch.Size(shape),
        row_major(tuple(shape)),
        spec.tensor_meta.dtype if spec.tensor_meta is not None else torch.float32,
    )
    order: Any = None if spec.use_strided_shard_as_shard_order else spec.shard_order
    return DTensorSpec(
        spec.mesh, spec.placements, meta, order, spec.use_strided_shard_as_shard_order
    )


def has_shape_env(*values: Any) -> bool:
    """Whether every SymInt among the values belongs to a trace (in LocalTensorMode there are
    others, which stand for a number on each rank).
    """
    return all(
        has_shape_env(*v)
        if isinstance(v, (tuple, list))
        else not isinstance(v, torch.SymInt) or hasattr(v.node, "shape_env")
        for v in values
    )


class Tracing:
    """What the compiler sees of DTensors, where torch stops short. Made, it is in force;
    :meth:`restore` puts torch's own back.

    2.13, 2.14 and 2.15 have each name that is replaced here, with the same arguments, and come by
    it. Where a later torch lacks one, that is logged, and :attr:`missing` names it.

    - A DTensor with _StridedShard placements that are no shard order, as views make them, cannot
      leave a compiled program or enter one: `__tensor_unflatten__` takes them for an order.
    - A split factor that is a SymInt is believed to be what it is now (`_guarded_hint_int` leaves
      an assertion for later calls to trip over). Here it is a guard, and only where the number is
      needed: in what leaves the program, in a redistribution, in what the program itself reads.
    - The sizes of a local tensor are known to be those that the placements give it, not other
      symbols.
    - They are worked out by ``local_size(rows, *cuts)``, each cut (split factor, devices,
      coordinate), which needs no guard on whether sizes divide.
    - Global sizes that are constants of a program are guarded: torch looks at those of local
      tensors only, which may be the same.
    - An expression that the tracer has not met before is put together from what it has, also where
      it has powers (2.13 has no function for them), products of three (2.13 and 2.14 call one of
      two with them) or maxima of three (all three call functions that Inductor does not know). What
      it knows to compute a symbol stays as it is: torch takes `max(s, 1)`, which is s again, for
      the way to s, and then looks for s without end.
    - An op that can run on its inputs as they are is asked about that first: torch weighs every
      other way to shard them too, each with guards on the sizes. So it is also where nothing is
      compiled and an input has _StridedShard placements: to weigh a way is then a search, of which
      a mesh of three dims has a thousand (half a minute, for `detach` from 2.14 on; ten seconds for
      arithmetic in 2.13).
    - Where Inductor is to overlap communication with computation
      (`reorder_for_compute_comm_overlap`) and is given no way to, as since 2.13 it is not, waits
      sink to where they are needed.
    - An in-place squeeze changes the shape of a DTensor whose placements stay.
    - A compiled program that returns a view of its input makes it again by `as_strided`, which
      torch refuses for DTensors that are not as before: ``as_view(tensor, size, stride, offset)``.
    """

    settles = False  # whether split factors become numbers where they leave a compiled program
    _in_force: Tracing | None = None

    def __init__(
        self,
        local_size: Callable[..., Any],
        equate: Callable[..., None],
        as_view: Callable[..., torch.Tensor | None],
    ) -> None:
        self._local_size, self._equate, self._as_view = local_size, equate, as_view
        self._stock: list[tuple[Any, str, Any]] = []
        self.missing: list[str] = []
        self._knows_compiler = self._reads_numbers = False
        Tracing._in_force = self
        try:
            self._replace(
                (DTensor, "__tensor_flatten__", self._flatten),
                (DTensor, "__tensor_unflatten__", self._unflatten),
                (_sharding_prop, "compute_local_shape_and_global_offset", self._local),
                (_sharding_prop, "_expand_single_dim_strategy_to_mesh", self._as_they_are),
                (_StridedShard, "local_shard_size_and_offset", self._strided),
                (
                    _StridedShard,
                    "_split_factor_int",
                    lambda stock: (
                        lambda placement: (
                            _number(placement.split_factor)
                            if isinstance(placement.split_factor, torch.SymInt)
                            else stock(placement)
                        )
                    ),
                ),
                (_placement_types, "_guarded_hint_int", self._number),
            )
            for name, handler in _VIEWS_IN_PLACE.items():
                _handlers().setdefault(overload(name), handler)
        except BaseException:
            self.restore()
            raise

    def _meet_compiler(self) -> None:
        """Replace what belongs to the compiler, once there is one: importing it takes as long as
        the rest of torch, and most programs do without.
        """
        if self._knows_compiler or "torch._dynamo" not in sys.modules:
            return
        self._knows_compiler = True
        import torch._inductor.config as inductor
        from torch._dynamo import output_graph
        from torch._functorch._aot_autograd import runtime_wrappers, subclass_utils
        from torch.fx.experimental import proxy_tensor, symbolic_shapes

        self._replace(
            (symbolic_shapes.ShapeEnv, "produce_guards_verbose", _on_global_sizes),
            (output_graph.OutputGraph, "compile_and_call_fx_graph", self._outputs),
            (subclass_utils, "create_subclass_metadata", self._metadata),
            (runtime_wrappers, "gen_alias_from_base", self._alias),
            (proxy_tensor, "_build_proxy_for_sym_expr", _binary),
            (proxy_tensor, "set_proxy_slot", _first_wins),
            (proxy_tensor, "_sympy_handlers", _with_plain_functions),
        )
        Tracing.settles = hasattr(subclass_utils, "create_subclass_metadata")
        if not inductor.reorder_for_compute_comm_overlap_passes:
            self._replace(
                (inductor, "reorder_for_compute_comm_overlap_passes", lambda stock: ["sink_waits"])
            )

    def _replace(self, *wrappers: tuple[Any, str, Callable[[Any], Any]]) -> None:
        for owner, name, wrap in wrappers:
            stock = vars(owner).get(name, getattr(owner, name, None))
            if stock is None:  # every torch that was checked has each of them
                self.missing.append(f"{owner.__name__}.{name}")
                logger.warning(
                    "torch %s has no %s: what cute_sharding mends there stays as torch has it (see "
                    "compat.Tracing)",
                    torch.__version__,
                    self.missing[-1],
                )
                continue
            self._stock.append((owner, name, stock))
            setattr(
                owner,
                name,
                staticmethod(wrap(stock.__func__))
                if isinstance(stock, staticmethod)
                else wrap(stock),
            )

    def names(self) -> list[str]:
        """What is replaced."""

        def module_of(owner: Any) -> str:
            return f"{owner.__module__}." if isinstance(owner, type) else ""

        attributes = [
            f"{module_of(owner)}{owner.__name__}.{name}" for owner, name, _ in self._stock
        ]
        return attributes + [
            f"the handler of {op}"
            for op, handler in _handlers().items()
            if handler in _VIEWS_IN_PLACE.values()
        ]

    @classmethod
    def read_numbers(cls) -> None:
        """From the first split factor on that is a SymInt, ``DTensor.placements`` reads as numbers.
        (Not before: programs read it at every step.)
        """
        tracing = cls._in_force
        if tracing is not None and not tracing._reads_numbers:
            tracing._reads_numbers = True
            tracing._replace((DTensor, "placements", tracing._read))

    def _read_as_they_are(self) -> None:
        """No split factor is a SymInt any more: the program has been compiled."""
        if self._reads_numbers:
            self._reads_numbers = False
            for entry in [entry for entry in self._stock if entry[:2] == (DTensor, "placements")]:
                self._stock.remove(entry)
                setattr(*entry)

    def restore(self) -> None:
        Tracing.settles, Tracing._in_force = False, None
        ours = [op for op, kept in _handlers().items() if kept in _VIEWS_IN_PLACE.values()]
        for op in ours:
            del _handlers()[op]
        while self._stock:
            owner, name, value = self._stock.pop()
            setattr(owner, name, value)

    def _read(self, stock: property) -> property:
        return property(lambda tensor: settled(tensor._spec.placements), doc=stock.__doc__)

    def _flatten(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def __tensor_flatten__(tensor: DTensor) -> Any:
            self._meet_compiler()
            return stock(tensor)

        return __tensor_flatten__

    def _unflatten(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def __tensor_unflatten__(
            inner: dict[str, Any], context: Any, size: Any, stride: Any
        ) -> Any:
            placements, meta, order, requires_grad = context
            local, mesh = inner["_local_tensor"], inner["device_mesh"]
            if is_symbolic(tuple(size)) and has_shape_env(tuple(size)):
                expected = self._local_shape(size, mesh, placements)
                for actual, wanted in zip(local.shape, expected or ()):
                    self._equate(actual, wanted, size)
            if order is None or not any(isinstance(p, _StridedShard) for p in placements):
                return stock(inner, context, size, stride)
            spec = DTensorSpec(
                mesh,
                placements,
                TensorMeta(size, stride, meta.dtype),
                order,
                use_strided_shard_as_shard_order=False,
            )
            return DTensor(local, spec, requires_grad=requires_grad)

        return __tensor_unflatten__

    def _local_shape(
        self, shape: Sequence[Any], mesh: Any, placements: Sequence[Placement]
    ) -> tuple[Any, ...] | None:
        """The shape of this rank's local tensor where global sizes are symbolic; None where it
        cannot be said.
        """
        device = mesh.get_coordinate()
        if device is None:
            return None
        cuts: list[list[Any]] = [[] for _ in shape]
        for placement, parts, coordinate in zip(placements, mesh.shape, device):
            if isinstance(placement, (Shard, _StridedShard)):
                cuts[placement.dim].append(
                    (getattr(placement, "split_factor", 1), parts, coordinate)
                )
        local = tuple(
            [self._local_size(n, *chain) if chain else n for n, chain in zip(shape, cuts)]
        )
        return None if any(n is None for n in local) else local

    def _strided(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def local_shard_size_and_offset(
            placement: Any, curr_local_size: Any, num_chunks: int, rank: Any, offset_mode: Any = 0
        ) -> Any:
            sizes = curr_local_size, placement.split_factor
            if (
                is_symbolic(*sizes)
                and has_shape_env(*sizes)
                and type(rank) is int
                and offset_mode != _ALL_OFFSETS
            ):
                size = self._local_size(curr_local_size, (placement.split_factor, num_chunks, rank))
                if size is not None:
                    piece = -(-curr_local_size // placement.split_factor)
                    return size, rank * -(-piece // num_chunks)
            return stock(placement, curr_local_size, num_chunks, rank, offset_mode)

        return local_shard_size_and_offset

    def _as_they_are(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """torch's expansion of a strategy for one mesh dim to the mesh, which first tries the
        placements that the inputs have where weighing the others costs much: it would choose them.
        """

        def _expand_single_dim_strategy_to_mesh(
            mesh: Any, schema: OpSchema, info: Any, metas: Any
        ) -> Any:
            expanded = stock(mesh, schema, info, metas)
            # By kind, for == would compare sizes, which unbacked ones do not take. Lists may hold
            # some, too: those of an index_put.
            inputs = [arg for arg in schema.args_schema if isinstance(arg, OpStrategy)]
            everywhere = [
                leaf
                for leaf in tree_leaves((schema.args_schema, schema.kwargs_schema))
                if isinstance(leaf, StrategyType)
            ]
            name = schema.op.name().split("::")[1].split(".")[0]
            if (
                len(everywhere) != len(inputs)
                or name.endswith("_")
                or schema.is_out_variant_op()
                or any(len(arg.strategies) != 1 or arg.mesh != mesh for arg in inputs)
            ):
                return expanded
            specs = [arg.strategies[0].output_spec for arg in inputs]
            if not is_symbolic(*(tuple(spec.shape) for spec in specs)) and not _are_strided(specs):
                return expanded

            def expanded_strategy(op: Any, args: Any, kwargs: Any) -> Any:
                prepared = _single_dim_strategy._PreparedSingleDimStrategy(
                    info, schema, metas, num_inputs=len(specs)
                )
                found = prepared.try_propagate(
                    mesh, tuple([spec.placements for spec in specs]), specs
                )
                # From 2.14 on an op may also refuse placements of the whole mesh, each dim of which
                # it would take: a mean those of uneven rows.
                suits = getattr(prepared, "full_mesh_strategy_filter", None)
                if found is None or (
                    suits is not None
                    and not suits(
                        mesh,
                        schema,
                        found.strategies[0].input_specs,
                        found.strategies[0].output_specs,
                    )
                ):
                    return expanded(op, args, kwargs)
                return found

            return expanded_strategy

        return _expand_single_dim_strategy_to_mesh

    def _outputs(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def compile_and_call_fx_graph(
            graph: Any, tx: Any, outputs: Any, *args: Any, **options: Any
        ) -> Any:
            for output in outputs:
                tensor = output.as_proxy().node.meta.get("example_value")
                if isinstance(tensor, DTensor):
                    tensor._spec = settled_spec(tensor._spec)
            try:
                return stock(graph, tx, outputs, *args, **options)
            finally:
                self._read_as_they_are()

        return compile_and_call_fx_graph

    def _alias(self, stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def gen_alias_from_base(
            base: torch.Tensor, like: torch.Tensor, requires_grad: bool, *args: Any, **options: Any
        ) -> torch.Tensor:
            view = (
                self._as_view(base, like.size(), like.stride(), like.storage_offset())
                if isinstance(base, DTensor) and isinstance(like, DTensor)
                else None
            )
            if view is None:
                return stock(base, like, requires_grad, *args, **options)
            if view.requires_grad and not requires_grad:
                return view.detach()
            return view.requires_grad_(requires_grad) if requires_grad else view

        return gen_alias_from_base

    def _metadata(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def create_subclass_metadata(tensor: Any, *args: Any, **options: Any) -> Any:
            if isinstance(tensor, DTensor):
                tensor._spec = settled_spec(tensor._spec)
            return stock(tensor, *args, **options)

        return create_subclass_metadata

    def _local(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def compute_local_shape_and_global_offset(
            shape: Any, mesh: Any, placements: Any, skip_offset: bool = False
        ) -> Any:
            if skip_offset and is_symbolic(tuple(shape)) and has_shape_env(tuple(shape)):
                local = self._local_shape(shape, mesh, placements)
                if local is not None:
                    return local, ()
            return stock(shape, mesh, placements, skip_offset)

        return compute_local_shape_and_global_offset

    def _number(self, stock: Callable[..., int]) -> Callable[..., int]:
        def _guarded_hint_int(value: Any, *, reason: str) -> int:
            return (
                _number(value)
                if isinstance(value, torch.SymInt) and value.node.has_hint()
                else stock(value, reason=reason)
            )

        return _guarded_hint_int


def _squeeze_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``squeeze_`` of a DTensor. torch changes the local tensor, and the spec only where placements
    change with it: else the DTensor keeps the shape that it had.

    Raises:
        RuntimeError: a dim that goes is sharded. In place nothing can be moved, whatever views may
            do elsewhere.
    """
    tensor, *dims = args
    ndim, spec = tensor.ndim, tensor._spec
    asked = (
        range(ndim)
        if not dims
        else [d % ndim for d in ([dims[0]] if isinstance(dims[0], int) else dims[0])]
        if ndim
        else []
    )
    gone = {d for d in asked if tensor.shape[d] == 1}
    for m, placement in enumerate(spec.placements):
        if (
            isinstance(placement, (Shard, _StridedShard))
            and placement.dim in gone
            and spec.mesh.size(m) > 1
        ):
            raise RuntimeError(
                f"{name_of(op)} of a DTensor of shape {tuple(tensor.shape)} with placements "
                f"{spec.placements}: dim {placement.dim} is sharded on mesh dim {m}, and to "
                "squeeze it in place cannot be done "
                "without communication, which nothing in place can have. Take squeeze, not "
                "squeeze_, or redistribute the tensor first."
            )
    squeezed = getattr(torch.ops.aten.squeeze, op._overloadname)(tensor, *dims, **kwargs)
    if spec.mesh._is_current_rank_part_of_mesh():
        tensor._local_tensor.squeeze_(tuple(gone))
    tensor._spec = squeezed._spec
    return return_and_correct_aliasing(op, args, kwargs, tensor)


def _turn_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``t_``, ``transpose_`` and ``unsqueeze_`` of a DTensor, for which torch has no rule: the view
    that gives a new tensor is free on any placements, so spec and local tensor change alike.
    """
    tensor, *arguments = args
    turned = _TURNS[name_of(op)](tensor, *arguments, **kwargs)
    if tensor._spec.mesh._is_current_rank_part_of_mesh():
        op(tensor._local_tensor, *arguments, **kwargs)
    tensor._spec = turned._spec
    return return_and_correct_aliasing(op, args, kwargs, tensor)


_TURNS = {
    "t_.default": torch.ops.aten.t.default,
    "transpose_.default": torch.ops.aten.transpose.int,
    "unsqueeze_.default": torch.ops.aten.unsqueeze.default,
}
_VIEWS_IN_PLACE = {
    **dict.fromkeys(("squeeze_.default", "squeeze_.dim", "squeeze_.dims"), _squeeze_in_place),
    **dict.fromkeys(_TURNS, _turn_in_place),
}


def _handlers() -> dict[Any, Any]:
    """torch's own functions for ops that are no matter of propagation, by op."""
    return DTensor._op_dispatcher._custom_op_handlers


def _are_strided(specs: Sequence[DTensorSpec]) -> bool:
    """Whether some have _StridedShard placements, and no two of all are to be read in different
    ways.
    """
    read = {spec.use_strided_shard_as_shard_order for spec in specs if split_factors(spec)}
    return len(read) == 1 and all(
        split_factors(spec) or DTensorSpec.is_default_device_order(spec.shard_order)
        for spec in specs
    )


def _binary(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that finds how to compute an expression, with powers, long products and long
    maxima as ones of two.
    """
    from torch.fx.experimental import proxy_tensor

    def _build_proxy_for_sym_expr(tracer: Any, expr: Any, out: Any = None) -> Any:
        if expr in tracer.sympy_expr_tracker:
            return stock(tracer, expr, out)
        if getattr(expr, "is_Pow", False) and expr.exp.is_Integer and expr.exp > 1:
            parts = expr.base ** (expr.exp - 1), expr.base
        elif type(expr).__name__ in ("Mul", "Max", "Min") and len(expr.args) > 2:
            parts = expr.func(*expr.args[:-1]), expr.args[-1]
        else:
            return stock(tracer, expr, out)
        args = [_build_proxy_for_sym_expr(tracer, part) for part in parts]
        if any(arg is None for arg in args):
            return None
        function: Any = {"Max": torch.sym_max, "Min": torch.sym_min}.get(
            type(expr).__name__, operator.mul
        )
        if out is None:
            return function(*args)
        proxy_tensor._sym_register(tracer, function, tuple(args), out)
        return out

    return _build_proxy_for_sym_expr


def _on_global_sizes(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's guards on the inputs of a program, and beside them those on global sizes of DTensors
    that are constants of it.

    torch leaves all guards on constants to its checks of plain tensors, which see local sizes. To
    have it write all of them out would be too much: also offsets of local tensors, and sizes of
    what they are views of, would then be guarded, and programs compiled again for nothing.
    """

    def produce_guards_verbose(
        shape_env: Any,
        placeholders: Any,
        sources: Any,
        source_ref: Any = lambda source: source.name,
        *,
        ignore_static: bool = True,
        **options: Any,
    ) -> Any:
        found = stock(
            shape_env, placeholders, sources, source_ref, ignore_static=ignore_static, **options
        )
        if not ignore_static or options.get("_simplified"):
            return found  # all are there, or only those of interest are wanted
        for source, n in _constant_sizes(placeholders, sources).items():
            for guards in found:
                guards.exprs.append(f"{_in_language_of(guards, source, source_ref)} == {n}")
        return found

    return produce_guards_verbose


def _constant_sizes(placeholders: Sequence[Any], sources: Sequence[Any]) -> dict[Any, int]:
    """The global sizes of DTensors among the inputs that are numbers, by their source."""
    from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource

    found = {}
    for value, source in zip(placeholders, sources):
        if isinstance(value, DTensor):
            sizes: tuple[Any, ...] = tuple(value.size())
            for dim, n in enumerate(sizes):
                number = n.node.maybe_as_int() if isinstance(n, torch.SymInt) else n
                if number is not None:
                    found[
                        TensorPropertySource(
                            LocalSource(source) if isinstance(source, str) else source,
                            TensorProperty.SIZE,
                            dim,
                        )
                    ] = number
    return found


def _in_language_of(guards: Any, source: Any, source_ref: Callable[[Any], str]) -> str:
    """A source as guards name it: Python by an expression, C++ by a variable."""
    symbols = getattr(guards, "source_to_symbol", None)
    if symbols is None:
        return source_ref(source)
    if source not in symbols:
        import sympy

        symbols[source] = sympy.Symbol(f"global_size_{len(symbols)}")
    return str(symbols[source])


def _with_plain_functions(stock: Callable[[], dict[Any, Any]]) -> Callable[[], dict[Any, Any]]:
    """torch's functions for kinds of expressions. Where it has its own for Max and Min, that
    Inductor does not know, torch.sym_max and torch.sym_min: see :func:`_binary`.
    """

    from torch.fx.experimental import proxy_tensor

    plain = {
        getattr(proxy_tensor, "_nary_sym_max", None): torch.sym_max,
        getattr(proxy_tensor, "_nary_sym_min", None): torch.sym_min,
    }

    def _sympy_handlers() -> dict[Any, Any]:
        return {kind: plain.get(function, function) for kind, function in stock().items()}

    return _sympy_handlers


def _first_wins(stock: Callable[..., None]) -> Callable[..., None]:
    def set_proxy_slot(value: Any, tracer: Any, proxy: Any) -> None:
        expr = value.node.expr if isinstance(value, torch.SymInt) else None
        known = tracer.sympy_expr_tracker.get(expr) if expr is not None else None
        stock(value, tracer, proxy)
        if known is not None:
            tracer.sympy_expr_tracker[expr] = known

    return set_proxy_slot


_ALL_OFFSETS = (
    getattr(_placement_types, "_StridedShardOffsetMode", None)
    and _placement_types._StridedShardOffsetMode.ALL
)


def check_shard_order(spec: DTensorSpec, op: str) -> None:
    """Refuse a spec whose placements do not apply left to right: propagation reads them so, as
    torch's rules do.
    """
    order = spec.shard_order
    if (
        order is not None
        and not spec.use_strided_shard_as_shard_order
        and not DTensorSpec.is_default_device_order(order)
    ):
        raise RuntimeError(
            f"{op}: the input's placements {spec.placements} apply in the shard order {order}, not "
            "left to right. "
            "Redistribute it to the default order, or say the order with _StridedShard placements, "
            "first."
        )


def decodes_to_shard_order(spec: DTensorSpec) -> bool:
    """Whether torch reads the _StridedShard placements of ``spec`` as what they are.

    It takes those of a spec that a user makes for a shard order. On a mesh of several dims, split
    factors that no order has make its redistribution silently wrong, or raise half way (2.13 and
    2.15 alike). Specs that propagation makes are not read so, and are moved rightly.
    """
    if not spec.use_strided_shard_as_shard_order:
        return True
    return (
        DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple(spec.placements), spec.mesh)
        is not None
    )


def shard_order(spec: DTensorSpec) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """The (tensor dim, mesh dims in the order in which they cut) that ``spec`` says or that torch
    decodes from it; None where it is left to right, or no order.
    """
    if spec.use_strided_shard_as_shard_order:
        return decoded_order(tuple(spec.placements), spec.mesh)
    order = spec.shard_order
    if order is None or DTensorSpec.is_default_device_order(order):
        return None
    if any(isinstance(p, StridedShard) for p in spec.placements):
        raise NotImplementedError(
            f"placements {spec.placements} in the shard order {order}: say the order by "
            "_StridedShard alone, or by Shard placements and an order"
        )
    return tuple([(entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order])


def decoded_order(
    placements: tuple[Placement, ...], mesh: Any
) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """The shard order for which torch takes the _StridedShard placements of a spec that a program
    made; None without any, or where no order has these split factors.
    """
    if not any(isinstance(p, StridedShard) for p in placements):
        return None
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh)
    return (
        None
        if order is None
        else tuple([(entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order])
    )


def is_tracing() -> bool:
    """Whether what runs now becomes part of a graph."""
    return bool(_are_we_tracing())


def _placed(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    """``spec`` with other placements, applied left to right."""
    return DTensorSpec(
        mesh=spec.mesh,
        placements=placements,
        tensor_meta=spec.tensor_meta,
        use_strided_shard_as_shard_order=False,
    )


def op_spec(
    given: OpStrategy,
    spec: DTensorSpec,
    mesh: Any,
    source: tuple[Placement, ...],
    output: tuple[Placement, ...],
) -> OpSpec:
    """The strategy entry: input placements, output placements and what the redistribution between
    costs by torch's model.
    """
    wanted = spec
    if source != tuple(spec.placements):
        wanted = _placed(spec, source)
    return OpSpec(
        output_specs=DTensorSpec(
            mesh=mesh, placements=output, use_strided_shard_as_shard_order=False
        ),
        input_specs=(wanted,),
        redistribute_cost=[generate_redistribute_costs(given, wanted)],
    )


# -- redistribution --------------------------------------------------------------------------------


def rank_lists(mesh: Any) -> list[list[int]]:
    """The ranks of the mesh, row-major; where it is a slice of a larger one, those of every such
    slice.
    """
    with no_modes():
        return mesh._layout.remap_to_tensor(mesh._rank_map).flatten(1).tolist()


def has_groups(mesh: Any) -> bool:
    """Whether the mesh was made with process groups."""
    return bool(getattr(mesh, "_dim_group_names", None))


def layout_of(mesh: Any, dims: Sequence[int]) -> tuple[Any, ...]:
    """How the ranks lie on those mesh dims: the same for a slice of a mesh and for the mesh that it
    is of.
    """
    return mesh._flatten_rank_map, tuple([mesh._layout[m] for m in dims])


def this_rank() -> int:
    """This process's rank, as a number also where every rank runs in this process."""
    return dist.group.WORLD.rank()  # type: ignore[union-attr]


def flattened_mesh(mesh: Any, dims: tuple[int, ...]) -> Any | None:
    """The mesh that the program made of those mesh dims by flattening them, or None."""
    return _redistribute._get_flattened_mesh_by_layout_impl(mesh, dims)


def group_of_dim(mesh: Any, dim: int) -> Any:
    """The process group of a mesh dim."""
    group = _living(mesh.get_group(dim))
    if group is None:
        raise RuntimeError(f"the process group of dim {dim} of the mesh {mesh} is gone")
    return group


def group_of_flattened(mesh: Any) -> Any | None:
    """The process group of a mesh that a program made by flattening; None where it is gone."""
    try:
        return _living(mesh.get_group())
    except RuntimeError:
        return None


def _living(group: Any) -> Any | None:
    """The group that has the name of ``group`` now; None where none has.

    torch caches specs, and so hands out meshes of a process group that has been destroyed, which
    equal those of the one after it. Its collectives go by name and do not notice; but while it
    compiles, such a mesh gives the group that it had.
    """
    if not isinstance(group, dist.ProcessGroup) or group in distributed_c10d._world.pg_map:
        return group
    c10d: Any = distributed_c10d
    try:
        return c10d._resolve_process_group(group.group_name)
    except RuntimeError:
        return None


def flattenings(mesh: Any) -> tuple[Any, ...]:
    """The layouts of the meshes that the program has made of this one's root by flattening it, and
    whose groups it has not destroyed.
    """
    return tuple(
        [
            flattened._layout
            for flattened in mesh._get_root_mesh()._flatten_mapping.values()
            if group_of_flattened(flattened) is not None
        ]
    )


def new_groups(
    slices: list[list[int]], mesh: Any, name: str, timeout: Any, pg_options: Any
) -> Any | None:
    """A process group of each of those lists of ranks, which all ranks of the world make in that
    order; the one of this rank is returned, if any.

    Of the backend of the mesh's own groups, with their timeout unless one is given. Where NCCL was
    given a device, groups are split off the world's communicator all at once, as DeviceMesh does.
    """
    world: Any = dist.group.WORLD
    like = group_of_dim(mesh, 0) if mesh._is_current_rank_part_of_mesh() else world
    backend, rank = dist.get_backend(like), this_rank()
    if timeout is None:
        timeout = timeout_of(like, mesh.device_type)
    with no_modes():
        # By what all ranks know alike, also those outside of the mesh.
        everybody = sum(map(len, slices)) == dist.get_world_size()
        if (
            everybody
            and world.bound_device_id is not None
            and backend == dist.get_backend(world) == "nccl"
        ):
            return dist.split_group(
                world, slices, timeout=timeout, pg_options=pg_options, group_desc=name
            )
        made = [
            dist.new_group(
                ranks, timeout=timeout, backend=backend, pg_options=pg_options, group_desc=name
            )
            for ranks in slices
        ]
    return next((group for group, ranks in zip(made, slices) if rank in ranks), None)


def timeout_of(group: Any, device_type: str) -> Any | None:
    """How long the group's collectives wait; None where its backend does not say."""
    try:
        return group._get_backend(torch.device(device_type)).options._timeout
    except (RuntimeError, AttributeError):
        return None


def backend_name(group: Any, device_type: str) -> str | None:
    """The name of the group's backend for a kind of device; None where it has none."""
    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return None


def averages(group: Any, device_type: str) -> bool:
    """Whether the group's backend can average, so that halves do not overflow: NCCL scales
    contributions before it sums them.
    """
    return backend_name(group, device_type) == "nccl"


def no_modes() -> Any:
    """Outside of tracing, for what is not to become part of the graph."""
    return _disable_current_modes()


def local_tensor_mode() -> Any | None:
    """The mode that runs every rank in this process, if it is on."""
    return enabled_local_tensor_mode()


@contextmanager
def all_ranks(world: int) -> Iterator[None]:
    """Every rank of a world runs in this process inside the ``with`` block, each op on the tensors
    of all. Makes a process group that communicates with nobody, where there is none.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made = not dist.is_initialized()
    if made:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with LocalTensorMode(world):
            yield
    finally:
        if made:
            dist.destroy_process_group()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a subclass that wraps others (a float8 tensor with its scale): it has
    its own ways to be split and gathered.
    """
    return is_traceable_wrapper_subclass(tensor) and not isinstance(
        tensor, (LocalTensor, funcol.AsyncCollectiveTensor)
    )


def is_imagined(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data: it is on meta, or a fake of a tensor."""
    return tensor.is_meta or isinstance(in_flight(tensor), FakeTensor)


def local_of(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's tensor of a LocalTensor."""
    return tensor._local_tensors[rank] if isinstance(tensor, LocalTensor) else tensor


def parts_of(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """The local tensors that are at hand, by rank: those of a LocalTensor; of another the tensor
    itself, as rank -1.
    """
    return dict(tensor._local_tensors) if isinstance(tensor, LocalTensor) else {-1: tensor}


def local_tensor(parts: dict[int, torch.Tensor]) -> torch.Tensor:
    """The inverse of :func:`parts_of`."""
    return parts[-1] if -1 in parts else LocalTensor(parts)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a local tensor; of a LocalTensor that of its first rank. torch keeps the
    object, and what is set on it, for as long as there is the memory.
    """
    return next(iter(parts_of(tensor).values())).untyped_storage()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other tensors lie in the memory of a local tensor, or may. (A tensor holds it once,
    and so does its own object.)
    """
    return any(
        torch._C._storage_Use_Count(part.untyped_storage()._cdata) > 2
        for part in parts_of(tensor).values()
    )


def with_specs(found: OutputSharding, specs: Sequence[DTensorSpec]) -> OutputSharding:
    """torch's answer for what an op writes to, with those specs."""
    return (
        found
        if found.output_spec is None
        else OutputSharding(specs[0] if len(specs) == 1 else tuple(specs))
    )


def local_int(values: dict[int, int]) -> Any:
    """An int that may differ from rank to rank."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return torch.SymInt(LocalIntNode(values))


# -- collectives -----------------------------------------------------------------------------------
#
# torch's functional ones. What they give may not have ended: it is to be :func:`waited` for.
# Eagerly it is wrapped without the custom op that torch wraps with for autograd's sake, which costs
# the host as much as the collective itself; redistribution is an autograd function of its own.

_c10d: Any = torch.ops._c10d_functional


def all_to_all(
    buffer: torch.Tensor, receives: list[Any], sends: list[Any], group: Any
) -> torch.Tensor:
    if not _is_plain(buffer):
        return funcol.all_to_all_single(buffer, receives, sends, group)
    return funcol.AsyncCollectiveTensor(
        _c10d.all_to_all_single(buffer, receives, sends, group.group_name)
    )


def all_gather(tensor: torch.Tensor, group: Any, dim: int = 0) -> torch.Tensor:
    if not _is_plain(tensor):
        return funcol.all_gather_single(tensor, dim, group)
    parts, outer = group.size(), tensor.shape[:dim]
    blocks: torch.Tensor = _c10d.all_gather_into_tensor(tensor, parts, group.group_name)
    if prod(outer) == 1:
        return funcol.AsyncCollectiveTensor(
            blocks.view(*outer, parts * tensor.shape[dim], *tensor.shape[dim + 1 :])
            if dim
            else blocks
        )
    return torch.cat(awaited(blocks).chunk(parts), dim)


def reduce_scatter(tensor: torch.Tensor, op: str, group: Any, dim: int = 0) -> torch.Tensor:
    if dim or not _is_plain(tensor):
        return funcol.reduce_scatter_single(tensor, op, dim, group)
    return funcol.AsyncCollectiveTensor(
        _c10d.reduce_scatter_tensor(tensor, op.lower(), group.size(), group.group_name)
    )


def all_reduce(tensor: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    if not _is_plain(tensor):
        return funcol.all_reduce(tensor, op, group)
    return funcol.AsyncCollectiveTensor(_c10d.all_reduce(tensor, op.lower(), group.group_name))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the program runs as it is: neither traced nor as all ranks in one process; and
    autograd does not look.
    """
    return not (
        is_tracing()
        or local_tensor_mode() is not None
        or (tensor.requires_grad and torch.is_grad_enabled())
    )


@dataclass(frozen=True)
class Redistribution:
    """torch's own redistribution: of a local tensor, and of the arguments of an op."""

    local_tensor: Callable[..., torch.Tensor]
    local_args: Callable[..., None]


# The modules that have taken redistribute_local_tensor by name.
REDISTRIBUTION_USERS = (_redistribute, _dispatch, _api)


def redistribution() -> Redistribution:
    """torch's own, as it is now.

    Raises:
        RuntimeError: this torch redistributes elsewhere, and nothing would come by here.
    """
    needed: list[tuple[Any, str]] = [
        *((module, "redistribute_local_tensor") for module in REDISTRIBUTION_USERS),
        (_dispatch.OpDispatcher, "redistribute_local_args"),
    ]
    for owner, name in needed:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"torch {torch.__version__} has no {owner.__name__}.{name}: cute_sharding cannot "
                "redistribute there"
            )
    return Redistribution(
        _redistribute.redistribute_local_tensor, _dispatch.OpDispatcher.redistribute_local_args
    )


def moves(op_info: Any, schema: OpSchema) -> bool:
    """Whether an argument of the op is to be redistributed first: whether its placements are others
    in ``schema``, of what the op is to be given.
    """
    wanted = (
        tree_leaves(schema.args_schema)
        if op_info.args_tree_spec is not None
        else schema.args_schema
    )
    return any(
        isinstance(spec, DTensorSpec) and spec != other
        for spec, other in zip(op_info.flat_args_schema, wanted)
    )


def viewed(op_info: Any, schema: OpSchema) -> tuple[DTensorSpec, DTensorSpec] | None:
    """The spec of what a view op is given, and to what that is redistributed first; None where it
    is not.
    """
    first = schema.args_schema[0] if schema.args_schema else None
    if not isinstance(first, DTensorSpec) or not schema.op._schema._is_view_op():
        return None
    spec = op_info.flat_args_schema[0]
    return None if tuple(spec.placements) == tuple(first.placements) else (spec, first)


def install_redistribution(
    local_tensor: Callable[..., torch.Tensor], local_args: Callable[..., None]
) -> None:
    for module in REDISTRIBUTION_USERS:
        module.redistribute_local_tensor = local_tensor  # type: ignore[attr-defined]
    dispatcher: Any = _dispatch.OpDispatcher
    dispatcher.redistribute_local_args = staticmethod(local_args)


def restore_redistribution(saved: Redistribution) -> None:
    install_redistribution(saved.local_tensor, saved.local_args)


def unbound_spec(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]
) -> DTensorSpec:
    """The spec of a tensor that a user makes, on a mesh of those sizes as its first rank sees it.
    No process group is needed, and none is made.
    """
    with no_modes():
        devices = DeviceMesh(
            "cpu", torch.arange(prod(mesh)).reshape(tuple(mesh)), _init_backend=False, _rank=0
        )
    return DTensorSpec(
        devices,
        tuple(placements),
        TensorMeta(torch.Size(shape), row_major(tuple(shape)), torch.float32),
    )


def stock_transforms(source: DTensorSpec, target: DTensorSpec) -> list[Any]:
    """torch's own steps from one spec to another: each has ``mesh_dim``, ``src_dst_placements`` and
    ``logical_shape``.

    torch keeps planners, and they keep what earlier plans led to; so this one starts afresh, and
    leaves those of the program alone.
    """
    kept, _redistribute._planner_cache = _redistribute._planner_cache, {}
    try:
        with maybe_disable_local_tensor_mode():
            return list(_redistribute._gen_transform_infos_non_cached(source, target))
    finally:
        _redistribute._planner_cache = kept


def reduce_value(
    placement: Placement, tensor: torch.Tensor, mesh: Any, mesh_dim: int
) -> torch.Tensor:
    """Finish a pending reduction as the placement itself does."""
    return waited(placement._reduce_value(tensor, mesh, mesh_dim))  # type: ignore[attr-defined]


def reduce_shard_value(
    placement: Placement, tensor: torch.Tensor, mesh: Any, mesh_dim: int, shard: Placement
) -> torch.Tensor:
    """Finish a pending reduction as the placement itself does, and keep this rank's share of the
    result.
    """
    of_its_own: Any = placement
    return waited(of_its_own._reduce_shard_value(tensor, mesh, mesh_dim, shard))


def partition_value(
    placement: Placement, tensor: torch.Tensor, mesh: Any, mesh_dim: int
) -> torch.Tensor:
    """This rank's contribution to a pending reduction that is to give ``tensor``."""
    return placement._partition_value(tensor, mesh, mesh_dim)  # type: ignore[attr-defined]


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run inside the ``with`` block. (torch's CommDebugMode needs
    numpy, which comes with no torch.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own ops come by here as well
        if func.namespace in ("_c10d_functional", "_dtensor") and func._opname not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            self.count += 1
        return func(*args, **(kwargs or {}))


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as a graph has what comes of a collective: no compiler leaves that out."""
    result: torch.Tensor = _c10d.wait_tensor(tensor)
    return result


def in_flight(tensor: torch.Tensor) -> torch.Tensor:
    """What a collective writes to, which may not have ended."""
    return tensor.elem if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def waited(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


# -- ops beside views ------------------------------------------------------------------------------


def specs_of(schema: OpSchema) -> list[DTensorSpec]:
    """The specs of all tensors that an op is given, in the order of its arguments."""
    return [
        leaf
        for leaf in tree_leaves((schema.args_schema, schema.kwargs_schema))
        if isinstance(leaf, DTensorSpec)
    ]


def keeps_any_cut(op: torch._ops.OpOverload) -> bool:
    """Whether torch's rule for the op is one that keeps any cut as it is: that of pointwise ops,
    and of lists of tensors, and of ops that draw; of others, where they write to nothing: what they
    write to cannot be redistributed.
    """
    info = _propagator().op_single_dim_strategy_funcs.get(op)
    return is_pointwise(op) or (
        info is not None
        and info.allow_uneven_sharding
        and (not op._schema.is_mutable or _strategy_is_of(op, "_random_ops"))
    )


@cache
def is_pointwise(op: torch._ops.OpOverload) -> bool:
    """Whether the op is pointwise for torch; in place, of lists and with ``out=`` too."""
    rules = _rules_of_pointwise_ops()
    alike = [op]
    if (
        op._schema.is_mutable and op.namespace == "aten"
    ):  # those that write have the arguments of one that does not, and perhaps ``out``
        wanted = [argument.name for argument in op._schema.arguments if not argument.is_out]
        packets = [
            getattr(torch.ops.aten, name, None)
            for name in (op._opname, op._opname.removesuffix("_"))
        ]
        overloads = [
            getattr(packet, name)
            for packet in packets
            if packet is not None
            for name in packet.overloads()
        ]
        alike += [
            one
            for one in overloads
            if [argument.name for argument in one._schema.arguments] == wanted
        ]
    return any(one in rules or _strategy_is_of(one, "_pointwise_ops") for one in alike)


def _strategy_is_of(op: Any, module: str) -> bool:
    info = _propagator().op_single_dim_strategy_funcs.get(op)
    return info is not None and str(getattr(info.func, "__module__", "")).endswith(f".{module}")


@cache
def _rules_of_pointwise_ops() -> frozenset[Any]:
    from torch.distributed.tensor._ops import _pointwise_ops as rules

    everything = {*rules.pointwise_ops, *getattr(rules, "_specially_registered_ops", ())}
    for name in ("linear_pointwise_ops", "partial_preserving_ops"):
        everything |= set(getattr(rules, name, ()))
    return frozenset(everything)


def with_shapes(
    schema: OpSchema, shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments with shapes for tensors."""
    remaining = iter(shapes)
    args, kwargs = tree_map(
        lambda leaf: next(remaining) if isinstance(leaf, DTensorSpec) else leaf,
        (tuple(schema.args_schema), dict(schema.kwargs_schema)),
    )
    return args, kwargs


def replaced_specs(
    schema: OpSchema, placements: Callable[[DTensorSpec], Sequence[Placement]]
) -> OpSchema:
    """The schema with other placements for its tensors."""

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, DTensorSpec):
            return leaf
        wanted = tuple(placements(leaf))
        return (
            leaf
            if wanted == tuple(leaf.placements)
            else DTensorSpec(leaf.mesh, wanted, leaf.tensor_meta)
        )

    args, kwargs = tree_map(replaced, (tuple(schema.args_schema), dict(schema.kwargs_schema)))
    return OpSchema(schema.op, args, kwargs, schema.schema_info)


# Ops that write to some of their arguments, of which torch's dispatcher does not see that they do:
# the schemas of batch norms do not say it, and it goes by "out" in the names of overloads. And the
# arguments.
WRITERS = {
    **dict.fromkeys(
        (
            "native_batch_norm.default",
            "_native_batch_norm_legit.default",
            "_batch_norm_with_update.default",
            "cudnn_batch_norm.default",
            "miopen_batch_norm.default",
        ),
        ("running_mean", "running_var"),
    ),
    "max.dim_max": ("max", "max_values"),
    "min.dim_min": ("min", "min_indices"),
}


def is_written(op: torch._ops.OpOverload, argument: Any) -> bool:
    """Whether the op writes to that argument of its schema."""
    return (
        argument.alias_info is not None and argument.alias_info.is_write
    ) or argument.name in WRITERS.get(name_of(op), ())


def argument(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], name: str
) -> Any:
    """What the op is given as the argument of that name; None where it has none, or is not given
    it.
    """
    for place, declared in enumerate(op._schema.arguments):
        if declared.name == name:
            return args[place] if place < len(args) else kwargs.get(name)
    return None


def arguments(schema: OpSchema) -> list[tuple[bool, list[DTensorSpec | None]]]:
    """The arguments that are tensors or lists of them, in the order of :func:`specs_of`: (the op
    writes to it, its specs; None for one of a list that is no DTensor).
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


def written(schema: OpSchema) -> list[tuple[str, DTensorSpec]]:
    """The tensors that the op writes to: (name of the argument, spec)."""
    found = []
    for i, argument in enumerate(schema.op._schema.arguments):
        if is_written(schema.op, argument):
            value = (
                schema.kwargs_schema.get(argument.name)
                if argument.kwarg_only
                else schema.args_schema[i]
                if i < len(schema.args_schema)
                else None
            )
            found += [
                (argument.name, leaf)
                for leaf in tree_leaves(value)
                if isinstance(leaf, DTensorSpec)
            ]
    return found


def is_out(op: torch._ops.OpOverload, name: str) -> bool:
    """Whether the argument of that name is one of ``out=``."""
    return any(argument.is_out and argument.name == name for argument in op._schema.arguments)


def draws(op: torch._ops.OpOverload) -> bool:
    """Whether the op draws numbers. (Attention may, but with dropout alone.)"""
    return op in DTensor._op_dispatcher._random_ops or (
        torch.Tag.nondeterministic_seeded in op.tags and "attention" not in op._opname
    )


def draws_apart(mesh: Any) -> bool:
    """Whether torch has each rank of the mesh draw the numbers of its own part, and then all go on
    alike (torch/distributed/tensor/_random.py: on accelerators).
    """
    return hasattr(getattr(torch, mesh.device_type, None), "set_rng_state")


def is_in_place(op: torch._ops.OpOverload) -> bool:
    """Whether the op writes to its first argument and gives it back, as ``add_`` does."""
    return op._opname.endswith("_") and not op._opname.endswith("__")


def output_metas(schema: OpSchema) -> Any:
    """Shape, stride and dtype of what comes of the op, globally."""
    return _propagator()._propagate_tensor_meta_non_cached(schema)


def shapes_of_results(metas: Any) -> list[tuple[Any, ...] | None]:
    """The shapes of all tensors that come of an op; None for one that is left out."""
    return [
        None if meta is None else tuple(meta.shape)
        for meta in ([metas] if isinstance(metas, TensorMeta) else metas)
    ]


def op_sharding(
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    wanted: Sequence[tuple[Placement, ...]],
    given: Sequence[tuple[Placement, ...]],
    metas: Any,
    *,
    as_order: bool,
) -> OutputSharding:
    """torch's answer for an op whose tensors are to have the placements ``wanted``, and whose
    results then have those ``given``.
    """
    mesh = specs[0].mesh

    def spec_of(placements: tuple[Placement, ...], meta: Any) -> DTensorSpec:
        order = as_order and any(isinstance(p, _StridedShard) for p in placements)
        return DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=order)

    remaining = iter(zip(specs, wanted))

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, DTensorSpec):
            return leaf
        spec, placements = next(remaining)
        return (
            spec if placements == tuple(spec.placements) else spec_of(placements, spec.tensor_meta)
        )

    args, kwargs = tree_map(placed, (tuple(schema.args_schema), dict(schema.kwargs_schema)))
    moves = any(placements != tuple(spec.placements) for spec, placements in zip(specs, wanted))
    outputs: Any
    if metas is None:
        outputs = None
    elif isinstance(metas, TensorMeta):
        outputs = spec_of(given[0], metas)
    else:
        outputs = tuple(
            [
                None if meta is None else spec_of(placements, meta)
                for placements, meta in zip(given, metas)
            ]
        )
    suggestion = OpSchema(schema.op, args, kwargs, schema.schema_info) if moves else None
    adjusted = False
    if (
        given
        and schema.op in _propagator().op_to_shape_and_stride_idx
        and any(isinstance(p, (Shard, _StridedShard)) for p in given[0])
    ):
        suggestion, adjusted = (
            _propagator()._adjust_shape_and_stride_args(metas, suggestion or schema, outputs),
            True,
        )
    return OutputSharding(
        outputs,
        _by_plan(suggestion),
        needs_redistribute=moves or adjusted,
        use_val_from_redistribute_schema=adjusted,
    )


def from_other_specs(found: OutputSharding, schema: OpSchema) -> OutputSharding:
    """torch's answer for the op on the specs of ``schema``, as one for an op that has others and is
    redistributed to these first.
    """
    if not isinstance(found, OutputSharding):
        return found
    return OutputSharding(
        found.output_spec,
        _by_plan(found.redistribute_schema or schema),
        needs_redistribute=True,
        use_val_from_redistribute_schema=found.use_val_from_redistribute_schema,
    )


@dataclass
class WrittenBack(OutputSharding):
    """Of an op that writes to copies of what it was to write to: what it wrote is to be taken back
    (see writes.py).
    """


def written_back(
    found: OutputSharding, schema: OpSchema, original: OpSchema, outputs: Any
) -> OutputSharding:
    """As :func:`from_other_specs`, for an op that is to write to tensors of ``original``;
    ``outputs`` are the specs of what it gives back.
    """
    redistributed = from_other_specs(found, schema)
    given: Any = redistributed.redistribute_schema
    given._cute_sharding_writes = dict(original.kwargs_schema)
    return WrittenBack(
        outputs,
        redistributed.redistribute_schema,
        True,
        redistributed.use_val_from_redistribute_schema,
    )


def as_on_one_device(schema: OpSchema) -> OutputSharding:
    """The op on replicas of all tensors, with what it writes to ``out=`` taken back."""
    replicas = replaced_specs(schema, lambda spec: (Replicate(),) * spec.mesh.ndim)
    outputs = tuple([spec for _, spec in written(schema)])
    return written_back(
        OutputSharding(None), replicas, schema, outputs[0] if len(outputs) == 1 else outputs
    )


def with_keywords(found: Any, schema: OpSchema) -> Any:
    """The answer, with a note of the keyword arguments of ``schema`` (a mask) that are to be
    redistributed too: torch does so with positional ones alone.
    """
    wanted = getattr(found, "redistribute_schema", None)
    if wanted is not None and schema.kwargs_schema:
        outs = {argument.name for argument in schema.op._schema.arguments if argument.is_out}
        moved = {
            name: (spec, wanted.kwargs_schema[name])
            for name, spec in schema.kwargs_schema.items()
            if name not in outs
            and isinstance(spec, DTensorSpec)
            and isinstance(wanted.kwargs_schema.get(name), DTensorSpec)
            and tuple(spec.placements) != tuple(wanted.kwargs_schema[name].placements)
        }
        if moved:
            wanted._cute_sharding_keywords = moved
    return found


def keywords(schema: OpSchema) -> dict[str, tuple[DTensorSpec, DTensorSpec]]:
    """The keyword arguments that are to be redistributed: the spec that each has, and is to
    have.
    """
    return getattr(schema, "_cute_sharding_keywords", {})


def redistribute_keywords(op_info: Any, schema: OpSchema) -> None:
    dispatch: Any = _dispatch
    for name, (spec, wanted) in keywords(schema).items():
        dispatch.ExplicitRedistributionContext.observe_redistribution(
            spec, wanted, f"Implicit redistribution of {name} of {schema.op}"
        )
        op_info.local_kwargs[name] = dispatch.redistribute_local_tensor(
            op_info.local_kwargs[name], spec, wanted
        )


def writes(schema: OpSchema) -> bool:
    """Whether what the op writes to, under these specs, is to be taken back."""
    return hasattr(schema, "_cute_sharding_writes")


Moved = dict[int, tuple[torch.Tensor, DTensorSpec]]


def moved_to(op_info: Any, schema: OpSchema, before: Sequence[Any]) -> Moved:
    """By id of a local tensor that the op was to be given, ``before``, what it is given instead,
    and its spec. What comes as ``out=`` is given here: torch redistributes no such arguments.
    """
    found: Moved = {}
    for name, was in schema._cute_sharding_writes.items():  # type: ignore[attr-defined]
        spec = schema.kwargs_schema[name]
        if (
            isinstance(was, DTensorSpec)
            and isinstance(spec, DTensorSpec)
            and tuple(spec.placements) != tuple(was.placements)
        ):
            old = op_info.local_kwargs[name]
            op_info.local_kwargs[name] = (
                old if _is_finished(was, spec) else old.new_empty(tuple(spec.shape))
            )
            found.setdefault(id(old), (op_info.local_kwargs[name], spec))
    specs = (
        tree_leaves(schema.args_schema)
        if op_info.args_tree_spec is not None
        else schema.args_schema
    )
    for old, new, spec in zip(before, op_info.local_args, specs):
        if isinstance(spec, DTensorSpec):
            found.setdefault(id(old), (new, spec))
    return found


def _is_finished(spec: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether the one is the other but for what is pending, so that devices have as much
    of either.
    """
    return all(
        a == b or (isinstance(a, Partial) and isinstance(b, Replicate))
        for a, b in zip(spec.placements, other.placements)
    )


def moves_first(found: OutputSharding, schema: OpSchema) -> bool:
    """Whether the op's first argument is redistributed before it runs, and nothing else than its
    placements changes.
    """
    first = schema.args_schema[0] if schema.args_schema else None
    if (
        not isinstance(first, DTensorSpec)
        or not isinstance(found, OutputSharding)
        or found.redistribute_schema is None
        or isinstance(found, WrittenBack)
    ):
        return False
    moved: Any = found.redistribute_schema.args_schema[0]
    output: Any = found.output_spec
    return (
        isinstance(moved, DTensorSpec)
        and tuple(moved.placements) != tuple(first.placements)
        and isinstance(output, DTensorSpec)
        and tuple(output.shape) == tuple(first.shape)
    )


def placements_of_outputs(found: OutputSharding) -> list[tuple[Placement, ...] | None]:
    outputs: Any = (
        found.output_spec if isinstance(found.output_spec, (list, tuple)) else [found.output_spec]
    )
    return [None if spec is None else tuple(spec.placements) for spec in outputs]


def with_outputs(
    found: OutputSharding, placements: Callable[[DTensorSpec], Sequence[Placement]]
) -> OutputSharding:
    """torch's answer, with other placements for what comes of the op."""
    outputs: Any = tree_map(
        lambda leaf: (
            DTensorSpec(leaf.mesh, tuple(placements(leaf)), leaf.tensor_meta)
            if isinstance(leaf, DTensorSpec)
            else leaf
        ),
        found.output_spec,
    )
    return OutputSharding(
        outputs,
        found.redistribute_schema,
        found.needs_redistribute,
        found.use_val_from_redistribute_schema,
    )


def _by_plan(schema: OpSchema | None) -> Any:
    """The schema with the note that the arguments go there by plan (see
    adapter._redistribution_of_arguments).
    """
    if schema is not None:
        schema._cute_sharding_by_plan = True  # type: ignore[attr-defined]
    return schema


def is_by_plan(schema: OpSchema) -> bool:
    return hasattr(schema, "_cute_sharding_by_plan")


def shapes_at_hand(specs: Sequence[DTensorSpec]) -> list[tuple[int, ...]] | None:
    """The global shapes as numbers, those of the call that is being compiled; None where some size
    has no value yet, or is none of a compiler's.
    """
    found = []
    for spec in specs:
        sizes: list[Any] = list(spec.shape)
        if any(
            isinstance(n, torch.SymInt) and not (hasattr(n.node, "shape_env") and n.node.has_hint())
            for n in sizes
        ):
            return None
        found.append(
            tuple([int(n.node.hint) if isinstance(n, torch.SymInt) else int(n) for n in sizes])
        )
    return found


def factors_at_hand(specs: Sequence[DTensorSpec]) -> dict[int, Any] | None:
    """The split factors, by the numbers that they are now; None where some has none, or two are the
    same number that need not be so in a later call.
    """
    found: dict[int, Any] = {}
    for factor in (factor for spec in specs for factor in split_factors(spec)):
        number = (
            factor.node.hint
            if isinstance(factor, torch.SymInt) and factor.node.has_hint()
            else factor
        )
        if isinstance(number, torch.SymInt) or size_text(
            found.setdefault(int(number), factor)
        ) != size_text(factor):
            return None
    return found


def is_truly(condition: Any) -> bool:
    """Whether a condition on sizes holds, with a guard that it does or does not; False where sizes
    have no value yet.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def size_text(n: Any) -> str:
    """A size as text, the same for sizes that are known to be equal."""
    return str(n.node.expr) if isinstance(n, torch.SymInt) else str(n)


@dataclass(frozen=True)
class OpRules:
    """What the propagator and the dispatcher have of ops: what to put back."""

    infos: tuple[tuple[Any, tuple[Any, ...]], ...]
    handlers: tuple[tuple[Any, Any], ...]
    tail: Any


def propagation() -> Callable[[OpSchema], OutputSharding]:
    """torch's own way from an op on specs to the placements that it needs and gives."""
    return _propagator().propagate_op_sharding_non_cached


# Ops that torch's dispatcher takes past the propagator; the last two since 2.15.
HANDLED = (
    "convolution.default",
    "convolution_backward.default",
    "argmin.default",
    "argmax.default",
    "max.dim",
    "min.dim",
)


class Writes(NamedTuple):
    """What is to be done about ops that write.

    Attributes:
        reach: called with (op, args, kwargs) after each, while there are ``copies``.
        take_back: called with the same and torch's answer after one that wrote to copies (see
            :class:`WrittenBack`), before ``reach``; the answer to go on with.
        copies: empty, as long as no view is a copy.
    """

    reach: Callable[..., None]
    take_back: Callable[..., OutputSharding]
    copies: set[int]


def install_propagation(
    propagate: Callable[[OpSchema], OutputSharding],
    names: Sequence[str],
    handler: Callable[[Callable[..., Any]], Callable[..., Any]],
    writing: Callable[..., Any],
    writes: Writes,
) -> OpRules:
    """Make ``propagate`` the propagator's way, on all arguments of the ops of those names;
    ``handler(torch's)`` the function of the ops that go past it; ``writing`` that of
    :data:`WRITERS`; and have ops that write followed by ``writes``.

    torch keeps what it found by the arguments that the op's schema info names: of ops that it
    decomposes it names none.
    """
    p = _propagator()
    infos, handlers = [], []
    for op in filter(None, map(overload, names)):
        infos.append(
            (
                op,
                tuple(
                    table.get(op)
                    for table in (p.op_to_schema_info, p.op_to_schema_info_for_single_dim_strategy)
                ),
            )
        )
        lists = any(
            "Tensor[]" in str(argument.type) or "List[Tensor]" in str(argument.type)
            for argument in op._schema.arguments
        )
        info = RuntimeSchemaInfo(
            0,
            [
                *(argument.name for argument in op._schema.arguments if argument.kwarg_only),
                "cute_sharding",
            ],
            lists,
        )
        p.op_to_schema_info[op] = info
        if infos[-1][1][1] is not None:
            p.op_to_schema_info_for_single_dim_strategy[op] = info
    for op in filter(None, map(overload, HANDLED)):
        stock = _handlers().get(op)
        if stock is not None:
            handlers.append((op, stock))
            _handlers()[op] = handler(stock)
    for op in filter(None, map(overload, WRITERS)):
        handlers.append((op, _handlers().get(op)))
        _handlers()[op] = writing
    p.propagate_op_sharding_non_cached = propagate
    code = _begin_with(_dispatch.OpDispatcher._dispatch_fast_path_python_tail, writes)
    return OpRules(tuple(infos), tuple(handlers), code)


def _begin_with(function: Any, writes: Writes) -> Any:
    """Have the function of torch's that ends ops that write begin with ``writes``; returns its
    code, to be put back.

    C++ keeps the function from its first call on, so another in its place would not be met: it gets
    other code. And every write comes by here: one more call would cost a tenth of the op, so what
    is added is a statement.
    """
    code = function.__code__
    try:
        tree = ast.parse(dedent(inspect.getsource(function)))
    except OSError:  # a torch without its sources
        logger.warning(
            "torch %s comes without its sources: writes to slices of sharded dims are lost, as "
            "torch has it (see dtensor/writes.py)",
            torch.__version__,
        )
        return code
    body: list[ast.stmt] = tree.body[0].body  # type: ignore[attr-defined]
    body[1:1] = ast.parse(_BEGINNING).body  # after the docstring
    made: dict[str, Any] = {}
    exec(
        compile(ast.fix_missing_locations(tree), code.co_filename, "exec"),
        function.__globals__,
        made,
    )
    names = {**writes._asdict(), "WrittenBack": WrittenBack}
    function.__globals__.update({f"_cute_sharding_{name}": value for name, value in names.items()})
    function.__code__ = made[function.__name__].__code__
    return code


_BEGINNING = """
if output_sharding.__class__ is _cute_sharding_WrittenBack and participating:
    output_sharding = _cute_sharding_take_back(op_call, args, kwargs, output_sharding)
if _cute_sharding_copies and participating:
    _cute_sharding_reach(op_call, args, kwargs)
"""


def restore_propagation(saved: OpRules) -> None:
    p = _propagator()
    vars(p).pop("propagate_op_sharding_non_cached", None)
    for op, entries in saved.infos:
        for table, entry in zip(
            (p.op_to_schema_info, p.op_to_schema_info_for_single_dim_strategy), entries
        ):
            if entry is None:
                table.pop(op, None)
            else:
                table[op] = entry
    for op, stock in saved.handlers:
        if stock is None:
            _handlers().pop(op, None)
        else:
            _handlers()[op] = stock
    function: Any = _dispatch.OpDispatcher._dispatch_fast_path_python_tail
    function.__code__ = saved.tail
    for name in [name for name in function.__globals__ if name.startswith("_cute_sharding_")]:
        del function.__globals__[name]


def leaves(*values: Any) -> list[Any]:
    return tree_leaves(values)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two local tensors lie in one storage."""
    return storage_of(one) is storage_of(other)


def is_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor)


def takes_strays() -> bool:
    """Whether plain tensors among DTensors are taken for replicas
    (torch.distributed.tensor.experimental.implicit_replication).
    """
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def as_replica(tensor: torch.Tensor, mesh: Any) -> DTensor:
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(tensor, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta), requires_grad=False)


def world_size() -> int:
    return dist.get_world_size()


def schema_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpSchema:
    """The op with specs for DTensors."""
    schema = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    assert schema is not None
    return schema


def run_slowly(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Moved]:
    """The op as torch's dispatcher runs it where its fast path does not; and, by id of the local
    tensors of its arguments, what was given to it instead.
    """
    dispatcher = DTensor._op_dispatcher
    info: Any = dispatcher.unwrap_to_op_info(op, args, kwargs)
    found: Any = dispatcher._propagate_op_sharding_dispatch_slow_path(op, args, kwargs, info, True)
    info.output_sharding = found
    before = info.local_args
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    moved = {}
    if found.redistribute_schema is not None:
        given = [*zip(before, info.local_args, found.redistribute_schema.args_schema)]
        given += [
            (kwargs[name]._local_tensor, info.local_kwargs[name], spec)
            for name, spec in found.redistribute_schema.kwargs_schema.items()
            if isinstance(kwargs.get(name), DTensor)
        ]
        moved = {id(old): (new, spec) for old, new, spec in given if isinstance(spec, DTensorSpec)}
    outs = tuple([kwargs[argument.name] for argument in op._schema.arguments if argument.is_out])
    return outs or dispatcher.wrap(results, found.output_spec), moved


def run_as(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    found: OutputSharding,
    move: Callable[..., torch.Tensor],
) -> Any:
    """The op on local tensors that were brought by ``move(local, spec, spec)`` to where ``found``
    has them.
    """
    wanted = args if found.redistribute_schema is None else found.redistribute_schema.args_schema

    def local(arg: Any, spec: Any) -> Any:
        if not isinstance(arg, DTensor):
            return arg
        moved = (
            arg
            if not isinstance(spec, DTensorSpec)
            or tuple(spec.placements) == tuple(arg._spec.placements)
            else with_placements(arg, spec.placements, move)
        )
        return moved._local_tensor

    result = op(*[local(arg, spec) for arg, spec in zip(args, wanted)])
    return DTensor._op_dispatcher.wrap(result, found.output_spec)


def with_placements(
    tensor: DTensor, placements: Sequence[Placement], move: Callable[..., torch.Tensor]
) -> DTensor:
    """The tensor with other placements, its local tensor brought there by ``move(local, spec,
    spec)``; outside of autograd.
    """
    target = DTensorSpec(tensor._spec.mesh, tuple(placements), tensor._spec.tensor_meta)
    return DTensor(move(tensor._local_tensor, tensor._spec, target), target, requires_grad=False)


# -- checkpoints, state dicts, pictures ------------------------------------------------------------


@dataclass(frozen=True)
class StateRules:
    """What of torch's is replaced: what to put back."""

    methods: tuple[tuple[Any, str, Any], ...]
    functions: list[tuple[Any, str, Any]]
    waiting: tuple[Callable[[], None], ...]


def install_state(
    methods: dict[tuple[Any, str], Callable[[Any], Any]],
    distribute: Callable[[Any], Any],
    visualization: Callable[..., Any],
) -> StateRules:
    """Have each method be ``methods[class, name](torch's)``, and so the functions that hand out
    state dicts and draw pictures, once a program imports these.
    """
    found = tuple([(owner, name, vars(owner)[name]) for owner, name in methods])
    functions: list[tuple[Any, str, Any]] = []
    when_imported: Callable[..., Callable[[], None]] = importlib.import_module(
        "cute_sharding._autoload"
    ).when_imported  # what runs before all else, and imports nothing

    def replace(
        module: str, name: str, wrap: Callable[[Any, Any], Any], also: Sequence[str] = ()
    ) -> Callable[[], None]:
        def action() -> None:
            try:
                made = wrap(sys.modules[module], getattr(sys.modules[module], name))
                for owner in (sys.modules[m] for m in (module, *also) if m in sys.modules):
                    functions.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, made)
            except (
                Exception
            ) as error:  # it runs where the program imports something, and that must not fail
                logger.warning(
                    "%s.%s is torch's own: %s: %s", module, name, type(error).__name__, error
                )

        return when_imported(module, action)

    for owner, name, stock in found:
        setattr(owner, name, methods[owner, name](stock))
    waiting = (
        replace(
            "torch.distributed._state_dict_utils",
            "_distribute_tensors",
            lambda module, stock: distribute(stock),
        ),
        replace(
            "torch.distributed.tensor.debug._visualize_sharding",
            "visualize_sharding",
            lambda module, stock: visualization(
                stock, module._create_table, module._create_rich_table
            ),
            ("torch.distributed.tensor.debug",),
        ),
    )
    return StateRules(found, functions, waiting)


def restore_state(saved: StateRules) -> None:
    for give_up in saved.waiting:
        give_up()
    for owner, name, stock in saved.methods:
        setattr(owner, name, stock)
    for owner, name, stock in saved.functions:
        setattr(owner, name, stock)
    saved.functions.clear()


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def write_item(fqn: str, tensor: DTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """What a checkpoint is told of one block of a tensor."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    data = TensorWriteData(
        chunk=chunk(offsets, sizes),
        properties=TensorProperties.create_from_tensor(tensor.to_local()),
        size=tensor.size(),
    )
    return WriteItem(
        index=MetadataIndex(fqn, torch.Size(offsets)), type=WriteItemType.SHARD, tensor_data=data
    )


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor as ``tensor``, of another local tensor."""
    return DTensor(local, tensor._spec, requires_grad=False)


def scattered(
    parts: Sequence[torch.Tensor], dim: int, mesh: Any, mesh_dim: int, source: int
) -> torch.Tensor:
    """This rank's of the parts that the rank ``source`` of its slice has; the parts, of which all
    ranks know the shapes, differ along ``dim`` alone.
    """
    longest = max(part.shape[dim] for part in parts)
    missing = [longest - part.shape[dim] for part in parts]
    padded = [
        torch.nn.functional.pad(part, [0, 0] * (part.ndim - 1 - dim) + [0, n]).contiguous()
        if n
        else part.contiguous()
        for part, n in zip(parts, missing)
    ]
    output = torch.empty_like(padded[0])
    mesh_scatter(output, padded, mesh, mesh_dim=mesh_dim, group_src=source)
    return Shard._maybe_unpad_tensor_with_sizes(
        dim, output, missing, mesh.get_coordinate()[mesh_dim], True
    )


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None

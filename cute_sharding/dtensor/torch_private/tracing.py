"""What the compiler sees of DTensors (torch/distributed/tensor/_api.py, _sharding_prop.py,
placement_types.py): :class:`Tracing`.

Functions and methods may be wrapped here, each calls torch's own where it has nothing to say, and
all are put back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor import placement_types as _placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, StrategyType
from torch.distributed.tensor._ops import single_dim_strategy as _single_dim_strategy
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard
from torch.utils._pytree import tree_leaves

from cute_sharding.dtensor.stats import logger
from cute_sharding.dtensor.torch_private.compiler import (
    first_wins,
    of_two_arguments,
    on_global_sizes,
    with_plain_functions,
)
from cute_sharding.dtensor.torch_private.registry import op_handlers, overload
from cute_sharding.dtensor.torch_private.symints import (
    has_shape_env,
    is_symbolic,
    number_of,
    settled,
    settled_spec,
)
from cute_sharding.dtensor.torch_private.tensor_specs import split_factors
from cute_sharding.dtensor.torch_private.views_in_place import VIEWS_IN_PLACE

__all__ = [
    "Tracing",
    "strided_shard",
]

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
                            number_of(placement.split_factor)
                            if isinstance(placement.split_factor, torch.SymInt)
                            else stock(placement)
                        )
                    ),
                ),
                (_placement_types, "_guarded_hint_int", self._number),
            )
            for name, handler in VIEWS_IN_PLACE.items():
                op_handlers().setdefault(overload(name), handler)
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
            (symbolic_shapes.ShapeEnv, "produce_guards_verbose", on_global_sizes),
            (output_graph.OutputGraph, "compile_and_call_fx_graph", self._outputs),
            (subclass_utils, "create_subclass_metadata", self._metadata),
            (runtime_wrappers, "gen_alias_from_base", self._alias),
            (proxy_tensor, "_build_proxy_for_sym_expr", of_two_arguments),
            (proxy_tensor, "set_proxy_slot", first_wins),
            (proxy_tensor, "_sympy_handlers", with_plain_functions),
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
                    "dtensor/torch_private/tracing.py)",
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
            for op, handler in op_handlers().items()
            if handler in VIEWS_IN_PLACE.values()
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
        ours = [op for op, kept in op_handlers().items() if kept in VIEWS_IN_PLACE.values()]
        for op in ours:
            del op_handlers()[op]
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
                number_of(value)
                if isinstance(value, torch.SymInt) and value.node.has_hint()
                else stock(value, reason=reason)
            )

        return _guarded_hint_int


def _are_strided(specs: Sequence[DTensorSpec]) -> bool:
    """Whether some have _StridedShard placements, and no two of all are to be read in different
    ways.
    """
    read = {spec.use_strided_shard_as_shard_order for spec in specs if split_factors(spec)}
    return len(read) == 1 and all(
        split_factors(spec) or DTensorSpec.is_default_device_order(spec.shard_order)
        for spec in specs
    )


_ALL_OFFSETS = (
    getattr(_placement_types, "_StridedShardOffsetMode", None)
    and _placement_types._StridedShardOffsetMode.ALL
)

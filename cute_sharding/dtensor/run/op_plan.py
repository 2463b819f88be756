"""What a call of an op does, as one value (:class:`OpPlan`); and runs calls as their plans say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import dispatch, op_schemas
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.local_tensors import leaves, tree_map
from cute_sharding.dtensor.replaced.op_schemas import (
    OpSchema,
    OutputSharding,
    is_in_place,
    propagator,
    specs_of,
    with_specs,
)
from cute_sharding.dtensor.replaced.redistribution_hook import reduce_value
from cute_sharding.dtensor.replaced.symints import ask_whether_contiguous, shape_with_symbols
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Shard,
    StridedShard,
    TensorMeta,
    placed_as,
)
from cute_sharding.dtensor.run.packing import lay_out

__all__ = [
    "OpPlan",
    "Prepare",
    "as_list",
    "by_function",
    "dtypes_of_results",
    "finished",
    "made_of",
    "of_torch",
    "placed",
    "plan_for",
    "plan_of",
    "run_slowly",
    "shapes_of_results",
    "with_metas",
]


# -- numbers ---------------------------------------------------------------------------------------
# Results without dims are never left pending: their reduction runs together with the op.
#
# Programs read a loss, a norm or a flag on one rank alone (``if rank == 0: print(loss.item())``). A
# reduction at that point would wait for the other ranks forever. Results with dims may stay
# pending: programs read them on all ranks.


class Pending(NamedTuple):
    """The pending reductions of a result, by mesh dim."""

    mesh: Any
    placements: tuple[tuple[int, Partial], ...]


def pending_of(spec: Any) -> Pending | None:
    """The pending reductions of a number; None for a tensor with dims, or if nothing is pending.
    (A mesh of one device is torch's stand-in for any mesh.)
    """
    if not isinstance(spec, DTensorSpec) or len(spec.shape) or spec.mesh.size() == 1:
        return None
    placements = tuple([(m, p) for m, p in enumerate(spec.placements) if isinstance(p, Partial)])
    return Pending(spec.mesh, placements) if placements else None


def finished(results: Any, pending: Sequence[Pending | None]) -> Any:
    """The local results of an op, of which the pending numbers are reduced."""
    if not isinstance(results, tuple):  # mostly
        return _reduced(results, pending[0])
    every = dict(enumerate(results))
    return tuple((every | finish(every, dict(enumerate(pending)))).values())


def finish(numbers: Mapping[Any, Any], pending: Mapping[Any, Pending | None]) -> dict[Any, Any]:
    """The numbers with pending reductions, reduced: those with the same reductions and dtype
    together, once for each mesh dim.
    """
    of_a_kind = defaultdict(list)
    for key, of in pending.items():
        if of is not None:
            of_a_kind[of, numbers[key].dtype].append(key)
    found: dict[Any, Any] = {}
    for (of, _), keys in of_a_kind.items():
        some = [numbers[key] for key in keys]
        x = _reduced(some[0] if len(some) == 1 else torch.stack(some), of)
        found.update(zip(keys, [x] if len(some) == 1 else x.unbind()))
    return found


def _reduced(x: torch.Tensor, pending: Any) -> torch.Tensor:
    for m, placement in pending.placements:
        x = reduce_value(placement, x, pending.mesh, m)
    return x


# -- op plan ---------------------------------------------------------------------------------------
# What a call of an op does, as one value: ``OpPlan``.
#
# The propagator's answers are made as plans, and given to torch's dispatcher in its own form at the
# end (``OpPlan.for_torch``; OutputSharding of torch/distributed/tensor/_op_schema.py). There a plan
# is an attribute of the schema that the operands are redistributed to: all that is put on torch's
# objects.

# Converts the positional local arguments of an op just before it runs.
Prepare = Callable[[Sequence[Any]], Sequence[Any]]

_NAME = "_cute_sharding_plan"


@dataclass(frozen=True, eq=False)
class OpPlan:
    """What a call of an op does, in this order.

    Attributes:
        schema: the op, with the specs of the tensors that it is called with.
        results: the specs of its results, as torch has them: one, several, or None for no DTensor.
        needs: the op, with the specs to which its tensors are redistributed; None: as they are.
        local_values: whether other arguments are those of ``needs`` too, such as local sizes.
        by_plan: whether what is redistributed is so by our plan. Otherwise as the settings say.
        read: called first, with the dispatcher's OpInfo of this call: it rewrites operands on
            several meshes as operands on one mesh.
        copied: for a view whose input is redistributed: whether its output is a copy, and writes to
            it have to reach the input.
        prepares: convert the positional local arguments, the first one first.
        kernel: runs in place of the op, on local arguments; None: the op.
        takes_all: whether the kernel gets local tensors that are not redistributed.
        pending: for each result, the reductions that run with the op, since it is a number.
        lies: for each result, the TensorMeta by which it is laid out.
        finishes: for an op whose results have sizes that depend on values, so that no plan has
            their specs: called in place of all that the dispatcher does after it has the plan, with
            the op, its arguments, the dispatcher's OpInfo and the plan in torch's form.
    """

    schema: OpSchema
    results: Any
    needs: OpSchema | None = None
    local_values: bool = False
    by_plan: bool = False
    read: Callable[[Any], None] | None = None
    copied: bool = False
    prepares: tuple[Prepare, ...] = ()
    kernel: Callable[..., Any] | None = None
    takes_all: bool = False
    pending: tuple[Pending | None, ...] = ()
    lies: tuple[TensorMeta | None, ...] = ()
    finishes: Callable[..., Any] | None = None

    # -- what it says --

    @property
    def wanted(self) -> OpSchema:
        """The op, with the specs that its tensors have when it runs."""
        return self.needs or self.schema

    @property
    def moves(self) -> bool:
        """Whether some tensor is redistributed."""
        return self.needs is not None and any(
            tuple(a.placements) != tuple(b.placements)
            for a, b in zip(specs_of(self.schema), specs_of(self.needs))
        )

    @property
    def is_local(self) -> bool:
        """Whether the op alone runs, on local tensors as they are: nothing is exchanged."""
        others = (self.kernel, self.read, self.finishes, *self.prepares, *self.pending)
        return not (self.moves or self.takes_all or self.copied or any(others))

    @property
    def specs(self) -> list[Any]:
        """The specs of the results; None for a result that is no DTensor."""
        found = self.results
        return list(found) if isinstance(found, (list, tuple)) else [found]

    @property
    def function(self) -> Callable[..., Any]:
        """What runs on the local arguments: the op itself, if nothing else is to be done."""
        if self.prepares or any(self.pending) or any(self.lies):
            return self
        return self.kernel or self.wanted.op

    @cached_property
    def keywords(self) -> Mapping[str, tuple[DTensorSpec, DTensorSpec]]:
        """The keyword arguments, such as a mask, that are redistributed: name -> (spec, wanted
        spec). torch redistributes positional arguments only. (``out=`` only says where results go.)
        """
        if self.needs is None or not self.schema.kwargs_schema:
            return MappingProxyType({})
        outs = {argument.name for argument in self.schema.op._schema.arguments if argument.is_out}
        kwargs: Any = self.needs.kwargs_schema
        return {
            name: (spec, kwargs[name])
            for name, spec in self.schema.kwargs_schema.items()
            if name not in outs
            and isinstance(spec, DTensorSpec)
            and isinstance(kwargs.get(name), DTensorSpec)
            and tuple(spec.placements) != tuple(kwargs[name].placements)
        }

    # -- what else it could say --

    def asked(self, schema: OpSchema) -> OpPlan:
        """The plan for the op on other specs, those of ``schema``, whose tensors are first
        redistributed to the specs of this plan, by our plan.
        """
        return replace(self, schema=schema, needs=self.wanted, by_plan=True)

    def placed(self, placements: Callable[[DTensorSpec], Sequence[Placement]]) -> OpPlan:
        """The plan with other placements for the results: ``placements(spec)`` for each."""
        results: Any = tree_map(
            lambda leaf: (
                placed_as(leaf, tuple(placements(leaf))) if isinstance(leaf, DTensorSpec) else leaf
            ),
            self.results,
        )
        return replace(self, results=results)

    def prepared(self, prepare: Prepare | None) -> OpPlan:
        """The plan with local arguments converted by ``prepare`` first, unless that is None."""
        return self if prepare is None else replace(self, prepares=(prepare, *self.prepares))

    # -- when it runs --

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The local results, from local arguments that are redistributed."""
        for prepare in self.prepares:
            args = prepare(args)  # type: ignore[assignment]
        results = (self.kernel or self.wanted.op)(*args, **kwargs)
        if any(self.pending):
            results = finished(results, self.pending)
        if not any(self.lies):
            return results
        if not isinstance(results, (tuple, list)):
            return lay_out(results, self.lies[0])
        laid = [x if x is None else lay_out(x, meta) for x, meta in zip(results, self.lies)]
        return tuple(laid) if isinstance(results, tuple) else laid

    def for_torch(self) -> OutputSharding:
        """The plan in the form of torch's dispatcher."""
        wanted, function = self.wanted, self.function
        says = (
            function is not wanted.op or self.by_plan or self.takes_all or self.copied
        ) or self.keywords
        if not (says or self.read or self.finishes):
            return OutputSharding(
                self.results,
                self.needs,
                needs_redistribute=self.needs is not None,
                use_val_from_redistribute_schema=self.local_values,
            )
        # torch caches its own schemas, so a copy is changed.
        given: Any = OpSchema(
            self.schema.op, wanted.args_schema, wanted.kwargs_schema, self.schema.schema_info
        )
        given.op = function
        setattr(given, _NAME, self)
        return OutputSharding(
            self.results,
            given,
            needs_redistribute=True,
            use_val_from_redistribute_schema=self.local_values,
        )

    def settle_strides(self, *, asks: bool) -> None:
        """In a traced program: a spec with symbolic strides also gets a symbolic size, by which
        torch leaves it out of its cache.

        With ``asks``, ask on all ranks whether the results are contiguous, as torch asks of tensors
        with rows. A tensor of one row or none is contiguous whatever its strides are. So on a rank
        that has such a local tensor the compiler learns less about sizes. What it knows about them
        decides what is exchanged, and whether by a plan for any sizes.
        """
        for spec in leaves(self.results):
            meta = spec.tensor_meta if isinstance(spec, DTensorSpec) else None
            if meta is None:
                continue
            if asks:
                ask_whether_contiguous(meta.shape, meta.stride)
            shape = shape_with_symbols(meta.shape, meta.stride)
            if shape is not meta.shape:
                spec.tensor_meta = TensorMeta(shape, meta.stride, meta.dtype)


def plan_of(schema: OpSchema) -> OpPlan | None:
    """The plan that redistributes an op's arguments to ``schema``; None for an answer of torch to
    which nothing is added.
    """
    found: OpPlan | None = getattr(schema, _NAME, None)
    return found


def of_torch(found: OutputSharding, schema: OpSchema) -> OpPlan:
    """torch's answer for the op as a plan."""
    local = found.use_val_from_redistribute_schema
    return OpPlan(schema, found.output_spec, found.redistribute_schema, local_values=local)


def by_function(
    schema: OpSchema,
    function: Callable[..., Any],
    mesh: Any,
    given: Sequence[tuple[Placement, ...]],
    metas: Any,
) -> OpPlan:
    """The plan of an op that ``function`` runs, on local tensors that are not redistributed. The
    results have the placements ``given``. Without ``metas``, ``function`` returns no tensor.
    """
    results: Any = None
    if metas is not None:
        specs = [DTensorSpec(mesh, of, meta) for of, meta in zip(given, as_list(metas))]
        results = specs[0] if isinstance(metas, TensorMeta) else tuple(specs)
    return OpPlan(schema, results, kernel=function, takes_all=True)


def placed(
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    wanted: Sequence[tuple[Placement, ...]],
    given: Sequence[tuple[Placement, ...] | None],
    metas: Any,
    *,
    as_order: bool,
) -> OpPlan:
    """The plan of an op that needs its tensors in the placements ``wanted`` and then returns
    results in the placements ``given``; None in ``given`` for a result that is no DTensor.
    """
    mesh = specs[0].mesh

    def spec_of(placements: tuple[Placement, ...] | None, meta: Any) -> DTensorSpec | None:
        if placements is None or meta is None:
            return None
        order = as_order and any(isinstance(p, StridedShard) for p in placements)
        return DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=order)

    before_and_after = [
        spec if placements == tuple(spec.placements) else spec_of(placements, spec.tensor_meta)
        for spec, placements in zip(specs, wanted)
    ]
    moves = any(new is not spec for new, spec in zip(before_and_after, specs))
    results: Any = None
    if isinstance(metas, TensorMeta):
        results = spec_of(given[0], metas)
    elif metas is not None:
        results = tuple(map(spec_of, given, metas))
    needs = with_specs(schema, before_and_after) if moves else None
    local = _with_local_values(needs or schema, given, metas, results)
    return OpPlan(schema, results, local or needs, local_values=local is not None, by_plan=moves)


def _with_local_values(
    schema: OpSchema, given: Sequence[tuple[Placement, ...] | None], metas: Any, results: Any
) -> OpSchema | None:
    """The op with local arguments in place of global ones; None if it runs unchanged. An op that
    takes the sizes of its result gets the local sizes. A squeeze gets the dims that have size 1
    globally, because a device may have one row of a longer dim.
    """
    placements = given[0] if given else None
    if schema.op in propagator().op_to_shape_and_stride_idx:
        if any(isinstance(p, (Shard, StridedShard)) for p in placements or ()):
            return propagator()._adjust_shape_and_stride_args(metas, schema, results)
    elif schema.op in propagator().squeeze_op_to_dims_variant:
        return propagator()._adjust_squeeze_to_global_singletons(schema)
    return None


def shapes_of_results(metas: Any) -> list[tuple[Any, ...] | None]:
    """The shapes of all tensors that an op returns; None for one that is left out."""
    return [None if meta is None else tuple(meta.shape) for meta in as_list(metas)]


def dtypes_of_results(metas: Any) -> set[torch.dtype]:
    """The dtypes of all tensors that an op returns."""
    return {meta.dtype for meta in as_list(metas) if meta is not None}


def as_list(metas: Any) -> Sequence[Any]:
    """The TensorMetas of an op's results as a sequence, also for a single result."""
    return [metas] if isinstance(metas, TensorMeta) else metas


def with_metas(metas: Any, of: Callable[[TensorMeta], TensorMeta]) -> Any:
    """The TensorMetas of an op's results, with ``of`` applied to each."""
    if isinstance(metas, TensorMeta):
        return of(metas)
    return tuple([None if meta is None else of(meta) for meta in metas])


# -- calls -----------------------------------------------------------------------------------------
# Runs ops as their plans say, also those that skip torch's fast path.


def answered(found: Any, op: Any, args: Any, kwargs: Any, info: Any) -> Any:
    """What the propagator has found for the op; or, if its plan finishes the op, the results."""
    plan = _plan(found) if isinstance(found, OutputSharding) else None
    return (
        found
        if plan is None or plan.finishes is None
        else plan.finishes(op, args, kwargs, info, found)
    )


def plan_for(op: Any, *args: Any) -> OpPlan | None:
    """Our plan for the op; None if torch's answer is all."""
    schema, propagator = dispatch.schema_of(op, args, {}), op_schemas.propagator()
    return _plan(
        propagator.propagate_op_sharding_non_cached(schema)
        if is_tracing()
        else propagator.propagate_op_sharding(schema)
    )


def _plan(found: Any) -> OpPlan | None:
    return None if found.redistribute_schema is None else plan_of(found.redistribute_schema)


def made_of(local: Any, specs: Any) -> Any:
    """DTensors with these specs from the local results of an op."""
    return dispatch.dispatcher().wrap(local, specs)


def run_slowly(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op on the dispatcher's slow path, whatever its name, from which the dispatcher
    guesses whether an op writes or draws random numbers.
    """
    torchs = dispatch.dispatcher()
    info: Any = torchs.unwrap_to_op_info(op, args, kwargs)
    found: Any = torchs._propagate_op_sharding_dispatch_slow_path(op, args, kwargs, info, True)
    if not isinstance(found, OutputSharding):  # the results themselves
        return found
    info.output_sharding = found
    plan = _plan(found)
    if plan is not None and plan.takes_all:  # also if the op draws random numbers
        results = None
        if info.compute_mesh._is_current_rank_part_of_mesh():
            # at most calls plan.read
            torchs.redistribute_local_args(info, found.redistribute_schema, False)
            results = plan.function(*info.local_args, **info.local_kwargs)
    else:
        results = torchs._dispatch_get_local_results_slow_path(op, args, info)
    if is_in_place(op):
        return args[0]
    outs = tuple([kwargs[argument.name] for argument in op._schema.arguments if argument.is_out])
    if outs:
        specs = leaves(found.output_spec)
        for out, spec in zip(outs, specs):
            if (
                isinstance(out, DTensor)
                and isinstance(spec, DTensorSpec)
                and out._spec.mesh != spec.mesh
            ):
                out._spec = spec  # as torch's dispatcher does for ops with out in their name
        return outs[0] if len(outs) == 1 else outs
    return torchs.wrap(results, found.output_spec)

"""Runs ops as their plans say, also those that skip torch's fast path."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import dispatch, registry
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.local_tensors import leaves
from cute_sharding.dtensor.replaced.op_schemas import OutputSharding, is_in_place
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.op_plan import OpPlan, plan_of

__all__ = ["finished", "made_of", "plan_for", "run_slowly"]


def finished(found: Any, op: Any, args: Any, kwargs: Any, info: Any) -> Any:
    """What the propagator has found for the op; or, if its plan finishes the op, the results."""
    plan = _plan(found) if isinstance(found, OutputSharding) else None
    return (
        found
        if plan is None or plan.finishes is None
        else plan.finishes(op, args, kwargs, info, found)
    )


def plan_for(op: Any, *args: Any) -> OpPlan | None:
    """Our plan for the op; None if torch's answer is all."""
    schema, propagator = dispatch.schema_of(op, args, {}), registry.propagator()
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

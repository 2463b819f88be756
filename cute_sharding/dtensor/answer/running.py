"""Runs ops as their answers say, also those that skip torch's fast path."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.answer.answers import answer_of
from cute_sharding.dtensor.replaced import dispatch, registry
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.local_tensors import leaves
from cute_sharding.dtensor.replaced.op_schemas import OutputSharding, is_in_place
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec

__all__ = ["finished", "made_of", "run_slowly", "runner_of"]


def finished(found: Any, op: Any, args: Any, kwargs: Any, info: Any) -> Any:
    """What the propagator has found for the op; or, if its answer finishes the op, the results."""
    wanted = found.redistribute_schema if isinstance(found, OutputSharding) else None
    finishes = None if wanted is None else answer_of(wanted).finishes
    return found if finishes is None else finishes(op, args, kwargs, info, found)


def runner_of(op: Any, *args: Any) -> tuple[Any, Any]:
    """The function of ours that would run the op, and the specs of the op's results; (None, None)
    if the op itself would run.
    """
    schema, propagator = dispatch.schema_of(op, args, {}), registry.propagator()
    propagate = (
        propagator.propagate_op_sharding_non_cached
        if is_tracing()
        else propagator.propagate_op_sharding
    )
    found: Any = propagate(schema)
    wanted = found.redistribute_schema
    return (
        (wanted.op, found.output_spec) if wanted and answer_of(wanted).takes_all else (None, None)
    )


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
    wanted = found.redistribute_schema
    if wanted is not None and answer_of(wanted).takes_all:  # also if the op draws random numbers
        results = None
        if info.compute_mesh._is_current_rank_part_of_mesh():
            torchs.redistribute_local_args(info, wanted, False)  # at most calls answer.read
            results = wanted.op(*info.local_args, **info.local_kwargs)
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

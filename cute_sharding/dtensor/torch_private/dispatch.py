"""The dispatcher at work (torch/distributed/tensor/_dispatch.py): what it is about to give an op,
and ops that run as it runs them.

The local arguments of the one call at hand may be exchanged; the dispatcher itself is changed
elsewhere: in :mod:`.op_hooks`, in :mod:`.redistribution_hook`, and by :mod:`.tracing`, which puts
the handlers of :mod:`.views_in_place`, whatever the settings are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, _dispatch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.utils._pytree import tree_leaves

from cute_sharding.dtensor.torch_private.answers import (
    is_run_by_function,
    keywords,
    op_of,
    preparation,
)
from cute_sharding.dtensor.torch_private.dispatch_modes import is_tracing

__all__ = [
    "Moved",
    "finish",
    "function_of",
    "has_more",
    "moved_to",
    "moves",
    "observe",
    "run_as",
    "run_slowly",
    "schema_of",
    "viewed",
    "with_placements",
]


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
    if not isinstance(first, DTensorSpec) or not op_of(schema)._schema._is_view_op():
        return None
    spec = op_info.flat_args_schema[0]
    return None if tuple(spec.placements) == tuple(first.placements) else (spec, first)


def observe(spec: DTensorSpec, wanted: DTensorSpec, what: str) -> None:
    """What torch does before it redistributes an argument by itself: a program that has asked for
    it (``ExplicitRedistributionContext``) is told, or has it refused.

    Raises:
        RuntimeError: the program has asked for that.
    """
    context: Any = _dispatch.ExplicitRedistributionContext  # type: ignore[attr-defined]
    context.observe_redistribution(spec, wanted, f"Implicit redistribution in {what}")


def has_more(schema: OpSchema) -> bool:
    """Whether :func:`finish` has something to do."""
    return bool(keywords(schema)) or preparation(schema) is not None


def finish(op_info: Any, schema: OpSchema) -> None:
    """What is to be done with local arguments beside what torch does: it redistributes no keywords,
    and knows nothing of what a kernel wants of strides.
    """
    dispatch: Any = _dispatch
    for name, (spec, wanted) in keywords(schema).items():
        observe(spec, wanted, f"{schema.op}, of {name}")
        op_info.local_kwargs[name] = dispatch.redistribute_local_tensor(
            op_info.local_kwargs[name], spec, wanted
        )
    if (prepare := preparation(schema)) is not None:
        op_info.local_args = prepare(op_info.local_args)


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


def schema_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpSchema:
    """The op with specs for DTensors."""
    schema = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    assert schema is not None
    return schema


def function_of(op: Any, *args: Any) -> Any:
    """The function of ours that the op would be run by; None where it is run by none."""
    schema, propagator = schema_of(op, args, {}), DTensor._op_dispatcher.sharding_propagator
    propagate = (
        propagator.propagate_op_sharding_non_cached
        if is_tracing()
        else propagator.propagate_op_sharding
    )
    wanted = getattr(propagate(schema), "redistribute_schema", None)
    return wanted.op if wanted is not None and is_run_by_function(wanted) else None


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
    if outs:
        specs = tree_leaves(found.output_spec)
        for out, spec in zip(outs, specs):
            if (
                isinstance(out, DTensor)
                and isinstance(spec, DTensorSpec)
                and out._spec.mesh != spec.mesh
            ):
                out._spec = spec  # as torch's dispatcher does of what it sees to be out=
        return outs[0] if len(outs) == 1 else outs, moved
    return dispatcher.wrap(results, found.output_spec), moved


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

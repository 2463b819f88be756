"""Answers of the propagator: OutputSharding and OpSpec
(torch/distributed/tensor/_op_schema.py), made and remade.

An answer is made new; the schema it redistributes to may carry notes of ours, attributes that begin
with ``_cute_sharding_``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, OutputSharding
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch.utils._pytree import tree_leaves, tree_map

from cute_sharding.dtensor.torch_private.op_schemas import replaced_specs, written
from cute_sharding.dtensor.torch_private.registry import propagator
from cute_sharding.dtensor.torch_private.symints import with_symbols_in_shape
from cute_sharding.dtensor.torch_private.tensor_specs import placed_as

__all__ = [
    "OpSpec",
    "OpStrategy",
    "OutputSharding",
    "WrittenBack",
    "as_on_one_device",
    "by_function",
    "dtypes_of_results",
    "for_no_cache",
    "from_other_specs",
    "function_of",
    "generate_redistribute_costs",
    "instead",
    "is_by_plan",
    "is_run_by_function",
    "keywords",
    "metas_of_results",
    "moves_first",
    "op_of",
    "op_sharding",
    "op_spec",
    "placements_of_outputs",
    "shapes_of_results",
    "specs_of_results",
    "with_keywords",
    "with_outputs",
    "with_specs",
    "writes",
    "written_back",
]


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


def with_specs(found: OutputSharding, specs: Sequence[DTensorSpec]) -> OutputSharding:
    """torch's answer for what an op writes to, with those specs."""
    return (
        found
        if found.output_spec is None
        else OutputSharding(specs[0] if len(specs) == 1 else tuple(specs))
    )


def shapes_of_results(metas: Any) -> list[tuple[Any, ...] | None]:
    """The shapes of all tensors that come of an op; None for one that is left out."""
    return [
        None if meta is None else tuple(meta.shape)
        for meta in ([metas] if isinstance(metas, TensorMeta) else metas)
    ]


def dtypes_of_results(metas: Any) -> set[torch.dtype]:
    """The dtypes of all tensors that come of an op."""
    every = [metas] if isinstance(metas, TensorMeta) else metas
    return {meta.dtype for meta in every if meta is not None}


def op_sharding(
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    wanted: Sequence[tuple[Placement, ...]],
    given: Sequence[tuple[Placement, ...] | None],
    metas: Any,
    *,
    as_order: bool,
) -> OutputSharding:
    """torch's answer for an op whose tensors are to have the placements ``wanted``, and whose
    results then have those ``given``; None for one that is no DTensor.
    """
    mesh = specs[0].mesh

    def spec_of(placements: tuple[Placement, ...] | None, meta: Any) -> DTensorSpec | None:
        if placements is None or meta is None:
            return None
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
        outputs = tuple(map(spec_of, given, metas))
    suggestion = OpSchema(schema.op, args, kwargs, schema.schema_info) if moves else None
    adjusted = False
    if (
        given
        and given[0] is not None
        and schema.op in propagator().op_to_shape_and_stride_idx
        and any(isinstance(p, (Shard, _StridedShard)) for p in given[0])
    ):
        suggestion, adjusted = (
            propagator()._adjust_shape_and_stride_args(metas, suggestion or schema, outputs),
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
    (see memory/writes.py).
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


Prepare = Callable[[Sequence[Any]], Sequence[Any]]


def prepared(found: OutputSharding, schema: OpSchema, prepare: Prepare) -> OutputSharding:
    """The answer, with a note that the op's local arguments, in order, are to be what ``prepare``
    makes of them: the same values.
    """
    wanted: Any = found.redistribute_schema or OpSchema(
        schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info
    )
    wanted._cute_sharding_prepare = prepare
    return OutputSharding(found.output_spec, wanted, True, found.use_val_from_redistribute_schema)


def preparation(schema: OpSchema) -> Prepare | None:
    """What the op's local arguments are to be prepared by."""
    return getattr(schema, "_cute_sharding_prepare", None)


def instead(
    found: OutputSharding, schema: OpSchema, function: Callable[..., Any]
) -> OutputSharding:
    """The answer, with a note that ``function`` is run in the op's place, on local arguments."""
    wanted: Any = found.redistribute_schema or OpSchema(
        schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info
    )
    wanted._cute_sharding_in_place_of, wanted.op = schema.op, function
    return OutputSharding(found.output_spec, wanted, True, found.use_val_from_redistribute_schema)


def function_of(found: OutputSharding, schema: OpSchema) -> Callable[..., Any]:
    """What is run on local arguments by the answer as it is: the op, or what stands for it."""
    return schema.op if found.redistribute_schema is None else found.redistribute_schema.op


def specs_of_results(found: OutputSharding) -> list[Any]:
    """The specs of an op's results; None for what is no DTensor."""
    output = found.output_spec
    return list(output) if isinstance(output, (list, tuple)) else [output]


def op_of(schema: OpSchema) -> Any:
    """The op that a schema of an answer is of, whatever is run in its place."""
    return getattr(schema, "_cute_sharding_in_place_of", schema.op)


def for_no_cache(found: Any) -> Any:
    """The answer while a program is traced, its specs such as torch does not look up."""
    for spec in tree_leaves(getattr(found, "output_spec", None)):
        if isinstance(spec, DTensorSpec):
            with_symbols_in_shape(spec)
    return found


def writes(schema: OpSchema) -> bool:
    """Whether what the op writes to, under these specs, is to be taken back."""
    return hasattr(schema, "_cute_sharding_writes")


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


def metas_of_results(answer: OutputSharding) -> list[TensorMeta]:
    """The global shapes and strides of an op's results, where they are known."""
    specs = [spec for spec in specs_of_results(answer) if isinstance(spec, DTensorSpec)]
    return [spec.tensor_meta for spec in specs if spec.tensor_meta is not None]


def placements_of_outputs(found: OutputSharding) -> list[tuple[Placement, ...] | None]:
    return [None if spec is None else tuple(spec.placements) for spec in specs_of_results(found)]


def with_outputs(
    found: OutputSharding, placements: Callable[[DTensorSpec], Sequence[Placement]]
) -> OutputSharding:
    """torch's answer, with other placements for what comes of the op."""
    outputs: Any = tree_map(
        lambda leaf: (
            placed_as(leaf, tuple(placements(leaf))) if isinstance(leaf, DTensorSpec) else leaf
        ),
        found.output_spec,
    )
    return OutputSharding(
        outputs,
        found.redistribute_schema,
        found.needs_redistribute,
        found.use_val_from_redistribute_schema,
    )


def by_function(
    schema: OpSchema,
    function: Callable[..., Any],
    mesh: Any,
    given: Sequence[tuple[Placement, ...]],
    metas: Any,
) -> OutputSharding:
    """torch's answer for an op that is run by ``function``, on local tensors as they are, with
    results of the placements ``given``: as one that torch rewrites to another op. Without ``metas``
    what the function gives is no tensor.
    """
    suggestion = OpSchema(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    rewritten: Any = suggestion
    rewritten.op, rewritten._cute_sharding_function = function, True
    if metas is None:
        return OutputSharding(None, suggestion, needs_redistribute=True)
    specs = [
        DTensorSpec(mesh, placements, meta)
        for placements, meta in zip(given, [metas] if isinstance(metas, TensorMeta) else metas)
    ]
    outputs: Any = specs[0] if isinstance(metas, TensorMeta) else tuple(specs)
    return OutputSharding(outputs, suggestion, needs_redistribute=True)


def is_run_by_function(schema: OpSchema) -> bool:
    """Whether the op is run by a function of ours, which is given local tensors as they are."""
    return hasattr(schema, "_cute_sharding_function")


def _by_plan(schema: OpSchema | None) -> Any:
    """The schema with the note that the arguments go there by plan (see
    adapter._redistribution_of_arguments).
    """
    if schema is not None:
        schema._cute_sharding_by_plan = True  # type: ignore[attr-defined]
    return schema


def is_by_plan(schema: OpSchema) -> bool:
    return hasattr(schema, "_cute_sharding_by_plan")

"""Makes and changes answers of the propagator: OutputSharding and OpSpec
(torch/distributed/tensor/_op_schema.py).

An :class:`Answer` is a frozen value that holds what running an op needs beside torch's answer. It
is an attribute of the schema that the answer redistributes to: the only one put on torch's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.replaced.local_tensors import leaves, tree_map
from cute_sharding.dtensor.replaced.op_schemas import OpSchema, OutputSharding, with_specs
from cute_sharding.dtensor.replaced.registry import propagator
from cute_sharding.dtensor.replaced.symints import ask_whether_contiguous, shape_with_symbols
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Placement,
    Shard,
    StridedShard,
    TensorMeta,
    placed_as,
)

__all__ = [
    "Answer",
    "OutputSharding",
    "answer_of",
    "by_function",
    "dtypes_of_results",
    "from_other_specs",
    "kernel_of",
    "op_sharding",
    "settle_strides",
    "shapes_of_results",
    "specs_of_results",
    "with_fields",
    "with_keywords",
    "with_outputs",
    "with_preparation",
]


Prepare = Callable[[Sequence[Any]], Sequence[Any]]


class Answer(NamedTuple):
    """What running an op needs beside torch's answer.

    Attributes:
        by_plan: whether the arguments are redistributed by plan.
        keywords: keyword arguments to redistribute: name -> (current spec, wanted spec). torch
            redistributes positional arguments only.
        takes_all: whether the function that runs in place of the op takes the local tensors without
            redistribution.
        read: called first, with the dispatcher's OpInfo of this call: it rewrites operands on
            several meshes as operands on one mesh.
        copied: for a view whose input is redistributed first: the input's specs before and after.
            The output is then a copy, not a view.
        finishes: for an op whose results have sizes that depend on values, so that no answer has
            their specs: called in place of all that the dispatcher does after it has the answer,
            with the op, its arguments, the dispatcher's OpInfo and this answer.
    """

    by_plan: bool = False
    keywords: Mapping[str, tuple[DTensorSpec, DTensorSpec]] = MappingProxyType({})
    takes_all: bool = False
    read: Callable[[Any], None] | None = None
    copied: tuple[DTensorSpec, DTensorSpec] | None = None
    finishes: Callable[..., Any] | None = None


_NAME = "_cute_sharding_answer"


_NOTHING_ELSE = Answer()


def answer_of(schema: OpSchema) -> Answer:
    """The :class:`Answer` of the op that is redistributed to this schema; one that says nothing
    beside torch's if it has none.
    """
    return getattr(schema, _NAME, _NOTHING_ELSE)


def shapes_of_results(metas: Any) -> list[tuple[Any, ...] | None]:
    """The shapes of all tensors that an op returns; None for one that is left out."""
    return [None if meta is None else tuple(meta.shape) for meta in as_list(metas)]


def dtypes_of_results(metas: Any) -> set[torch.dtype]:
    """The dtypes of all tensors that an op returns."""
    every = as_list(metas)
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
    """torch's answer for an op that needs its tensors in the placements ``wanted`` and then returns
    results in the placements ``given``; None in ``given`` for a result that is no DTensor.
    """
    mesh = specs[0].mesh

    def spec_of(placements: tuple[Placement, ...] | None, meta: Any) -> DTensorSpec | None:
        if placements is None or meta is None:
            return None
        order = as_order and any(isinstance(p, StridedShard) for p in placements)
        return DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=order)

    placed = [
        spec if placements == tuple(spec.placements) else spec_of(placements, spec.tensor_meta)
        for spec, placements in zip(specs, wanted)
    ]
    moves = any(new is not spec for new, spec in zip(placed, specs))
    outputs: Any
    if metas is None:
        outputs = None
    elif isinstance(metas, TensorMeta):
        outputs = spec_of(given[0], metas)
    else:
        outputs = tuple(map(spec_of, given, metas))
    suggestion = with_specs(schema, placed) if moves else None
    adjusted = _with_local_arguments(suggestion or schema, given, metas, outputs)
    suggestion = adjusted or suggestion
    if moves:
        setattr(suggestion, _NAME, Answer(by_plan=True))
    return OutputSharding(
        outputs,
        suggestion,
        needs_redistribute=moves or adjusted is not None,
        use_val_from_redistribute_schema=adjusted is not None,
    )


def _with_local_arguments(
    schema: OpSchema, given: Sequence[tuple[Placement, ...] | None], metas: Any, outputs: Any
) -> OpSchema | None:
    """The op with local arguments in place of global ones; None if it runs unchanged. An op that
    takes the sizes of its result gets the local sizes. A squeeze gets the dims that have size 1
    globally, because a device may have one row of a longer dim.
    """
    placements = given[0] if given else None
    if schema.op in propagator().op_to_shape_and_stride_idx:
        if any(isinstance(p, (Shard, StridedShard)) for p in placements or ()):
            return propagator()._adjust_shape_and_stride_args(metas, schema, outputs)
    elif schema.op in propagator().squeeze_op_to_dims_variant:
        return propagator()._adjust_squeeze_to_global_singletons(schema)
    return None


def from_other_specs(found: OutputSharding, schema: OpSchema) -> OutputSharding:
    """torch's answer for the op on the specs of ``schema``, turned into an answer for an op on
    other specs, whose operands are first redistributed to those of ``schema`` by plan.
    """
    return with_fields(found, schema, by_plan=True)


def with_keywords(found: OutputSharding, schema: OpSchema) -> OutputSharding:
    """The answer, with a note of the keyword arguments of ``schema`` (such as a mask) that have to
    be redistributed too.
    """
    wanted = found.redistribute_schema
    if wanted is None or not schema.kwargs_schema:
        return found
    outs = {argument.name for argument in schema.op._schema.arguments if argument.is_out}
    kwargs: dict[str, Any] = dict(wanted.kwargs_schema)
    moved = {
        name: (spec, kwargs[name])
        for name, spec in schema.kwargs_schema.items()
        if name not in outs
        and isinstance(spec, DTensorSpec)
        and isinstance(kwargs.get(name), DTensorSpec)
        and tuple(spec.placements) != tuple(kwargs[name].placements)
    }
    return with_fields(found, schema, keywords=moved) if moved else found


def with_fields(
    found: OutputSharding,
    schema: OpSchema,
    *,
    runs: Callable[..., Any] | None = None,
    **says: Any,
) -> OutputSharding:
    """The answer, with the fields ``says`` of its :class:`Answer` changed; and with ``runs`` in
    place of the op: on the redistributed local arguments, or with ``takes_all`` on the local
    tensors without redistribution. (torch caches its own schemas, so a copy is changed.)
    """
    given: Any = found.redistribute_schema or schema
    wanted: Any = OpSchema(schema.op, given.args_schema, given.kwargs_schema, schema.schema_info)
    wanted.op = runs or given.op
    setattr(wanted, _NAME, answer_of(given)._replace(**says))
    return OutputSharding(found.output_spec, wanted, True, found.use_val_from_redistribute_schema)


def of_view(found: OutputSharding, schema: OpSchema, *, by_plan: bool) -> OutputSharding:
    """The answer for a view. If its input is redistributed first, by plan (``by_plan``) or by
    torch, the answer notes that the output is a copy.
    """
    wanted = found.redistribute_schema
    if wanted is None:
        return found
    before: Any = schema.args_schema[0]
    after: Any = wanted.args_schema[0]
    if not isinstance(before, DTensorSpec) or tuple(before.placements) == tuple(after.placements):
        return found
    by_plan = by_plan or answer_of(wanted).by_plan
    return with_fields(found, schema, copied=(before, after), by_plan=by_plan)


def with_preparation(found: OutputSharding, schema: OpSchema, prepare: Prepare) -> OutputSharding:
    """The answer, with its positional local arguments converted by ``prepare`` just before it runs:
    the same values, in the form that the kernel expects.
    """
    run = kernel_of(found, schema)
    return with_fields(found, schema, runs=lambda *args, **kwargs: run(*prepare(args), **kwargs))


def kernel_of(found: OutputSharding, schema: OpSchema) -> Callable[..., Any]:
    """The function that the answer runs on local arguments: the op, or the one in place of it."""
    return schema.op if found.redistribute_schema is None else found.redistribute_schema.op


def specs_of_results(found: OutputSharding) -> list[Any]:
    """The specs of an op's results; None for a result that is no DTensor."""
    output = found.output_spec
    return list(output) if isinstance(output, (list, tuple)) else [output]


def settle_strides(found: Any, *, asks: bool) -> None:
    """For an answer in a traced program: a spec with symbolic strides also gets a symbolic size, by
    which torch leaves it out of its cache.

    With ``asks``, ask on all ranks whether the results are contiguous, as torch asks of tensors
    with rows. A tensor of one row or none is contiguous whatever its strides are. So on a rank that
    has such a local tensor the compiler learns less about sizes. What it knows about them decides
    what is exchanged, and whether by a plan for any sizes.
    """
    for spec in leaves(found.output_spec):
        meta = spec.tensor_meta if isinstance(spec, DTensorSpec) else None
        if meta is None:
            continue
        if asks:
            ask_whether_contiguous(meta.shape, meta.stride)
        shape = shape_with_symbols(meta.shape, meta.stride)
        if shape is not meta.shape:
            spec.tensor_meta = TensorMeta(shape, meta.stride, meta.dtype)


def as_list(metas: Any) -> Sequence[Any]:
    """The TensorMetas of an op's results as a sequence, also for a single result."""
    return [metas] if isinstance(metas, TensorMeta) else metas


def with_metas(metas: Any, of: Callable[[TensorMeta], TensorMeta]) -> Any:
    """The TensorMetas of an op's results, with ``of`` applied to each."""
    if isinstance(metas, TensorMeta):
        return of(metas)
    return tuple([None if meta is None else of(meta) for meta in metas])


def with_outputs(
    found: OutputSharding, placements: Callable[[DTensorSpec], Sequence[Placement]]
) -> OutputSharding:
    """torch's answer, with other placements for the results: ``placements(spec)`` for each."""
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
    """torch's answer for an op that ``function`` runs, on local tensors without redistribution. The
    results have the placements ``given``. Without ``metas``, ``function`` returns no tensor.
    torch's own form of such an answer is that of an op which it rewrites to another op.
    """
    found = with_fields(OutputSharding(None), schema, runs=function, takes_all=True)
    if metas is None:
        return found
    specs = [DTensorSpec(mesh, placements, meta) for placements, meta in zip(given, as_list(metas))]
    outputs: Any = specs[0] if isinstance(metas, TensorMeta) else tuple(specs)
    return OutputSharding(outputs, found.redistribute_schema, needs_redistribute=True)

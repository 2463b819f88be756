"""When torch is wrong: conditions of the rows of :mod:`.table`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import isinf, prod
from typing import Any

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.door.cuts import is_sharded, some_device_is_empty
from cute_sharding.dtensor.replaced import op_schemas, registry, symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Replicate,
    Shard,
    StridedShard,
)


def is_norm_of_nothing(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether a norm is undefined for no elements, because its order is infinite or negative, and
    some device has no row of a reduced dim.
    """
    if not any(
        isinstance(arg, (int, float)) and (arg < 0 or isinf(arg)) for arg in schema.args_schema[1:2]
    ):
        return False
    is_of_dims = registry.name_of(schema.op) == "linalg_vector_norm.default"
    dims = _reduced_dims(schema) if is_of_dims else None
    return any(some_device_is_empty(spec, dims) for spec in specs)


def _reduced_dims(schema: OpSchema) -> frozenset[int] | None:
    """The dims that a norm names; None: all."""
    first: Any = schema.args_schema[0]
    named: Any = schema.args_schema[2] if len(schema.args_schema) > 2 else None
    if named is None or named == []:
        return None
    ndim = max(len(first.shape), 1)
    return frozenset(d % ndim for d in ([named] if isinstance(named, int) else named))


def is_not_of_contributions(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether something is pending, and the reduction of it is not the reduction of the
    contributions. That is so except for a sum, not rounded to integers, of a pending sum or
    average. (A pending norm is a root of sums.)
    """
    pending = [p for spec in specs for p in spec.placements if isinstance(p, Partial)]
    if not pending:
        return False
    if any(type(p) is not Partial or p.reduce_op not in ("sum", "avg") for p in pending):
        return True
    if registry.name_of(schema.op).partition(".")[0] != "sum":
        return True
    dtype: Any = schema.kwargs_schema.get("dtype")
    summed: Any = specs[0].tensor_meta
    return dtype is not None and _is_of_integers(dtype) and not _is_of_integers(summed.dtype)


def _is_of_integers(dtype: Any) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def rounds_contributions(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether something is pending and is converted to a dtype that lacks some of its numbers, so
    that contributions are rounded, or overflow, one by one. (Of what is rounded alike the largest
    and the smallest stay so; of integers that overflow they do not.)
    """
    source, wanted = specs[0].tensor_meta, schema.kwargs_schema.get("dtype")
    reductions = {p.reduce_op for p in specs[0].placements if isinstance(p, Partial)}
    if source is None or not isinstance(wanted, torch.dtype) or not reductions:
        return False
    is_rounded = reductions & {"sum", "avg", "product"} or _is_of_integers(wanted)
    return bool(is_rounded) and not _has_all_of(wanted, source.dtype)


def _has_all_of(wanted: torch.dtype, source: torch.dtype) -> bool:
    """Whether one dtype has all numbers of another; of complex numbers, of their parts."""
    wanted, source = (x.to_real() if x.is_complex else x for x in (wanted, source))
    if torch.bool in (wanted, source):
        return source is torch.bool
    if _is_of_integers(source):
        numbers = torch.iinfo(source)
        if _is_of_integers(wanted):
            others = torch.iinfo(wanted)
            return others.min <= numbers.min and numbers.max <= others.max
        return numbers.max < 2 / torch.finfo(wanted).eps and numbers.max < torch.finfo(wanted).max
    if _is_of_integers(wanted):
        return False
    own, other = torch.finfo(source), torch.finfo(wanted)
    return other.eps <= own.eps and own.max <= other.max and other.tiny <= own.tiny


def names_no_dim(schema: OpSchema, at: int) -> bool:
    """Whether the dims of a reduction, argument ``at``, are an empty list, which stands for all
    dims.
    """
    return len(schema.args_schema) > at and schema.args_schema[at] == []


def picks_of_fewer_rows(schema: OpSchema) -> bool:
    """Whether an index has fewer rows than the tensor that it picks from, in a dim other than the
    named one.
    """
    args: Any = schema.args_schema
    picked, index = args[0], args[2]
    dim = args[1] % max(len(picked.shape), 1)
    return any(
        d != dim and not symints.is_truly(n == k)
        for d, (n, k) in enumerate(zip(picked.shape, index.shape))
    )


def is_counted_from_the_end(dim: Any) -> bool:
    return isinstance(dim, int) and dim < 0


def is_one_image(schema: OpSchema, spatial: int) -> bool:
    """Whether the first operand has channels and the dims of one image, without a batch dim."""
    first = schema.args_schema[0]
    return isinstance(first, DTensorSpec) and len(first.shape) == spatial + 1


def is_one_term(schema: OpSchema) -> bool:
    """Whether the term of a product of a matrix and a vector is one value for all rows. If a device
    has no rows, or none to sum over, the product gets the shape of the term. And torch may shard
    the term, which a scalar cannot be.
    """
    term, matrix, _ = op_schemas.specs_of(schema)
    rows, mesh = tuple(matrix.shape[:1]), tuple(matrix.mesh.shape)
    return tuple(term.shape) != rows and (
        not term.shape or any(_leaves_one_without(n, mesh) for n in matrix.shape)
    )


def broadcasts_matrices(schema: OpSchema) -> bool:
    """Whether the first operand of an equation has batch dims, and the last has not the same ones.
    (For ``solve`` the last may be one vector for each matrix.)
    """
    specs = op_schemas.specs_of(schema)
    first, last = (tuple(spec.shape) for spec in (specs[0], specs[-1]))
    if registry.name_of(schema.op) == "_linalg_solve_ex.default" and last == first[:-1]:
        return False
    return len(first) > 2 and last[:-2] != first[:-2]


def cuts_one_side(schema: OpSchema) -> bool:
    """Whether the triangles have batch dims, and torch may shard these on one side only: a part of
    one side would be solved with all of the other. Only if both sides are sharded there alike does
    torch have nothing to move.
    """
    triangles, sides = op_schemas.specs_of(schema)
    kept = {Replicate(), *map(Shard, range(len(sides.shape) - 2))}
    alike = tuple(triangles.placements) == tuple(sides.placements)
    return len(triangles.shape) > 2 and not (alike and kept.issuperset(sides.placements))


def attends_wrongly(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether torch's rule may leave some device without heads, by the number of which kernels
    divide; or, if several heads of queries share one of keys, with heads whose keys are on another
    device, so that wrong keys are used. torch may shard heads itself, to reduce what is pending or
    to align placements; only if they are sharded already has it no reason to. And its rule for
    cuDNN does not know masks, and raises. (Context parallelism has its own rules.)
    """
    if schema.op in registry.op_handlers():
        return False
    name = registry.name_of(schema.op)
    of_gradient = name.endswith("backward.default")
    queries, keys = specs[of_gradient : of_gradient + 2]
    if "cudnn" in name and isinstance(schema.args_schema[8 if of_gradient else 3], DTensorSpec):
        return any(map(is_sharded, specs))
    heads, sizes = keys.shape[1], tuple(keys.mesh.shape)
    shared = not symints.is_truly(queries.shape[1] == heads)
    if symints.is_symbolic(heads):
        return shared or any(map(some_device_is_empty, specs))
    if not (_leaves_one_without(heads, sizes) or (shared and heads % prod(sizes))):
        return any(map(some_device_is_empty, specs))
    placements = {tuple(spec.placements) for spec in specs if len(spec.shape) > 2}
    if len(placements) > 1 or not placements <= {*product(_KEPT, repeat=len(sizes))}:
        return True
    parts = prod(n for n, p in zip(sizes, *placements) if p == Shard(1))
    return any(map(some_device_is_empty, specs)) or (shared and heads % parts != 0)


# The placements that torch's rule for attention keeps: on batch and heads.
_KEPT = (Replicate(), Shard(0), Shard(1))


def _leaves_one_without(n: int, mesh: tuple[int, ...]) -> bool:
    """Whether some device has none of n rows that some mesh dims divide."""
    for cut in (cut for k in range(len(mesh)) for cut in combinations(mesh, k + 1)):
        last = n
        for parts in cut:
            last -= min((parts - 1) * -(-last // parts), last)
        if last == 0:
            return True
    return False


def averages_rows(schema: OpSchema) -> bool:
    """Whether a loss of classes is a mean over sharded rows: torch shards them like the scores."""
    scores: Any = schema.args_schema[0]
    classes = min(len(scores.shape) - 1, 1)
    return schema.args_schema[3] == 1 and any(
        isinstance(p, (Shard, StridedShard)) and p.dim != classes for p in scores.placements
    )


def convolves_wrongly(specs: Sequence[DTensorSpec], arguments: int) -> bool:
    """Whether torch's function for a convolution with so many arguments, or its gradient, may be
    wrong. It is right if all is replicated, or, on a mesh of one dim, the batch is evenly sharded.
    (It takes images sharded by their last dim for replicas, and exchanges no halos.)
    """
    images = 1 if arguments == 9 else 2  # the input; or the gradient and the input
    return not all(
        isinstance(p, Replicate)
        or (
            type(p) is Shard
            and p.dim == 0
            and i < images
            and spec.mesh.ndim == 1
            and symints.is_truly(spec.shape[0] % spec.mesh.size() == 0)
        )
        for i, spec in enumerate(specs)
        for p in spec.placements
    )


def searches_nothing(spec: DTensorSpec, dim: int | None) -> bool:
    """Whether some device has nothing to search: along a sharded ``dim``, or for None along any.
    (If the whole tensor has nothing, torch's function raises the op's error.)
    """
    known = not symints.is_symbolic(spec.shape)
    return (_lacks_rows if known else _lacks_rows.__wrapped__)(spec, dim)


@remembered
def _lacks_rows(spec: DTensorSpec, dim: int | None) -> bool:
    cut = {p.dim for p in spec.placements if isinstance(p, Shard)}
    searched = cut if dim is None else cut & {dim % max(spec.ndim, 1)}
    has_rows = all(type(spec.shape[d]) is not int or spec.shape[d] for d in searched)
    return bool(searched) and has_rows and some_device_is_empty(spec)

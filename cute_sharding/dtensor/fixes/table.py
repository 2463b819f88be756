"""Bugs of torch on placements that its own rules accept, one row each, and when they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import combinations, product
from math import isinf, prod
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.bookkeeping.versions import RELEASES
from cute_sharding.dtensor.door.cuts import (
    devices_differ,
    is_of_views,
    is_sharded,
    is_uneven,
    some_device_is_empty,
)
from cute_sharding.dtensor.replaced import op_schemas, symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.relations.table import SIGNATURES
from cute_sharding.relations.table.indexing import BY_MASK

# -- when ------------------------------------------------------------------------------------------
# When torch is wrong: conditions of the rows of ``table``.


def is_norm_of_nothing(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether a norm is undefined for no elements, because its order is infinite or negative, and
    some device has no row of a reduced dim.
    """
    if not any(
        isinstance(arg, (int, float)) and (arg < 0 or isinf(arg)) for arg in schema.args_schema[1:2]
    ):
        return False
    is_of_dims = op_schemas.name_of(schema.op) == "linalg_vector_norm.default"
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
    if op_schemas.name_of(schema.op).partition(".")[0] != "sum":
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
    if op_schemas.name_of(schema.op) == "_linalg_solve_ex.default" and last == first[:-1]:
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
    if schema.op in op_schemas.op_handlers():
        return False
    name = op_schemas.name_of(schema.op)
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


# -- table -----------------------------------------------------------------------------------------
# Bugs of torch on placements that its own rules accept.

Condition = Callable[[OpSchema, Sequence[DTensorSpec]], bool]
CUTS, ALL = (Shard, StridedShard), (Shard, StridedShard, Partial)


class Remedy(Enum):
    """What is done where torch would be wrong."""

    SIGNATURE = "the op's signature answers; without one, as GATE"
    GATE = "its operands' placements of the fix's kinds are replicated first"
    FALSE = "the answer is False"
    SUM = "the gradient is that of a sum, which is as empty"


class Fix(NamedTuple):
    """One bug.

    Attributes:
        ops: the overloads; empty: any op.
        what: what torch does.
        when: for which arguments and placements.
        until: what ends it.
        remedy: what is done instead.
        kinds: the placements on which torch is wrong.
        releases: those of the checked releases on which the test shows the bug. The remedy is used
            on every release.
    """

    ops: tuple[str, ...]
    what: str
    when: Condition
    until: str
    remedy: Remedy = Remedy.SIGNATURE
    kinds: tuple[type, ...] = CUTS
    releases: tuple[str, ...] = RELEASES


def _sharded(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    return any(map(is_sharded, specs))


def _not_whole(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    return any(not isinstance(p, Replicate) for spec in specs for p in spec.placements)


def _sharded_and(condition: Callable[[OpSchema], bool]) -> Condition:
    return lambda schema, specs: condition(schema) and _sharded(schema, specs)


def _is_mean(at: int) -> Condition:
    return _sharded_and(lambda schema: op_schemas.is_mean(schema, at))


def _is_mean_of_nothing(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    return op_schemas.is_mean(schema, 3) and any(
        not symints.is_symbolic(tuple(spec.shape)) and 0 in spec.shape for spec in specs
    )


def _some_device_is_empty(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    return any(map(some_device_is_empty, specs))


def _draws_differently(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    op = schema.op
    return (
        op_schemas.draws(op)
        and not op_schemas.draws_apart(op, specs[0].mesh)
        and any(devices_differ(spec) or is_of_views(spec) for spec in specs)
    )


def _compares_other_shapes(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    shapes = {tuple(spec.shape) for spec in specs}
    return len(shapes) > 1 and not symints.is_symbolic(*shapes) and _sharded(schema, specs)


def _names(*patterns: str) -> tuple[str, ...]:
    """All names in patterns ``name.overload|overload``."""
    return tuple(
        f"{name}.{overload}"
        for name, _, overloads in (pattern.partition(".") for pattern in patterns)
        for overload in overloads.split("|")
    )


_LOSSES = tuple(
    each
    for name in SIGNATURES
    if "_loss" in name or name.startswith("binary_cross_entropy")
    for each in (name, name.replace(".default", ".out"))
)
_GRADIENTS_OF_MEANS = _names(
    "mse_loss_backward.default|grad_input|out",
    "smooth_l1_loss_backward.default|grad_input|out",
    "huber_loss_backward.default|grad_input|out",
)
ATTENTION = tuple(
    f"_scaled_dot_product_{kind}_attention{backward}.default"
    for kind in ("flash", "efficient", "cudnn")
    for backward in ("", "_backward")
)

# The first row that holds for an op is its fix.
TABLE: tuple[Fix, ...] = (
    Fix(
        (),
        "Where ranks draw for themselves (CPUs), each draws the numbers of its own shard. If "
        "shards have different sizes, ranks draw different numbers from then on, and replicas "
        "differ; and for blocks that only views make, they are not the numbers of one device.",
        _draws_differently,
        "torch draws on CPUs as on accelerators",
        Remedy.GATE,
    ),
    Fix(
        ("_local_scalar_dense.default",),
        "item() reads the value of a rank's own shard, or contribution.",
        _not_whole,
        "torch reduces or gathers it first, for any placement",
        Remedy.GATE,
        ALL,
    ),
    Fix(
        _names("convolution.default", "convolution_backward.default"),
        "Images that are sharded by another dim, unevenly or over several mesh dims, sharded "
        "weights, and pending operands are taken for replicas.",
        lambda schema, specs: convolves_wrongly(specs, len(schema.args_schema)),
        "torch reduces and gathers what it cannot convolve in shards",
        kinds=ALL,
    ),
    Fix(
        ("equal.default",),
        "Tensors of different shapes are sharded alike, and the compared shards may be equal.",
        _compares_other_shapes,
        "torch compares shapes first",
        Remedy.FALSE,
        releases=("2.13",),
    ),
    Fix(
        _names("linalg_vector_norm.default", "norm.Scalar", "_foreach_norm.Scalar"),
        "Norms of infinite or negative order raise on a device without rows.",
        is_norm_of_nothing,
        "torch gives such a device a neutral value",
        Remedy.GATE,
    ),
    Fix(
        ("native_group_norm_backward.default",),
        "The op gets global sizes together with local tensors, and raises.",
        _sharded,
        "torch passes it local sizes",
        Remedy.SIGNATURE,
    ),
    Fix(
        ATTENTION,
        "A device may get no heads, by whose number kernels divide; or heads of queries whose keys "
        "are on another device. A pending operand is reduce-scattered by heads.",
        attends_wrongly,
        "torch gives each device heads and their keys",
        kinds=ALL,
    ),
    Fix(
        _names("soft_margin_loss_backward.default|grad_input"),
        "The gradient is divided by the number of local elements.",
        _sharded,
        "torch divides by the number of all elements",
    ),
    Fix(
        _GRADIENTS_OF_MEANS,
        "Of no elements, torch finds the sizes of the gradient of a mean by code that divides by "
        "their number, and raises.",
        _is_mean_of_nothing,
        "torch divides a tensor by it",
        Remedy.SUM,
    ),
    Fix(
        _GRADIENTS_OF_MEANS,
        "The gradient of a mean is divided by the number of local elements.",
        _is_mean(3),
        "torch divides by the number of all elements",
    ),
    Fix(
        _names(
            "sum.dim_IntList",
            "nansum.default",
            "mean.dim",
            "amax.default",
            "amin.default",
            "var.correction",
            "std.correction",
            "var_mean.correction",
        ),
        "An empty list of dims, which stands for all dims, is taken for none.",
        _sharded_and(lambda schema: names_no_dim(schema, 1)),
        "torch reads such a list as the op does",
    ),
    Fix(
        _names("linalg_vector_norm.default", "norm.ScalarOpt_dim|ScalarOpt_dim_dtype"),
        "An empty list of dims, which stands for all dims, is taken for none.",
        _sharded_and(lambda schema: names_no_dim(schema, 2)),
        "torch reads such a list as the op does",
    ),
    Fix(
        _names("any.default|dim|dims|out|dims_out|all_out"),
        "The result is left pending as a sum of flags, and so counts them.",
        _sharded,
        "torch leaves a maximum pending, or nothing",
        kinds=ALL,
        releases=("2.13",),
    ),
    Fix(
        _names(
            "nansum.default", "sum.default|dim_IntList", "any.default|dim|dims|out|dims_out|all_out"
        ),
        "A pending operand stays pending: flags, integers, sums of norms and sums without NaNs are "
        "computed from contributions.",
        is_not_of_contributions,
        "torch reduces it first",
        kinds=(Partial,),
    ),
    Fix(
        _names("embedding.default", "gather.default"),
        "The pending result has a mask in its placement, for which most later ops raise. Rows of a "
        "replica are sharded as well, though no operand is, on a mesh dim that the op leaves free; "
        "and rows of what is pending.",
        _not_whole,
        "the mask ends with the op",
        kinds=ALL,
    ),
    Fix(
        ("histc.default",),
        "A range without a length is that of the values, for which each device takes its own.",
        _sharded_and(lambda schema: len({*schema.args_schema[2:4]}) == 1),
        "torch compares the ends of the range",
        Remedy.GATE,
    ),
    Fix(
        ("eye.m_out",),
        "Each device makes the whole matrix of its shard.",
        _not_whole,
        "torch passes it local sizes, and where the diagonal begins",
        Remedy.GATE,
        ALL,
    ),
    Fix(
        ("embedding_dense_backward.default",),
        "The number of reads of a row is counted in local indices alone.",
        _sharded_and(lambda schema: any(arg is True for arg in schema.args_schema[4:])),
        "torch counts all indices",
    ),
    Fix(
        ("gather.default",),
        "An index with fewer rows than a sharded dim is sharded alike: its rows meet other rows.",
        _sharded_and(picks_of_fewer_rows),
        "torch compares the sizes of the index with those of the operand",
    ),
    Fix(
        tuple(BY_MASK),
        "A mask is taken for an index of one dim: other dims stay sharded, and the mask is whole.",
        _sharded_and(op_schemas.is_by_mask),
        "torch counts the dims of a mask",
    ),
    Fix(
        ("_to_copy.default",),
        "A pending sum stays pending, and each contribution is rounded to the dtype.",
        rounds_contributions,
        "torch reduces it first",
        Remedy.GATE,
        (Partial,),
    ),
    Fix(
        ("logsumexp.default",),
        "Reduced dims that are kept (keepdim) are taken for removed.",
        _sharded_and(lambda schema: any(arg is True for arg in schema.args_schema[2:])),
        "torch reads keepdim",
    ),
    Fix(
        _names("_adaptive_avg_pool2d_backward.default", "max_unpool2d.default"),
        "The rows of one image, without a batch dim, are taken for channels.",
        _sharded_and(lambda schema: is_one_image(schema, 2)),
        "torch counts dims from the end",
    ),
    Fix(
        _names("max_unpool3d.default"),
        "The rows of one image, without a batch dim, are taken for channels.",
        _sharded_and(lambda schema: is_one_image(schema, 3)),
        "torch counts dims from the end",
    ),
    Fix(
        _names("cumsum.default", "cumprod.default", "logcumsumexp.default"),
        "A negative dim is taken for another dim.",
        _sharded_and(lambda schema: is_counted_from_the_end(schema.args_schema[1])),
        "torch makes dims positive first",
        releases=("2.13",),
    ),
    Fix(
        _names("slice_backward.default", "select_backward.default"),
        "A negative dim is taken for another dim.",
        _sharded_and(lambda schema: is_counted_from_the_end(schema.args_schema[2])),
        "torch makes dims positive first",
        releases=("2.13",),
    ),
    Fix(
        ("addmv.default",),
        "A term that is one value for all rows is sharded like the rows, or gives an empty shard "
        "its shape.",
        _sharded_and(is_one_term),
        "torch replicates such a term",
        releases=("2.13", "2.14"),
    ),
    Fix(
        _names(
            "linalg_ldl_solve.default",
            "linalg_lu_solve.default",
            "_linalg_solve_ex.default",
            "cholesky_solve.default",
            "triangular_solve.default",
        ),
        "Batch dims are counted from the front, even if one operand has fewer of them.",
        _sharded_and(broadcasts_matrices),
        "torch counts them from the end",
    ),
    Fix(
        ("linalg_solve_triangular.default",),
        "Some right-hand sides are solved with all triangles, or all with some.",
        _sharded_and(lambda schema: broadcasts_matrices(schema) or cuts_one_side(schema)),
        "torch shards triangles and sides alike",
    ),
    Fix(
        _names("nll_loss_forward.default", "nll_loss2d_forward.default"),
        "The means of shards are averaged, whatever their rows weigh.",
        _sharded_and(averages_rows),
        "torch adds up weights",
        releases=("2.13",),
    ),
    Fix(
        _names("max.default", "min.default", "amax.default", "amin.default"),
        "A device without rows raises.",
        _some_device_is_empty,
        "torch gives such a device a neutral value",
    ),
    Fix(
        _LOSSES,
        "The means of blocks of different sizes are averaged.",
        lambda schema, specs: any(map(is_uneven, specs)),
        "torch weights them by their sizes",
    ),
)

_OF_ANY = tuple([fix for fix in TABLE if not fix.ops])
BY_NAME: dict[str, tuple[Fix, ...]] = {
    name: tuple([fix for fix in TABLE if name in fix.ops or not fix.ops])
    for name in {name for fix in TABLE for name in fix.ops}
}


def fix_of(schema: OpSchema, specs: Sequence[DTensorSpec]) -> Fix | None:
    """The fix for an op, if torch would be wrong. (torch uses a mesh of one device as a stand-in
    for ops that it decomposes, so answers there have to hold on any mesh.)
    """
    if all(spec.mesh.size() == 1 for spec in specs):
        return None
    fixes = BY_NAME.get(op_schemas.name_of(schema.op), _OF_ANY)
    return next((fix for fix in fixes if fix.when(schema, specs)), None)

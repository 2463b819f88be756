"""Bugs of torch on placements that its own rules accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from cute_sharding.dtensor.bookkeeping.versions import RELEASES
from cute_sharding.dtensor.door.cuts import (
    devices_differ,
    is_of_views,
    is_sharded,
    is_uneven,
    some_device_is_empty,
)
from cute_sharding.dtensor.fixes import when
from cute_sharding.dtensor.replaced import op_schemas, registry, symints, tensor_specs
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

Condition = Callable[[OpSchema, Sequence[DTensorSpec]], bool]
CUTS, ALL = (Shard, StridedShard), (Shard, StridedShard, Partial)


class Remedy(Enum):
    """What is done where torch would be wrong."""

    SIGNATURE = "the op's signature answers; without one, as GATE"
    GATE = "its operands' placements of the fix's kinds are replicated first"
    FALSE = "the answer is False"
    SUM = "the gradient is that of a sum, which is as empty"
    FUNCTION = "torch's function for the op runs, and its results have the placements it leaves"


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
        lambda schema, specs: when.convolves_wrongly(specs, len(schema.args_schema)),
        "torch reduces and gathers what it cannot convolve in shards",
        kinds=ALL,
    ),
    Fix(
        _names("argmax.default", "argmin.default"),
        "A device without rows to search raises.",
        lambda schema, specs: when.searches_nothing(
            specs[0],
            op_schemas.argument(schema.op, schema.args_schema, schema.kwargs_schema, "dim"),
        ),
        "torch gives such a device a neutral value",
    ),
    Fix(
        _names("argmax.default", "argmin.default"),
        "The op's function runs on operands without redistribution, but takes the placements of "
        "its results from a rule that may redistribute operands.",
        lambda schema, specs: not any(map(tensor_specs.split_factors, specs)),
        "torch takes the placements that the function leaves",
        Remedy.FUNCTION,
        releases=("2.14", "2.15"),
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
        when.is_norm_of_nothing,
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
        when.attends_wrongly,
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
        _sharded_and(lambda schema: when.names_no_dim(schema, 1)),
        "torch reads such a list as the op does",
    ),
    Fix(
        _names("linalg_vector_norm.default", "norm.ScalarOpt_dim|ScalarOpt_dim_dtype"),
        "An empty list of dims, which stands for all dims, is taken for none.",
        _sharded_and(lambda schema: when.names_no_dim(schema, 2)),
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
        when.is_not_of_contributions,
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
        ("embedding_dense_backward.default",),
        "The number of reads of a row is counted in local indices alone.",
        _sharded_and(lambda schema: any(arg is True for arg in schema.args_schema[4:])),
        "torch counts all indices",
    ),
    Fix(
        ("gather.default",),
        "An index with fewer rows than a sharded dim is sharded alike: its rows meet other rows.",
        _sharded_and(when.picks_of_fewer_rows),
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
        when.rounds_contributions,
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
        _sharded_and(lambda schema: when.is_one_image(schema, 2)),
        "torch counts dims from the end",
    ),
    Fix(
        _names("max_unpool3d.default"),
        "The rows of one image, without a batch dim, are taken for channels.",
        _sharded_and(lambda schema: when.is_one_image(schema, 3)),
        "torch counts dims from the end",
    ),
    Fix(
        _names("cumsum.default", "cumprod.default", "logcumsumexp.default"),
        "A negative dim is taken for another dim.",
        _sharded_and(lambda schema: when.is_counted_from_the_end(schema.args_schema[1])),
        "torch makes dims positive first",
        releases=("2.13",),
    ),
    Fix(
        _names("slice_backward.default", "select_backward.default"),
        "A negative dim is taken for another dim.",
        _sharded_and(lambda schema: when.is_counted_from_the_end(schema.args_schema[2])),
        "torch makes dims positive first",
        releases=("2.13",),
    ),
    Fix(
        ("addmv.default",),
        "A term that is one value for all rows is sharded like the rows, or gives an empty shard "
        "its shape.",
        _sharded_and(when.is_one_term),
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
        _sharded_and(when.broadcasts_matrices),
        "torch counts them from the end",
    ),
    Fix(
        ("linalg_solve_triangular.default",),
        "Some right-hand sides are solved with all triangles, or all with some.",
        _sharded_and(lambda schema: when.broadcasts_matrices(schema) or when.cuts_one_side(schema)),
        "torch shards triangles and sides alike",
    ),
    Fix(
        _names("nll_loss_forward.default", "nll_loss2d_forward.default"),
        "The means of shards are averaged, whatever their rows weigh.",
        _sharded_and(when.averages_rows),
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
    fixes = BY_NAME.get(registry.name_of(schema.op), _OF_ANY)
    return next((fix for fix in fixes if fix.when(schema, specs)), None)

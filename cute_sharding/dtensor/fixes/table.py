"""Bugs of torch on placements that its own rules know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

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
    """What is done where torch would go wrong."""

    SIGNATURE = "the op's signature answers; where it has none, as GATE"
    GATE = "its operands are replicated first, as far as they are of the fix's kinds"
    FALSE = "the answer is False"
    FUNCTION = "torch's function of the op runs, and its results are placed as it leaves them"


@dataclass(frozen=True)
class Fix:
    """One bug.

    Attributes:
        ops: the overloads; empty: any op.
        what: what torch does.
        when: of which arguments and placements it does so.
        until: what ends it.
        remedy: what is done instead.
        kinds: the placements that torch goes wrong on.
        releases: those on which the test shows the bug, of the releases that were checked. The
            remedy is taken on every release.
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


def _sharded_and(condition: Callable[[OpSchema], bool]) -> Condition:
    return lambda schema, specs: condition(schema) and _sharded(schema, specs)


def _is_mean(at: int) -> Condition:
    """Whether the reduction, argument ``at``, is a mean, which it is where it is left out."""
    return _sharded_and(lambda schema: [*schema.args_schema, *[1] * 5][at] == 1)


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
    """Of ``name.overload|overload``, all."""
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
ATTENTION = tuple(
    f"_scaled_dot_product_{kind}_attention{backward}.default"
    for kind in ("flash", "efficient", "cudnn")
    for backward in ("", "_backward")
)

# The first that holds for an op is its fix.
TABLE: tuple[Fix, ...] = (
    Fix(
        (),
        "On devices where ranks draw for themselves (CPUs), each draws the numbers of its part. "
        "Where parts are of different sizes, ranks draw other numbers from then on, and replicas "
        "differ; and of blocks that only views make, what one device would draw is meant.",
        _draws_differently,
        "torch draws on CPUs as on accelerators",
        Remedy.GATE,
    ),
    Fix(
        ("_local_scalar_dense.default",),
        "item() reads the value of a rank's own part, or contribution.",
        lambda schema, specs: any(
            not isinstance(p, Replicate) for spec in specs for p in spec.placements
        ),
        "torch finishes it first, of any placement",
        Remedy.GATE,
        ALL,
    ),
    Fix(
        _names("convolution.default", "convolution_backward.default"),
        "Images that are cut by another dim, unevenly or over several mesh dims, weights that are "
        "cut, and what is pending are taken for replicas.",
        lambda schema, specs: when.convolves_wrongly(specs, len(schema.args_schema)),
        "torch finishes and gathers what it cannot convolve in parts",
        kinds=ALL,
    ),
    Fix(
        _names("argmax.default", "argmin.default"),
        "A device that has no row to search raises.",
        lambda schema, specs: when.searches_nothing(
            specs[0],
            op_schemas.argument(schema.op, schema.args_schema, schema.kwargs_schema, "dim"),
        ),
        "torch gives such a device what changes nothing",
    ),
    Fix(
        _names("argmax.default", "argmin.default"),
        "The function of the op runs on operands as they are, and takes the placements of its "
        "results from a rule that may move operands.",
        lambda schema, specs: not any(map(tensor_specs.split_factors, specs)),
        "torch takes them from the placements that the function leaves",
        Remedy.FUNCTION,
        releases=("2.14", "2.15"),
    ),
    Fix(
        ("equal.default",),
        "Tensors of two shapes are cut alike, and what is compared may be equal.",
        _compares_other_shapes,
        "torch compares shapes first",
        Remedy.FALSE,
        releases=("2.13",),
    ),
    Fix(
        _names("linalg_vector_norm.default", "norm.Scalar", "_foreach_norm.Scalar"),
        "Norms of infinite or negative order raise on a device that has no row.",
        when.is_norm_of_nothing,
        "torch gives such a device what changes nothing",
        Remedy.GATE,
    ),
    Fix(
        ("native_group_norm_backward.default",),
        "The op is told the sizes of the whole, beside the tensors of a part, and raises.",
        _sharded,
        "torch tells it local sizes",
        Remedy.SIGNATURE,
    ),
    Fix(
        ATTENTION,
        "A device may be left without heads, by the number of which kernels divide; or with heads "
        "of queries whose keys are elsewhere. What is pending is cut by heads to finish it.",
        when.attends_wrongly,
        "torch leaves each device heads and their keys",
        kinds=ALL,
    ),
    Fix(
        _names("soft_margin_loss_backward.default|grad_input"),
        "The gradient is divided by the elements of a part.",
        _sharded,
        "torch divides by those of the whole",
    ),
    Fix(
        _names(
            "mse_loss_backward.default|grad_input|out",
            "smooth_l1_loss_backward.default|grad_input|out",
            "huber_loss_backward.default|grad_input|out",
        ),
        "The gradient of a mean is divided by the elements of a part.",
        _is_mean(3),
        "torch divides by those of the whole",
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
        "An empty list of dims, which stands for all, is taken for none.",
        _sharded_and(lambda schema: when.names_no_dim(schema, 1)),
        "torch reads such a list as the op does",
    ),
    Fix(
        _names("linalg_vector_norm.default", "norm.ScalarOpt_dim|ScalarOpt_dim_dtype"),
        "An empty list of dims, which stands for all, is taken for none.",
        _sharded_and(lambda schema: when.names_no_dim(schema, 2)),
        "torch reads such a list as the op does",
    ),
    Fix(
        _names("any.default|dim|dims|out|dims_out|all_out"),
        "What is pending is a sum of flags, which stays pending where flags are counted.",
        _sharded,
        "torch leaves a maximum pending, or nothing",
        kinds=ALL,
        releases=("2.13",),
    ),
    Fix(
        _names(
            "nansum.default", "sum.default|dim_IntList", "any.default|dim|dims|out|dims_out|all_out"
        ),
        "What is pending stays pending: flags, integers, sums of norms and of what is no NaN are "
        "made of contributions.",
        when.is_not_of_contributions,
        "torch finishes it first",
        kinds=(Partial,),
    ),
    Fix(
        _names("embedding.default", "gather.default"),
        "What is pending has a mask of its own, and most ops that follow raise. Rows of a replica, "
        "which no operand says to be cut, are cut as well, on a mesh dim that the op has left.",
        _sharded,
        "the mask ends with the op",
    ),
    Fix(
        ("embedding_dense_backward.default",),
        "How often a row is read is counted of a part of the indices.",
        _sharded_and(lambda schema: any(arg is True for arg in schema.args_schema[4:])),
        "torch counts all of them",
    ),
    Fix(
        ("gather.default",),
        "An index with fewer rows than a dim that is cut is cut alike: its rows meet others.",
        _sharded_and(when.picks_of_fewer_rows),
        "torch compares the sizes of the index with those of what is picked of",
    ),
    Fix(
        tuple(BY_MASK),
        "A mask is taken for an index of one dim: the others stay cut, and the mask is whole.",
        _sharded_and(op_schemas.is_by_mask),
        "torch counts the dims of a mask",
    ),
    Fix(
        ("view.dtype",),
        "What is pending of numbers stays pending of the bits that they are made of.",
        lambda schema, specs: any(isinstance(p, Partial) for p in specs[0].placements),
        "torch finishes it first",
        Remedy.GATE,
        (Partial,),
    ),
    Fix(
        ("logsumexp.default",),
        "Dims that are kept are taken for gone.",
        _sharded_and(lambda schema: any(arg is True for arg in schema.args_schema[2:])),
        "torch reads keepdim",
    ),
    Fix(
        _names("_adaptive_avg_pool2d_backward.default", "max_unpool2d.default"),
        "The rows of one image, without a dim for several, are taken for channels.",
        _sharded_and(lambda schema: when.is_one_image(schema, 2)),
        "torch counts dims from the end",
    ),
    Fix(
        _names("max_unpool3d.default"),
        "The rows of one image, without a dim for several, are taken for channels.",
        _sharded_and(lambda schema: when.is_one_image(schema, 3)),
        "torch counts dims from the end",
    ),
    Fix(
        _names("cumsum.default", "cumprod.default", "logcumsumexp.default"),
        "A dim that is counted from the end is taken for another.",
        _sharded_and(lambda schema: when.is_counted_from_the_end(schema.args_schema[1])),
        "torch counts dims from the front first",
        releases=("2.13",),
    ),
    Fix(
        _names("slice_backward.default", "select_backward.default"),
        "A dim that is counted from the end is taken for another.",
        _sharded_and(lambda schema: when.is_counted_from_the_end(schema.args_schema[2])),
        "torch counts dims from the front first",
        releases=("2.13",),
    ),
    Fix(
        ("addmv.default",),
        "A term that is one value for all rows is cut as they are, or gives a part without rows "
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
        "Batch dims are counted from the front, also where one operand has fewer of them.",
        _sharded_and(when.broadcasts_matrices),
        "torch counts them from the end",
    ),
    Fix(
        ("linalg_solve_triangular.default",),
        "A part of the sides is solved with all of the triangles, or all with some.",
        _sharded_and(lambda schema: when.broadcasts_matrices(schema) or when.cuts_one_side(schema)),
        "torch cuts triangles and sides alike",
    ),
    Fix(
        _names("nll_loss_forward.default", "nll_loss2d_forward.default"),
        "The means of parts are averaged, whatever their rows weigh.",
        _sharded_and(when.averages_rows),
        "torch adds up weights",
        releases=("2.13",),
    ),
    Fix(
        _names("max.default", "min.default", "amax.default", "amin.default"),
        "A device that has no row raises.",
        _some_device_is_empty,
        "torch gives such a device what changes nothing",
    ),
    Fix(
        _LOSSES,
        "The means of blocks of different sizes are averaged.",
        lambda schema, specs: any(map(is_uneven, specs)),
        "torch weighs them by their sizes",
    ),
)

_OF_ANY = tuple([fix for fix in TABLE if not fix.ops])
BY_NAME: dict[str, tuple[Fix, ...]] = {
    name: tuple([fix for fix in TABLE if name in fix.ops or not fix.ops])
    for name in {name for fix in TABLE for name in fix.ops}
}


def fix_of(schema: OpSchema, specs: Sequence[DTensorSpec]) -> Fix | None:
    """The fix for an op, where torch would go wrong. (A mesh of one device is torch's stand-in for
    ops that it decomposes: what holds there is to hold anywhere.)
    """
    if all(spec.mesh.size() == 1 for spec in specs):
        return None
    fixes = BY_NAME.get(registry.name_of(schema.op), _OF_ANY)
    return next((fix for fix in fixes if fix.when(schema, specs)), None)

"""Which ops torch gets wrong on Shard placements alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from math import isinf, prod
from typing import Any

from cute_sharding.dtensor.ops.cuts import is_sharded, is_uneven, some_device_is_empty
from cute_sharding.dtensor.torch_private import op_schemas, registry, symints
from cute_sharding.dtensor.torch_private.op_schemas import OpSchema
from cute_sharding.dtensor.torch_private.tensor_specs import (
    DTensorSpec,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.ops.table import BY_OVERLOAD

# Torch takes an average over blocks of different sizes for one of blocks of one size.
_AVERAGES = frozenset(
    one
    for name in BY_OVERLOAD
    if "_loss" in name or name.startswith("binary_cross_entropy")
    for one in (name, name.replace(".default", ".out"))
)


ATTENTION = frozenset(
    f"_scaled_dot_product_{kind}_attention{backward}.default"
    for kind in ("flash", "efficient", "cudnn")
    for backward in ("", "_backward")
)

# Of no elements there is no largest: where a device has none, torch's kernels raise.
_EXTREMES = frozenset(["max.default", "min.default", "amax.default", "amin.default"])

# Those that torch gets wrong on any shards: gradients that it divides by other counts, mean losses
# of classes, where some rows weigh more or are ignored, reductions that name no dim, logsumexp that
# keeps its dims, pools of one image, whose rows it takes for channels, dims that are counted from
# the end, which it takes for others, a term that is one value for all rows of a product, and
# equations that are solved for several matrices alike, whose batch dims it counts from the front;
# with triangles, of all of which it solves for a part of the other sides.
_WRONG_ON_SHARDS: dict[str, Callable[[OpSchema], bool]] = {
    **dict.fromkeys(
        [f"soft_margin_loss_backward.{which}" for which in ("default", "grad_input")],
        lambda schema: True,
    ),
    **dict.fromkeys(
        [
            f"{loss}_loss_backward.{which}"
            for loss in ("mse", "smooth_l1", "huber")
            for which in ("default", "grad_input", "out")
        ],
        lambda schema: schema.args_schema[3] == 1,
    ),
    **dict.fromkeys(
        [f"binary_cross_entropy_backward.{which}" for which in ("default", "grad_input")],
        lambda schema: len(schema.args_schema) < 5 or schema.args_schema[4] == 1,
    ),
    **dict.fromkeys(
        (
            "sum.dim_IntList",
            "nansum.default",
            "mean.dim",
            "amax.default",
            "amin.default",
            "var.correction",
            "std.correction",
            "var_mean.correction",
        ),
        lambda schema: _names_no_dim(schema, 1),
    ),
    **dict.fromkeys(
        ("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"),
        lambda schema: _names_no_dim(schema, 2),
    ),
    "logsumexp.default": lambda schema: any(arg is True for arg in schema.args_schema[2:]),
    "_adaptive_avg_pool2d_backward.default": lambda schema: _is_one_image(schema, 2),
    "max_unpool2d.default": lambda schema: _is_one_image(schema, 2),
    "max_unpool3d.default": lambda schema: _is_one_image(schema, 3),
    **dict.fromkeys(
        ("cumsum.default", "cumprod.default", "logcumsumexp.default"),
        lambda schema: _is_counted_from_the_end(schema.args_schema[1]),
    ),
    **dict.fromkeys(
        ("slice_backward.default", "select_backward.default"),
        lambda schema: _is_counted_from_the_end(schema.args_schema[2]),
    ),
    "addmv.default": lambda schema: _is_one_term(schema),
    **dict.fromkeys(
        (
            "linalg_ldl_solve.default",
            "linalg_lu_solve.default",
            "_linalg_solve_ex.default",
            "cholesky_solve.default",
            "triangular_solve.default",
        ),
        lambda schema: _broadcasts_matrices(schema),
    ),
    "linalg_solve_triangular.default": lambda schema: (
        _broadcasts_matrices(schema) or _cuts_one_side(schema)
    ),
    "nll_loss_forward.default": lambda schema: _averages_rows(schema),
    "nll_loss2d_forward.default": lambda schema: _averages_rows(schema),
}


def plain_shards_go_wrong(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether torch's own rule would be wrong on these shards, were they all plain."""
    name = registry.name_of(schema.op)
    if name in ATTENTION:
        return _attends_wrongly(name, schema, specs)
    if name in _WRONG_ON_SHARDS and _WRONG_ON_SHARDS[name](schema):
        return any(map(is_sharded, specs))
    if name in _EXTREMES:
        return any(map(some_device_is_empty, specs))
    return name in _AVERAGES and any(map(is_uneven, specs))


def is_norm_of_nothing(schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether the op is a norm that has no value for no elements, of an order that is infinite or
    negative, and some device has no row of what is reduced: torch's raise there, as does item().
    """
    name = registry.name_of(schema.op)
    if name not in ("linalg_vector_norm.default", "norm.Scalar", "_foreach_norm.Scalar") or not any(
        isinstance(arg, (int, float)) and (arg < 0 or isinf(arg)) for arg in schema.args_schema[1:2]
    ):
        return False
    dims = _reduced_dims(schema) if name == "linalg_vector_norm.default" else None
    return any(some_device_is_empty(spec, dims) for spec in specs)


def _reduced_dims(schema: OpSchema) -> frozenset[int] | None:
    """Those that a norm names; None: all."""
    first: Any = schema.args_schema[0]
    named: Any = schema.args_schema[2] if len(schema.args_schema) > 2 else None
    if named is None or named == []:
        return None
    ndim = max(len(first.shape), 1)
    return frozenset(d % ndim for d in ([named] if isinstance(named, int) else named))


def _names_no_dim(schema: OpSchema, at: int) -> bool:
    """Whether the dims of a reduction, argument ``at``, are an empty list, which stands for all of
    them.
    """
    return len(schema.args_schema) > at and schema.args_schema[at] == []


def _is_counted_from_the_end(dim: Any) -> bool:
    return isinstance(dim, int) and dim < 0


def _is_one_image(schema: OpSchema, spatial: int) -> bool:
    """Whether the first operand has channels and the dims of an image, and no dim for several."""
    first = schema.args_schema[0]
    return isinstance(first, DTensorSpec) and len(first.shape) == spatial + 1


def _is_one_term(schema: OpSchema) -> bool:
    """Whether the term of a product of a matrix and a vector is one value for all rows. Where a
    device has no rows, or none to sum over, the product has the shape of the term. And torch may
    have it cut, which a scalar cannot be.
    """
    term, matrix, _ = op_schemas.specs_of(schema)
    rows, mesh = tuple(matrix.shape[:1]), tuple(matrix.mesh.shape)
    return tuple(term.shape) != rows and (
        not term.shape or any(_leaves_one_without(n, mesh) for n in matrix.shape)
    )


def _broadcasts_matrices(schema: OpSchema) -> bool:
    """Whether the first operand has batch dims, and the last, of the equation's two sides, has not
    the same. (Of ``solve`` that may be one vector for each matrix.)
    """
    specs = op_schemas.specs_of(schema)
    first, last = (tuple(spec.shape) for spec in (specs[0], specs[-1]))
    if registry.name_of(schema.op) == "_linalg_solve_ex.default" and last == first[:-1]:
        return False
    return len(first) > 2 and last[:-2] != first[:-2]


def _cuts_one_side(schema: OpSchema) -> bool:
    """Whether the triangles have batch dims, and torch may end with one side cut in these and the
    other not: a part would be solved with all of the triangles, or all with some. Only where both
    are cut there alike has it nothing to move.
    """
    triangles, sides = op_schemas.specs_of(schema)
    kept = {Replicate(), *map(Shard, range(len(sides.shape) - 2))}
    alike = tuple(triangles.placements) == tuple(sides.placements)
    return len(triangles.shape) > 2 and not (alike and kept.issuperset(sides.placements))


def _attends_wrongly(name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether torch's rule may leave some device without heads, by the number of which kernels
    divide; or, where several heads of queries share one of keys, with heads whose keys are
    elsewhere, so that others are taken for them. It may cut heads by itself, to finish what is
    pending or to have all cut alike; only where they are already, it has no reason to. And its rule
    for cuDNN knows nothing of a mask, and raises. (Context parallelism has rules of its own.)
    """
    if schema.op in registry.op_handlers():
        return False
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


# What torch's rule for attention keeps: batch and heads.
_KEPT = (Replicate(), Shard(0), Shard(1))


def _leaves_one_without(n: int, mesh: tuple[int, ...]) -> bool:
    """Whether some device has none of n rows that some mesh dims share."""
    for cut in (cut for k in range(len(mesh)) for cut in combinations(mesh, k + 1)):
        last = n
        for parts in cut:
            last -= min((parts - 1) * -(-last // parts), last)
        if last == 0:
            return True
    return False


def _averages_rows(schema: OpSchema) -> bool:
    """Whether a loss of classes is the mean of rows that are cut: torch cuts them as the scores."""
    scores: Any = schema.args_schema[0]
    classes = min(len(scores.shape) - 1, 1)
    return schema.args_schema[3] == 1 and any(
        isinstance(p, (Shard, StridedShard)) and p.dim != classes for p in scores.placements
    )

"""The table of ops beside views and ops that move rows: one row for each, op -> signature. (Those
of ops that move rows follow from their maps: movement/signatures.py.)

A row is all that is known of an op: its aten overloads, how its arguments make a signature
(signature.py), what a contracted dim leaves pending, and of which operands the result is a sum. A
rule (rules/) is called with the op's arguments, where tensors are their shapes; it gives a pattern
for the tensors among them in their order, those in lists and options too. Where it gives None, no
signature is known for such arguments.

Sources: the ops' definitions in PyTorch's documentation and in
aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_sharding.ops.assign import COPIED, Linear
from cute_sharding.ops.rules import dims, losses, normalization, parts, products, windows
from cute_sharding.ops.rules.names import Rule


@dataclass(frozen=True)
class Row:
    """One op, or several that do the same to dims.

    Attributes:
        overloads: its aten overloads.
        rule: a pattern, or arguments -> pattern.
        reduce: what a contracted dim leaves pending: "sum", "avg", "max", "min"; or, of arguments;
            None: such dims are whole.
        linear: the operands of which what is pending may stay so; by position, those of which the
            result is linear, each by itself.
        filled: the names of which no device may be left without rows, since the op refuses to
            compute of nothing, or torch's kernel divides by their number; or, of arguments; True:
            all of them.
        shares: an average that is left pending may be of blocks that differ: the op is then run so
            that each counts by its share of the "elements", or, of losses that give their weight as
            a second result, of the "rows" (dtensor/decide/shares.py).
        empty: what the op gives of no rows changes nothing of what is pending, as of sums: a device
            may have none.
        of_numbers: the rule computes with the numbers among the arguments. In a compiled program
            those that another call may have otherwise are given as
            ``ThisCall`` (``cute_sharding/ops/rules/names.py``).

    >>> row = Row(("mm.default",), "m k, k n -> m n", "sum", linear=(0, 1))
    >>> row.pattern(), row.reduction()
    ('m k, k n -> m n', 'sum')
    """

    overloads: tuple[str, ...]
    rule: str | Rule
    reduce: str | Rule | None = None
    linear: Linear | tuple[int, ...] = ()
    filled: bool | frozenset[str] | Callable[..., frozenset[str]] = False
    shares: str | None = None
    empty: bool = False
    of_numbers: bool = False

    def pattern(self, *args: Any, **kwargs: Any) -> str | None:
        """The op's signature for those arguments, as :func:`parse` reads it; None: none is known.
        Tensors among the arguments are given as their shapes.
        """
        return self.rule if isinstance(self.rule, str) else self.rule(*args, **kwargs)

    def reduction(self, *args: Any, **kwargs: Any) -> str | None:
        """What a contracted dim leaves pending for those arguments; None: such dims are whole."""
        return self.reduce(*args, **kwargs) if callable(self.reduce) else self.reduce

    def has_rows(self, *args: Any, **kwargs: Any) -> bool | frozenset[str]:
        """The names of which each device must have rows for those arguments; True: all."""
        return self.filled(*args, **kwargs) if callable(self.filled) else self.filled


# Of ops that torch keeps pending what is pending of their operands, whose elements they copy: of
# others, as triangles, programs there have what is finished, and their next op may need that.
COPIES = Linear((0,), COPIED, alone=True)
COPIES_ALL = Linear(None, COPIED, alone=True, together=True)

TABLE: tuple[Row, ...] = (
    # products
    Row(("mm.default",), "m k, k n -> m n", "sum", (0, 1)),
    Row(("bmm.default",), "b m k, b k n -> b m n", "sum", (0, 1)),
    Row(("mv.default",), "m k, k -> m", "sum", (0, 1)),
    Row(("dot.default", "vdot.default"), "k, k ->", "sum", (0, 1)),
    Row(("addmm.default",), products.sum_and_product("m k, k n -> m n"), "sum"),
    Row(
        ("addmv.default",),
        products.sum_and_product("m k, k -> m"),
        "sum",
        filled=products.rows_of_matrix_vector,
    ),
    Row(("addr.default",), products.sum_and_outer_product),
    Row(("baddbmm.default",), products.sum_and_product("b m k, b k n -> b m n"), "sum"),
    Row(("addbmm.default",), products.sum_and_product("b m k, b k n -> m n"), "sum"),
    Row(("linalg_solve_triangular.default",), products.solved_with_triangles, linear=(1,)),
    Row(
        ("linalg_lu_solve.default", "linalg_ldl_solve.default"),
        products.solved_with_factors,
        filled=True,
    ),
    Row(("_linalg_solve_ex.default",), products.solved, filled=True),
    Row(("cholesky_solve.default",), "... [k] n, ... [i] [j] -> ... [k] n", filled=True),
    Row(
        ("triangular_solve.default",),
        "... [k] [n], ... [i] [j] -> ... [k] [n], ... [i] [j]",
        filled=True,
    ),
    Row(("_cdist_forward.default", "_euclidean_dist.default"), "... p [m], ... r [m] -> ... p r"),
    Row(
        ("_cdist_backward.default",),
        "... p r, ... p [m], ... r [m], ... p r -> ... p [m]",
        "sum",
    ),
    # along dims
    Row(
        (
            "_softmax.default",
            "_log_softmax.default",
            "_safe_softmax.default",
            "cumsum.default",
            "cumprod.default",
            "logcumsumexp.default",
        ),
        dims.along(1),
    ),
    Row(
        ("_softmax_backward_data.default", "_log_softmax_backward_data.default"),
        dims.along(2, alike=2),
    ),
    Row(("cummax.default", "cummin.default"), dims.along(1, results=2)),
    Row(("sort.default",), dims.along(1, -1, results=2)),
    Row(("sort.stable",), dims.stable_sort),
    Row(("topk.default",), dims.topk),
    Row(("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode.default"), dims.picked(1)),
    Row(("kthvalue.default",), dims.picked(2)),
    Row(("diag_embed.default",), dims.put_on_diagonals),
    Row(("linalg_cross.default",), dims.across),
    Row(("renorm.default",), dims.each_of(2)),
    Row(("trace.default",), "[n] [m] ->"),
    Row(("glu.default",), dims.halved),
    Row(("glu_backward.default",), dims.doubled),
    Row(("_fft_c2c.default",), dims.along(1), filled=True),
    Row(("_fft_r2c.default", "_fft_c2r.default"), dims.transformed, filled=True),
    # reductions
    Row(("sum.default",), dims.to_scalar, "sum", (0,)),
    Row(("sum.dim_IntList",), dims.reduced(), "sum", (0,)),
    Row(("nansum.default",), dims.reduced(), "sum"),
    Row(("mean.default",), dims.to_scalar, "avg", (0,), shares="elements"),
    Row(("mean.dim",), dims.reduced(), "avg", (0,), shares="elements"),
    Row(("amax.default",), dims.reduced(), "max"),
    Row(("amin.default",), dims.reduced(), "min"),
    Row(("max.default",), dims.to_scalar, "max"),
    Row(("min.default",), dims.to_scalar, "min"),
    Row(("prod.default",), dims.to_scalar, "product", empty=True),
    Row(("prod.dim_int",), dims.reduced(), "product", empty=True),
    Row(("any.dim", "any.dims"), dims.reduced(), "max", empty=True),
    Row(("any.default",), dims.to_scalar, "max", empty=True),
    Row(("all.dim", "all.dims"), dims.reduced(), "min", empty=True),
    Row(("all.default",), dims.to_scalar, "min", empty=True),
    Row(("logsumexp.default",), dims.reduced()),
    Row(("count_nonzero.dim_IntList", "count_nonzero.default"), dims.reduced(keep=9), "sum"),
    Row(("var.correction", "std.correction"), dims.reduced(keep=9)),
    Row(("std_mean.correction", "var_mean.correction"), dims.reduced(keep=9, results=2)),
    Row(("argmax.default", "argmin.default"), dims.reduced()),
    # normalization
    Row(("native_layer_norm.default",), normalization.layer_norm),
    Row(("native_layer_norm_backward.default",), normalization.layer_norm_backward, "sum"),
    Row(
        ("native_batch_norm.default", "_native_batch_norm_legit.default"),
        normalization.batch_norm,
        filled=True,
    ),
    Row(("_batch_norm_with_update.default",), normalization.batch_norm_with_update, filled=True),
    Row(("native_batch_norm_backward.default",), normalization.batch_norm_backward, filled=True),
    Row(
        ("batch_norm_backward.default",),
        normalization.batch_norm_backward_with_reserve,
        filled=True,
    ),
    Row(("native_group_norm.default",), normalization.group_norm, filled=True),
    Row(
        ("native_group_norm_backward.default",),
        normalization.group_norm_backward,
        "sum",
        filled=True,
    ),
    Row(("_fused_rms_norm.default",), normalization.rms_norm),
    Row(("_fused_rms_norm_backward.default",), normalization.rms_norm_backward, "sum"),
    # by index
    Row(("gather.default",), parts.gather, "sum"),
    Row(
        (
            *("scatter.src", "scatter.value", "scatter_add.default"),
            *("scatter_reduce.two", "scatter_reduce_.two"),
            *("scatter.reduce", "scatter.value_reduce"),
            *("scatter_.reduce", "scatter_.value_reduce"),
        ),
        parts.scatter,
    ),
    Row(("index_select.default",), parts.index_select),
    Row(("isin.Tensor_Tensor",), parts.sought, "max"),
    Row(("index_add.default", "index_copy.default"), parts.index_written),
    Row(("take.default",), parts.taken),
    Row(("index.Tensor",), parts.indexed),
    Row(("index_put.default",), parts.index_put),
    Row(("index_fill.int_Scalar", "index_fill.int_Tensor"), parts.index_filled),
    Row(("bucketize.Tensor",), "..., [boundary] -> ..."),
    Row(("searchsorted.Tensor", "searchsorted.Scalar"), parts.searched),
    Row(
        ("masked_scatter.default", "masked_scatter_.default"),
        parts.in_their_order(3, lambda x, mask, _: max(len(x), len(mask))),
    ),
    Row(
        ("masked_scatter_backward.default",),
        parts.in_their_order(2, lambda gradient, mask, sizes: len(sizes)),
    ),
    Row(("put.default", "put_.default"), parts.in_their_order(3, lambda x, *_: len(x))),
    Row(("nonzero_static.default",), parts.in_their_order(1, lambda *_: 2)),
    Row(("embedding.default",), parts.embedding, "sum"),
    Row(("embedding_dense_backward.default",), parts.embedding_backward, "sum"),
    # together and apart
    Row(("stack.default",), parts.stack, linear=COPIES_ALL),
    Row(("slice_scatter.default",), parts.slice_scatter),
    Row(("select_scatter.default",), parts.select_scatter),
    Row(("diagonal_scatter.default",), parts.diagonal_scatter),
    # losses
    Row(
        (
            "mse_loss.default",
            "smooth_l1_loss.default",
            "huber_loss.default",
            "soft_margin_loss.default",
            "binary_cross_entropy.default",
            "binary_cross_entropy_with_logits.default",
        ),
        losses.loss,
        losses.reduction_of_loss,
        shares="elements",
    ),
    Row(
        (
            "mse_loss_backward.default",
            "smooth_l1_loss_backward.default",
            "huber_loss_backward.default",
            "soft_margin_loss_backward.default",
            "binary_cross_entropy_backward.default",
        ),
        losses.loss_backward,
    ),
    Row(
        ("nll_loss_forward.default", "nll_loss2d_forward.default"),
        losses.nll_loss,
        losses.reduction_of_classes,
        shares="rows",
    ),
    Row(("nll_loss_backward.default", "nll_loss2d_backward.default"), losses.nll_loss_backward),
    # convolutions
    Row(("convolution.default",), products.convolution, "sum", filled=True),
    Row(("convolution_backward.default",), products.convolution_backward, "sum", filled=True),
    # matrices, each by itself
    *(
        Row(tuple(f"{name}.default" for name in names), pattern, filled=True)
        for pattern, names in (
            ("... [m] [n] -> ... [p] [q]", ("linalg_matrix_exp", "cholesky_inverse")),
            ("... [m] [n] -> ... [k]", ("_linalg_eigvals", "linalg_eigvals")),
            ("... [m] [n] -> ... [m] [n], ...", ("linalg_inv_ex", "linalg_cholesky_ex")),
            ("... [m] [n] -> ..., ... [p] [q], ... [k]", ("_linalg_det",)),
            ("... [m] [n] -> ..., ..., ... [p] [q], ... [k]", ("_linalg_slogdet",)),
            ("... [m] [n] -> ... [k], ... [p] [q]", ("_linalg_eigh", "linalg_eig")),
            ("... [m] [n] -> ... [m] [k], ... [r], ... [p] [q]", ("_linalg_svd",)),
            ("... [m] [n] -> ... [m] [k], ... [p] [q]", ("linalg_qr",)),
            ("... [m] [n] -> ... [m] [n], ... [k]", ("geqrf",)),
            ("... [m] [n] -> ... [m] [n], ... [k], ...", ("linalg_lu_factor_ex",)),
            ("... [m] [n] -> ... [p] [q], ... [r] [s], ... [t] [u]", ("linalg_lu",)),
            ("... [m] [n], ... [k] -> ... [p] [q], ... [r] [s], ... [t] [u]", ("lu_unpack",)),
            ("... [m] [n], ... [k] -> ... [m] [n]", ("linalg_householder_product",)),
        )
    ),
    # windows
    *(
        row
        for n in (2, 3)
        for row in (
            Row((f"avg_pool{n}d.default",), windows.windowed(n), filled=True),
            Row((f"avg_pool{n}d_backward.default",), windows.windowed(n, "y=x", "x"), filled=True),
            Row(
                (f"max_pool{n}d_with_indices.default", f"adaptive_max_pool{n}d.default"),
                windows.windowed(n, "x", "yy"),
                filled=True,
            ),
            Row(
                (
                    f"max_pool{n}d_with_indices_backward.default",
                    f"adaptive_max_pool{n}d_backward.default",
                ),
                windows.windowed(n, "y=xy", "x"),
                filled=True,
            ),
        )
    ),
    *(
        row
        for n in (2, 3)
        for row in (
            Row((f"_adaptive_avg_pool{n}d.default",), windows.windowed(n), filled=True),
            Row(
                (f"_adaptive_avg_pool{n}d_backward.default",),
                windows.windowed(n, "y=x", "x"),
                filled=True,
            ),
            Row((f"max_unpool{n}d.default",), windows.windowed(n, "yy", "x"), filled=True),
        )
    ),
    *(
        row
        for n, kinds in (
            (1, ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d")),
            (
                2,
                (
                    *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d"),
                    *("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
                ),
            ),
            (3, ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d")),
        )
        for row in (
            Row(tuple(f"{kind}.default" for kind in kinds), windows.windowed(n), filled=True),
            Row(
                tuple(f"{kind}_backward.default" for kind in kinds),
                windows.windowed(n, "y", "x"),
                filled=True,
            ),
        )
    ),
    Row(("grid_sampler_2d.default",), "n c [x0] [x1], n p q [two] -> n c p q", filled=True),
    Row(
        ("grid_sampler_3d.default",),
        "n c [x0] [x1] [x2], n p q r [three] -> n c p q r",
        filled=True,
    ),
    Row(
        ("grid_sampler_2d_backward.default",),
        "n c p q, n c [x0] [x1], n p q [two] -> n c [x0] [x1], n p q [two]",
        "sum",
        filled=True,
    ),
    Row(
        ("grid_sampler_3d_backward.default",),
        "n c p q r, n c [x0] [x1] [x2], n p q r [three] -> n c [x0] [x1] [x2], n p q r [three]",
        "sum",
        filled=True,
    ),
    # pointwise ops, of which torch's own list has not all
    Row(dims.GRADIENTS, dims.pointwise, linear=(0,)),
    Row(dims.POINTWISE, dims.pointwise),
    Row(("log_sigmoid_forward.default",), "... -> ..., ..."),
    # attention
    Row(
        ("_scaled_dot_product_flash_attention_for_cpu.default",),
        products.attention,
        filled=frozenset("h"),
    ),
    Row(
        ("_scaled_dot_product_flash_attention_for_cpu_backward.default",),
        products.attention_backward,
        filled=frozenset("h"),
    ),
    *(
        Row((f"_scaled_dot_product_{name}.default",), rule, filled=frozenset("bh"))
        for name, rule in (
            ("flash_attention", products.flash_attention),
            ("flash_attention_backward", products.flash_attention_backward),
            ("efficient_attention", products.efficient_attention),
            ("efficient_attention_backward", products.efficient_attention_backward),
            ("cudnn_attention", products.cudnn_attention),
            ("cudnn_attention_backward", products.cudnn_attention_backward),
        )
    ),
)
"""The rows, one for each op or family of ops.

>>> [row.pattern() for row in TABLE if "bmm.default" in row.overloads]
['b m k, b k n -> b m n']
"""

# Of all ops that are pointwise, of which torch has the list; those of lists of tensors are torch's.
POINTWISE = Row((), dims.pointwise)

# Those of two tensors that are linear, for operands of which something is pending.
LINEAR: dict[str, Row] = {
    overload: row
    for row in (
        Row(("add.Tensor", "sub.Tensor"), dims.terms, linear=(0, 1)),
        Row(("mul.Tensor",), dims.pointwise, linear=(0, 1)),
        Row(("div.Tensor",), dims.pointwise, linear=(0,)),
    )
    for overload in row.overloads
}

# Those that write by index, where the index is a mask: it stands for as many dims as it has.
BY_MASK = {
    name: Row((name,), parts.written_by_mask)
    for name in (
        *("index_put.default", "index_put_.default"),
        *("_unsafe_index_put.default", "_index_put_impl_.default"),
    )
}

BY_OVERLOAD: dict[str, Row] = {name: row for row in TABLE for name in row.overloads}

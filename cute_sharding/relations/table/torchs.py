"""Ops without a relation: torch's own rules answer, and a row states what is known of the op.

docs/ops.md describes how we measure that torch's rule is right on any cut. Beside the ops named
here, it is right for all ops that torch lists as pointwise, in place or not, and on lists; and for
ops that draw random numbers.
"""

from __future__ import annotations

from cute_sharding.relations.table.row import OfTorch

ROWS: tuple[OfTorch, ...] = (
    OfTorch(
        (
            "clone.default",
            "contiguous.default",
            "detach.default",
            "detach_.default",
            "alias.default",
            "copy_.default",
            "_to_copy.default",
        ),
        carries_any_cut=True,
        note="the result has the elements of the operand",
    ),
    OfTorch(
        (
            "zero_.default",
            "zeros_like.default",
            "ones_like.default",
            "full_like.default",
            "rand_like.default",
            "randn_like.default",
            "randint_like.default",
            "new_empty.default",
            "new_zeros.default",
            "new_ones.default",
            "new_full.default",
            "new_empty_strided.default",
        ),
        carries_any_cut=True,
        note="the result has new values",
    ),
    OfTorch(
        ("empty_like.default", "fill_.Scalar"),
        carries_any_cut=True,
        leaves_pending=True,
        note="the result has new values, and is a Partial if the operand is a Partial",
    ),
    OfTorch(
        ("equal.default", "is_same_size.default"),
        carries_any_cut=True,
        note="the result is a bool of Python",
    ),
    OfTorch(
        (
            "linalg_vector_norm.default",
            "norm.Scalar",
            "linalg__powsum.default",
            "_foreach_norm.Scalar",
            "_foreach_powsum.Scalar",
        ),
        carries_any_cut=True,
        note="the result is a norm, or a sum of powers",
    ),
    OfTorch(
        ("masked_fill_.Scalar",),
        smooths_labels=True,
        note="cross_entropy with label smoothing calls it on a Partial",
    ),
    OfTorch(("bincount.default",), counts=True, note="each device counts its own numbers"),
    OfTorch(
        ("miopen_batch_norm.default",),
        writes=("running_mean", "running_var"),
        note="batch norm of one backend",
    ),
    OfTorch(("rrelu_with_noise.default",), writes=("noise",), note="saves the random slopes"),
    OfTorch(
        ("tensor_split.sections", "tensor_split.indices"),
        made_of="slice.Tensor",
        note="DTensor does not get this op",
    ),
    OfTorch(
        (
            "quantile.default",
            "quantile.scalar",
            "nanquantile.default",
            "nanquantile.scalar",
            "vander.default",
            "linalg_vander.default",
            "combinations.default",
            "stft.default",
            "stft.center",
            "istft.default",
        ),
        makes_constants=True,
        note="DTensor does not get this op, but ops that it is made of",
    ),
    OfTorch(
        ("_scaled_dot_product_attention_math.default",),
        makes_constants=True,
        in_parts=True,
        note="DTensor gets this op only in inference mode",
    ),
    OfTorch(
        (
            "scaled_dot_product_attention.default",
            "cross_entropy_loss.default",
            "nll_loss_nd.default",
            "nll_loss.default",
            "nll_loss2d.default",
            "softmax.int",
            "log_softmax.int",
        ),
        in_parts=True,
        note="DTensor gets this op only in inference mode",
    ),
)

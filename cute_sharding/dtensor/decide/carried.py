"""Ops of which torch's own rules are right on any cut: docs/ops.md says how that is measured.
Beside these, all that torch knows to be pointwise, in place or not, and of lists; and those that
draw.
"""

from __future__ import annotations

CARRIED = frozenset(
    [
        *(
            "clone.default",
            "contiguous.default",
            "detach.default",
            "detach_.default",
            "alias.default",
            "copy_.default",
            "_to_copy.default",
            "fill_.Scalar",
            "zero_.default",
        ),
        *("equal.default", "is_same_size.default"),
        *(
            "empty_like.default",
            "zeros_like.default",
            "ones_like.default",
            "full_like.default",
            "rand_like.default",
            "randn_like.default",
            "randint_like.default",
        ),
        *(
            "new_empty.default",
            "new_zeros.default",
            "new_ones.default",
            "new_full.default",
            "new_empty_strided.default",
        ),
        *(
            "linalg_vector_norm.default",
            "norm.Scalar",
            "linalg__powsum.default",
            "_foreach_norm.Scalar",
            "_foreach_powsum.Scalar",
        ),
    ]
)

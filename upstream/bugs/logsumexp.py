"""logsumexp that keeps its dims."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import EitherHook, Hook, either
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
MATH = "torch/distributed/tensor/_ops/_math_ops.py"
TEST = "test/distributed/tensor/test_logsumexp_keepdim.py"

MESSAGE = """[DTensor] logsumexp reads keepdim as a positional argument

keepdim is the third argument of aten.logsumexp, and its strategy looks for it
among the keyword arguments, so it is taken for False. A shard of a dim behind
those that are reduced is then labeled a shard of the dim before it: of (4, 8)
with Shard(1), logsumexp(0, keepdim=True) is (1, 8) with Shard(0).

Test plan:
  python test/distributed/tensor/test_logsumexp_keepdim.py
"""


def test() -> str:
    """Its test."""
    return formatted((HERE / "test_logsumexp_keepdim.py.in").read_text())


KEPT = "    keep_dim = len(args_schema) > 2 and bool(args_schema[2])\n"
HOOKS: tuple[EitherHook, ...] = (
    either(
        Hook(
            MATH,
            """    keep_dim = cast(bool, op_schema.kwargs_schema.get("keepdim", False))
    return common_reduction_strategy(
        input_strategy,
        reduce_dims,
        keep_dim=keep_dim,
        reduction_linear=False,
    )


_LINALG""",
            KEPT
            + """    return common_reduction_strategy(
        input_strategy,
        reduce_dims,
        keep_dim=keep_dim,
        reduction_linear=False,
    )


_LINALG""",
        ),
        Hook(
            MATH,
            """    dims = _infer_reduction_dims(args_schema[1], ndim)
    keep_dim = cast(bool, kwargs_schema.get("keepdim", False))
    return _reduction_single_dim_strategy(
        args_schema,
        reduction_dims=dims,
        keep_dim=keep_dim,
        reduction_linear=False,
        reduction_op="sum",
    )


_LINALG""",
            "    dims = _infer_reduction_dims(args_schema[1], ndim)\n"
            + KEPT
            + """    return _reduction_single_dim_strategy(
        args_schema,
        reduction_dims=dims,
        keep_dim=keep_dim,
        reduction_linear=False,
        reduction_op="sum",
    )


_LINALG""",
        ),
    ),
)

PATCH = Patch(name="logsumexp", message=MESSAGE, files={TEST: test}, hooks=HOOKS)

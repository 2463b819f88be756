"""logsumexp that keeps its dims."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import EitherHook, Hook, either
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
MATH = "torch/distributed/tensor/_ops/_math_ops.py"
TEST = "test/distributed/tensor/test_logsumexp_keepdim.py"

MESSAGE = """[DTensor] Read keepdim of logsumexp as a positional argument

keepdim is the third positional argument of aten.logsumexp. The strategy looks
for keepdim in the keyword arguments, and therefore always uses False. If a dim
after the reduced dim is sharded, the output is a shard of the wrong dim:

  x.logsumexp(0, keepdim=True)   # x has shape (4, 8), placements [Shard(1)]
  # today: shape (1, 8) with [Shard(0)]. With the patch: [Shard(1)]

With the patch, the strategy reads keepdim from the positional arguments.

Cost: 1 line added, 1 removed.

Test plan (fails without the patch):
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

"""Convolutions of operands that their rule has redistributed first."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import Hook, behind
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
CONVOLUTIONS = "torch/distributed/tensor/_tp_conv.py"
TEST = "test/distributed/tensor/test_convolution_redistribute.py"

MESSAGE = """[DTensor] Convolutions redistribute what their strategy asks for

The strategies of convolution and convolution_backward take images that are
sharded by batch, and from 2.14 on some by the last dim, and everything else
replicated. convolution_handler and convolution_backward_handler propagate by
them, and then run on the local tensors as they are: needs_redistribute is not
looked at. So for images and weights that are both sharded by input channels
the output is labeled Replicate and each rank holds its own term of the sum;
for images sharded by rows the local outputs do not have the global shape; and
weight gradients are labeled Replicate and never reduced. What a view makes,
_StridedShard on a dim other than the batch, is one of these.

The handlers now redistribute local args as the dispatcher does for other ops.

Test plan:
  python test/distributed/tensor/test_convolution_redistribute.py
"""


def test() -> str:
    """Its test."""
    return formatted((HERE / "test_convolution_redistribute.py.in").read_text())


HOOKS: tuple[Hook, ...] = (
    Hook(
        CONVOLUTIONS,
        "from typing import cast\n",
        "from collections.abc import Sequence\nfrom typing import cast\n",
    ),
    behind(
        CONVOLUTIONS,
        "import torch.distributed.tensor._api as dtensor\n",
        "from torch.distributed.tensor._op_schema import OpInfo, OutputSharding\n",
    ),
    Hook(
        CONVOLUTIONS,
        "def convolution_handler(\n",
        '''def _redistribute_local_args(
    op_info: OpInfo, output_sharding: OutputSharding
) -> Sequence[object]:
    """
    Bring the local args to the placements that the output sharding is for, and return
    the schema of the args that they then have.
    """
    if not output_sharding.needs_redistribute:
        return op_info.flat_args_schema
    schema = output_sharding.redistribute_schema
    if schema is None:
        raise AssertionError("redistribute schema should not be None")
    dtensor.DTensor._op_dispatcher.redistribute_local_args(
        op_info, schema, output_sharding.use_val_from_redistribute_schema
    )
    return schema.args_schema


def convolution_handler(
''',
    ),
    Hook(
        CONVOLUTIONS,
        """    # local propagation
    local_results = tp_convolution(
""",
        """    _redistribute_local_args(op_info, output_sharding)

    # local propagation
    local_results = tp_convolution(
""",
    ),
    Hook(
        CONVOLUTIONS,
        """    if not isinstance(op_info.flat_args_schema[0], dtensor.DTensorSpec):
        raise AssertionError
""",
        """    grad_output_spec = _redistribute_local_args(op_info, output_sharding)[0]
    if not isinstance(grad_output_spec, dtensor.DTensorSpec):
        raise AssertionError
""",
    ),
    Hook(
        CONVOLUTIONS,
        "        op_info.flat_args_schema[0].dim_map,\n",
        "        grad_output_spec.dim_map,\n",
    ),
)

PATCH = Patch(name="convolutions", message=MESSAGE, files={TEST: test}, hooks=HOOKS)

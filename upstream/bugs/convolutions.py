"""Convolutions of operands that their rule has redistributed first."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import Hook, behind
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
CONVOLUTIONS = "torch/distributed/tensor/_tp_conv.py"
TEST = "test/distributed/tensor/test_convolution_redistribute.py"

MESSAGE = """[DTensor] Redistribute the inputs of convolutions

The strategies of convolution and convolution_backward support images that are
sharded by batch (since 2.14, also some that are sharded by the last dim). For
other shards, the strategies set needs_redistribute. convolution_handler and
convolution_backward_handler ignore needs_redistribute, and run on the local
tensors without redistribution. Example, on 2 ranks:

  F.conv2d(images, weight)   # both have placements [Shard(1)]
  # output is labeled Replicate, but each rank has only its summand

For images that are sharded by rows, the local outputs do not have the global
shape. Weight gradients are labeled Replicate, but are never reduced. Views can
also make such shards: a _StridedShard on a dim other than the batch.

With the patch, the handlers redistribute the local args, as the dispatcher does
for other ops. Convolutions of images that are sharded by batch do not change.

Cost: 25 lines added, 2 removed.

Test plan (fails without the patch):
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

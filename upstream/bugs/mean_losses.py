"""Mean losses of uneven shards."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import Hook, behind
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
DECOMPOSITIONS = "torch/distributed/tensor/_decompositions.py"
TEST = "test/distributed/tensor/test_decomposed_means.py"

MESSAGE = """[DTensor] Fix mean losses of uneven shards

mse_loss, smooth_l1_loss and huber_loss have no sharding rules of their own.
DTensor derives their rules by tracing the decompositions on a mesh of one
device, where all shards are even. For a mean over a sharded dim, the derived
rule gives Partial("avg"). With uneven shards, Partial("avg") weights shards of
different sizes equally, and the mean is wrong, without an error. Example:

  F.mse_loss(x, target)   # both have shape (3, 5), [Shard(1)] on 4 ranks
  # local sizes 2, 2, 1, 0 have equal weights; the empty shard adds a nan

With the patch, DTensor derives Partial("avg") only if the size of the real mesh
divides the sharded dim. Otherwise, DTensor replicates the input, as mean does.

Cost: 31 lines added, 1 removed. Uneven inputs of these losses are gathered.

Test plan (fails without the patch):
  python test/distributed/tensor/test_decomposed_means.py
"""


def test() -> str:
    """Its test."""
    return formatted((HERE / "test_decomposed_means.py.in").read_text())


HOOKS: tuple[Hook, ...] = (
    Hook(
        DECOMPOSITIONS,
        "    _StridedShard,\n    Placement,",
        "    _StridedShard,\n    Partial,\n    Placement,",
    ),
    Hook(
        DECOMPOSITIONS,
        "import GuardOnDataDependentSymNode\n",
        "import (\n    guard_or_true,\n    GuardOnDataDependentSymNode,\n)\n",
    ),
    behind(
        DECOMPOSITIONS,
        "    return op_schema.args_schema + tuple(op_schema.kwargs_schema.values())\n",
        '''

def _averages_uneven_shards(
    op_schema: OpSchema,
    inputs: tuple[Placement | None, ...],
    outputs: list[Placement | tuple[Placement, ...]],
    mesh: DeviceMesh,
) -> bool:
    """Whether an average is pending of shards that may be of different sizes: it weighs
    every shard alike, whatever the number of its elements.
    """
    averages = (isinstance(p, Partial) and p.reduce_op == "avg" for p in outputs)
    if not any(averages):
        return False
    specs, _ = tree_flatten(list(_extract_input_specs(op_schema)))
    for spec, p in zip(specs, inputs):
        if isinstance(p, (Shard, _StridedShard)):
            # Any mesh dims may come to shard the dim, one after the other.
            blocks = getattr(p, "split_factor", 1) * mesh.size()
            if guard_or_true(spec.shape[p.dim] % blocks != 0):
                return True
    return False
''',
    ),
    behind(
        DECOMPOSITIONS,
        """            output_placements = (
                [output] if not isinstance(output, tuple) else list(output)
            )
""",
        """            if _averages_uneven_shards(
                op_schema, input_placements, output_placements, mesh
            ):
                continue
""",
    ),
)

PATCH = Patch(name="mean-losses", message=MESSAGE, files={TEST: test}, hooks=HOOKS)

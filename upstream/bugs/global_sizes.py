"""Guards of compiled programs on the global sizes of DTensors."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import Hook, behind
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
SHAPES = "torch/fx/experimental/symbolic_shapes.py"
TEST = "test/distributed/tensor/test_compiled_global_sizes.py"

MESSAGE = """[dynamo][DTensor] Guard constant sizes of tensor subclasses

For sizes that are constants of a graph, produce_guards writes no guard, because
check_tensor_fn compares these sizes. But for a traceable wrapper subclass,
check_tensor_fn runs only on the inner tensors. Two DTensors of different global
sizes may have local tensors of the same size. Example, with Shard(0) on 4 ranks:

  compiled(a)   # a has shape (8, 3); local shape (2, 3) on rank 0
  compiled(b)   # b has shape (7, 3); local shape (2, 3) on rank 0

Ranks 0 to 2 run the graph of a for b, and the result has the wrong size, without
an error. The last rank compiles a second graph.

With the patch, sizes of the subclass itself have guards, also if the sizes are
constants. For subclasses whose outer sizes follow from the inner sizes
(track_outer_size_stride is False), nothing changes. The patch does not guard
strides and offsets.

Cost: 7 lines added, 2 removed. A program compiles again for each new global
size, as for plain tensors.

Test plan (fails without the patch):
  python test/distributed/tensor/test_compiled_global_sizes.py
"""


def test() -> str:
    """Its test."""
    return formatted((HERE / "test_compiled_global_sizes.py.in").read_text())


HOOKS: tuple[Hook, ...] = (
    behind(
        SHAPES,
        "        constraint_violations: list[tuple[bool, str, Callable[[], str]]] = []\n",
        "        subclass_sources: set[Source] = set()\n",
    ),
    behind(
        SHAPES,
        "                if context.track_outer_size_stride:\n",
        "                    subclass_sources.add(source)\n",
    ),
    Hook(
        SHAPES,
        """                # However, for non tensor sources, we still need to guard here.
                if ignore_static and isinstance(source, TensorPropertySource):
                    if expr.is_number:
""",
        """                # However, for non tensor sources, we still need to guard here, and for
                # sizes of tensor subclasses, whose inner tensors it checks.
                if ignore_static and isinstance(source, TensorPropertySource):
                    if expr.is_number and not (
                        is_dim(source) and source.base in subclass_sources
                    ):
""",
    ),
)

PATCH = Patch(name="global-sizes", message=MESSAGE, files={TEST: test}, hooks=HOOKS)

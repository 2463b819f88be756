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

Of sizes that are constants of a graph produce_guards writes no guard, because
check_tensor_fn compares them. It is not run on a traceable wrapper subclass,
but on its inner tensors, and a DTensor of another size may have a local tensor
of the same: on 4 ranks, (8, 3) and (7, 3) with Shard(0) are both (2, 3) on the
first three. There the graph of the one is run for the other, and what comes of
it has the wrong size, without a word. The last rank compiles another graph.

Sizes of the subclass itself are now guarded also where they are constants. For
subclasses whose outer sizes follow from the inner ones
(track_outer_size_stride is False) nothing changes.

Test plan:
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

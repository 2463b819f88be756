"""Views of tensors whose mesh dims do not shard left to right (run/reading.py). Views are decided
as if mesh dims shard left to right: this says if the decision holds, and what is done if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.dtensor.bookkeeping.settings import Implicit
from cute_sharding.dtensor.compiled.symbols import to_symints
from cute_sharding.dtensor.decide.view_placements import Decision
from cute_sharding.dtensor.replaced import tensor_specs
from cute_sharding.dtensor.run.placements import cut_of, text, without
from cute_sharding.dtensor.run.reading import agree
from cute_sharding.layout import Size
from cute_sharding.relations.view import View


def holds_in_its_order(
    view: View, spec: tensor_specs.DTensorSpec, decision: Decision, *, sized: bool
) -> bool:
    """Whether the decision holds in the order in which the mesh dims shard the input, and torch's
    reading of the output's placements (reading.py) agrees. ``sized``: the op is given local sizes,
    which torch computes left to right.
    """
    if tensor_specs.says_an_order(spec):
        return False
    shapes: Any = ((view.output_shape, decision.output),)
    if spec.use_strided_shard_as_shard_order:
        shapes += (view.input_shape, spec.placements), (view.input_shape, decision.source)
    elif any(isinstance(n, Size) for n in view.output_shape):
        return True
    if any(isinstance(n, Size) for shape, _ in shapes for n in shape):
        if all(_divides(shape, spec.mesh.shape, placements) for shape, placements in shapes):
            return True
        # Whether the orders agree then depends on the sizes' values.
        shapes = [([int(to_symints(n)) for n in shape], placements) for shape, placements in shapes]
    if all(agree(shape, spec, placements) for shape, placements in shapes):
        return True
    if sized:
        return False
    # Dims that the view keeps whole, as in a permutation, keep their cuts in any order.
    cuts = [cut_of(p) for p in spec.placements]
    is_kept = all(cut is None or cut[0] in view.kept for cut in cuts)
    return is_kept and decision.source == tuple(spec.placements)


def _divides(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[tensor_specs.Placement]
) -> bool:
    """Whether each dim divides by the mesh dims that shard it together: then all orders agree."""
    parts = [1] * len(shape)
    for placement, n in zip(placements, mesh):
        cut = cut_of(placement)
        if cut is not None:
            parts[cut[0]] *= n
    return all(n % m == 0 for n, m in zip(shape, parts))


def with_whole_input(
    spec: tensor_specs.DTensorSpec,
    mesh: tuple[int, ...],
    decision: Decision,
    name: str,
    *,
    if_not_free: Implicit,
) -> Decision:
    """The decision with an input that is not sharded.

    Raises:
        RuntimeError: the setting asks for an error.
    """
    if if_not_free == "error":
        raise RuntimeError(
            f"{name} got a tensor of shape {tuple(spec.shape)} with placements "
            f"{text(spec.placements)} on mesh "
            f"{tensor_specs.mesh_text(mesh, spec.mesh.mesh_dim_names)}. The placements "
            "mean that a later mesh dim shards the tensor first. For uneven shards, the order of "
            "the mesh dims changes which elements a device has. First redistribute the tensor to "
            "placements without _StridedShard: "
            f".redistribute(placements={[tensor_specs.Replicate()] * len(mesh)!r})."
        )
    source = without((tensor_specs.Shard, tensor_specs.StridedShard), decision.source)
    return Decision(source, source, "redistribution")

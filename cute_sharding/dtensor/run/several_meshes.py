"""Two meshes: the ranks of each, as this rank sees them, and how they communicate.

That depends only on the meshes, the groups that ``prepare_groups`` made and the exchange, so all
ranks of both agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.run.groups import group_of_ranks, is_native, slice_with
from cute_sharding.exchange import Bundle, Exchange, Mesh
from cute_sharding.sharding.rows import Chains

# The backend's all-to-all may also visit ranks that get nothing. In groups of at least MANY ranks,
# a rank with FEW times fewer peers sends to each peer by itself.
MANY, FEW = 16, 4


class Meshes(NamedTuple):
    """The ranks of the mesh that a tensor is on, and of the mesh that it goes to.

    Attributes:
        slices: whether the target has one more mesh dim in front: the slices of a larger mesh, each
            of which gets the tensor.
    """

    source: Mesh
    target: Mesh
    slices: bool = False

    def chains(self, of_target: Chains) -> Chains:
        """The chains of cuts on the target, from those of the placements on its mesh."""
        more = int(self.slices)
        return tuple([tuple([(m + more, factor) for m, factor in chain]) for chain in of_target])


@remembered
def meshes_of(mesh: Any, other: Any, rank: int) -> Meshes:
    """The ranks of both meshes, where they are slices of larger ones: of the slices that belong
    together for ``rank``. Where ``other`` is a slice, and ranks of ``mesh`` are on several such,
    each of these gets the tensor.

    Raises:
        ValueError: it is not known which slice goes to which, or a rank of the one sees another
            slice of the other.
    """
    mine, others = communication.slices(mesh), communication.slices(other)
    source = mine[0] if len(mine) == 1 else slice_with(mesh, rank)
    meeting = [on for on in others if not {*on.ranks}.isdisjoint(source.ranks)]
    if len(mine) == 1 and len(meeting) > 1:
        every = [r for on in others for r in on.ranks]
        return Meshes(source, Mesh((len(others), *other.shape), every), slices=True)
    target = others[0] if len(others) == 1 else slice_with(other, rank)
    for one, theirs, some in ((source, target, others), (target, source, mine)):
        for seen in some:
            if seen != theirs and not {*one.ranks}.isdisjoint(seen.ranks):
                raise ValueError(
                    f"cannot redistribute from {mesh} to {other}: some of the ranks "
                    f"{[*one.ranks]} are on the mesh slice of ranks {[*seen.ranks]} instead of the "
                    f"mesh slice of ranks {[*theirs.ranks]}. Redistribute on a whole mesh instead "
                    "of a slice"
                )
    return Meshes(source, target)


def on_which_group(exchange: Exchange | Bundle, mesh: Any, other: Any) -> Any | None:
    """The process group for one collective; None for point-to-point messages: the ranks of both
    meshes have no common group, or each has few peers and the backend's all-to-all visits all
    ranks.
    """
    ranks = exchange.ranks
    group = group_of_ranks(ranks, mesh, other)
    if group is None or is_native(communication.backend_name(group, mesh.device_type)):
        return group
    return None if len(ranks) >= MANY and exchange.most_peers * FEW <= len(ranks) else group

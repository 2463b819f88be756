"""Two meshes: the ranks of each, as this rank sees them, and how they communicate.

That depends only on the meshes, the groups that ``prepare_groups`` made and the exchange, so all
ranks of both agree.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cute_sharding.dtensor.replaced import process_groups
from cute_sharding.dtensor.run.groups import group_of_ranks
from cute_sharding.dtensor.run.ranks import is_native
from cute_sharding.exchange import Bundle, Exchange, Mesh
from cute_sharding.sharding.chains import Chains

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


@lru_cache(maxsize=1 << 10)
def meshes_of(mesh: Any, other: Any, rank: int) -> Meshes:
    """The ranks of both meshes, where they are slices of larger ones: of the slices that belong
    together for ``rank``. Where ``other`` is a slice, and ranks of ``mesh`` are on several such,
    each of these gets the tensor.

    Raises:
        ValueError: it is not known which slice goes to which, or a rank of the one sees another
            slice of the other.
    """
    lists = [process_groups.rank_lists(of) for of in (mesh, other)]
    source = _of_rank(mesh, lists[0], rank)
    meeting = [ranks for ranks in lists[1] if not {*ranks}.isdisjoint(source)]
    if len(lists[0]) == 1 and len(meeting) > 1:
        every = [r for ranks in lists[1] for r in ranks]
        target = Mesh((len(lists[1]), *other.shape), tuple(every))
        return Meshes(Mesh(tuple(mesh.shape), tuple(source)), target, slices=True)
    found = source, _of_rank(other, lists[1], rank)
    for ranks, theirs, some in ((found[0], found[1], lists[1]), (found[1], found[0], lists[0])):
        for seen in some:
            if seen != theirs and not {*ranks}.isdisjoint(seen):
                raise ValueError(
                    f"{mesh} and {other} are slices of larger meshes, but the ranks {ranks} of "
                    f"one slice are on several slices of the other mesh, {theirs} and {seen}, so "
                    "the pair of slices is not clear. Redistribute on the larger mesh"
                )
    one, two = (Mesh(tuple(of.shape), tuple(r)) for of, r in zip((mesh, other), found))
    return Meshes(one, two)


def _of_rank(mesh: Any, lists: list[list[int]], rank: int) -> list[int]:
    """The ranks of the slice that a rank is on; all ranks if the mesh is no slice."""
    if len(lists) == 1:
        return lists[0]
    for ranks in lists:
        if rank in ranks:
            return ranks
    raise ValueError(
        f"rank {rank} is on none of the {len(lists)} slices to which the mesh {mesh} belongs, so "
        "it is not clear which slice takes part: pass a mesh that is not a slice, or call this "
        "function only on the ranks of the slice"
    )


def on_which_group(exchange: Exchange | Bundle, mesh: Any, other: Any) -> Any | None:
    """The process group for one collective; None for point-to-point messages: the ranks of both
    meshes have no common group, or each has few peers and the backend's all-to-all visits all
    ranks.
    """
    ranks = exchange.ranks
    group = group_of_ranks(ranks, mesh, other)
    if group is None or is_native(process_groups.backend_name(group, mesh.device_type)):
        return group
    return None if len(ranks) >= MANY and exchange.most_peers * FEW <= len(ranks) else group

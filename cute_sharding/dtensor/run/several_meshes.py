"""Two meshes: which ranks each of them has, as this rank sees them, and how these communicate.

Which way it goes follows from the meshes, the groups that ``prepare_groups`` has made and the
exchange alone, so that all ranks of both agree.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cute_sharding.dtensor.replaced import process_groups
from cute_sharding.dtensor.run.groups import group_of_ranks
from cute_sharding.dtensor.run.ranks import is_native
from cute_sharding.exchange import Exchange, Mesh

# Where the backend's all-to-all visits those that get nothing, too: among so many ranks, a rank of
# so many times fewer peers sends to each by itself.
MANY, FEW = 16, 4


class Meshes(NamedTuple):
    """The ranks of the mesh that a tensor is on, and of the one that it goes to."""

    source: Mesh
    target: Mesh


@lru_cache(maxsize=1 << 10)
def meshes_of(mesh: Any, other: Any, rank: int) -> Meshes:
    """The ranks of both meshes, where they are slices of larger ones: of the slices that belong
    together for ``rank``.

    Raises:
        ValueError: it is not known which slice goes to which, or a rank of the one sees another
            slice of the other.
    """
    lists = [process_groups.rank_lists(of) for of in (mesh, other)]
    found = []
    for of, some in zip((mesh, other), lists):
        mine = [ranks for ranks in some if rank in ranks] or (some if len(some) == 1 else [])
        if not mine:
            raise ValueError(
                f"rank {rank} is on none of the {len(some)} slices that the mesh {of} is one of, "
                "so it is not known which of them takes part: give a mesh that is no slice, or "
                "call this on the ranks of the slice alone"
            )
        found.append(mine[0])
    for (ranks, _), (one, some) in zip(
        (found, found[::-1]), ((found[1], lists[1]), (found[0], lists[0]))
    ):
        for seen in some:
            if seen != one and not {*ranks}.isdisjoint(seen):
                raise ValueError(
                    f"{mesh} and {other} are slices of larger meshes, and the ranks {ranks} of the "
                    f"one are on several slices of the other, {one} and {seen}: nothing says which "
                    "is meant. Redistribute on the larger mesh"
                )
    return Meshes(*[Mesh(tuple(of.shape), tuple(r)) for of, r in zip((mesh, other), found)])


def on_which_group(exchange: Exchange, mesh: Any, other: Any) -> Any | None:
    """The process group on which it is one collective; None where it is point-to-point messages:
    the ranks of both meshes have no group together, or each has few peers and the backend's
    all-to-all visits all.
    """
    ranks = exchange.ranks
    group = group_of_ranks(ranks, mesh, other)
    if group is None or is_native(process_groups.backend_name(group, mesh.device_type)):
        return group
    return None if len(ranks) >= MANY and exchange.most_peers * FEW <= len(ranks) else group

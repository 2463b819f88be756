"""A tensor on the ranks of a device mesh: where each rank is, and the cuts of the tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from cute_sharding._memory import remembered
from cute_sharding._words import counted
from cute_sharding.exchange.cost import coordinates
from cute_sharding.layout import Layout, LayoutError
from cute_sharding.relations.devices import local
from cute_sharding.relations.piece import Piece
from cute_sharding.sharding import Partial, Sharding
from cute_sharding.sharding.chains import (
    Chains,
    Device,
    chain_of,
    chains_of,
    placements_text,
)
from cute_sharding.sharding.digits import layout_of
from cute_sharding.sharding.meeting import Chain, count_rows, rows_held

# The most runs of ranks that are written out, beside the last one.
RUNS_SHOWN = 8


def ranks_text(
    ranks: Sequence[int], to: str = " to ", joint: str = ", ", most: int | None = RUNS_SHOWN
) -> str:
    """Ranks in their order; three or more consecutive ones are written as a run.

    >>> ranks_text(range(8, 12)), ranks_text((4, 6, 5, 7)), ranks_text((0, 1, 2, 8, 9), "-", ",")
    ('8 to 11', '4, 6, 5, 7', '0-2,8,9')
    >>> ranks_text(range(0, 40, 2))
    '0, 2, 4, 6, 8, 10, 12, 14, .., 38'
    """
    runs: list[list[int]] = []
    if isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 2:
        runs = [[ranks[0], ranks[-1]]]
    else:
        for rank in ranks:
            if runs and rank == runs[-1][1] + 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
    parts = [
        part
        for first, last in runs
        for part in (
            [f"{first}{to}{last}"] if last > first + 1 else map(str, dict.fromkeys((first, last)))
        )
    ]
    if most is not None and len(parts) > most + 1:
        parts = [*parts[:most], "..", parts[-1]]
    return joint.join(parts)


@dataclass(frozen=True)
class Mesh:
    """A device mesh: its ranks, row-major.

    Attributes:
        sizes: the number of ranks of each mesh dim.
        ranks: the rank at each place; consecutive ones are kept as a range.

    Raises:
        ValueError: the number of ranks is not that of places, or a rank is repeated.

    >>> mesh = Mesh((2, 2), (4, 6, 5, 7))
    >>> mesh.coordinates(5), mesh.rank((0, 1)), mesh.coordinates(0)
    ((1, 0), 6, None)
    """

    sizes: tuple[int, ...]
    ranks: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.ranks) != prod(self.sizes):
            raise ValueError(
                f"the mesh {self.sizes} has {counted(prod(self.sizes), 'device')}, but the list of "
                f"ranks has {len(self.ranks)}: give one rank for each device"
            )
        if isinstance(self.ranks, range) and self.ranks.step == 1:
            return
        if len({*self.ranks}) < len(self.ranks):
            raise ValueError(
                f"a mesh must not repeat a rank, but the ranks are {tuple(self.ranks)}"
            )
        first = self.ranks[0] if self.ranks else 0
        following = range(first, first + len(self.ranks))
        alike = all(rank == other for rank, other in zip(self.ranks, following))
        object.__setattr__(self, "ranks", following if alike else tuple(self.ranks))

    @staticmethod
    @lru_cache(maxsize=1 << 8)
    def numbered(sizes: tuple[int, ...]) -> Mesh:
        """The mesh whose ranks are the numbers of their places.

        >>> Mesh.numbered((2, 2)).ranks
        range(0, 4)
        """
        return Mesh(sizes, range(prod(sizes)))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: at for at, rank in enumerate(self.ranks)}

    def coordinates(self, rank: int) -> Device | None:
        """The coordinates of a rank; None if it is not on the mesh."""
        if isinstance(self.ranks, range):
            at = rank - self.ranks.start if rank in self.ranks else None
        else:
            at = self._places.get(rank)
        if at is None:
            return None
        return _place(at, self.sizes)

    def device(self, rank: int) -> Device:
        """The coordinates of a rank that is on the mesh."""
        found = self.coordinates(rank)
        assert found is not None
        return found

    def rank(self, device: Device) -> int:
        """The rank at these coordinates."""
        at = 0
        for n, k in zip(self.sizes, device):
            at = at * n + k
        return self.ranks[at]

    def slice_of(self, device: Device, dims: Sequence[int]) -> list[int]:
        """The ranks that differ from a device only on these mesh dims, row-major.

        >>> Mesh((2, 2), (4, 6, 5, 7)).slice_of((1, 0), (0,))
        [4, 5]
        """
        places = [0]
        for m, n in enumerate(self.sizes):
            some = range(n) if m in dims else (device[m],)
            places = [at * n + k for at in places for k in some]
        return [self.ranks[at] for at in places]

    def __str__(self) -> str:
        return self.text()

    def text(self, names: Sequence[str] | None = None) -> str:
        """The mesh in words, with names for its dims.

        >>> Mesh((2, 2), (4, 5, 6, 8)).text(("dp", "tp"))
        'mesh (dp=2, tp=2) of ranks 4 to 6, 8'
        """
        sizes = self.sizes if names is None else tuple(map("{}={}".format, names, self.sizes))
        inside = ", ".join(map(str, sizes)) + "," * (names is None and len(sizes) == 1)
        word = "rank" if len(self.ranks) == 1 else "ranks"
        return f"mesh ({inside}) of {word} {ranks_text(self.ranks)}"


def standing_for_all(meshes: Iterable[Mesh], used: Collection[int] | None = None) -> list[int]:
    """The ranks of meshes, ascending; of a mesh of more than 64, those at the first, a middle and
    the last coordinates of each mesh dim. On mesh dims that are not ``used``, coordinate 0 alone.

    >>> standing_for_all([Mesh.numbered((2, 2))]), standing_for_all([Mesh.numbered((100,))])
    ([0, 1, 2, 3], [0, 1, 50, 99])
    """
    found = {
        mesh.rank(device)
        for mesh in dict.fromkeys(meshes)
        for device in product(
            *(
                coordinates(n, len(mesh.ranks)) if used is None or m in used else (0,)
                for m, n in enumerate(mesh.sizes)
            )
        )
    }
    return sorted(found)


@remembered
def _place(at: int, sizes: tuple[int, ...]) -> Device:
    """The coordinates of the place with that row-major number."""
    found = []
    for n in reversed(sizes):
        at, k = divmod(at, n)
        found.append(k)
    return tuple(reversed(found))


@dataclass(frozen=True)
class Placed:
    """A tensor of global ``shape`` on ``mesh``; ``chains`` are the cuts of each dim.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> placed = Placed.of(Sharding((5, 4), (2,), (Shard(0),)), range(6, 8))
    >>> placed.local_shape(7), placed.local_shape(0)
    ((2, 4), None)
    """

    shape: tuple[int, ...]
    mesh: Mesh
    chains: Chains

    @classmethod
    def of(cls, sharding: Sharding, ranks: Sequence[int] | None = None) -> Placed:
        """The tensor that lies as a sharding says, on these ranks; by default on 0, 1, and so on.

        Raises:
            ValueError: something is pending, so no rank holds elements of the tensor.
        """
        if any(isinstance(p, Partial) for p in sharding.placements):
            raise ValueError(f"{sharding} has a Partial: reduce the Partial first")
        mesh = Mesh(sharding.mesh, range(prod(sharding.mesh)) if ranks is None else ranks)
        chains = chains_of(sharding.cuts, len(sharding.shape), sharding.mesh)
        return cls(sharding.shape, mesh, chains)

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """The mesh dims that cut a dim."""
        return tuple(sorted(m for chain in self.chains for m, _ in chain))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The mesh dims that cut nothing: ranks that differ only on them hold the same."""
        return tuple(m for m in range(len(self.mesh.sizes)) if m not in self.cut)

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same, if each holds something."""
        return prod(self.mesh.sizes[m] for m in self.replicated)

    @cached_property
    def classes(self) -> tuple[Device, ...]:
        """The first device of each class of devices that hold the same.

        >>> from cute_sharding.sharding import Replicate, Shard, Sharding
        >>> rows = Placed.of(Sharding((4, 2), (2, 2), (Replicate(), Shard(0))))
        >>> rows.classes, rows.class_of((1, 1))
        (((0, 0), (0, 1)), (0, 1))
        """
        sizes = self.mesh.sizes
        return tuple(product(*[range(n if m in self.cut else 1) for m, n in enumerate(sizes)]))

    def class_of(self, device: Device) -> Device:
        """The first device of a device's class."""
        return tuple([k if m in self.cut else 0 for m, k in enumerate(device)])

    def chain(self, dim: int, device: Device) -> Chain:
        """The cuts of a dim, with the coordinates of a device."""
        chain = self.chains[dim]
        return chain_of(chain, self.mesh.sizes, device) if chain else ()

    def held_on(self, device: Device) -> tuple[Chain, ...]:
        """The cuts of each dim, with the coordinates of a device."""
        return tuple([self.chain(d, device) for d in range(len(self.shape))])

    def pieces(self, device: Device) -> tuple[Piece, ...]:
        """What a device holds: from places of its local tensor to elements of the whole."""
        return local(self.shape, self.held_on(device))

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """The local shape of a rank; None if it is not on the mesh."""
        device = self.mesh.coordinates(rank)
        return None if device is None else self.shape_of(device)

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """The local shape of a rank that is on the mesh."""
        shape = self.local_shape(rank)
        assert shape is not None, f"rank {rank} is not on the {self.mesh}"
        return shape

    def shape_of(self, device: Device) -> tuple[int, ...]:
        """The local shape of a device."""
        held = map(rows_held, self.shape, self.held_on(device))
        return tuple(map(count_rows, held))

    @cached_property
    def layout(self) -> Layout | None:
        """((devices), (local)) -> flat index, devices by place; None if sizes do not divide."""
        try:
            return layout_of(self.shape, self.chains, self.mesh.sizes)
        except LayoutError:
            return None

    def placements_text(self, names: Sequence[str] | None = None) -> str:
        """The placements that make these cuts.

        >>> from cute_sharding.sharding import Replicate, Shard, Sharding
        >>> placed = Placed.of(Sharding((8, 4), (2, 2, 2), (Shard(0), Replicate(), Shard(1, 2))))
        >>> placed.placements_text()
        '[S(0), R, _S(1,2)]'
        """
        return placements_text(self.chains, len(self.mesh.sizes), names)

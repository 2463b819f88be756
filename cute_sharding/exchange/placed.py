"""A tensor on the ranks of a device mesh: which rank stands where, and what cuts the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from cute_sharding.redistribution.chains import Chains, Device, chain_of, chains_of
from cute_sharding.sharding import Partial, Sharding
from cute_sharding.sharding.meeting import Chain, count_rows, rows_held


@dataclass(frozen=True)
class Mesh:
    """A device mesh: its ranks, row-major.

    Attributes:
        sizes: the number of ranks of each mesh dim.
        ranks: the rank at each place.

    Raises:
        ValueError: there are more or fewer ranks than places, or a rank stands twice.

    >>> mesh = Mesh((2, 2), (4, 6, 5, 7))
    >>> mesh.coordinates(5), mesh.rank((0, 1)), mesh.coordinates(0)
    ((1, 0), 6, None)
    """

    sizes: tuple[int, ...]
    ranks: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.ranks) != prod(self.sizes):
            raise ValueError(
                f"{len(self.ranks)} ranks for a mesh of {self.sizes}, which has "
                f"{prod(self.sizes)} places: give one for each"
            )
        if not isinstance(self.ranks, range) and len({*self.ranks}) < len(self.ranks):
            raise ValueError(f"a mesh has each rank once; these are {tuple(self.ranks)}")

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: at for at, rank in enumerate(self.ranks)}

    def coordinates(self, rank: int) -> Device | None:
        """Where a rank stands; None where it is not on the mesh."""
        if isinstance(self.ranks, range):
            at = rank - self.ranks.start if rank in self.ranks else None
        else:
            at = self._places.get(rank)
        if at is None:
            return None
        found = []
        for n in reversed(self.sizes):
            at, k = divmod(at, n)
            found.append(k)
        return tuple(reversed(found))

    def rank(self, device: Device) -> int:
        """The rank at those coordinates."""
        at = 0
        for n, k in zip(self.sizes, device):
            at = at * n + k
        return self.ranks[at]

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if isinstance(self.ranks, range) or [*self.ranks] == [*range(first, last + 1)]:
            return f"mesh {self.sizes} of ranks {first} to {last}"
        return f"mesh {self.sizes} of ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Placed:
    """A tensor of global ``shape`` on ``mesh``, of which ``chains`` say what cuts each dim.

    >>> from cute_sharding.sharding import Shard
    >>> placed = Placed.of(Sharding((5, 4), (2,), (Shard(0),)), range(6, 8))
    >>> placed.local_shape(7), placed.local_shape(0)
    ((2, 4), None)
    """

    shape: tuple[int, ...]
    mesh: Mesh
    chains: Chains

    @classmethod
    def of(cls, sharding: Sharding, ranks: Sequence[int] | None = None) -> Placed:
        """Of a sharding, on those ranks; by default on 0 and those that follow.

        Raises:
            ValueError: something is pending, so that no rank holds elements of the tensor.
        """
        if any(isinstance(p, Partial) for p in sharding.placements):
            raise ValueError(f"{sharding}: finish what is pending first")
        mesh = Mesh(sharding.mesh, range(prod(sharding.mesh)) if ranks is None else ranks)
        chains = chains_of(sharding.cuts, len(sharding.shape), sharding.mesh)
        return cls(sharding.shape, mesh, chains)

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """The mesh dims that cut something."""
        return tuple(sorted(m for chain in self.chains for m, _ in chain))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The others: ranks that differ on those alone hold the same."""
        return tuple(m for m in range(len(self.mesh.sizes)) if m not in self.cut)

    @cached_property
    def replicas(self) -> int:
        """How many ranks hold each element."""
        return prod(self.mesh.sizes[m] for m in self.replicated)

    def chain(self, dim: int, device: Device) -> Chain:
        """What cuts a dim, with the coordinates of a device."""
        return chain_of(self.chains[dim], self.mesh.sizes, device)

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """The shape of what a rank holds; None where it is not on the mesh."""
        device = self.mesh.coordinates(rank)
        if device is None:
            return None
        held = [rows_held(n, self.chain(d, device)) for d, n in enumerate(self.shape)]
        return tuple(map(count_rows, held))

    def number_of_replica(self, device: Device) -> int:
        """The number of a device among those that hold the same."""
        number = 0
        for m in self.replicated:
            number = number * self.mesh.sizes[m] + device[m]
        return number

    def devices(self) -> list[Device]:
        return list(product(*map(range, self.mesh.sizes)))

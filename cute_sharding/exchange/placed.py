"""A tensor on the ranks of a device mesh: where each rank is, and the cuts of the tensor; and what
devices receive and hold, in elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain as chained
from itertools import product
from math import prod

from cute_sharding._memory import remembered
from cute_sharding._words import counted
from cute_sharding.layout import Layout, LayoutError
from cute_sharding.relations.relation import Piece, local
from cute_sharding.sharding import Partial, Sharding
from cute_sharding.sharding.digits import common, digits, layout_of
from cute_sharding.sharding.rows import (
    Chain,
    Chains,
    Cut,
    Device,
    chains_of,
    chains_on,
    count_rows,
    kinds_of_device,
    local_size,
    meet,
    placements_text,
    rows_held,
)

# -- cost ------------------------------------------------------------------------------------------
# The cost of going from one sharding to another, in elements held and received. Seconds, and so
# latency, are in ``network``.

# Meshes of up to so many devices are looked at one by one; on larger ones a few coordinates of each
# mesh dim stand for all, if sizes do not divide.
DEVICES = 64


def local_elements(shape: Sequence[int], cuts: Sequence[Cut], mesh: Sequence[int]) -> int:
    """The most elements that a device holds of a tensor of global ``shape`` under ``cuts``, one for
    each mesh dim.

    >>> local_elements((10, 4), [(0, 1)], (4,))  # 3 of 10 rows
    12
    """
    shape, mesh = tuple(shape), tuple(mesh)
    return most_local(shape, chains_of(cuts, len(shape), mesh), mesh)


def received_elements(
    shape: Sequence[int], source: Sequence[Cut], target: Sequence[Cut], mesh: Sequence[int]
) -> int:
    """The elements that the busiest device must receive: what it needs under ``target`` and does
    not hold under ``source``.

    If sizes divide, it follows from the digits that each mesh dim fixes, on meshes of any size.
    Otherwise devices are counted one by one: all on meshes of up to 64 devices; on larger ones the
    first, a middle and the last coordinates of each mesh dim stand for the rest.

    >>> received_elements((8, 8), [(0, 1)], [(1, 1)], (4,))  # Shard(0) to Shard(1): 3/4 of 16
    12
    """
    shape, mesh = tuple(shape), tuple(mesh)
    return received(
        shape, chains_of(source, len(shape), mesh), chains_of(target, len(shape), mesh), mesh
    )


def received(shape: tuple[int, ...], source: Chains, target: Chains, mesh: tuple[int, ...]) -> int:
    """:func:`received_elements` for chains."""
    if source == target or 0 in shape:
        return 0
    found = received_by_digits(shape, source, target, mesh)
    return (
        max([wanted - kept for wanted, kept in devices_of(shape, source, target, mesh)])
        if found is None
        else found
    )


def holds_all(
    shape: tuple[int, ...], mesh: tuple[int, ...], source: Chains, target: Chains
) -> bool:
    """Whether every device already holds what it needs. May be False by mistake, but never True."""
    if all(after[: len(before)] == before for before, after in zip(source, target)):
        return True
    if prod(mesh) > DEVICES:
        for n, before, after in zip(shape, source, target):
            if _common(n, before, after, mesh, frozenset()) is None:
                return False
    return received(shape, source, target, mesh) == 0


def received_by_digits(
    shape: tuple[int, ...],
    source: Chains,
    target: Chains,
    mesh: tuple[int, ...],
    near: frozenset[int] = frozenset(),
) -> int | None:
    """:func:`received`, if sizes divide and the digits line up; else None. ``near``: without
    elements from devices that differ on these mesh dims alone.
    """
    need = have = 1
    for n, before, after in zip(shape, source, target):
        counts = _common(n, before, after, mesh, near)
        if counts is None:
            return None
        have *= counts[0]
        need *= counts[1]
    return need - have


@remembered
def _common(
    n: int, before: Chain, after: Chain, mesh: tuple[int, ...], near: frozenset[int]
) -> tuple[int, int] | None:
    """(Rows of one dim that a device holds before and needs after, the fewest; rows that it needs
    after); None if digits do not tell.
    """
    one, other = digits(n, before, mesh), digits(n, after, mesh)
    return None if one is None or other is None else common(n, one.beyond(near), other)


def most_local(
    shape: tuple[int, ...], chains: Chains, mesh: tuple[int, ...], least_of: Sequence[int] = ()
) -> int:
    """The number of elements on the fullest device; ``least_of``: see :func:`most_rows`."""
    return prod(most_rows(shape, chains, mesh, tuple(least_of)))


@remembered
def most_rows(
    shape: tuple[int, ...], chains: Chains, mesh: tuple[int, ...], least_of: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The number of rows of each dim on the fullest device. This may not be device 0: if a cut
    before left another device fewer rows, they are dealt in shorter pieces, and it may get more of
    them.

    Among devices that differ on the mesh dims ``least_of``, the one with the fewest counts: it
    receives most when they gather.
    """
    most = []
    for n, chain in zip(shape, chains):
        if chain:
            cuts = tuple([(factor, mesh[m], m in least_of) for m, factor in chain])
            n = max(rows_of_devices(n, cuts))
        most.append(n)
    return tuple(most)


@remembered
def rows_of_devices(n: int, chain: tuple[tuple[int, int, bool], ...]) -> frozenset[int]:
    """The numbers of rows, of ``n``, that devices hold after a chain of cuts: (split factor,
    devices, whether only the device with the fewest of these counts).

    >>> sorted(rows_of_devices(10, ((1, 4, False),)))
    [1, 3]
    """
    sizes = {n}
    for split_factor, parts, is_least in chain:
        blocks = [
            {
                local_size(size, split_factor, parts, device)
                for device in kinds_of_device(size, split_factor, parts)
            }
            for size in sizes
        ]
        sizes = {*map(min, blocks)} if is_least else {*chained.from_iterable(blocks)}
    return frozenset(sizes)


def devices_of(
    shape: tuple[int, ...], source: Chains, target: Chains, mesh: tuple[int, ...]
) -> list[tuple[int, int]]:
    """(elements needed, elements of these held) of each device, or of those that stand for all."""
    dims = [d for d in range(len(shape)) if source[d] or target[d]]
    whole = prod(n for d, n in enumerate(shape) if d not in dims)
    used = {m for chains in (source, target) for chain in chains for m, _ in chain}
    result = []
    for device in product(
        *(coordinates(n, prod(mesh)) if m in used else (0,) for m, n in enumerate(mesh))
    ):
        need = have = whole
        before, after = (chains_on(chains, mesh, device) for chains in (source, target))
        for d in dims:
            wanted, kept = _counts(shape[d], before[d], after[d])
            need *= wanted
            have *= kept
        result.append((need, have))
    return result


def coordinates(n: int, devices: int) -> Sequence[int]:
    """The coordinates of a mesh dim of ``n`` that stand for all, on a mesh of so many devices."""
    return range(n) if devices <= DEVICES or n <= 3 else sorted({0, 1, n // 2, n - 1})


@remembered
def _counts(n: int, before: Chain, after: Chain) -> tuple[int, int]:
    """(rows needed after, rows of these held before) of a dim of ``n`` rows."""
    return count_rows(rows_held(n, after)), count_rows(meet(n, before, after))


# -- placed ----------------------------------------------------------------------------------------
# A tensor on the ranks of a device mesh: where each rank is, and the cuts of the tensor.

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
    """A tensor of global ``shape`` on ``mesh``; ``chains`` are the cuts of each dim. On the mesh
    dims ``pending``, each with the op of its reduction, ranks hold contributions.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> placed = Placed.of(Sharding((5, 4), (2,), (Shard(0),)), range(6, 8))
    >>> placed.local_shape(7), placed.local_shape(0)
    ((2, 4), None)
    """

    shape: tuple[int, ...]
    mesh: Mesh
    chains: Chains
    pending: tuple[tuple[int, str], ...] = ()

    @classmethod
    def numbered(
        cls,
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        chains: Chains,
        pending: tuple[tuple[int, str], ...] = (),
    ) -> Placed:
        """The tensor on a mesh of these sizes, whose ranks are the numbers of their places.

        >>> Placed.numbered((8, 8), (4,), (((0, 1),), ())).shape_on(3)
        (2, 8)
        """
        return cls(shape, Mesh.numbered(sizes), chains, pending)

    def reduced_to(self, target: Placed) -> dict[int, str]:
        """The mesh dims whose reduction is pending here and not in ``target``, with its op."""
        return {m: op for m, op in self.pending if (m, op) not in target.pending}

    def cut_as(self, chains: Chains) -> Placed:
        """The same tensor with other cuts, and nothing pending."""
        return replace(self, chains=chains, pending=())

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
        return tuple(sorted([m for chain in self.chains for m, _ in chain]))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The mesh dims that cut nothing: ranks that differ only on them hold the same."""
        return tuple([m for m in range(len(self.mesh.sizes)) if m not in self.cut])

    @property
    def most(self) -> int:
        """The elements on the fullest rank."""
        return most_local(self.shape, self.chains, self.mesh.sizes)

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

    def held_on(self, device: Device) -> tuple[Chain, ...]:
        """The cuts of each dim, with the coordinates of a device."""
        return chains_on(self.chains, self.mesh.sizes, device)

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


def several(first: Placed, others: Sequence[Placed]) -> Placed:
    """A tensor that lies in the same way on several meshes, all of which have all of it, as one
    that is replicated.

    Raises:
        ValueError: the meshes share ranks, or the tensor lies otherwise on some.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> rows = Placed.of(Sharding((4, 6), (2,), (Shard(0),)))
    >>> both = several(rows, [replace(rows, mesh=Mesh((2,), (4, 5)))])
    >>> both.mesh, both.placements_text()
    (Mesh(sizes=(2, 2), ranks=(0, 1, 4, 5)), '[R, S(0)]')
    """
    ranks = [rank for each in (first, *others) for rank in each.mesh.ranks]
    alike = all(
        (each.shape, each.mesh.sizes, each.chains) == (first.shape, first.mesh.sizes, first.chains)
        for each in others
    )
    if not alike or len(set(ranks)) < len(ranks):
        raise ValueError("meshes share ranks, or the tensor is divided otherwise on some")
    chains = tuple([tuple([(m + 1, f) for m, f in chain]) for chain in first.chains])
    mesh = Mesh((1 + len(others), *first.mesh.sizes), tuple(ranks))
    return Placed(first.shape, mesh, chains)

"""Who holds what: the value that panels of a tensor are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from cute_sharding.exchange import Mesh, Placed
from cute_sharding.sharding import Partial, Sharding, format_placements
from cute_sharding.sharding.rows import Chains, chains_of, cutting, local_size
from cute_sharding.tools.drawing.devices import devices_named, devices_text, first_of
from cute_sharding.tools.drawing.owners import run_at
from cute_sharding.tools.drawing.palette import COMMON

# Devices with numbers up to here have each a colour of their own.
COLOURED = 16


@dataclass(frozen=True)
class Holding:
    """A tensor of ``shape`` on ``mesh``, cut by ``chains``.

    Attributes:
        shape: the global shape.
        mesh: the sizes of the mesh dims.
        names: their names.
        chains: for each tensor dim the (mesh dim, split factor) that cut it, in order.
        pending: the mesh dims on which each device holds a term of a reduction, with its op.
        ranks: of the devices, by number; then they are called by these.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    names: tuple[str, ...]
    chains: Chains
    pending: tuple[tuple[int, str], ...] = ()
    ranks: Sequence[int] | None = None

    @classmethod
    def of(cls, sharding: Sharding, names: tuple[str, ...]) -> Holding:
        return cls(
            sharding.shape,
            sharding.mesh,
            names,
            chains_of(sharding.cuts, len(sharding.shape), sharding.mesh),
            tuple(
                (m, p.reduce_op)
                for m, p in enumerate(sharding.placements)
                if isinstance(p, Partial) and sharding.mesh[m] > 1
            ),
        )

    @classmethod
    def placed(
        cls,
        placed: Placed,
        names: tuple[str, ...],
        pending: tuple[tuple[int, str], ...] = (),
    ) -> Holding:
        """Of a tensor on the ranks of a mesh."""
        mesh = placed.mesh
        return cls(placed.shape, mesh.sizes, names, placed.chains, pending, mesh.ranks)

    @cached_property
    def cutting(self) -> tuple[int, ...]:
        """The mesh dims that cut the tensor."""
        return tuple(sorted(cutting(self.chains)))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The mesh dims on which devices hold the same."""
        taken = {*self.cutting, *(m for m, _ in self.pending)}
        return tuple(m for m, n in enumerate(self.mesh) if m not in taken and n > 1)

    @property
    def groups(self) -> int:
        """How many sets of devices there are that hold the same elements."""
        return prod(self.mesh[m] for m in self.cutting)

    def group(self, number: int) -> dict[int, int]:
        """The coordinates on the mesh dims that cut, of such a set: in the order of its devices."""
        fixed = {}
        for m in reversed(self.cutting):
            number, fixed[m] = divmod(number, self.mesh[m])
        return fixed

    def cuts_of(self, dim: int) -> list[tuple[int, int, int]]:
        """The cuts of a tensor dim, as :mod:`.owners` takes them."""
        return [(m, factor, self.mesh[m]) for m, factor in self.chains[dim]]

    def owner(self, dim: int, owner: tuple[int, ...]) -> dict[int, int]:
        """The coordinates that the owner of a run of rows fixes, by mesh dim."""
        return {m: c for (m, _), c in zip(self.chains[dim], owner)}

    def holders(self, element: tuple[int, ...]) -> dict[int, int]:
        """The coordinates of the devices that hold an element, on the mesh dims that cut."""
        fixed: dict[int, int] = {}
        for dim, row in enumerate(element):
            run = run_at(self.shape[dim], self.cuts_of(dim), row)
            fixed |= self.owner(dim, run.owner or ())
        return fixed

    def local_shape(self, fixed: Mapping[int, int]) -> tuple[int, ...]:
        """What the devices with those coordinates on the mesh dims that cut hold."""
        shape = list(self.shape)
        for dim, chain in enumerate(self.chains):
            for m, factor in chain:
                shape[dim] = local_size(shape[dim], factor, self.mesh[m], fixed[m])
        return tuple(shape)

    @property
    def word(self) -> str:
        """What a device is called."""
        return "device" if self.ranks is None else "rank"

    def number(self, device: int) -> int:
        """The number that a device is called by, of the one at that place in the mesh."""
        return device if self.ranks is None else self.ranks[device]

    # -- as text -----------------------------------------------------------------------------------

    def label(self, fixed: Mapping[int, int]) -> str:
        """The devices with those coordinates, for a cell: 0,4 hold the same, 0+4 a term each."""
        if not self.pending:
            return devices_text(self.mesh, fixed, ranks=self.ranks)
        joint = "," if self.replicated else "+"
        text = devices_text(self.mesh, fixed, joint, self.ranks)
        return text if "+" in text else f"+{text}"

    def device(self, fixed: Mapping[int, int]) -> int:
        """The number that colours them: of their first device, or, where devices are many, among
        the sets of devices. What all devices hold has a colour of its own.
        """
        if self.groups == 1 and prod(self.mesh) > 1:
            return COMMON
        if prod(self.mesh) <= COLOURED:
            return self.number(first_of(self.mesh, fixed))
        number = 0
        for m in self.cutting:
            number = number * self.mesh[m] + fixed[m]
        return number

    def who(self, fixed: Mapping[int, int]) -> str:
        """What the legend says of them."""
        said = [f"{self.names[m]}={fixed[m]}" for m in self.cutting]
        said += [f"any {self.names[m]}" for m in self.replicated]
        terms = [f"each {self.names[m]} a term of the {op}" for m, op in self.pending]
        where = f" ({', '.join([*said, *terms])})" if said or terms else ""
        return f"{devices_named(self.mesh, fixed, self.word, self.ranks)}{where}"

    def what(self, fixed: Mapping[int, int]) -> str:
        """What they hold, as a local shape."""
        shape = self.local_shape(fixed)
        return "a scalar" if shape == () else str(shape) if prod(shape) else "nothing"

    def cut_text(self, dim: int) -> str:
        """Which mesh dims cut a tensor dim, for its axis."""
        cuts = [
            self.names[m] + (f" in {factor} pieces" if factor > 1 else "")
            for m, factor in self.chains[dim]
        ]
        return f", on {', then '.join(cuts)}" if cuts else ""

    @property
    def mesh_text(self) -> str:
        if self.ranks is not None:
            return Mesh(self.mesh, self.ranks).text(self.names)
        return "mesh (" + ", ".join(f"{m}={n}" for m, n in zip(self.names, self.mesh)) + ")"


def title_of(sharding: Sharding, holding: Holding) -> str:
    return f"{sharding.shape} on {holding.mesh_text} as {format_placements(sharding.placements)}"

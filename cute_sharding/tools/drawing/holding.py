"""Who holds what of a tensor: the value that its panels and its legend are made from. Whose a row
is, and which rows beside it are the same ranks', is computed in closed form, so that a tensor of
any size is drawn from a few positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

from cute_sharding.exchange import Mesh, Placed
from cute_sharding.sharding import Sharding, format_placements
from cute_sharding.sharding.digits import digits
from cute_sharding.sharding.rows import Chains, local_size
from cute_sharding.tools.drawing.palette import COMMON
from cute_sharding.tools.drawing.picture import GAP, Cell, Key, Panel
from cute_sharding.tools.inputs import placed_of

# The most that is shown: rows and columns of a grid, of one of several grids, and grids; runs of a
# leading dim; lines of the legend.
ROWS, COLUMNS = 16, 24
SMALL_ROWS, SMALL_COLUMNS = 8, 16
PANELS, LEADING = 6, 4
KEYS = 16
# Ranks of meshes with up to so many have each a colour of their own.
COLOURED = 16
# Sets of up to so many ranks are listed one by one.
LISTED = 3

# The cuts of a tensor dim in their order, each (mesh dim, split factor, devices).
Cuts = Sequence[tuple[int, int, int]]


class OwnedRows(NamedTuple):
    """Rows ``[start, stop)`` that are side by side and of the same ranks: those with the coordinate
    ``owner[i]`` on the mesh dim of the i-th cut. ``owner`` is None for rows that are left out.
    """

    start: int
    stop: int
    owner: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.owner is None:
            return GAP
        return str(self.start) if self.stop - self.start == 1 else f"{self.start}:{self.stop}"


def run_at(n: int, cuts: Cuts, row: int) -> OwnedRows:
    """The longest run of rows around ``row``, of ``n``, that are the same ranks'.

    One step a cut: each says who has the row, where its block begins and ends, and where the row
    lies among those that the device is left with (:mod:`cute_sharding.sharding.rows`).
    """
    owner: list[int] = []
    before, after = row, n - row  # how far the run reaches to either side
    position, left = row, n
    for _, split_factor, parts in cuts:
        piece = -(-left // split_factor)
        if piece <= 1 or parts == 1:  # device 0 has everything
            owner.append(0)
            continue
        number, within = divmod(position, piece)
        length = min(piece, left - number * piece)
        block = -(-length // parts)
        device, offset = divmod(within, block)
        size = min(block, length - device * block)
        owner.append(device)
        before, after = min(before, offset), min(after, size - offset)
        whole = -(-piece // parts)
        position = number * max(0, min(whole, piece - device * whole)) + offset
        left = local_size(left, split_factor, parts, device)
    return OwnedRows(row - before, row + after, tuple(owner))


def runs_shown(n: int, cuts: Cuts, most: int, *, singly: bool) -> list[OwnedRows]:
    """The rows of a dim of ``n`` as at most ``most`` runs, in order.

    Row by row, if ``singly`` and the rows are few enough; else one for each run of rows of the same
    ranks; of very many the first ones and the last, and between them one that is left out.
    """
    if singly and n <= most:
        return [OwnedRows(row, row + 1, run_at(n, cuts, row).owner) for row in range(n)]
    found: list[OwnedRows] = []
    at = 0
    while at < n and len(found) <= most:
        found.append(run_at(n, cuts, at))
        at = found[-1].stop
    if at >= n and len(found) <= most:
        return found
    last = run_at(n, cuts, n - 1)
    kept = found[: most - 2]
    return [*kept, OwnedRows(kept[-1].stop, last.start, None), last]


class Axis(NamedTuple):
    """An axis of panels: its name, and what is at each of its places, which has a text for a tick;
    None, or rows without an owner, where something is left out.
    """

    name: str
    places: Sequence[Any]


def panels(axes: Sequence[Axis], cell: Callable[..., Cell]) -> tuple[Panel, ...]:
    """Grids of the last two axes, one for each place of the others. ``cell`` is called with a place
    of each axis.
    """
    leading = axes[:-2]
    rows, columns = [*[Axis("", [""])] * 2, *axes][-2:]
    found = []
    for before in islice(product(*[filter(_is_shown, axis.places) for axis in leading]), PANELS):
        cells = [
            tuple(
                [
                    cell(*[*before, i, j][2 - min(len(axes), 2) :])
                    if _is_shown(i) and _is_shown(j)
                    else Cell(GAP)
                    for j in columns.places
                ]
            )
            for i in rows.places
        ]
        title = f"[{', '.join([*map(str, before), ':', ':'])}]" if before else ""
        down, across = (tuple(map(_tick, axis.places)) for axis in (rows, columns))
        name = columns.name or "a scalar"
        found.append(Panel(title, rows.name, name, down, across, tuple(cells)))
    return tuple(found)


def _is_shown(place: Any) -> bool:
    return place is not None and getattr(place, "owner", ()) is not None


def _tick(place: Any) -> str:
    return GAP if place is None else str(place)


def left_out(axes: Sequence[Axis]) -> list[str]:
    """How many panels are left out, in words."""
    count = prod([sum(map(_is_shown, axis.places)) for axis in axes[:-2]])
    return [f"{PANELS} of {count} panels are shown; the others are left out"] * (count > PANELS)


@dataclass(frozen=True)
class Holding:
    """A tensor on the ranks of a mesh, as it is drawn.

    Attributes:
        placed: the tensor.
        names: the names of the mesh dims.
        said: the placements, as text.
    """

    placed: Placed
    names: tuple[str, ...]
    said: str

    @classmethod
    def of(
        cls, sharding: Sharding, names: tuple[str, ...], mesh: Mesh, chains: Chains | None = None
    ) -> Holding:
        """Of a sharding; ``chains``: the cuts, if they are not those of its placements in order."""
        placed = placed_of(sharding, mesh, chains)
        return cls(placed, names, format_placements(sharding.placements))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.placed.shape

    @property
    def title(self) -> str:
        """The shape, the placements and the mesh."""
        return f"{self.shape}: {self.said} on {self.placed.mesh.text(self.names)}"

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The mesh dims on which ranks hold the same."""
        sizes, terms = self.placed.mesh.sizes, [m for m, _ in self.placed.pending]
        return tuple([m for m in self.placed.replicated if m not in terms and sizes[m] > 1])

    @cached_property
    def groups(self) -> int:
        """How many sets of ranks there are that hold the same elements."""
        return prod([self.placed.mesh.sizes[m] for m in self.placed.cut])

    def group(self, number: int) -> dict[int, int]:
        """The coordinates on the mesh dims that cut, of such a set: in the order of its ranks."""
        fixed = {}
        for m in reversed(self.placed.cut):
            number, fixed[m] = divmod(number, self.placed.mesh.sizes[m])
        return fixed

    def cuts_of(self, dim: int) -> list[tuple[int, int, int]]:
        """The cuts of a tensor dim."""
        sizes = self.placed.mesh.sizes
        return [(m, factor, sizes[m]) for m, factor in self.placed.chains[dim]]

    def holders(self, element: Sequence[int | OwnedRows]) -> dict[int, int]:
        """The coordinates of the ranks that hold an element, on the mesh dims that cut."""
        fixed: dict[int, int] = {}
        for dim, row in enumerate(element):
            cuts = self.cuts_of(dim)
            run = run_at(self.shape[dim], cuts, row) if isinstance(row, int) else row
            fixed |= {m: c for (m, _, _), c in zip(cuts, run.owner or ())}
        return fixed

    def cell(self, *element: int | OwnedRows) -> Cell:
        """The box of an element, or of all elements of some runs of rows."""
        fixed = self.holders(element)
        return Cell(self._label(fixed), self._colour(fixed))

    def panels(self) -> tuple[tuple[Panel, ...], tuple[str, ...]]:
        """The panels of the tensor, and what is left out of them, in words. There are at most
        ``PANELS`` of ``ROWS`` by ``COLUMNS`` cells, however large the tensor and the mesh.
        """
        ndim = len(self.shape)
        if not prod(self.shape):
            return (), ("no elements: nobody holds any",)
        most = [SMALL_ROWS, SMALL_COLUMNS] if ndim > 2 else [ROWS, COLUMNS]
        limits = [*[PANELS if ndim == 3 else LEADING] * (ndim - 2), *most][-ndim:]
        axes, said = [], []
        for dim, n in enumerate(self.shape):
            cuts = self.cuts_of(dim)
            shown = runs_shown(n, cuts, limits[dim], singly=dim >= ndim - 2)
            dims = [self.names[m] + f" in {f} pieces" * (f > 1) for m, f, _ in cuts]
            on = f", on {', then '.join(dims)}" if cuts else ""
            axes.append(Axis(f"dim {dim} ({n}){on}", shown))
            # Where the rows are a layout, it says of the rest what it says of the first ones.
            chain, sizes = self.placed.chains[dim], self.placed.mesh.sizes
            how = "are left out" if digits(n, chain, sizes) is None else "go on alike"
            said += [
                f"dim {dim}: rows {run.start} to {run.stop - 1} of {n} {how}"
                for run in shown
                if run.owner is None
            ]
        return panels(axes, self.cell), (*said, *left_out(axes))

    def _ranks(self, fixed: Mapping[int, int]) -> tuple[list[int], int, int, bool]:
        """Of the ranks that have the coordinates ``fixed``: the first few, the last, how many they
        are, and whether they are consecutive.
        """
        mesh = self.placed.mesh
        count = prod([n for m, n in enumerate(mesh.sizes) if m not in fixed])
        axes = [
            (fixed[m],) if m in fixed else range(min(n, count)) for m, n in enumerate(mesh.sizes)
        ]
        some = [mesh.rank(device) for device in islice(product(*axes), min(count, LISTED))]
        last = mesh.rank(tuple([fixed.get(m, n - 1) for m, n in enumerate(mesh.sizes)]))
        is_run = last - some[0] + 1 == count
        if is_run and not isinstance(mesh.ranks, range):
            places = [mesh.ranks.index(rank) for rank in (some[0], last)]
            between = mesh.ranks[places[0] : places[1] + 1]
            is_run = [*between] == [*range(some[0], last + 1)]
        return some, last, count, is_run

    def _label(self, fixed: Mapping[int, int]) -> str:
        """Those ranks, for a cell: 0,4 hold the same, 0+4 a term each."""
        some, last, count, is_run = self._ranks(fixed)
        joint = "+" if self.placed.pending and not self.replicated else ","
        text = f"{some[0]}-{last}" if is_run else f"{some[0]}.."
        text = joint.join(map(str, some)) if count <= LISTED else text
        return f"+{text}" if self.placed.pending and "+" not in text else text

    def _colour(self, fixed: Mapping[int, int]) -> int:
        """The number that colours them: of their first rank, or, where ranks are many, among the
        sets of ranks. What all ranks hold has a colour of its own.
        """
        mesh = self.placed.mesh
        if self.groups == 1 and len(mesh.ranks) > 1:
            return COMMON
        if len(mesh.ranks) <= COLOURED:
            return mesh.rank(tuple([fixed.get(m, 0) for m in range(len(mesh.sizes))]))
        number = 0
        for m in self.placed.cut:
            number = number * mesh.sizes[m] + fixed[m]
        return number

    def key(self, number: int) -> tuple[str, str, int, str]:
        """Of a set of ranks that hold the same: its label, who they are, their colour, and what
        they hold, as a local shape.
        """
        fixed = self.group(number)
        some, last, count, is_run = self._ranks(fixed)
        who = f"rank {last}" if count == 1 else f"ranks {', '.join(map(str, some))}"
        if is_run and count > 2:
            who = f"ranks {some[0]} to {last}"
        elif count > LISTED:
            who += f", {'.., ' * (count > LISTED + 1)}{last}"
        where = [f"{self.names[m]}={fixed[m]}" for m in self.placed.cut]
        where += [f"any {self.names[m]}" for m in self.replicated]
        where += [f"each {self.names[m]} a term of the {op}" for m, op in self.placed.pending]
        device = tuple([fixed.get(m, 0) for m in range(len(self.names))])
        shape = self.placed.shape_of(device)
        what = "a scalar" if shape == () else str(shape) if prod(shape) else "nothing"
        who += f" ({', '.join(where)})" if where else ""
        return self._label(fixed), who, self._colour(fixed), what


def legend_of(sides: Mapping[str, Holding]) -> tuple[tuple[Key, ...], tuple[str, ...]]:
    """A line for each set of ranks that hold the same, of tensors by what each is called; of very
    many the first ones and the last, and which are left out, in words.
    """
    held: dict[tuple[str, str], dict[str, str]] = {}
    colours: dict[tuple[str, str], int] = {}
    said: dict[str, None] = {}
    for side, of in sides.items():
        groups = of.groups
        for number in range(groups) if groups <= KEYS else [*range(KEYS - 1), groups - 1]:
            label, who, colour, what = of.key(number)
            held.setdefault((label, who), {})[side] = what
            colours.setdefault((label, who), colour)
        if groups > KEYS:
            said[
                f"of {groups} sets of ranks that hold the same, the first {KEYS - 1} and the last "
                "are in the legend; the others are left out"
            ] = None
    keys = []
    for (label, who), shapes in held.items():
        text = f"{who}: holds {', then '.join(dict.fromkeys(shapes.values()))}"
        if len(shapes) < len(sides):
            text = (
                f"{who}: {' and '.join(shapes)}, holds {', '.join(dict.fromkeys(shapes.values()))}"
            )
        keys.append(Key(label, colours[label, who], text))
    return tuple(keys), tuple(said)

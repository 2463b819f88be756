"""Which placements of the input make a view free, cheapest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from cute_sharding.sharding.deal import local_size
from cute_sharding.views import Cut, View, carry

# Above so many combinations of candidates, mesh dims are only kept or replicated (2 choices each).
SEARCH_LIMIT = 4096


@dataclass(frozen=True, order=True)
class Target:
    """Cuts of the input under which the view is free, with what getting there costs the busiest device, in elements."""

    received: int
    local: int  # elements held of input and output together
    changed: int  # mesh dims that change
    source: tuple[Cut, ...]
    output: tuple[Cut, ...]


def local_elements(shape: Sequence[int], cuts: Sequence[Cut], mesh: Sequence[int]) -> int:
    """The most elements a device holds: device 0, everywhere."""
    sizes = list(shape)
    for cut, parts in zip(cuts, mesh):
        if cut is not None:
            sizes[cut[0]] = local_size(sizes[cut[0]], cut[1], parts, 0)
    return prod(sizes)


def received_elements(shape: Sequence[int], source: Sequence[Cut], target: Sequence[Cut], mesh: Sequence[int]) -> int:
    """The elements that a device must receive to go from ``source`` to ``target``.

    What it needs, less what it has: of each mesh dim that changes, a device that held a shard already has one part in as many as there are
    devices; from a replicated mesh dim it has all. Exact where sizes divide and the cuts cross (name different tensor dims).
    """
    need = local_elements(shape, target, mesh)
    share = prod(parts for a, b, parts in zip(source, target, mesh) if a != b and a is not None)
    return need - need // share


def free_targets(view: View, cuts: Sequence[Cut], mesh: Sequence[int], fixed: Sequence[int] = ()) -> Iterator[Target]:
    """The cuts of the input under which ``view`` is free, cheapest first.

    The candidates: every mesh dim keeps its cut, shards another input dim, or replicates; those in ``fixed`` keep theirs (they carry a
    pending reduction). Replicating everything comes last and is always free, so the iterator is never empty.
    """
    shape = view.input_shape
    options: list[list[Cut]] = []
    for mesh_dim, cut in enumerate(cuts):
        if cut is None or mesh_dim in fixed:
            options.append([cut])
            continue
        options.append([cut, *[(dim, 1) for dim in range(len(shape)) if (dim, 1) != cut], None])
    if prod(map(len, options)) > SEARCH_LIMIT:
        options = [[cut] if len(choices) == 1 else [cut, None] for cut, choices in zip(cuts, options, strict=True)]
    candidates = []
    for combination in product(*options):
        received = received_elements(shape, cuts, combination, mesh)
        changed = sum(a != b for a, b in zip(cuts, combination))
        candidates.append((received, changed, local_elements(shape, combination, mesh), combination))
    candidates.sort(key=lambda c: (c[:3], tuple((-1, 0) if cut is None else cut for cut in c[3])))
    for received, changed, local, combination in candidates:
        carried = carry(view, combination, mesh)
        if carried.blocked is None:
            output = local_elements(view.target, carried.cuts, mesh)
            yield Target(received, local + output, changed, combination, carried.cuts)

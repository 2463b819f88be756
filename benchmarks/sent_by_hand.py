"""Sends as a program writes them that knows its placements: for each tensor and pair of ranks the
slice that both have, worked out before, and all of them posted at once. What ``benchmarks.reshard``
is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Side = tuple[DeviceMesh, Callable[[str], list[Any]]]
# Of each dim, from where to where.
Box = list[tuple[int, int]]


class Send(NamedTuple):
    """What one rank gives another of a tensor: where it lies on the one, and on the other."""

    name: str
    giver: int
    taker: int
    given: Box
    taken: Box


def boxes(side: Side, name: str, shape: tuple[int, ...]) -> dict[int, Box]:
    """What each rank holds."""
    mesh, placements = side
    found = {}
    for at in product(*map(range, mesh.shape)):
        box = [(0, n) for n in shape]
        for k, parts, placement in zip(at, mesh.shape, placements(name)):
            if placement.is_shard():
                low, high = box[placement.dim]
                step = -(-(high - low) // parts)
                first = min(low + k * step, high)
                box[placement.dim] = first, min(first + step, high)
        found[int(mesh.mesh[at])] = box
    return found


def meet(one: Box, other: Box) -> Box | None:
    found = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other)]
    return found if all(a < b for a, b in found) else None


def within(box: Box, held: Box) -> Box:
    return [(low - first, high - first) for (low, high), (first, _) in zip(box, held)]


def written(shapes: Mapping[str, tuple[int, ...]], source: Side, target: Side) -> list[Send]:
    """All sends of all ranks, in the same order on each."""
    return [
        send
        for name, shape in shapes.items()
        for taker, wanted in boxes(target, name, shape).items()
        for send in _of(name, taker, wanted, boxes(source, name, shape))
    ]


def _of(name: str, taker: int, wanted: Box, givers: dict[int, Box]) -> Iterator[Send]:
    """From the taker itself where it has it, else from the first that has."""
    taken: list[Box] = []
    for giver in sorted(givers, key=lambda giver: (giver != taker, giver)):
        box = meet(givers[giver], wanted)
        if box is not None and not any(meet(box, other) for other in taken):
            taken.append(box)
            yield Send(name, giver, taker, within(box, givers[giver]), within(box, wanted))


def cut(x: torch.Tensor, box: Box) -> torch.Tensor:
    for d, (low, high) in enumerate(box):
        x = x.narrow(d, low, high - low)
    return x


def send_by_hand(state: dict[str, DTensor], sends: list[Send], target: Side) -> dict[str, DTensor]:
    rank, (mesh, placements) = dist.get_rank(), target
    result = {
        name: torch.empty([b - a for a, b in boxes(target, name, x.shape).get(rank, [(0, 0)])])
        for name, x in state.items()
    }
    works, sent, into = [], [], []
    for name, giver, taker, given, taken in sends:
        if giver == taker == rank:
            cut(result[name], taken).copy_(cut(state[name].to_local(), given))
        elif giver == rank:
            sent.append(cut(state[name].to_local(), given).contiguous())
            works.append(dist.isend(sent[-1], taker))
        elif taker == rank:
            part = torch.empty([b - a for a, b in taken])
            works.append(dist.irecv(part, giver))
            into.append((cut(result[name], taken), part))
    for work in works:
        work.wait()
    for place, part in into:
        place.copy_(part)
    return {
        name: DTensor.from_local(
            local, mesh, placements(name), run_check=False, shape=x.shape, stride=x.stride()
        )
        for (name, x), local in zip(state.items(), result.values())
    }

"""Folds whose states no reduction combines: each device gets the states of all, and combines them.

A scan, such as ``cumsum``, runs on each of a device's pieces of rows, which lie side by side in the
tensor. The state of a piece is its total. The same op, over the states of all pieces in the order
of their rows, says what comes before each. The greatest rows of all are among the greatest of each
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.run.folds.states import States, wider
from cute_sharding.dtensor.run.groups import all_on_all_ranks, all_on_each_rank, on_each_rank, place
from cute_sharding.dtensor.run.numbered import as_number, chain_of_dim, numbers_of
from cute_sharding.exchange import Mesh
from cute_sharding.sharding.rows import Device, each_turn, rows_held

# -- scans -----------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """The pieces of rows that devices have of a dim.

    Attributes:
        most: of one device.
        order: where the states of pieces are among those of all, one device behind the other, in
            the order of their rows; None: as they are.
        own: for each of a device's pieces, its number of rows and its place in that order.
    """

    most: int
    order: tuple[int, ...] | None
    own: tuple[tuple[Any, int], ...]

    def split(self, x: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
        """A device's rows, by pieces."""
        return x.split([n for n, _ in self.own], dim) if len(self.own) > 1 else [x]


def _pieces(fold: States, dim: int, device: Device, rows: Any) -> Pieces:
    """The pieces that a device has, which has so many ``rows``."""
    sizes = tuple([fold.mesh.size(m) for m in fold.over])
    chain = chain_of_dim(dim, fold.placements, fold.mesh)
    here = Mesh.numbered(sizes).rank(tuple([device[m] for m in fold.over]))
    if all(factor == 1 for factor, *_ in chain):  # one piece each, in the order of the devices
        return Pieces(1, None, ((rows, here),))
    n = as_number(fold.shape[dim])
    turns: list[list[tuple[int, int]]] = []
    for coordinates in product(*map(range, sizes)):
        at = dict(zip(fold.over, coordinates))
        held = rows_held(n, tuple([(factor, parts, at[m]) for factor, parts, m in chain]))
        found = sorted([turn for run in held for turn in each_turn(run)], key=lambda turn: turn.y)
        turns.append([(turn.x, turn.length) for turn in found])
    most = max(1, *map(len, turns))
    starts = sorted(
        [(x, p * most + k) for p, some in enumerate(turns) for k, (x, _) in enumerate(some)]
    )
    places = {slot: j for j, (_, slot) in enumerate(starts)}
    own = [(n, places[here * most + k]) for k, (_, n) in enumerate(turns[here])]
    return Pieces(most, tuple([slot for _, slot in starts]), tuple(own) or ((0, 0),))


class Scan(NamedTuple):
    """A scan.

    Attributes:
        run: the op on a tensor, along a dim.
        total: a piece's state: what it adds to what comes after.
        then: the results of rows that others come before, from the results of these rows alone, and
            the state of the others.
        nothing: the state of no rows.
    """

    run: Callable[[torch.Tensor, int], torch.Tensor]
    total: Callable[[torch.Tensor, int], torch.Tensor]
    then: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    nothing: float


def _scanned(scan: Scan, fold: States, x: torch.Tensor, dim: int, **_: Any) -> torch.Tensor:
    (dim,) = fold.dims
    dtype = wider(fold.dtype(0))

    def totals(rank: int, x: torch.Tensor) -> torch.Tensor:
        pieces = _pieces(fold, dim, place(fold.mesh, rank), x.shape[dim])
        found = [scan.total(part.to(dtype), dim) for part in pieces.split(x, dim)]
        missing = [torch.full_like(found[0], scan.nothing)] * (pieces.most - len(found))
        return torch.stack([*found, *missing])

    (states,) = fold.of_each(on_each_rank(totals, x))

    def finish(rank: int, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        pieces = _pieces(fold, dim, place(fold.mesh, rank), x.shape[dim])
        if pieces.order is not None:
            states = states.index_select(0, torch.tensor(pieces.order, device=states.device))
        before, made = scan.run(states, 0), []
        for part, (_, at) in zip(pieces.split(x, dim), pieces.own):
            found = scan.run(part.to(dtype), dim)
            made.append(scan.then(found, before[at - 1]) if at else found)
        return (torch.cat(made, dim) if len(made) > 1 else made[0]).to(fold.dtype(0))

    return on_each_rank(finish, x, states)


def _sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """(PyTorch's kernel adds up numbers of 32 bits in 64, and so do states.)"""
    dtype = torch.float64 if x.dtype is torch.float32 else x.dtype
    return x.sum(dim, keepdim=True, dtype=dtype)


def _logsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.logsumexp(dim, keepdim=True)


# (A product of pieces is another where one is 0 and the next infinite.)
_SCANS = {
    "cumsum": Scan(torch.cumsum, _sum, torch.Tensor.add_, 0),
    "logcumsumexp": Scan(torch.logcumsumexp, _logsumexp, torch.logaddexp, -torch.inf),
}


# -- the greatest ----------------------------------------------------------------------------------


def topk(
    fold: States,
    x: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    is_sorted: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest of those that each device has."""
    (dim,) = fold.dims
    n, chain = as_number(fold.shape[dim]), chain_of_dim(dim, fold.placements, fold.mesh)
    numbering = torch.int32 if n < 1 << 31 else torch.int64

    def own(rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        device = place(fold.mesh, rank)
        count = min(k, x.shape[dim])
        found, at = x.topk(count, dim, largest)
        at = numbers_of(at, n, chain, device).to(numbering)
        if count < k:  # rows with a number that no row has
            shape = [k - count if d == dim else size for d, size in enumerate(x.shape)]
            found = torch.cat([found, found.new_zeros(shape)], dim)
            at = torch.cat([at, at.new_full(shape, n)], dim)
        return [found.unsqueeze(0), at.unsqueeze(0)]

    numbers, places = fold.of_result(0).of_each(*all_on_each_rank(own, x))

    def best(numbers: torch.Tensor, places: torch.Tensor) -> list[torch.Tensor]:
        numbers, places = (each.movedim(0, dim).flatten(dim, dim + 1) for each in (numbers, places))
        order = numbers.argsort(dim=dim, descending=largest, stable=True)
        is_row = (places != n).gather(dim, order).to(torch.uint8)
        rows = is_row.argsort(dim=dim, descending=True, stable=True)
        order = order.gather(dim, rows).narrow(dim, 0, k)
        return [numbers.gather(dim, order), places.gather(dim, order).long()]

    found, at = all_on_all_ranks(best, numbers, places)
    return found, at


# By the names in the rows of the table.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: partial(_scanned, scan) for name, scan in _SCANS.items()},
    "topk": topk,
}

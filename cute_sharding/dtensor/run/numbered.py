"""Rows by their numbers: which device has the row with a number, and the number of a device's row.
Ops with an index run on each device for the rows that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_sharding.dtensor.replaced import dispatch, dispatch_modes, local_tensors
from cute_sharding.dtensor.replaced.symints import number_of
from cute_sharding.dtensor.replaced.tensor_specs import Placement, cut_of
from cute_sharding.dtensor.run.groups import on_each_rank, place
from cute_sharding.sharding.rows import local_size, piece_and_block

# (split factor, devices, mesh dim) of each mesh dim that cuts a dim, in order.
Chain = tuple[tuple[int, int, int], ...]


def as_number(size: Any) -> int:
    """The size as a number (in a graph with a guard): a device's rows are computed in numbers."""
    return size if isinstance(size, int) else number_of(size)


def chain_of_dim(dim: int, placements: Sequence[Placement], mesh: Any) -> Chain:
    """The mesh dims that cut a dim."""
    return tuple(
        [
            (as_number(cut[1]), mesh.size(m), m)
            for m, cut in enumerate(map(cut_of, placements))
            if cut is not None and cut[0] == dim
        ]
    )


def own_rows(
    numbers: torch.Tensor, n: int, chain: Chain, device: Sequence[int]
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """For rows with these ``numbers`` of ``n``: their numbers among the device's own rows, how many
    rows the device has, and a mask of the numbers that it has. (A mesh dim deals ``n`` rows in
    pieces, and each device gets one block of each piece: :mod:`cute_sharding.sharding.rows`.)
    """
    is_own = torch.ones_like(numbers, dtype=torch.bool)
    for factor, parts, m in chain:
        if n == 0:
            break
        piece, block = piece_and_block(n, factor, parts)
        full, rest = divmod(n, piece)
        last = -(-rest // parts)  # the block size of the rows that are left after whole pieces
        number = numbers // piece
        own = min(max(piece - device[m] * block, 0), block)
        size = torch.where(number < full, block, last) if rest else block
        first = size * device[m]
        within = numbers - number * piece - first
        is_own &= (within >= 0) & (within < size)
        numbers = number * own + within
        n = local_size(n, factor, parts, device[m])
    return numbers, n, is_own


def numbers_of(own: torch.Tensor, n: int, chain: Chain, device: Sequence[int]) -> torch.Tensor:
    """The numbers among all ``n`` rows of rows with the numbers ``own`` among a device's: the
    inverse of :func:`own_rows`.
    """
    levels = []
    for factor, parts, m in chain:
        levels.append((n, factor, parts, device[m]))
        n = local_size(n, factor, parts, device[m])
    for n, factor, parts, at in reversed(levels):
        if n == 0:
            continue
        piece, block = piece_and_block(n, factor, parts)
        full, rest = divmod(n, piece)
        mine = min(max(piece - at * block, 0), block)
        number = (own // mine).clamp_max(full) if mine else torch.full_like(own, full)
        first = block * at
        if rest:
            first = torch.where(number < full, first, -(-rest // parts) * at)
        own = number * (piece - mine) + own + first
    return own


def checked(numbers: torch.Tensor, n: int, what: str, least: int = 0) -> torch.Tensor:
    """The numbers, all of which are of ``n`` rows, from ``least`` on; ``what``: one of them.

    Raises:
        IndexError: one is not; where that is known only on a device, its kernel fails.
    """
    if is_at_hand(numbers):
        wrong = numbers[(numbers < least) | (numbers >= n)]
        if len(wrong):
            raise IndexError(
                f"{what} {wrong[0].item()} is out of bounds: there are {n} rows, counted from 0"
            )
        return numbers
    if n == least:
        return numbers
    # Zeros whose sum with the numbers is used, so that a compiler does not leave them out.
    zeros = numbers.new_zeros(()).expand(n - least).gather(0, numbers.reshape(-1).long() - least)
    return numbers + zeros.reshape(numbers.shape)


def is_at_hand(numbers: torch.Tensor) -> bool:
    """Whether a program may look at numbers without waiting for a device."""
    is_known = not (dispatch_modes.is_tracing() or local_tensors.is_imagined(numbers))
    return numbers.device.type == "cpu" and is_known


# -- ops by number ---------------------------------------------------------------------------------


Call: TypeAlias = "Callable[[Sequence[torch.Tensor]], torch.Tensor]"


class Pick(NamedTuple):
    """A sharded dim of which an index names rows.

    Attributes:
        dim: of the tensor.
        numbers: the position of the index, among all tensors.
        chain: the mesh dims that cut the dim.
        n: its rows on all devices.
        aligned: for each dim of the result, the index's dim that it is, or None.
    """

    dim: int
    numbers: int
    chain: Chain
    n: int
    aligned: tuple[int | None, ...]


@dataclass(frozen=True)
class ByNumber:
    """Runs an op that takes or writes rows by number, for a device's own rows: of others it gives
    zeros, and writes none.

    Attributes:
        op: the overload.
        mesh: the DeviceMesh.
        x: the position of the tensor with the rows, among all tensors.
        picks: its dims.
        writes: whether it writes the rows.
        counts_back: whether negative numbers count from the end.
    """

    op: Any
    mesh: Any
    x: int
    picks: tuple[Pick, ...]
    writes: bool
    counts_back: bool

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors, with_tensors = dispatch.tensors_of(args, kwargs)
        run = self._written if self.writes else self._taken

        def of_rank(rank: int, *tensors: torch.Tensor) -> torch.Tensor:
            def call(given: Sequence[torch.Tensor]) -> torch.Tensor:
                of, options = with_tensors(given)
                return self.op(*of, **options)

            return run(call, list(tensors), place(self.mesh, rank))

        return on_each_rank(of_rank, *tensors)

    def _own(
        self, pick: Pick, numbers: torch.Tensor, device: Sequence[int]
    ) -> tuple[torch.Tensor, int, torch.Tensor]:
        """As :func:`own_rows`."""
        numbers = checked(numbers, pick.n, "index", -pick.n if self.counts_back else 0)
        if self.counts_back:
            numbers = torch.where(numbers < 0, numbers + pick.n, numbers)
        return own_rows(numbers, pick.n, pick.chain, device)

    def _taken(self, call: Call, given: list[torch.Tensor], device: Sequence[int]) -> torch.Tensor:
        others = []
        for pick in self.picks:
            own, count, is_own = self._own(pick, given[pick.numbers], device)
            if count == 0:  # any row does: all results are masked below
                x = given[self.x]
                given[self.x] = x.new_zeros(
                    [1 if d == pick.dim else n for d, n in enumerate(x.shape)]
                )
            given[pick.numbers] = own.masked_fill(~is_own, 0)
            sizes = [1 if d is None else is_own.shape[d] for d in pick.aligned]
            others.append(~is_own.reshape(sizes))
        result = call(given)
        for mask in others:
            result = result.masked_fill(mask, 0)
        return result

    def _written(
        self, call: Call, given: list[torch.Tensor], device: Sequence[int]
    ) -> torch.Tensor:
        x, counts = given[self.x], {}
        for pick in self.picks:  # one row more, for what is written to the rows of others
            own, count, is_own = self._own(pick, given[pick.numbers], device)
            given[pick.numbers] = own.masked_fill(~is_own, count)
            counts[pick.dim] = count
            rows = given[self.x]
            more = rows.new_zeros([1 if d == pick.dim else n for d, n in enumerate(rows.shape)])
            given[self.x] = torch.cat([rows, more], pick.dim)
        result = call(given)
        for dim, count in counts.items():
            result = result.narrow(dim, 0, count)
        return x.copy_(result) if self.op._schema.is_mutable else result.contiguous()

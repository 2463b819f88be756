"""Whose a row is, and which rows beside it are the same devices': in closed form, so that a tensor
of any size is drawn from a few positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cute_sharding.sharding.rows import local_size

# The cuts of a tensor dim in their order, each (mesh dim, split factor, devices).
Cuts = Sequence[tuple[int, int, int]]


class OwnedRows(NamedTuple):
    """Rows ``[start, stop)`` that are side by side and of the same devices: those with the
    coordinate ``owner[i]`` on the mesh dim of the i-th cut. ``owner`` is None for rows that are
    left out.
    """

    start: int
    stop: int
    owner: tuple[int, ...] | None

    def rows(self) -> list[OwnedRows]:
        """The run, row by row."""
        return [OwnedRows(row, row + 1, self.owner) for row in range(self.start, self.stop)]


def run_at(n: int, cuts: Cuts, row: int) -> OwnedRows:
    """The longest run of rows around ``row``, of ``n``, that are the same devices'.

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
    devices; of very many the first ones and the last, and between them one that is left out.
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

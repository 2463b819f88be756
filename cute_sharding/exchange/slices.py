"""Results of a movement op that are slices of each device's local operand, so that local tensors
are views if the global ones are.
"""

from __future__ import annotations

from typing import NamedTuple

from cute_sharding.exchange.exchange import Exchange
from cute_sharding.exchange.meetings import side_of
from cute_sharding.exchange.placed import standing_for_all
from cute_sharding.relations.moves import Link
from cute_sharding.relations.rows import Rows, common_rows, held_rows
from cute_sharding.sharding.chains import Device
from cute_sharding.sharding.meeting import Run, count_rows, rows_held


class Slice(NamedTuple):
    """Local rows of an operand's dim; if the dim is not kept, the single row."""

    first: int
    rows: int
    step: int
    is_kept: bool = True


def is_view(exchange: Exchange) -> bool:
    """Whether each device's part of every result is a view of its local operand: a slice with one
    step in each dim, windows one step apart, or a diagonal of consecutive rows.
    """
    mesh = exchange.mesh
    if mesh is None or exchange.communicates or exchange.move.adds or len(exchange.sources) != 1:
        return False
    some = [mesh.coordinates(rank) for rank in standing_for_all([mesh])]
    return all(
        slices(exchange, link.target, device) is not None and _are_views(exchange, link, device)
        for link in exchange.move.links
        for device in some
        if device is not None
    )


def _are_views(exchange: Exchange, link: Link, device: Device) -> bool:
    sides = exchange.sources[link.source], exchange.targets[link.target]
    return all(
        rows.form is None or rows.form.is_view(*map(rows_held, *side_of(placed, rows, device)))
        for pair in link.pairs
        for rows, placed in zip(pair, sides)
    )


def slices(exchange: Exchange, output: int, device: Device) -> list[Slice] | None:
    """For each dim of the operand, the local rows that the result has; None if they are not evenly
    spaced, or some come from other devices.
    """
    links = [link for link in exchange.move.links if link.target == output]
    if len(links) != 1 or any(source.dim is None for source, _ in links[0].pairs):
        return None
    (link,), result = links, []
    operand, onto = exchange.sources[link.source], exchange.targets[output]
    lacks = 0 in (exchange.shape_on(output, device))
    for source, target in link.pairs:
        had, wanted = side_of(operand, source, device), side_of(onto, target, device)
        found = common_rows(source, *had, target, *wanted)
        there = count_rows(held_rows(Rows(source.dim), *had))
        if len(found) > 1 or (not found and target.dim is None and not (lacks and there)):
            return None
        first, count, step, _ = _evenly(found[0]) if found else Slice(0, 0, 1)
        is_kept = target.dim is not None
        if count < 0 or (is_kept and count != count_rows(held_rows(target, *wanted))):
            return None
        result.append(Slice(first, count, step, is_kept))
    return result


def keeps(exchange: Exchange, link: Link, d: int) -> bool:
    """Whether a dim of a link stays the same on each device, whatever its size."""
    one, other = link.pairs[d]
    return (
        one.is_plain
        and other.is_plain
        and one.dim is not None
        and other.dim is not None
        and exchange.sources[link.source].chains[one.dim]
        == exchange.targets[link.target].chains[other.dim]
    )


def ends_otherwise(exchange: Exchange, output: int) -> set[int]:
    """The dims of a result view with every n-th row of a whole operand dim, if some device does not
    hold n operand rows for each result row: its next outer row is not one step after the last one.
    """
    (link,) = [link for link in exchange.move.links if link.target == output]
    operand, onto = exchange.sources[link.source], exchange.targets[output]
    mesh, found = onto.mesh, set()
    for device in [mesh.coordinates(rank) for rank in standing_for_all([mesh])]:
        assert device is not None, "a rank of the mesh"
        held = operand.shape_of(device)
        for (source, target), rows in zip(link.pairs, slices(exchange, output, device) or ()):
            if source.dim is None or target.dim is None or rows.step == 1:
                continue
            is_all = onto.shape[target.dim] * rows.step == operand.shape[source.dim]
            if is_all and rows.rows * rows.step != held[source.dim]:
                found.add(target.dim)
    return found


def _evenly(run: Run) -> Slice:
    """The rows x of a run; with a count of -1 if they are not evenly spaced."""
    if not run.loops:
        return Slice(run.x, run.length, 1)
    if len(run.loops) == 1 and run.length == 1:
        (count, step, at), *_ = run.loops
        return Slice(run.x, count if at == 1 else -1, step)
    return Slice(0, -1, 1)

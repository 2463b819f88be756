"""A redistribution: who holds what before and after it, and step by step who sends how much to
whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice, product
from math import prod
from typing import TypeAlias

from cute_sharding.exchange import AllToAll, RedistributionPlan, Reduction, Step
from cute_sharding.exchange.meshes import ExchangePlan
from cute_sharding.sharding.rows import Device, placements_text
from cute_sharding.tools.drawing.devices import coordinate, number
from cute_sharding.tools.drawing.grids import legend_of, panels_of
from cute_sharding.tools.drawing.holding import Holding
from cute_sharding.tools.drawing.parts import GAP, Cell, Panel, Section
from cute_sharding.tools.drawing.picture import Picture

# The most devices in a matrix.
DEVICES = 16


def plan_picture(
    plan: RedistributionPlan, names: tuple[str, ...], ranks: Sequence[int] | None = None
) -> Picture:
    """The tensor before and after a redistribution, and a matrix of amounts for each step. With
    ``ranks``, given by number, devices are called by these.
    """
    made = partial(Holding, plan.shape, plan.mesh, names, ranks=ranks)
    kept = tuple((m, "reduction that stays Partial") for m, _ in plan.target.pending)
    reduced = plan.source.reduced_to(plan.target)
    before = made(plan.source.chains, tuple(sorted((*reduced.items(), *kept))))
    after = made(plan.target.chains, kept)
    keys, left_out = legend_of(before, after)
    sections = []
    for name, holding in (("before", before), ("after", after)):
        panels, captions = panels_of(holding)
        sections.append(Section(f"{name}: {placed_text(holding)}", panels, captions=captions))
    for i, step in enumerate(plan.steps):
        sections.append(step_section(f"step {i + 1}", step, before))
    title = f"{plan.shape} on {before.mesh_text}: {placed_text(before)} -> {placed_text(after)}"
    return Picture(title, tuple(sections), keys, (*left_out, in_all(plan, before.word)))


def placed_text(holding: Holding) -> str:
    """The placements that say what the chains do."""
    return placements_text(holding.chains, len(holding.mesh), holding.names, holding.pending)


def in_all(plan: RedistributionPlan | ExchangePlan, word: str) -> str:
    """What a plan takes. ``word``: what a device is called."""
    if not plan.collectives:
        return "nothing is sent"
    count = plan.collectives
    bound = plan.lower_bound
    least = "" if bound is None else f"; it needs {bound:,} that it does not hold"
    return (
        f"in all {count} collective{'s' * (count != 1)}: the busiest {word} receives "
        f"{plan.received_elements:,} elements{least}"
    )


def step_section(title: str, step: Step, of: Holding) -> Section:
    """Who sends how much to whom in a step, on the devices of a tensor that is drawn."""
    where = f" on {', '.join(of.names[m] for m in step.mesh_dims)}" if step.mesh_dims else ""
    devices, gap, left_out = _devices_shown(step, of)
    labels = [of.number(number(step.mesh, device)) for device in devices]
    amounts = [[_amount(step, sender, receiver) for receiver in devices] for sender in devices]
    return Section(
        f"{title}: {step.kind}{where}",
        (matrix_panel((labels, gap), (labels, gap), amounts),),
        captions=(_said(step, of.word), f"in brackets: what a {of.word} keeps", *left_out),
    )


# Numbers of senders or receivers, and whether others are left out before the last one.
Shown: TypeAlias = "tuple[Sequence[int], bool]"


def matrix_panel(senders: Shown, receivers: Shown, amounts: Sequence[Sequence[int]]) -> Panel:
    """A matrix of amounts, row by row; in brackets what goes from a number to itself."""
    (rows, gap_below), (columns, gap_between) = senders, receivers
    sent = [n for i, line in zip(rows, amounts) for j, n in zip(columns, line) if i != j]
    most = max(sent, default=0)
    cells = [
        [_cell(n, 0 if i == j else most) for j, n in zip(columns, line)]
        for i, line in zip(rows, amounts)
    ]
    heads = [list(map(str, rows)), list(map(str, columns))]
    if gap_between:
        cells = [[*line[:-1], Cell(GAP), line[-1]] for line in cells]
        heads[1].insert(-1, GAP)
    if gap_below:
        cells.insert(-1, [Cell(GAP)] * len(heads[1]))
        heads[0].insert(-1, GAP)
    down, across = map(tuple, heads)
    return Panel("", "sender", "receiver", down, across, tuple(map(tuple, cells)))


def _cell(n: int, most: int) -> Cell:
    """An amount that is sent, beside the largest; of none, what a device keeps."""
    if not most:
        return Cell(f"({amount_text(n)})" if n else "")
    return Cell(amount_text(n), share=n / most) if n else Cell(".")


def _said(step: Step, word: str) -> str:
    received = f"the busiest {word} receives {step.received_elements:,} elements"
    if not step.communicates:
        return f"every {word} has what it needs: nothing is sent"
    if isinstance(step, Reduction) and not step.scatters:
        return (
            f"{received}; of each pair it is counted what a reduce-scatter and an all-gather send, "
            "rounded up"
        )
    if getattr(step, "padded", False):
        return f"{received}, padding included, which the matrix leaves out"
    return received


def _devices_shown(step: Step, of: Holding) -> tuple[list[Device], bool, tuple[str, ...]]:
    """All devices; of many, those that have to do with device 0, or some of them. Whether there are
    others between the last two of them, and what is left out, in words.
    """
    devices = prod(step.mesh)
    if devices <= DEVICES:
        return [coordinate(step.mesh, device) for device in range(devices)], False, ()
    dims = step.mesh_dims or tuple(range(len(step.mesh)))
    each = DEVICES
    while each > 2 and prod(min(each, step.mesh[m]) for m in dims) > DEVICES:
        each -= 1
    axes = [_coordinates(n, each) if m in dims else [0] for m, n in enumerate(step.mesh)]
    shown = list(islice(product(*axes), DEVICES))
    text = f"{len(shown)} of {devices} {of.word}s are shown; the others are left out"
    alike = ", ".join(name for m, name in enumerate(of.names) if m not in dims and step.mesh[m] > 1)
    # Where there are layouts, all blocks are of one size.
    regular = None not in step.layouts
    if alike and regular:
        text += f" (those of other {alike} do likewise)"
    return shown, any(step.mesh[m] > each for m in dims), (text,)


def _coordinates(n: int, most: int) -> list[int]:
    return [*range(n)] if n <= most else [*range(most - 1), n - 1]


def _amount(step: Step, sender: Device, receiver: Device) -> int:
    """How many elements ``sender`` sends to ``receiver``, or keeps for itself."""
    if isinstance(step, Reduction):
        return _reduced(step, sender, receiver)
    if isinstance(step, AllToAll):
        return step.exchange.amount(number(step.mesh, sender), number(step.mesh, receiver))
    raise TypeError(f"a step of another kind: {step!r}")


def _reduced(step: Reduction, sender: Device, receiver: Device) -> int:
    if any(a != b for m, (a, b) in enumerate(zip(sender, receiver)) if m not in step.mesh_dims):
        return 0
    target = prod(step.ends[1].shape_on(number(step.mesh, receiver)))
    if sender == receiver or step.scatters:
        return target
    return -(-2 * target // step.parts)


def amount_text(n: int) -> str:
    """A number of elements, in three digits from 100,000 on.

    >>> amount_text(12), amount_text(480_000_000), amount_text(1_234_567)
    ('12', '480M', '1.23M')
    """
    if n < 100_000:
        return str(n)
    for unit in ("k", "M", "G", "T", "P"):
        n_in_unit = n / 1000
        if n_in_unit < 999.5:
            return f"{n_in_unit:.3g}{unit}"
        n = n_in_unit  # type: ignore[assignment]
    return f"{n / 1000:.3g}E"

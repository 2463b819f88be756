"""A redistribution: who holds what before and after it, and step by step who sends how much to
whom.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice, product
from math import prod

from cute_sharding.drawing.devices import coordinate, number
from cute_sharding.drawing.grids import legend_of, panels_of
from cute_sharding.drawing.holding import Holding
from cute_sharding.drawing.parts import GAP, Cell, Panel, Section
from cute_sharding.drawing.picture import Picture
from cute_sharding.redistribution import Exchange, RedistributionPlan, Reduction, Step
from cute_sharding.redistribution.chains import Device, placements_text

# The most devices in a matrix.
DEVICES = 16


def plan_picture(plan: RedistributionPlan, names: tuple[str, ...]) -> Picture:
    """The tensor before and after a redistribution, and a matrix of amounts for each step."""
    made = partial(Holding, plan.shape, plan.mesh, names)
    kept = tuple((m, "reduction that stays pending") for m in plan.source.kept if plan.mesh[m] > 1)
    before = made(plan.source.chains, tuple(sorted((*plan.source.pending, *kept))))
    after = made(plan.target.chains, kept)
    keys, left_out = legend_of(before, after)
    sections = []
    for name, holding in (("before", before), ("after", after)):
        panels, captions = panels_of(holding)
        sections.append(Section(f"{name}: {placed_text(holding)}", panels, captions=captions))
    for i, step in enumerate(plan.steps):
        sections.append(_step_section(f"step {i + 1}", step, names))
    title = f"{plan.shape} on {before.mesh_text}: {placed_text(before)} -> {placed_text(after)}"
    return Picture(title, tuple(sections), keys, (*left_out, _in_all(plan)))


def placed_text(holding: Holding) -> str:
    """The placements that say what the chains do."""
    return placements_text(holding.chains, len(holding.mesh), holding.names, holding.pending)


def _in_all(plan: RedistributionPlan) -> str:
    if not plan.collectives:
        return "nothing is sent"
    count = plan.collectives
    bound = plan.lower_bound
    least = "" if bound is None else f"; it needs {bound:,} that it does not hold"
    return (
        f"in all {count} collective{'s' * (count != 1)}: the busiest device receives "
        f"{plan.received_elements:,} elements{least}"
    )


def _step_section(title: str, step: Step, names: tuple[str, ...]) -> Section:
    where = f" on {', '.join(names[m] for m in step.mesh_dims)}" if step.mesh_dims else ""
    devices, gap, left_out = _devices_shown(step, names)
    amounts = [[_amount(step, sender, receiver) for receiver in devices] for sender in devices]
    most = max(
        (n for i, line in enumerate(amounts) for j, n in enumerate(line) if i != j), default=0
    )
    cells = [
        [_cell(n, 0 if i == j else most) for j, n in enumerate(line)]
        for i, line in enumerate(amounts)
    ]
    labels = [str(number(step.mesh, device)) for device in devices]
    if gap:  # before the last device
        cells = [[*line[:-1], Cell(GAP), line[-1]] for line in cells]
        cells.insert(-1, [Cell(GAP)] * (len(devices) + 1))
        labels.insert(-1, GAP)
    panel = Panel("", "sender", "receiver", tuple(labels), tuple(labels), tuple(map(tuple, cells)))
    return Section(
        f"{title}: {step.kind}{where}",
        (panel,),
        captions=(_said(step), "in brackets: what a device keeps", *left_out),
    )


def _cell(n: int, most: int) -> Cell:
    """An amount that is sent, beside the largest; of none, what a device keeps."""
    if not most:
        return Cell(f"({amount_text(n)})" if n else "")
    return Cell(amount_text(n), share=n / most) if n else Cell(".")


def _said(step: Step) -> str:
    received = f"the busiest device receives {step.received_elements:,} elements"
    if not step.communicates:
        return "every device has what it needs: nothing is sent"
    if isinstance(step, Reduction) and not step.scatters:
        return (
            f"{received}; of each pair it is counted what a reduce-scatter and an all-gather send, "
            "rounded up"
        )
    if getattr(step, "padded", False):
        return f"{received}, padding included, which the matrix leaves out"
    return received


def _devices_shown(
    step: Step, names: tuple[str, ...]
) -> tuple[list[Device], bool, tuple[str, ...]]:
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
    text = f"{len(shown)} of {devices} devices are shown; the others are left out"
    alike = ", ".join(name for m, name in enumerate(names) if m not in dims and step.mesh[m] > 1)
    # Where there are layouts, all blocks are of one size.
    regular = step.source_layout is not None and step.target_layout is not None
    if alike and regular:
        text += f" (those of other {alike} do likewise)"
    return shown, any(step.mesh[m] > each for m in dims), (text,)


def _coordinates(n: int, most: int) -> list[int]:
    return [*range(n)] if n <= most else [*range(most - 1), n - 1]


def _amount(step: Step, sender: Device, receiver: Device) -> int:
    """How many elements ``sender`` sends to ``receiver``, or keeps for itself."""
    if isinstance(step, Reduction):
        return _reduced(step, sender, receiver)
    if isinstance(step, Exchange):
        whole = replace(step, rounds=1) if step.rounds > 1 else step
        if sender == receiver:
            return whole.own(sender).size
        message = whole.message(sender, receiver) if step.communicates else None
        return 0 if message is None else message.size
    raise TypeError(f"a step of another kind: {step!r}")


def _reduced(step: Reduction, sender: Device, receiver: Device) -> int:
    if any(a != b for m, (a, b) in enumerate(zip(sender, receiver)) if m not in step.dims):
        return 0
    target = prod(step.local_shape(step.target, receiver))
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

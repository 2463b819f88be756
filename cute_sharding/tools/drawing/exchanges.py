"""From one device mesh to another: who holds what before and after, and which rank sends how much
to which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from cute_sharding.exchange import Exchange, Placed
from cute_sharding.exchange.meshes import ExchangePlan
from cute_sharding.tools.drawing.grids import legend_of_sides, panels_of
from cute_sharding.tools.drawing.holding import Holding
from cute_sharding.tools.drawing.inputs import names_of
from cute_sharding.tools.drawing.moves import (
    DEVICES,
    Shown,
    in_all,
    matrix_panel,
    placed_text,
    step_section,
)
from cute_sharding.tools.drawing.parts import Section, Table
from cute_sharding.tools.drawing.picture import Picture


def exchange_plan_picture(plan: ExchangePlan) -> Picture:
    """The tensor on the one mesh and on the other, the steps on the first, and the exchange."""
    source, target = plan.source, plan.target
    start = Placed(source.shape, source.mesh, plan.before.chains)
    names = names_of(plan.mesh_names, source.mesh.sizes)
    sides = {
        "before": Holding.placed(start, names, plan.before.pending),
        "after": Holding.placed(target, names_of(plan.target_names, target.mesh.sizes)),
    }
    steps = [
        step_section(f"step {i + 1}", step, sides["before"]) for i, step in enumerate(plan.steps)
    ]
    title = f"step {len(steps) + 1}: {plan.kind}"
    return _picture(sides, [*steps, _section(title, plan.exchange)], in_all(plan, "rank"))


def exchange_picture(exchange: Exchange) -> Picture:
    """Operands and results on their meshes, and the exchange."""
    sides = {}
    for name, all_placed in (("before", exchange.sources), ("after", exchange.targets)):
        for k, placed in enumerate(all_placed):
            called = name if len(all_placed) == 1 else f"{name}, {k}"
            sides[called] = Holding.placed(placed, names_of(None, placed.mesh.sizes))
    return _picture(sides, [_section("exchange", exchange)])


def _picture(sides: dict[str, Holding], steps: Iterable[Section], *captions: str) -> Picture:
    keys, left_out = legend_of_sides(sides)
    sections = []
    for name, holding in sides.items():
        panels, said = panels_of(holding)
        title = f"{name}: {placed_text(holding)} on {holding.mesh_text}"
        sections.append(Section(title, panels, captions=said))
    shapes = [str(shape) for shape in dict.fromkeys(each.shape for each in sides.values())]
    before, after = (
        " and ".join(
            f"{'' if len(shapes) == 1 else f'{each.shape} as '}{placed_text(each)} on "
            f"{each.mesh_text}"
            for name, each in sides.items()
            if name.startswith(side)
        )
        for side in ("before", "after")
    )
    title = f"{f'{shapes[0]}: ' if len(shapes) == 1 else ''}{before} -> {after}"
    return Picture(title, (*sections, *steps), keys, (*left_out, *captions))


def _section(title: str, exchange: Exchange) -> Section:
    """The matrix of who sends how much to whom."""
    said = ["every rank has what it needs: nothing is sent"]
    if not exchange.is_free:
        peers = exchange.most_peers
        said = [
            f"the busiest rank receives {exchange.received_elements:,} elements; a rank has at "
            f"most {peers} peer{'s' * (peers != 1)}"
        ]
    return section_of_ranks(title, (exchange,), exchange.amount, said)


def section_of_ranks(
    title: str,
    exchanges: Sequence[Exchange],
    amount: Callable[[int, int], int],
    said: Sequence[str],
    table: Table | None = None,
) -> Section:
    """The matrix of who sends how much to whom: the ranks that send down, those that receive
    across. ``amount``: what the one sends to the other.
    """
    sources, targets = (
        _ranks([placed for each in exchanges for placed in side(each)])
        for side in (lambda each: each.sources, lambda each: each.targets)
    )
    senders, receivers = _ranks_shown(exchanges, sources, targets)
    amounts = [[amount(i, j) for j in receivers[0]] for i in senders[0]]
    said = [*said]
    kept = {*senders[0]} & {*receivers[0]}
    if any(amount(rank, rank) for rank in kept):
        said.append("in brackets: what a rank keeps")
    for word, shown, many in (("send", senders, sources), ("receive", receivers, targets)):
        if len(shown[0]) < len(many):
            said.append(
                f"{len(shown[0])} of {len(many)} ranks that {word} are shown; the others are left "
                "out"
            )
    return Section(title, (matrix_panel(senders, receivers, amounts),), table, tuple(said))


def _ranks(placed: Sequence[Placed]) -> Sequence[int]:
    """The ranks of meshes, ascending; each once."""
    meshes = dict.fromkeys(each.mesh for each in placed)
    if len(meshes) == 1:
        (ranks,) = (mesh.ranks for mesh in meshes)
        return ranks if isinstance(ranks, range) else sorted(ranks)
    return sorted({rank for mesh in meshes for rank in mesh.ranks})


def _ranks_shown(
    exchanges: Sequence[Exchange], sending: Sequence[int], receiving: Sequence[int]
) -> tuple[Shown, Shown]:
    """All ranks that may send, and that may receive; of many, those that the first ones send to and
    receive from, and the last.
    """
    to = (m.peer for rank in sending[:1] for each in exchanges for m in each.sent_by(rank))
    receivers = _some(receiving, islice(to, DEVICES))
    of = (m.peer for rank in receivers[0][:1] for each in exchanges for m in each.sent_to(rank))
    return _some(sending, [*sending[:1], *islice(of, DEVICES)]), receivers


def _some(ranks: Sequence[int], first: Iterable[int]) -> Shown:
    """All of the ranks, if they are few; else those in ``first``, as many of the first ones as
    there is room for, and the last. And whether others are left out before the last.
    """
    if len(ranks) <= DEVICES:
        return ranks, False
    last = ranks[-1]
    wanted = dict.fromkeys([*first, *ranks[:DEVICES]])
    wanted.pop(last, None)
    return [*sorted(islice(wanted, DEVICES - 1)), last], True

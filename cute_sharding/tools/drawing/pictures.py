"""``draw``: a picture of a tensor, a layout, a view, a redistribution, an exchange, or a plan for
many tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any, TypeAlias

from cute_sharding.exchange import Bundle, Exchange, Mesh, Placed, RedistributionPlan, Reduction
from cute_sharding.exchange.meshes import ExchangePlan
from cute_sharding.exchange.step import Step
from cute_sharding.layout import Layout, LayoutError
from cute_sharding.layout.symbolic import is_static
from cute_sharding.models import ReshardPlan
from cute_sharding.models.refit import Refit
from cute_sharding.relations.view import View
from cute_sharding.sharding import Sharding, format_placements
from cute_sharding.sharding.rows import placements_text
from cute_sharding.tools.drawing.holding import (
    COLUMNS,
    PANELS,
    ROWS,
    SMALL_COLUMNS,
    SMALL_ROWS,
    Axis,
    Holding,
    left_out,
    legend_of,
    panels,
)
from cute_sharding.tools.drawing.picture import GAP, Cell, Panel, Picture, Section
from cute_sharding.tools.explain import explain_view, modes_of
from cute_sharding.tools.inputs import (
    DTensorLike,
    MeshLike,
    PlacementsLike,
    mesh_of,
    names_of,
    planned,
    sharding_of,
    sharding_of_dtensor,
    view_of,
)

MOVED = "*"
# Indices of a mode before the last two that are shown, ranks of a matrix, and lines of a plan.
LEADING_MODE, RANKS, LINES = 3, 16, 16


def holding_picture(holding: Holding) -> Picture:
    """Who holds what of one tensor."""
    shown, captions = holding.panels()
    return Picture(holding.title, (Section("", shown, (), captions),), *legend_of({"": holding}))


def layout_picture(layout: Layout) -> Picture:
    """The value of a layout at each coordinate: its last two modes as a grid, coloured by the index
    into its first mode, which in a layout of a sharding are the devices.

    Raises:
        LayoutError: a size or a stride is a symbol.
    """
    if not all(is_static(n) for leaf in layout.leaves for n in leaf):
        raise LayoutError(
            f"{layout!r} has symbols, but a picture can show only numbers: replace the symbols by "
            "numbers"
        )
    title, modes = f"layout {layout!r}", tuple(layout)
    if not prod(mode.size for mode in modes):
        return Picture(title, (Section("", captions=("the layout has no coordinates",)),))
    grid = [SMALL_ROWS, SMALL_COLUMNS] if len(modes) > 2 else [ROWS, COLUMNS]
    limits = [*[LEADING_MODE] * (len(modes) - 2), *grid][-len(modes) :]
    axes, said = [], []
    for m, (mode, most) in enumerate(zip(modes, limits)):
        n = int(mode.size)
        axes.append(Axis(f"mode {m}, {mode!r}", _indices(n, most)))
        if n > most:
            said.append(f"mode {m}: indices {most - 1} to {n - 2} of {n} are left out")

    def cell(*index: int) -> Cell:
        return Cell(str(sum(int(mode(c)) for mode, c in zip(modes, index))), (*index, 0)[0])

    return Picture(title, (Section("", panels(axes, cell), (), (*said, *left_out(axes))),))


def _indices(n: int, most: int) -> list[int | None]:
    """All indices of a mode, or the first ones, None for those left out, and the last."""
    return [*range(n)] if n <= most else [*range(most - 1), None, n - 1]


def view_picture(
    before: Sharding, view: View, mesh: Mesh, names: tuple[str, ...], what: str
) -> Picture:
    """Who holds what before and after a view; where it is not free, before it, what each rank would
    hold, what blocks it, and the placements that would make it free.
    """
    holding, found = Holding.of(before, names, mesh), explain_view(what, view, before, names)
    title = f"{what} of {holding.title}"
    shown, captions = holding.panels()
    if not found.is_free:
        sections = [Section(f"before: {before.shape} as {holding.said}", shown, (), captions)]
        if would := _would_hold(view, holding):
            said = ("what each rank would hold: no placements say so",)
            sections.append(Section(f"after: {view.output_shape}", would, captions=said))
        keys, more = legend_of({"before": holding})
        to, then = (
            format_placements(each.placements)
            for each in (found.redistributed, *found.outputs)
            if each is not None
        )
        last = (
            f"redistributed to {to} first, it is free, as {then}: a rank receives up to "
            f"{found.received_elements} elements"
        )
        return Picture(title, tuple(sections), keys, (*more, *found.why, last))
    (after,) = found.outputs
    sides = {"before": holding, "after": Holding.of(after, names, mesh)}
    modes = [_modes(sharding, names) for sharding in (before, after)]
    sections = []
    for (name, side), mine, other in zip(sides.items(), modes, reversed(modes)):
        shown, captions = side.panels()
        table = (("", "mode", "whose", "placed"), *_marked(mine, other)) if mine else ()
        if not mine:
            captions += ("no layout: blocks differ in size, or begin in an earlier split",)
        sections.append(Section(f"{name}: {side.shape} as {side.said}", shown, table, captions))
    keys, more = legend_of(sides)
    captions = (*more, "free: no element moves between ranks")
    if any(row[0] == MOVED for section in sections for row in section.table):
        captions += (f"{MOVED} marks the modes that moved: another dim, or another stride",)
    return Picture(title, tuple(sections), keys, captions)


def _modes(sharding: Sharding, names: Sequence[str]) -> list[tuple[str, str, str]]:
    try:
        return modes_of(sharding, names)
    except LayoutError:
        return []


def _marked(
    mine: Sequence[tuple[str, str, str]], other: Sequence[tuple[str, str, str]]
) -> list[tuple[str, ...]]:
    """The modes, those marked that the other side has not; of a local mode, whatever its dim."""

    def of(mode: tuple[str, str, str]) -> tuple[str, ...]:
        return mode[:2] if mode[1] == "local" else mode

    left = Counter(map(of, other))
    rows: list[tuple[str, ...]] = []
    for mode in mine:
        rows.append(("" if left[of(mode)] else MOVED, *mode))
        left[of(mode)] -= 1
    return rows


def _would_hold(view: View, holding: Holding) -> tuple[Panel, ...]:
    """The output, if it is small, with who holds each element of it."""
    shape = view.output_shape
    most = [PANELS, SMALL_ROWS, SMALL_COLUMNS] if len(shape) > 2 else [1, ROWS, COLUMNS]
    sizes = (prod(shape[:-2]), *(1, 1, *shape)[-2:])
    if len(view.target) != len(shape) or any(n > limit for n, limit in zip(sizes, most)):
        return ()  # or an element of the output is several of the input

    def cell(*place: int) -> Cell:
        flat = int(view.layout(Mesh.numbered(shape).rank(place)))
        return holding.cell(*(Mesh.numbered(holding.shape).coordinates(flat) or ()))

    axes = [Axis(f"dim {dim} ({n})", range(n)) for dim, n in enumerate(shape)]
    return panels(axes, cell) if prod(shape) else ()


def plan_picture(
    plan: RedistributionPlan | ExchangePlan,
    names: Sequence[str] | None = None,
    mesh: Mesh | None = None,
) -> Picture:
    """The tensor before and after, and a matrix of amounts for each step. ``mesh``: that of a plan
    on one mesh, with its ranks.
    """
    if isinstance(plan, ExchangePlan):
        before, after, targets = plan.before, plan.target, plan.target_names
    else:
        on = mesh or plan.source.mesh
        before, after = replace(plan.source, mesh=on), replace(plan.target, mesh=on)
        targets = plan.mesh_names if names is None else tuple(names)
    mesh, sources = before.mesh, names_of(names or plan.mesh_names, before.mesh.sizes)
    sides = {"before": _placed(before, sources), "after": _placed(after, targets)}
    steps = [
        _step(f"step {i + 1}", step, mesh, sources)
        if isinstance(step, Step)
        else _exchange(f"step {i + 1}: {step.kind}", plan.exchange)  # type: ignore[union-attr]
        for i, step in enumerate(plan.stages)
    ]
    said = "nothing is sent"
    if plan.collectives:
        bound = plan.lower_bound
        said = (
            f"in all {_many(plan.collectives, 'collective')}: the busiest rank receives "
            f"{plan.received_elements:,} elements"
            + ("" if bound is None else f"; it needs {bound:,} that it does not hold")
        )
    return _of_sides(sides, steps, said)


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _placed(placed: Placed, names: Sequence[str] | None) -> Holding:
    named = names_of(names, placed.mesh.sizes)
    said = placements_text(placed.chains, len(named), named, placed.pending)
    return Holding(placed, named, said)


def placed_picture(placed: Placed, names: Sequence[str] | None = None) -> Picture:
    """Who holds what of a tensor on the ranks of a mesh."""
    return holding_picture(_placed(placed, names))


def exchange_picture(exchange: Exchange) -> Picture:
    """Operands and results on their meshes, and the exchange."""
    sides = {}
    for name, every in (("before", exchange.sources), ("after", exchange.targets)):
        for k, placed in enumerate(every):
            sides[name if len(every) == 1 else f"{name}, {k}"] = _placed(placed, None)
    return _of_sides(sides, [_exchange("exchange", exchange)])


def _of_sides(sides: dict[str, Holding], steps: Iterable[Section], *captions: str) -> Picture:
    """Tensors by what each is called, and steps. Of one tensor on one mesh, shape and mesh are said
    once.
    """
    shapes, meshes = {of.shape for of in sides.values()}, {*map(_mesh, sides.values())}
    is_one, where = len(shapes) == 1, ""
    if is_one:
        of = next(iter(sides.values()))
        where = f"{of.shape}{_mesh(of) * (len(meshes) == 1)}: "
    said = {
        name: of.said + _mesh(of) * (len(meshes) > 1) if is_one else of.title
        for name, of in sides.items()
    }
    sections = []
    for name, holding in sides.items():
        shown, left = holding.panels()
        sections.append(Section(f"{name}: {said[name]}", shown, captions=left))
    before, after = (
        " and ".join(text for name, text in said.items() if name.startswith(side))
        for side in ("before", "after")
    )
    keys, more = legend_of(sides)
    title = f"{where}{before} -> {after}"
    return Picture(title, (*sections, *steps), keys, (*more, *captions))


def _mesh(of: Holding) -> str:
    return f" on {of.placed.mesh.text(of.names)}"


def _exchange(title: str, exchange: Exchange) -> Section:
    """The matrix of who sends how much to whom."""
    return _of_exchanges(
        title,
        (exchange,),
        exchange.amount,
        f"{exchange.received_elements:,} elements" if not exchange.is_free else "",
        exchange.most_peers,
    )


def _of_exchanges(
    title: str,
    exchanges: Sequence[Exchange],
    amount: Callable[[int, int], int],
    received: str,
    peers: int,
) -> Section:
    """The matrix of exchanges; of many ranks, those that the first ones send to and receive from,
    and the last. ``received``: what the busiest rank receives; empty if nothing is sent.
    """
    sources, targets = (
        _ranks([placed for each in exchanges for placed in side(each)])
        for side in (lambda each: each.sources, lambda each: each.targets)
    )
    to = (m.peer for rank in sources[:1] for each in exchanges for m in each.sent_by(rank))
    receivers = _shown(targets, to)
    of = (m.peer for rank in receivers[:1] for each in exchanges for m in each.sent_to(rank))
    senders = _shown(sources, [*sources[:1], *islice(of, RANKS)])
    said = ["every rank has what it needs: nothing is sent"]
    if received:
        said = [f"the busiest rank receives {received}; a rank has at most {_many(peers, 'peer')}"]
    return _matrix(title, (sources, senders), (targets, receivers), amount, said)


def _step(title: str, step: Step, mesh: Mesh, names: Sequence[str]) -> Section:
    """Who sends how much to whom in a step on one mesh."""
    where = f" on {', '.join(names[m] for m in step.mesh_dims)}" if step.mesh_dims else ""
    said = "every rank has what it needs: nothing is sent"
    if step.communicates:
        said = f"the busiest rank receives {step.received_elements:,} elements"
        if isinstance(step, Reduction) and not step.scatters:
            said += (
                "; of each pair it is counted what a reduce-scatter and an all-gather send, "
                "rounded up"
            )
        elif step.padded:
            said += ", padding included, which the matrix leaves out"
    places = Mesh.numbered(mesh.sizes)
    shown = _shown(mesh.ranks, [mesh.ranks[at] for at in islice(step.group(0), RANKS)])

    def amount(sender: int, receiver: int) -> int:
        one, other = (places.rank(mesh.device(rank)) for rank in (sender, receiver))
        if not isinstance(step, Reduction):
            return step.exchange.amount(one, other)
        if other not in step.group(one):
            return 0
        target = prod(step.ends[1].shape_on(other))
        return target if one == other or step.scatters else -(-2 * target // step.parts)

    sides = mesh.ranks, shown
    return _matrix(f"{title}: {step.kind}{where}", sides, sides, amount, [said])


def _ranks(placed: Sequence[Placed]) -> Sequence[int]:
    """The ranks of meshes, ascending; each once."""
    meshes = list(dict.fromkeys(each.mesh for each in placed))
    if len(meshes) == 1 and isinstance(meshes[0].ranks, range):
        return meshes[0].ranks
    return sorted({rank for mesh in meshes for rank in mesh.ranks})


def _shown(ranks: Sequence[int], first: Iterable[int]) -> Sequence[Any]:
    """All of the ranks, if they are few; else those in ``first``, as many of the first ones as
    there is room for, None, and the last.
    """
    if len(ranks) <= RANKS:
        return ranks
    wanted = dict.fromkeys([*islice(first, RANKS), *ranks[:RANKS]])
    wanted.pop(ranks[-1], None)
    order = {rank: at for at, rank in enumerate(ranks)} if not isinstance(ranks, range) else {}
    some = sorted(islice(wanted, RANKS - 1), key=lambda rank: order.get(rank, rank))
    return [*some, None, ranks[-1]]


def _matrix(
    title: str,
    senders: tuple[Sequence[int], Sequence[Any]],
    receivers: tuple[Sequence[int], Sequence[Any]],
    amount: Callable[[int, int], int],
    said: list[str],
) -> Section:
    """The matrix of who sends how much to whom: those that send down, those that receive across;
    all of them, and those that are shown. In brackets is what a rank keeps.
    """
    pairs = [(i, j) for i in senders[1] for j in receivers[1] if None not in (i, j)]
    amounts = {pair: amount(*pair) for pair in pairs}
    most = max([n for (i, j), n in amounts.items() if i != j], default=0)

    def cell(i: int, j: int) -> Cell:
        n = amounts[i, j]
        if i == j:
            return Cell(f"({amount_text(n)})" if n else "")
        return Cell(amount_text(n), share=n / most) if n else Cell(".")

    axes = [Axis("sender", senders[1]), Axis("receiver", receivers[1])]
    if any(n for (i, j), n in amounts.items() if i == j):
        said.append("in brackets: what a rank keeps")
    for word, (ranks, shown) in (("send", senders), ("receive", receivers)):
        if None in shown:
            said.append(
                f"{len(shown) - 1} of {len(ranks)} ranks that {word} are shown; the others are "
                "left out"
            )
    return Section(title, panels(axes, cell), captions=tuple(said))


def amount_text(n: float) -> str:
    """A number of elements, in three digits from 100,000 on.

    >>> amount_text(12), amount_text(480_000_000), amount_text(1_234_567)
    ('12', '480M', '1.23M')
    """
    if n < 100_000:
        return str(n)
    for unit in ("k", "M", "G", "T", "P"):
        n /= 1000
        if n < 999.5:
            return f"{n:.3g}{unit}"
    return f"{n / 1000:.3g}E"


def reshard_picture(plan: ReshardPlan) -> Picture:
    """The bytes from rank to rank in all, and the plan in words. What finishes pending sums, tensor
    by tensor before all else, the matrix leaves out.
    """
    return _bundle(plan, Bundle(tuple([way.item for _, way, stays in plan.tensors if not stays])))


def refit_picture(refit: Refit) -> Picture:
    """The bytes from rank to rank, and the refit in words."""
    return _bundle(refit, refit.bundle)


def _bundle(plan: ReshardPlan | Refit, bundle: Bundle) -> Picture:
    title, *said = str(plan).splitlines()
    if len(said) > LINES:
        said = [*said[: LINES // 2], GAP, *said[-LINES // 2 :]]
    received = "" if bundle.is_free else f"{bundle.received_bytes:,} bytes"
    peers = 0 if bundle.is_free else bundle.most_peers
    section = _of_exchanges("bytes in all", bundle.exchanges, bundle.amount, received, peers)
    return Picture(title, (section,), captions=tuple(said))


Drawable: TypeAlias = (
    "DTensorLike | Sharding | Layout | RedistributionPlan | Placed | ExchangePlan | Exchange"
    " | ReshardPlan | Refit"
)


def draw(
    x: Drawable,
    *,
    view: Sequence[int] | View | None = None,
    to: PlacementsLike | Sharding | None = None,
    mesh: MeshLike | None = None,
    shape: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Picture:
    """Draw which rank holds each element: before and after a view, or a redistribution. For a
    redistribution, the picture also shows how many elements each rank sends to each other rank.

    The picture is small for any tensor and mesh. For a long dim, it shows the first runs of rows
    and the last run, and says which runs it leaves out. Nothing is communicated, and the elements
    of a tensor are not read.

    Args:
        x: a DTensor, a :class:`~cute_sharding.sharding.Sharding`, a
            :class:`~cute_sharding.layout.Layout` or a
            :class:`~cute_sharding.exchange.RedistributionPlan`. Also, from
            ``cute_sharding.exchange``, a ``Placed`` tensor, an ``ExchangePlan`` or an ``Exchange``.
            Or the plan of a whole model, from ``plan_reshard`` or ``plan_refit``.
        view: for a tensor, the shape for ``Tensor.view``, or a
            :class:`~cute_sharding.relations.View`.
        to: for a tensor, the target placements of a redistribution, as text (``"S(1), R"``) or as
            objects of torch or of this package. The plan assumes that all process groups exist.
        mesh: the mesh of ``to``, if it is not the tensor's mesh: a DeviceMesh, a
            :class:`cute_sharding.exchange.Mesh`, or sizes, with ranks from 0 on.
        shape: for a layout ((devices), (local)), the tensor's shape. The picture then shows the
            sharding that the layout describes. Without ``shape``, the picture shows the values of
            the layout.
        names: names for the mesh dims; by default those of the DTensor or of the plan. A plan
            between two meshes has names of both (``plan.named``).

    Returns:
        A ``Picture`` (cute_sharding.tools.drawing). A notebook, ``print`` and ``.show()`` show it,
        and ``.save(path)`` writes it to a file.

    Raises:
        TypeError: ``x`` is of another type.
        ValueError: the arguments do not fit together.
        LayoutError: the layout is not a sharding of ``shape``, or has symbols.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> picture = draw(Sharding((4, 6), (2,), (Shard(1),)), view=(24,), names=("tp",))
    >>> picture
    <Picture of view(24,) of (4, 6): [S(1)] on mesh (tp=2) of ranks 0, 1: 2 panels>
    >>> after = picture.sections[1]
    >>> after.title
    'after: (24,) as [_S(0,4)]'
    >>> "".join(cell.label for cell in after.panels[0].cells[0])
    '000111000111000111000111'
    """
    given = {"view": view, "to": to, "mesh": mesh, "shape": shape, "names": names}
    options = {name: value for name, value in given.items() if value is not None}
    if view is not None and to is not None:
        raise ValueError("draw takes view= or to=, not both: a picture shows only one change")
    for kind, (picture_of, taken) in DRAWN.items():
        if isinstance(x, kind):
            for name in options:
                if name not in taken:
                    kinds = [k.__name__ for k, (_, others) in DRAWN.items() if name in others]
                    raise ValueError(
                        f"{name}= is for {', '.join(kinds)}, not for a {type(x).__name__}: leave "
                        f"out {name}="
                    )
            return picture_of(x, **options)
    raise TypeError(
        "draw takes a DTensor, a Sharding, a Placed, a Layout, a plan or an Exchange, not a "
        f"{type(x).__name__}"
    )


def _layout(
    x: Layout, shape: Sequence[int] | None = None, names: Sequence[str] | None = None
) -> Picture:
    return (
        layout_picture(x) if shape is None else draw_sharding(Sharding.read(x, shape), names=names)
    )


def draw_sharding(
    x: Sharding,
    view: Any = None,
    to: PlacementsLike | None = None,
    mesh: MeshLike | None = None,
    names: Sequence[str] | None = None,
    of: Mesh | None = None,
    holding: Holding | None = None,
    to_names: Sequence[str] | None = None,
) -> Picture:
    """The picture of a sharding.

    Args:
        of: the mesh of the sharding; by default of ranks from 0 on.
        holding: who holds what, if not as the placements say from left to right.
        to_names: the names of the dims of ``mesh``, if it has none itself.
    """
    if mesh is not None and to is None:
        raise ValueError("mesh= needs to=: give the placements on the new mesh, such as to='S(0)'")
    named, of = names_of(names, x.mesh), of or Mesh.numbered(x.mesh)
    if view is not None:
        what, found = view_of("view", view, x.shape)
        return view_picture(x, found, of, named, what)
    if to is None:
        return holding_picture(holding or Holding.of(x, named, of))
    other = of if mesh is None else mesh_of(mesh)
    plan = planned(x, of, sharding_of(x.shape, other.sizes, to), other)
    if isinstance(plan, ExchangePlan):
        return plan_picture(plan.named(named, getattr(mesh, "mesh_dim_names", to_names)))
    return plan_picture(plan, named, of)


def _dtensor(x: Any, names: Sequence[str] | None = None, **options: Any) -> Picture:
    from cute_sharding.dtensor.run.placements import chains_of_spec

    sharding, mesh = sharding_of_dtensor(x), mesh_of(x.device_mesh)
    names = names_of(names or x.device_mesh.mesh_dim_names, sharding.mesh)
    holding = Holding.of(sharding, names, mesh, chains_of_spec(x._spec))
    if options and holding != Holding.of(sharding, names, mesh):
        raise ValueError(
            f"{sharding} has a shard order, but draw applies view= and to= only to a tensor "
            "without a shard order: leave out view= and to="
        )
    return draw_sharding(sharding, names=names, of=mesh, holding=holding, **options)


# By the class of what is drawn: its picture, and the options of draw that it takes. A DTensor is
# known by what it has, so it comes last.
DRAWN: dict[type, tuple[Callable[..., Picture], tuple[str, ...]]] = {
    Layout: (_layout, ("shape", "names")),
    Sharding: (draw_sharding, ("view", "to", "mesh", "names")),
    Placed: (placed_picture, ("names",)),
    RedistributionPlan: (plan_picture, ("names",)),
    ExchangePlan: (plan_picture, ()),
    Exchange: (exchange_picture, ()),
    ReshardPlan: (reshard_picture, ()),
    Refit: (refit_picture, ()),
    DTensorLike: (_dtensor, ("view", "to", "mesh", "names")),
}

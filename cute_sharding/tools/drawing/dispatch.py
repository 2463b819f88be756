"""``draw``: from what it is given to a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from cute_sharding.exchange import Exchange, Mesh, Placed, RedistributionPlan
from cute_sharding.exchange.meshes import ExchangePlan
from cute_sharding.layout import Layout
from cute_sharding.models import ReshardPlan
from cute_sharding.models.refit import Refit
from cute_sharding.relations.view import View
from cute_sharding.sharding import Sharding
from cute_sharding.tools.drawing.exchanges import exchange_picture, exchange_plan_picture
from cute_sharding.tools.drawing.grids import legend_of, panels_of
from cute_sharding.tools.drawing.holding import Holding, title_of
from cute_sharding.tools.drawing.inputs import (
    DTensorLike,
    MeshLike,
    PlacementsLike,
    holding_of_dtensor,
    mesh_of,
    names_of,
    placements_of,
    said_of_numbers,
    sharding_of_dtensor,
    view_of,
)
from cute_sharding.tools.drawing.layouts import layout_picture
from cute_sharding.tools.drawing.models import refit_picture, reshard_picture
from cute_sharding.tools.drawing.moves import plan_picture
from cute_sharding.tools.drawing.parts import Section
from cute_sharding.tools.drawing.picture import Picture
from cute_sharding.tools.drawing.plans import planned, planned_between
from cute_sharding.tools.drawing.views import view_picture

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
    """Draw which device holds each element: before and after a view, or a redistribution. For a
    redistribution, the picture also shows how many elements each device sends to each other device.

    The picture is small for any tensor and mesh. For a long dim, it shows the first runs of rows
    and the last run, and says which runs it leaves out. Nothing is communicated, and the elements
    of a tensor are not read.

    Args:
        x: a DTensor, a :class:`~cute_sharding.sharding.Sharding`, a
            :class:`~cute_sharding.layout.Layout` or a
            :class:`~cute_sharding.exchange.RedistributionPlan`. Also, from
            ``cute_sharding.exchange``, a ``Placed`` tensor, an ``ExchangePlan`` or an ``Exchange``,
            whose pictures show ranks instead of devices. Or the plan of a whole model, from
            ``plan_reshard`` or ``plan_refit``.
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
    <Picture of view(24,) of (4, 6) on mesh (tp=2) as [S(1)]: 2 panels>
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
    if mesh is not None and to is None:
        raise ValueError("mesh= needs to=: give the placements on the new mesh, such as to='S(0)'")
    for kind, (picture_of, taken) in DRAWN.items():
        if isinstance(x, kind):
            _check_options(x, options, taken)
            return picture_of(x, **options)
    raise TypeError(
        "draw takes a DTensor, a Sharding, a Placed, a Layout, a plan or an Exchange, not a "
        f"{type(x).__name__}"
    )


def _check_options(x: Any, options: Iterable[str], taken: Sequence[str]) -> None:
    for name in options:
        if name not in taken:
            kinds = [kind.__name__ for kind, (_, others) in DRAWN.items() if name in others]
            raise ValueError(
                f"{name}= is for {', '.join(kinds)}, not for a {type(x).__name__}: leave out "
                f"{name}="
            )


def _layout_picture(
    x: Layout, shape: Sequence[int] | None = None, names: Sequence[str] | None = None
) -> Picture:
    if shape is None:
        return layout_picture(x)
    return _sharding_picture(Sharding.read(x, shape), names=names)


def _placed_picture(x: Placed, names: Sequence[str] | None = None) -> Picture:
    holding = Holding.placed(x, names_of(names, x.mesh.sizes))
    return holding_picture(
        holding, f"{x.shape} on {holding.mesh_text} as {x.placements_text(holding.names)}"
    )


def _plan_picture(x: RedistributionPlan, names: Sequence[str] | None = None) -> Picture:
    return plan_picture(x, names_of(names or x.mesh_names, x.mesh))


def _sharding_picture(
    x: Sharding,
    view: Sequence[int] | View | None = None,
    to: PlacementsLike | Sharding | None = None,
    mesh: MeshLike | None = None,
    names: Sequence[str] | None = None,
) -> Picture:
    named = names_of(names, x.mesh)
    if view is not None:
        what, found = view_of(view, x.shape)
        return view_picture(x, found, named, what)
    if to is not None and mesh is not None:
        return _picture_between(x, mesh_of(x.mesh), to, mesh, named)
    if to is not None:
        return plan_picture(planned(x, _target(x, to, x.mesh)), named)
    holding = Holding.of(x, named)
    return holding_picture(holding, title_of(x, holding))


def _picture_between(
    x: Sharding,
    ranks: Mesh,
    to: PlacementsLike | Sharding,
    mesh: MeshLike,
    named: tuple[str, ...],
) -> Picture:
    """From the mesh of ``ranks`` to ``mesh``."""
    other = mesh_of(mesh)
    target = _target(x, to, other.sizes)
    if other == ranks:
        return plan_picture(planned(x, target), named, ranks.ranks)
    plan = planned_between(x, ranks, target, other)
    return exchange_plan_picture(plan.named(named, getattr(mesh, "mesh_dim_names", None)))


def _target(x: Sharding, to: PlacementsLike | Sharding, mesh: tuple[int, ...]) -> Sharding:
    if isinstance(to, Sharding):
        return to
    return Sharding(x.shape, mesh, placements_of(to, len(x.shape)))


def _dtensor_picture(
    x: DTensorLike,
    view: Sequence[int] | View | None = None,
    to: PlacementsLike | Sharding | None = None,
    mesh: MeshLike | None = None,
    names: Sequence[str] | None = None,
) -> Picture:
    sharding = sharding_of_dtensor(x)
    named = names_of(names or x.device_mesh.mesh_dim_names, sharding.mesh)
    holding, said = holding_of_dtensor(x, named), said_of_numbers(x)
    if view is None and to is None:
        picture = holding_picture(holding, title_of(sharding, holding))
    elif holding != Holding.of(sharding, named):
        raise ValueError(
            f"{sharding} has a shard order, but draw applies view= and to= only to a tensor "
            "without a shard order: leave out view= and to="
        )
    elif mesh is not None and to is not None:
        return _picture_between(sharding, mesh_of(x.device_mesh), to, mesh, named)
    else:
        picture = _sharding_picture(sharding, view, to, names=named)
    return replace(picture, captions=(*picture.captions, *said))


def holding_picture(holding: Holding, title: str) -> Picture:
    """Who holds what of one tensor."""
    panels, captions = panels_of(holding)
    keys, left_out = legend_of(holding)
    return Picture(title, (Section("", panels, captions=captions),), keys, left_out)


# By the class of what is drawn: its picture, and the options of draw that it takes. A DTensor is
# known by what it has, so it comes last.
DRAWN: dict[type, tuple[Callable[..., Picture], tuple[str, ...]]] = {
    Layout: (_layout_picture, ("shape", "names")),
    Sharding: (_sharding_picture, ("view", "to", "mesh", "names")),
    Placed: (_placed_picture, ("names",)),
    RedistributionPlan: (_plan_picture, ("names",)),
    ExchangePlan: (exchange_plan_picture, ()),
    Exchange: (exchange_picture, ()),
    ReshardPlan: (reshard_picture, ()),
    Refit: (refit_picture, ()),
    DTensorLike: (_dtensor_picture, ("view", "to", "mesh", "names")),
}

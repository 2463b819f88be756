"""``draw``: from what it is given to a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from cute_sharding.exchange import Exchange, Mesh, Placed, RedistributionPlan
from cute_sharding.exchange.meshes import ExchangePlan
from cute_sharding.layout import Layout
from cute_sharding.models import ReshardPlan
from cute_sharding.models.refit import Refit
from cute_sharding.relations.view import View
from cute_sharding.sharding import Sharding
from cute_sharding.tools.drawing.holding import Holding
from cute_sharding.tools.drawing.picture import Picture
from cute_sharding.tools.drawing.pictures import (
    exchange_picture,
    holding_picture,
    layout_picture,
    placed_picture,
    plan_picture,
    refit_picture,
    reshard_picture,
    view_picture,
)
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
    named, of = names_of(names, x.mesh), of or Mesh.numbered(x.mesh)
    if view is not None:
        what, found = view_of("view", view, x.shape)
        return view_picture(x, found, of, named, what)
    if to is None:
        if mesh is not None:
            raise ValueError(
                "mesh= needs to=: give the placements on the new mesh, such as to='S(0)'"
            )
        return holding_picture(holding or Holding.of(x, named, of))
    other = of if mesh is None else mesh_of(mesh)
    plan = planned(x, of, sharding_of(x.shape, other.sizes, to), other)
    if isinstance(plan, ExchangePlan):
        return plan_picture(plan.named(named, getattr(mesh, "mesh_dim_names", to_names)))
    return plan_picture(plan, named, of)


def _dtensor(x: Any, names: Sequence[str] | None = None, **options: Any) -> Picture:
    from cute_sharding.dtensor.run.reading import chains_of_spec

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

"""``draw``: from what it is given to a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from cute_sharding._settings import network_in_force
from cute_sharding.drawing.exchanges import exchange_picture, exchange_plan_picture
from cute_sharding.drawing.grids import legend_of, panels_of
from cute_sharding.drawing.holding import Holding, title_of
from cute_sharding.drawing.inputs import (
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
from cute_sharding.drawing.layouts import layout_picture
from cute_sharding.drawing.models import refit_picture, reshard_picture
from cute_sharding.drawing.moves import plan_picture
from cute_sharding.drawing.parts import Section
from cute_sharding.drawing.picture import Picture
from cute_sharding.drawing.views import view_picture
from cute_sharding.exchange import Exchange, Mesh, Network, Placed, RedistributionPlan
from cute_sharding.exchange.meshes import ExchangePlan, plan_exchange
from cute_sharding.exchange.plan import Held
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.layout import Layout
from cute_sharding.models import ReshardPlan
from cute_sharding.models.refit import Refit
from cute_sharding.relations.view import View
from cute_sharding.sharding import Partial, Sharding
from cute_sharding.sharding.chains import chains_of

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
        A ``Picture`` (cute_sharding.drawing). A notebook, ``print`` and ``.show()`` show it, and
        ``.save(path)`` writes it to a file.

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
    _check_options(x, view, to, mesh, shape)
    if isinstance(x, Layout):
        if shape is None:
            return layout_picture(x)
        return draw(Sharding.read(x, shape), names=names)
    if isinstance(x, (ExchangePlan, Exchange, Placed)):
        return _picture_of_ranks(x, names)
    if isinstance(x, ReshardPlan):
        return reshard_picture(x)
    if isinstance(x, Refit):
        return refit_picture(x)
    if isinstance(x, RedistributionPlan):
        return plan_picture(x, names_of(names or x.mesh_names, x.mesh))
    if isinstance(x, DTensorLike):
        return _dtensor_picture(x, view, to, mesh, names)
    if isinstance(x, Sharding):
        named = names_of(names, x.mesh)
        if mesh is not None:
            return _picture_between(x, mesh_of(x.mesh), to, mesh, named)
        return _sharding_picture(x, view, to, named)
    raise TypeError(
        "draw takes a DTensor, a Sharding, a Placed, a Layout, a plan or an Exchange, not a "
        f"{type(x).__name__}"
    )


def _check_options(x: Any, view: Any, to: Any, mesh: Any, shape: Any) -> None:
    """That the options fit what is drawn, and one another."""
    if view is not None and to is not None:
        raise ValueError("draw takes view= or to=, not both: a picture shows only one change")
    has_change = isinstance(x, (Layout, RedistributionPlan, ExchangePlan, Exchange, Placed))
    if has_change and (view is not None or to is not None):
        raise ValueError(
            f"view= and to= need a tensor, a DTensor or a Sharding, not a {type(x).__name__}"
        )
    if mesh is not None and to is None:
        raise ValueError("mesh= needs to=: give the placements on the new mesh, such as to='S(0)'")
    if shape is not None and not isinstance(x, Layout):
        raise ValueError(f"shape= is only for a Layout: leave out shape= for a {type(x).__name__}")


def _picture_of_ranks(x: ExchangePlan | Exchange | Placed, names: Sequence[str] | None) -> Picture:
    if isinstance(x, Placed):
        holding = Holding.placed(x, names_of(names, x.mesh.sizes))
        return holding_picture(
            holding, f"{x.shape} on {holding.mesh_text} as {x.placements_text(holding.names)}"
        )
    if names is not None:
        raise ValueError(
            f"names= is for the dims of one mesh, but a {type(x).__name__} has two meshes: draw "
            "plan.named(names, target_names)"
        )
    return exchange_picture(x) if isinstance(x, Exchange) else exchange_plan_picture(x)


def _picture_between(
    x: Sharding, ranks: Mesh, to: Any, mesh: Any, named: tuple[str, ...]
) -> Picture:
    """From the mesh of ``ranks`` to ``mesh``."""
    other = mesh_of(mesh)
    target = (
        to
        if isinstance(to, Sharding)
        else Sharding(x.shape, other.sizes, placements_of(to, len(x.shape)))
    )
    if other == ranks:
        return plan_picture(planned(x, target), named, ranks.ranks)
    plan = planned_between(x, ranks, target, other)
    return exchange_plan_picture(plan.named(named, getattr(mesh, "mesh_dim_names", None)))


def _sharding_picture(x: Sharding, view: Any, to: Any, named: tuple[str, ...]) -> Picture:
    if view is not None:
        what, found = view_of(view, x.shape)
        return view_picture(x, found, named, what)
    if to is not None:
        target = (
            to
            if isinstance(to, Sharding)
            else Sharding(x.shape, x.mesh, placements_of(to, len(x.shape)))
        )
        return plan_picture(planned(x, target), named)
    holding = Holding.of(x, named)
    return holding_picture(holding, title_of(x, holding))


def _dtensor_picture(
    x: DTensorLike, view: Any, to: Any, mesh: MeshLike | None, names: Sequence[str] | None
) -> Picture:
    sharding = sharding_of_dtensor(x)
    named = names_of(names or x.device_mesh.mesh_dim_names, sharding.mesh)
    holding, said = holding_of_dtensor(x, named), said_of_numbers(x)
    if view is None and to is None:
        picture = holding_picture(holding, title_of(sharding, holding))
        return replace(picture, captions=(*picture.captions, *said))
    if holding != Holding.of(sharding, named):
        raise ValueError(
            f"{sharding} has a shard order, but draw applies view= and to= only to a tensor "
            "without a shard order: leave out view= and to="
        )
    if mesh is not None:
        picture, said = _picture_between(sharding, mesh_of(x.device_mesh), to, mesh, named), ()
    else:
        picture = draw(sharding, view=view, to=to, names=named)
    return replace(picture, captions=(*picture.captions, *said))


def holding_picture(holding: Holding, title: str) -> Picture:
    """Who holds what of one tensor."""
    panels, captions = panels_of(holding)
    keys, left_out = legend_of(holding)
    return Picture(title, (Section("", panels, captions=captions),), keys, left_out)


def planned_between(source: Sharding, ranks: Mesh, target: Sharding, other: Mesh) -> ExchangePlan:
    """The plan from a sharding on one mesh to a sharding on another, for meshes that have all
    process groups.

    Raises:
        ValueError: the shardings do not belong to one tensor, a mesh has another size than its
            sharding, or the target has a Partial.
    """
    for sharding, mesh in ((source, ranks), (target, other)):
        if sharding.mesh != mesh.sizes:
            raise ValueError(
                f"{sharding} does not fit the {mesh}: give a mesh with the sizes {sharding.mesh}"
            )
    if source.shape != target.shape:
        raise ValueError(f"{source} and {target} must have the same shape")
    if any(isinstance(p, Partial) for p in target.placements):
        raise ValueError(
            f"no plan to {target}, because a target on another mesh must not have a Partial: use "
            "Shard or Replicate"
        )
    ops = {p.reduce_op for p in source.placements if isinstance(p, Partial)}
    if len(ops) > 1:
        raise ValueError(
            f"{source} has Partial placements with the reductions {sorted(ops)}: use one reduction "
            "for all Partial placements"
        )
    pending = [
        (m, p.reduce_op)
        for m, p in enumerate(source.placements)
        if isinstance(p, Partial) and source.mesh[m] > 1
    ]
    ndim = len(source.shape)
    before, after = (
        Placed(x.shape, mesh, chains_of(x.cuts, ndim, x.mesh))
        for x, mesh in ((source, ranks), (target, other))
    )
    network = Network.of_programs(source.mesh, network_in_force())
    return plan_exchange(before, tuple(pending), after, network)


def planned(source: Sharding, target: Sharding) -> RedistributionPlan:
    """The plan between two shardings, on layouts alone, for a mesh that has all process groups.

    Raises:
        ValueError: they do not belong to one tensor, or a reduction would have to be made pending.
    """
    if (source.shape, source.mesh) != (target.shape, target.mesh):
        raise ValueError(f"{source} and {target} must have the same shape and the same mesh")
    mesh, ndim = source.mesh, len(source.shape)
    pairs = list(zip(source.placements, target.placements))
    for m, (before, after) in enumerate(pairs):
        if before != after and isinstance(after, Partial):
            raise ValueError(
                f"no plan from {before} to {after} on mesh dim {m}: a plan cannot create a Partial"
            )
    ops = {p.reduce_op for p in source.placements if isinstance(p, Partial)}
    if len(ops) > 1:
        raise ValueError(
            f"{source} has Partial placements with the reductions {sorted(ops)}: use one reduction "
            "for all Partial placements"
        )
    open_ = [m for m, (before, _) in enumerate(pairs) if isinstance(before, Partial)]
    kept = tuple(m for m in open_ if pairs[m][0] == pairs[m][1])
    held = Held(
        chains_of(source.cuts, ndim, mesh),
        tuple(
            (m, before.reduce_op)
            for m, (before, _) in enumerate(pairs)
            if isinstance(before, Partial) and m not in kept and mesh[m] > 1
        ),
        kept,
    )
    chains = chains_of(target.cuts, ndim, mesh)
    by = network_in_force()
    steps = plan_steps(source.shape, mesh, held, chains, Network.of_programs(mesh, by))
    shown = Network.of(mesh, by)
    return RedistributionPlan(source.shape, mesh, held, Held(chains), steps, shown)

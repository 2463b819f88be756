"""Moves a local tensor from one mesh to another.

What is pending is reduced on its own mesh first, and left in parts as small as possible. Then every
element that a rank needs and does not hold reaches it once (:mod:`cute_sharding.exchange`): in one
all-to-all of the ranks of both meshes or, if they have no common process group, in one batch of
point-to-point messages.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.stats import Kind, Moved, Received, count_moves
from cute_sharding.dtensor.replaced import (
    communication,
    dispatch_modes,
    observing,
    redistribution_hook,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial, Replicate
from cute_sharding.dtensor.run.bundles import Shipment
from cute_sharding.dtensor.run.executor import run
from cute_sharding.dtensor.run.groups import Means, means, on_each_rank
from cute_sharding.dtensor.run.packing import in_shape, lay_out
from cute_sharding.dtensor.run.placements import chains_of_spec, text
from cute_sharding.dtensor.run.several_meshes import meshes_of, on_which_group
from cute_sharding.exchange import Bundle, Item, Network, Placed
from cute_sharding.exchange.meshes import Crossing, ExchangePlan, plan_exchange
from cute_sharding.exchange.plan import received_by_all


class PreparedExchange(NamedTuple):
    """A plan from one mesh to another, what it counts as, and its exchange."""

    plan: ExchangePlan
    kind: Kind
    shipment: Shipment


def move_across(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, memory_limit: int | None = None
) -> torch.Tensor:
    """The local tensor of this rank on the mesh of ``target``, which is not that of ``current``; an
    empty tensor on a rank outside of it. A moved tensor is laid out by its global strides.

    Raises:
        NotImplementedError: a compiler traces.
        ValueError: the meshes are slices that do not belong together, or no plan keeps every rank
            within ``memory_limit`` elements.
        OtherShape: this rank's local tensor does not have the shape that its spec gives.
    """
    if dispatch_modes.is_tracing():
        raise NotImplementedError(
            f"cannot redistribute from mesh {current.mesh} to mesh {target.mesh} in a compiled "
            "program: call cute_sharding.redistribute(tensor, mesh, placements) outside of "
            "compiled programs, on real tensors"
        )
    plan, kind, shipment = planned_across(current, target, memory_limit)
    local, current = by_elements(local, current)
    if current.mesh._is_current_rank_part_of_mesh():
        local = run(plan.steps, local, current.mesh)
    if communication.this_rank() in plan.exchange:
        count_moves(kind)
    moved = _exchange_between(plan.crossing, shipment, local, current.mesh, target.mesh)
    return lay_out(moved, target.tensor_meta)


def planned_across(
    current: DTensorSpec, target: DTensorSpec, memory_limit: int | None
) -> PreparedExchange:
    """The plan that :func:`move_across` runs.

    Raises:
        ValueError: as that.
    """
    by = means(current.mesh)._replace(memory_limit=memory_limit)
    return _planned(current, target, by, communication.this_rank())


@remembered
def _planned(current: DTensorSpec, target: DTensorSpec, by: Means, rank: int) -> PreparedExchange:
    meshes = meshes_of(current.mesh, target.mesh, rank)
    tensor_specs.check_no_mixed_partials(tuple(current.placements))
    before, after = chains_of_spec(current), meshes.chains(chains_of_spec(target))
    plan = plan_exchange(
        Placed(tuple(current.shape), meshes.source, before, pending_sums(current)),
        Placed(tuple(current.shape), meshes.target, after),
        Network.of_programs(tuple(current.mesh.shape), by.network),
        by.memory_limit,
        by.groups,
        by.native,
    )
    return PreparedExchange(plan, Kind(partial(_moved_by, plan)), _shipment_of(plan, current))


def _moved_by(plan: ExchangePlan) -> Moved:
    received = Received(plan.received_elements, received_by_all(plan.stages))
    return Moved(plan=1, collectives=plan.collectives, received=received)


def _shipment_of(plan: ExchangePlan, spec: DTensorSpec) -> Shipment:
    """The exchange of a tensor that lies as ``spec`` says."""
    source, target, dtype = *plan.crossing.ends, _dtype(spec)
    bundle = Bundle((Item(plan.exchange, dtype.itemsize),))
    # torch does not always tell ranks outside of the mesh the placements that an op's result has on
    # it, so they may expect others. So messages start with a mark of the shardings they are of.
    is_told = not {*target.mesh.ranks} <= {*source.mesh.ranks}
    return Shipment(lambda _: bundle, (dtype,), refuse=partial(_refuse, spec) if is_told else None)


def _dtype(spec: DTensorSpec) -> torch.dtype:
    assert spec.tensor_meta is not None, "it has a shape"
    return spec.tensor_meta.dtype


# -- what is pending -------------------------------------------------------------------------------


def by_elements(local: torch.Tensor, spec: DTensorSpec) -> tuple[torch.Tensor, DTensorSpec]:
    """The tensor after reductions by methods of placements (a norm's, a masked embedding's)."""
    own = [
        m
        for m, p in enumerate(spec.placements)
        if isinstance(p, Partial) and type(p) is not Partial
    ]
    if not own:
        return local, spec
    placements = list(spec.placements)
    for m in own:
        if spec.mesh._is_current_rank_part_of_mesh():
            local = redistribution_hook.reduce_value(placements[m], local, spec.mesh, m)
        placements[m] = Replicate()
    return local, tensor_specs.with_placements(spec, placements)


def pending_sums(spec: DTensorSpec) -> tuple[tuple[int, str], ...]:
    return tuple(
        [
            (m, p.reduce_op)
            for m, p in enumerate(spec.placements)
            if type(p) is Partial and spec.mesh.size(m) > 1
        ]
    )


# -- the exchange ----------------------------------------------------------------------------------


def _exchange_between(
    crossing: Crossing, shipment: Shipment, local: torch.Tensor, mesh: Any, other: Any
) -> torch.Tensor:
    exchange, rounds, (dtype,) = crossing.exchange, crossing.rounds, shipment.dtypes
    if dispatch_modes.local_tensor_mode() is None and communication.this_rank() not in exchange:
        return local.new_empty(0)  # this rank is on neither mesh
    group = None if exchange.is_free else on_which_group(exchange, mesh, other)
    local = on_each_rank(
        lambda rank, x: _check_shape(x, exchange.sources[0].local_shape(rank), dtype),
        communication.wait_for(local),
    )
    with observing.exchange(lambda: -(-exchange.received_elements // rounds) * dtype.itemsize):
        return shipment.run([local], group, rounds, alias=True)[0]


def _refuse(current: DTensorSpec) -> NoReturn:
    raise RuntimeError(
        f"a tensor of shape {tuple(current.shape)} on mesh {current.mesh} has placements "
        f"{text(current.placements)} on this rank, but different placements on the ranks of the "
        "mesh. Ranks outside of a mesh may compute different placements for the result of an op. "
        "First redistribute the result to explicit placements on its own mesh"
    )


def _check_shape(
    local: torch.Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> torch.Tensor:
    """The local tensor that a rank sends from, in this shape; None: the rank has none."""
    if shape is None:
        return torch.empty(0, dtype=dtype, device=local.device)
    return in_shape(local, shape).resolve_conj().resolve_neg()

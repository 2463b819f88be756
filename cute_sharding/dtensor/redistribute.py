"""DTensor's redistribution by plan: what stands in for torch.distributed.tensor._redistribute.redistribute_local_tensor."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from cute_sharding.dtensor import compat
from cute_sharding.dtensor.compat import DTensorSpec, Partial
from cute_sharding.dtensor.executor import run
from cute_sharding.dtensor.placements import cut_of
from cute_sharding.redistribution.chains import Chains, chains_of
from cute_sharding.redistribution.network import Network
from cute_sharding.redistribution.plan import Held, plan_steps


def redistribute_local_tensor(local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, *, async_op: bool = False, is_explicit: bool = False) -> torch.Tensor:
    """Take this rank's local tensor from the placements of ``current`` to those of ``target``.

    Pending reductions of torch's own Partial are part of the plan; those of other kinds (a masked embedding's, a norm's) are finished first, by the placement's own method.
    Everything that can be refused is refused before anything is sent, by every rank alike.

    Raises:
        NotImplementedError: the meshes differ, or a reduction of another kind is to stay pending while elements move.
        RuntimeError: a change of one pending reduction into another.
        ValueError: mixed reductions that do not commute.
    """
    mesh: Any = current.mesh
    if mesh != target.mesh:
        raise NotImplementedError(f"redistribution from mesh {mesh} to another, {target.mesh}: DTensor has no such communication yet")
    compat.check_no_mixed_partials(current.placements)
    compat.check_no_mixed_partials(target.placements)
    if not mesh._is_current_rank_part_of_mesh():
        return local  # an empty tensor
    sizes, shape = tuple(mesh.shape), tuple(current.shape)
    pending, foreign, made = [], [], []
    for m, (before, after) in enumerate(zip(current.placements, target.placements, strict=True)):
        if sizes[m] == 1 or before == after:
            continue
        if isinstance(before, Partial):
            if isinstance(after, Partial):
                raise RuntimeError(f"redistribution from one pending reduction, {before}, to another, {after}, on mesh dim {m}: redistribute to Replicate or Shard first")
            if type(before) is Partial:
                pending.append((m, before.reduce_op))
            else:
                foreign.append(m)
        elif isinstance(after, Partial):
            made.append(m)
    source, wanted = chains_of_spec(current), chains_of_spec(target)
    if source != wanted:
        for m, placement in enumerate(current.placements):
            if isinstance(placement, Partial) and type(placement) is not Partial and m not in foreign and sizes[m] > 1:
                raise NotImplementedError(f"{placement} on mesh dim {m} belongs to the elements where they are, and cannot stay pending while they move: redistribute it to Replicate first")
    for m in made:
        compat.partition_value(target.placements[m], local.new_empty(0), mesh, m)  # raises now if it cannot be done
    steps = plan_steps(shape, sizes, Held(source, tuple(pending)), wanted, Network.default(sizes))
    debug = compat.active_debug_mode()
    record = nullcontext() if debug is None else debug.record_redistribute_calls(local, current.placements, target.placements, " -> ".join(step.kind for step in steps), is_explicit=is_explicit)
    with record:
        for m in foreign:
            local = compat.reduce_value(current.placements[m], local, mesh, m)
        local = run(steps, local, mesh, async_op=async_op and not made)
        for m in made:
            local = compat.partition_value(target.placements[m], local, mesh, m)
    return local


def chains_of_spec(spec: DTensorSpec) -> Chains:
    """The cuts of a spec's placements, left to right, or in its shard order if it has one of its own."""
    cuts = [cut_of(p) for p in spec.placements]
    return chains_of(cuts, len(spec.shape), tuple(spec.mesh.shape), compat.cut_order(spec))

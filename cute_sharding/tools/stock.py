"""What torch alone would do: its own redistribution, and its own rule for an op. Torch is asked for
the steps and the placements; what each step receives and holds is worked out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.door.cuts import is_of_views
from cute_sharding.dtensor.replaced import op_schemas, redistribution_hook, tensor_specs
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.run.placements import counted_from_0, cut_of
from cute_sharding.dtensor.switch import adapter
from cute_sharding.exchange import Mesh
from cute_sharding.exchange.network import Network
from cute_sharding.exchange.step import all_reduced, of_blocks
from cute_sharding.sharding.rows import local_size

# torch lists every rank of a mesh.
MOST_DEVICES = 1 << 20


class StockStep(NamedTuple):
    """One step of torch's, on one mesh dim. ``latencies``: how often the devices wait for one
    another; 0 where they do not.
    """

    kind: str
    mesh_dim: int
    change: str
    latencies: int
    received_elements: int
    peak_elements: int


@dataclass(frozen=True)
class StockPlan:
    """What torch's own redistribution does, counted for rank 0, as of a
    :class:`RedistributionPlan`.

    ``error``: where torch raises, why; there are no steps then. ``misread``: the placements have
    split factors that no shard order has, which torch may take for others on a mesh of several
    dims; it may then do something else than this, raise half way, or give wrong data.
    """

    mesh: tuple[int, ...]
    steps: tuple[StockStep, ...] = ()
    source_elements: int = 0
    error: str | None = None
    misread: bool = False

    @property
    def received_elements(self) -> int:
        return sum(step.received_elements for step in self.steps)

    @property
    def collectives(self) -> int:
        return sum(step.latencies > 0 for step in self.steps)

    @property
    def peak_elements(self) -> int:
        """The most elements held at once: the source, which stays, what a step starts from, its
        buffers and its result. Where sizes do not divide, without the copies that pad.
        """
        held = [
            step.peak_elements + (self.source_elements if i else 0)
            for i, step in enumerate(self.steps)
        ]
        return max(held, default=self.source_elements)

    def seconds(self, network: Network) -> float:
        """What it takes by the model that our own plans are timed with."""
        return sum(self._seconds(step, network.checked(self.mesh)) for step in self.steps)

    def _seconds(self, step: StockStep, network: Network) -> float:
        return network.collective(
            step.mesh_dim,
            self.mesh[step.mesh_dim],
            step.received_elements,
            together="all-to-all" not in step.kind,
            times=step.latencies,
        )

    def to_dict(self, network: Network, mesh_names: Sequence[str]) -> dict[str, Any]:
        """The plan as plain data, with the names of :meth:`RedistributionPlan.to_dict`; null where
        torch raises.
        """
        steps = [
            {
                "kind": step.kind,
                "mesh_dims": [mesh_names[step.mesh_dim]],
                "change": step.change,
                "communicates": step.latencies > 0,
                "received_elements": step.received_elements,
                "peak_elements": step.peak_elements,
                "seconds": self._seconds(step, network),
            }
            for step in self.steps
        ]
        plan = {
            "misread": self.misread,
            "steps": steps,
            "collectives": self.collectives,
            "received_elements": self.received_elements,
            "peak_elements": self.peak_elements,
            "seconds": self.seconds(network),
        }
        return {"error": self.error, **(plan if self.error is None else dict.fromkeys(plan))}


def stock_plan(
    shape: Sequence[int],
    mesh: Sequence[int],
    src: Sequence[Placement],
    dst: Sequence[Placement],
) -> StockPlan:
    """What torch's own DTensor redistribution does to get a tensor of global ``shape`` on a mesh of
    those sizes from the placements ``src`` to ``dst``.

    torch is asked for its steps; nothing is communicated, and no process group is needed. What rank
    0 receives and holds is counted, which holds the most. An all-to-all counts as one, as it is on
    GPUs. Mesh dims that a program has flattened are not known here: torch may join collectives on
    those.

    Raises:
        RuntimeError: this torch cannot be asked.
    """
    redistribution_hook.require_planner()  # what this torch lacks is no refusal of torch's
    shape, mesh = tuple(map(int, shape)), tuple(map(int, mesh))
    try:
        before, after = (_as_taken(placements, shape, mesh) for placements in (src, dst))
        local = list(shape)
        for placement, parts in zip(before, mesh):
            local = _cut(local, placement, parts)
        held, steps = prod(local), []
        source, target = (
            tensor_specs.unbound_spec(shape, mesh, placements) for placements in (before, after)
        )
        for info in redistribution_hook.stock_transforms(source, target):
            if mesh[info.mesh_dim] > 1:
                step, local = _step(info, mesh[info.mesh_dim], local)
                steps.append(step)
    except Exception as error:  # whatever torch raises is what it says to this redistribution
        words = next(iter(str(error).splitlines()), "") or type(error).__name__
        return StockPlan(mesh, error=words)
    misread = len(mesh) > 1 and any(map(is_of_views, (source, target)))
    return StockPlan(mesh, tuple(steps), held, misread=misread)


def stock_plan_between(
    shape: Sequence[int],
    mesh: Mesh,
    src: Sequence[Placement],
    target_mesh: Mesh,
    dst: Sequence[Placement],
) -> StockPlan:
    """As :func:`stock_plan`, from one mesh to another: what torch raises to that, as it does it of
    no mesh that is not the tensor's. Its function is called, with a tensor that has no elements.
    """
    sides = ((mesh, src), (target_mesh, dst))
    try:
        source, target = (
            tensor_specs.unbound_spec(
                shape, on.sizes, _as_taken(placements, shape, on.sizes), on.ranks[0], on.ranks
            )
            for on, placements in sides
        )
        redistribution_hook.stock_redistribute(torch.empty(0), source, target)
    except Exception as error:
        words = next(iter(str(error).splitlines()), "")
        return StockPlan(mesh.sizes, error=f"{type(error).__name__}: {words}")
    return StockPlan(
        mesh.sizes, error="this torch does it, in steps that are not known here: run it to see them"
    )


def _as_taken(
    placements: Sequence[Placement], shape: Sequence[int], mesh: Sequence[int]
) -> tuple[Placement, ...]:
    """The placements as ``redistribute`` takes them: dims counted from 0, and no reductions mixed
    that do not commute.
    """
    if len(placements) != len(mesh):
        raise ValueError(f"{len(placements)} placements for a mesh of {len(mesh)} dims")
    if prod(mesh) > MOST_DEVICES:
        raise ValueError(
            f"PyTorch lists all ranks of the mesh, and {prod(mesh):,} devices would take too long: "
            f"use a mesh of at most {MOST_DEVICES:,} devices"
        )
    tensor_specs.check_no_mixed_partials(placements)
    return tuple([counted_from_0(placement, len(shape)) for placement in placements])


class _Collective(NamedTuple):
    """A collective of torch's on one rank: the elements received, those of its buffers and result,
    and the local shape that it leaves.
    """

    kind: str
    latencies: int
    received: int
    buffers: int
    local: list[int]


def _step(transform: Any, parts: int, local: list[int]) -> tuple[StockStep, list[int]]:
    """What ``redistribute_local_tensor`` makes of one of torch's transforms from the local shape
    ``local`` of the first of ``parts`` devices, and the shape it leads to.
    """
    before, after = transform.src_dst_placements
    if isinstance(after, Partial) and not isinstance(before, Replicate):
        raise RuntimeError(f"redistribute from {before} to {after} not supported yet")
    # Only to a Shard does torch go in one; otherwise by way of Replicate.
    to = after.dim if isinstance(after, Shard) and not isinstance(before, StridedShard) else None
    if isinstance(before, Replicate):
        done = _Collective("", 0, 0, 0, local)
    elif isinstance(before, Partial):
        done = _reduction(before.reduce_op, parts, to, local)
    else:
        done = _exchange(before, parts, to, local, transform.logical_shape)
    kinds, peak, result = [done.kind] if done.kind else [], prod(local) + done.buffers, done.local
    if isinstance(before, Replicate) or (to is None and not isinstance(after, Replicate)):
        kinds.append("local share" if cut_of(after) is None else "local slice")
        result = _cut(result, after, parts)
        # What comes of the collective, and, where the pieces are strided, the slices of all
        # devices.
        copies = bool(done.kind) + isinstance(after, StridedShard)
        peak = max(peak, prod(local) + prod(result) + prod(done.local) * copies)
    change = f"{before} -> {after}"
    step = StockStep(
        ", ".join(kinds), transform.mesh_dim, change, done.latencies, done.received, peak
    )
    return step, result


def _reduction(op: str, parts: int, dim: int | None, local: list[int]) -> _Collective:
    """A pending reduction done, to Shard(dim) or to Replicate."""
    if dim is None:
        received = all_reduced(parts, prod(local))
        return _Collective(f"all-reduce ({op})", 2, received, prod(local), local)
    block = prod(_with(local, dim, -(-local[dim] // parts)))  # padded
    result = _with(local, dim, local_size(local[dim], 1, parts, 0))
    # Blocks are laid one after the other, unless they lie so.
    buffers = (parts * _apart(local, dim) + 1) * block
    return _Collective(f"reduce-scatter ({op})", 1, of_blocks(parts, block), buffers, result)


def _exchange(
    before: Placement,
    parts: int,
    to: int | None,
    local: list[int],
    logical: Sequence[int],
) -> _Collective:
    """From one Shard to Shard(to), or to Replicate. Torch takes the rows to gather from
    ``logical``, which in other dims may be longer than the local tensor.
    """
    dim, split_factor = cut_of(before)  # type: ignore[misc]  # a Shard
    sent = _with(local, dim, local_size(logical[dim], split_factor, parts, 0))
    result = _with(local, dim, logical[dim])
    if to is None:
        # What is gathered comes block after block, and is copied once more unless it lies as the
        # tensor does.
        kind, copies = "all-gather", 1 + (isinstance(before, StridedShard) or _apart(local, dim))
    else:
        # Cut into blocks unless they lie so, received, and joined.
        kind, copies = "all-to-all", 2 + _apart(local, to)
        sent = _with(sent, to, -(-local[to] // parts))  # padded
        result = _with(result, to, local_size(local[to], 1, parts, 0))
    block = prod(sent)
    return _Collective(kind, 1, of_blocks(parts, block), parts * copies * block, result)


def _cut(shape: list[int], placement: Placement, parts: int) -> list[int]:
    """The shape of the part of the first of ``parts`` devices."""
    cut = cut_of(placement)
    if cut is None:
        return shape
    return _with(shape, cut[0], local_size(shape[cut[0]], cut[1], parts, 0))


def _with(shape: Sequence[int], dim: int, n: int) -> list[int]:
    return [*shape[:dim], n, *shape[dim + 1 :]]


def _apart(shape: Sequence[int], dim: int) -> bool:
    """Whether a block of rows of ``dim`` lies in pieces."""
    return prod(shape[:dim]) > 1


def stock_rule(
    name: str,
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    arguments: Sequence[Any],
    *,
    times: int | None = None,
) -> dict[str, Any]:
    """What torch's own rule needs of a tensor of global ``shape`` and gives, as plain data; no
    process group is needed. Ours are switched off for it.

    Args:
        name: the aten overload.
        arguments: those after the tensor.
        times: the tensor is given so many times, in a list, as to ``cat``.
    """
    before = adapter.settings()
    adapter.disable()
    try:
        return _answered(name, shape, mesh, placements, arguments, times)
    finally:
        adapter.switch_to(before)


def _answered(
    name: str,
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    arguments: Sequence[Any],
    times: int | None,
) -> dict[str, Any]:
    spec = tensor_specs.unbound_spec(tuple(shape), tuple(mesh), placements)
    op: Any = op_schemas.overload(name)
    given: Any = spec if times is None else [spec] * times
    schema = OpSchema(op, (given, *arguments), {}, op_schemas.schema_info(op))
    rule = op_schemas.propagation()
    try:
        found = rule(schema)
    except Exception as error:  # whatever torch raises is what it says to this op
        words = next(iter(str(error).splitlines()), "") or type(error).__name__
        return {"error": words, "input": None, "outputs": None, "received_elements": None}
    wanted = [each.placements for each in op_schemas.specs_of(found.redistribute_schema or schema)]
    moves = [to for to in wanted if tuple(to) != tuple(placements)]
    plans = [stock_plan(shape, mesh, placements, to) for to in moves]
    output = found.output_spec
    outputs: list[Any] = [output] if isinstance(output, DTensorSpec) else list(output or ())
    return {
        "error": next((plan.error for plan in plans if plan.error is not None), None),
        "input": _text(moves[0] if moves else placements),
        "outputs": [_text(each.placements) for each in outputs],
        "received_elements": sum(plan.received_elements for plan in plans),
    }


def _text(placements: Sequence[Placement]) -> list[str]:
    return list(map(str, placements))

"""What torch alone would do: its own redistribution, and its own rule for an op. Torch is asked for
the steps and the placements; what each step receives is worked out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from cute_sharding._words import counted
from cute_sharding.dtensor.door.cuts import is_of_views
from cute_sharding.dtensor.replaced import op_schemas, redistribution_hook, registry, tensor_specs
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.run.placements import counted_from_0, cut_of, of_text
from cute_sharding.dtensor.switch import adapter
from cute_sharding.exchange.collectives import all_reduced, of_blocks
from cute_sharding.sharding import Sharding
from cute_sharding.sharding.deal import local_size

# torch lists every rank of a mesh.
MOST_DEVICES = 1 << 20


class StockStep(NamedTuple):
    """One step of torch's, on one mesh dim: the collective, and what each device does alone; the
    placements before and after; and the elements that rank 0 receives, which receives the most.
    """

    kind: str
    mesh_dim: int
    change: str
    received_elements: int


@dataclass(frozen=True)
class StockPlan:
    """What torch's own redistribution does.

    Attributes:
        steps: the steps; none where torch raises.
        error: why torch raises; None if it does not.
        misread: the placements have split factors that no shard order has, which torch may take for
            others on a mesh of several dims; it may then do something else than this, raise half
            way, or give wrong data.
    """

    steps: tuple[StockStep, ...] = ()
    error: str | None = None
    misread: bool = False

    @property
    def received_elements(self) -> int:
        """The elements that rank 0 receives."""
        return sum(step.received_elements for step in self.steps)

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return sum(not step.kind.startswith("local") for step in self.steps)

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """The plan as plain data, with the names of the mesh dims."""
        return {
            "error": self.error,
            "misread": self.misread,
            "steps": [{**s._asdict(), "mesh_dim": names[s.mesh_dim]} for s in self.steps],
            "collectives": self.collectives,
            "received_elements": self.received_elements,
        }

    def text(self, names: Sequence[str]) -> str:
        """The plan in words, as of a :class:`RedistributionPlan`."""
        if self.error is not None:
            return f"raises: {self.error}"
        lines = [
            f"{step.kind} on {names[step.mesh_dim]}, {step.change}: receives "
            f"{step.received_elements:,} elements"
            for step in self.steps
        ]
        if self.misread:
            lines.append(
                "beware: torch may misread these _StridedShard placements, and then raise or give "
                "wrong data"
            )
        if not self.steps:
            return "nothing to do"
        total = f"{counted(self.collectives, 'collective')}, {self.received_elements:,} elements"
        return "\n".join([*lines, f"in all: {total} received"])


def stock_plan(
    shape: Sequence[int],
    mesh: Sequence[int],
    src: Sequence[Placement] | str,
    dst: Sequence[Placement] | str,
) -> StockPlan:
    """What torch's own DTensor redistribution does to get a tensor of global ``shape`` on a mesh of
    those sizes from the placements ``src`` to ``dst``, which may be text.

    torch is asked for its steps; nothing is communicated, and no process group is needed. An
    all-to-all counts as one, as it is on GPUs. Mesh dims that a program has flattened are not known
    here: torch may join collectives on those.

    Raises:
        RuntimeError: this torch cannot be asked.
    """
    redistribution_hook.require_planner()  # what this torch lacks is no refusal of torch's
    shape, mesh = tuple(map(int, shape)), tuple(map(int, mesh))
    try:
        before, after = (_as_taken(placements, shape, mesh) for placements in (src, dst))
        local, steps = list(shape), []
        for placement, parts in zip(before, mesh):
            local = _cut(local, placement, parts)
        source, target = (
            tensor_specs.unbound_spec(shape, mesh, placements) for placements in (before, after)
        )
        for info in redistribution_hook.stock_transforms(source, target):
            if mesh[info.mesh_dim] > 1:
                step, local = _step(info, mesh[info.mesh_dim], local)
                steps.append(step)
    except Exception as error:  # whatever torch raises is what it says to this redistribution
        words = next(iter(str(error).splitlines()), "") or type(error).__name__
        return StockPlan(error=words)
    misread = len(mesh) > 1 and any(map(is_of_views, (source, target)))
    return StockPlan(tuple(steps), misread=misread)


def _as_taken(
    placements: Sequence[Placement] | str, shape: Sequence[int], mesh: Sequence[int]
) -> tuple[Placement, ...]:
    """The placements as ``redistribute`` takes them: dims counted from 0, and no reductions mixed
    that do not commute.
    """
    if isinstance(placements, str):
        placements = of_text(placements, len(shape))
    if len(placements) != len(mesh):
        raise ValueError(f"{len(placements)} placements for a mesh of {len(mesh)} dims")
    if prod(mesh) > MOST_DEVICES:
        raise ValueError(
            f"PyTorch lists all ranks of the mesh, and {prod(mesh):,} devices would take too long: "
            f"use a mesh of at most {MOST_DEVICES:,} devices"
        )
    tensor_specs.check_no_mixed_partials(placements)
    return tuple([counted_from_0(placement, len(shape)) for placement in placements])


def _step(transform: Any, parts: int, local: list[int]) -> tuple[StockStep, list[int]]:
    """What ``redistribute_local_tensor`` makes of one of torch's transforms from the local shape
    ``local`` of the first of ``parts`` devices, and the shape it leads to.
    """
    before, after = transform.src_dst_placements
    if isinstance(after, Partial) and not isinstance(before, Replicate):
        raise RuntimeError(f"redistribute from {before} to {after} not supported yet")
    # Only to a Shard does torch go in one; otherwise by way of Replicate.
    to = after.dim if isinstance(after, Shard) and not isinstance(before, StridedShard) else None
    kinds: list[str] = []
    received = 0
    if isinstance(before, Partial) and to is None:
        kinds = [f"all-reduce ({before.reduce_op})"]
        received = all_reduced(parts, prod(local))
    elif isinstance(before, Partial) and to is not None:
        kinds = [f"reduce-scatter ({before.reduce_op})"]
        received = of_blocks(parts, prod(_with(local, to, -(-local[to] // parts))))  # padded
        local = _cut(local, after, parts)
    elif not isinstance(before, Replicate):
        dim, split_factor = cut_of(before)  # type: ignore[misc]  # a Shard
        # The rows of the whole dim, which in other dims may be longer than the local tensor.
        rows = transform.logical_shape[dim]
        sent = _with(local, dim, local_size(rows, split_factor, parts, 0))
        local, kinds = _with(local, dim, rows), ["all-gather"]
        if to is not None:
            kinds = ["all-to-all"]
            sent = _with(sent, to, -(-local[to] // parts))  # padded
            local = _cut(local, after, parts)
        received = of_blocks(parts, prod(sent))
    if isinstance(before, Replicate) or (to is None and not isinstance(after, Replicate)):
        kinds.append("local share" if cut_of(after) is None else "local slice")
        local = _cut(local, after, parts)
    change = f"{before} -> {after}"
    return StockStep(", ".join(kinds), transform.mesh_dim, change, received), local


def _cut(shape: list[int], placement: Placement, parts: int) -> list[int]:
    """The shape of the part of the first of ``parts`` devices."""
    cut = cut_of(placement)
    if cut is None:
        return shape
    return _with(shape, cut[0], local_size(shape[cut[0]], cut[1], parts, 0))


def _with(shape: Sequence[int], dim: int, n: int) -> list[int]:
    return [*shape[:dim], n, *shape[dim + 1 :]]


def stock_rule(
    name: str, before: Sharding, arguments: Sequence[Any], *, times: int | None = None
) -> dict[str, Any]:
    """What torch's own rule needs of a tensor and gives, as plain data; no process group is needed.
    Ours are switched off for it.

    Args:
        name: the aten overload.
        before: the sharding of the tensor.
        arguments: those after the tensor.
        times: the tensor is given so many times, in a list, as to ``cat``.
    """
    on = adapter.settings()
    adapter.disable()
    try:
        placements = of_text(", ".join(map(str, before.placements)), len(before.shape))
        spec = tensor_specs.unbound_spec(before.shape, before.mesh, placements)
        op: Any = registry.overload(name)
        given: Any = spec if times is None else [spec] * times
        schema = OpSchema(op, (given, *arguments), {}, registry.schema_info(op))
        found = registry.propagation()(schema)
    except Exception as error:  # whatever torch raises is what it says to this op
        words = next(iter(str(error).splitlines()), "") or type(error).__name__
        return {"error": words, "input": None, "outputs": None, "received_elements": None}
    finally:
        adapter.switch_to(on)
    wanted = [each.placements for each in op_schemas.specs_of(found.redistribute_schema or schema)]
    moves = [to for to in wanted if tuple(to) != tuple(placements)]
    plans = [stock_plan(before.shape, before.mesh, placements, to) for to in moves]
    output = found.output_spec
    outputs: list[Any] = [output] if isinstance(output, DTensorSpec) else list(output or ())
    return {
        "error": next((plan.error for plan in plans if plan.error is not None), None),
        "input": list(map(str, moves[0] if moves else placements)),
        "outputs": [list(map(str, each.placements)) for each in outputs],
        "received_elements": sum(plan.received_elements for plan in plans),
    }

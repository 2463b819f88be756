"""torch's own redistribution: what it can be trusted with (an error must not suggest what would go
wrong), and what it would do and cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from cute_sharding.dtensor.redistributing.placements import Cuts, counted_from_0, cut_of
from cute_sharding.dtensor.torch_private import process_groups, redistribution_hook, tensor_specs
from cute_sharding.dtensor.torch_private.tensor_specs import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.redistribution.network import Network
from cute_sharding.sharding.deal import local_size

# torch lists every rank of a mesh.
MOST_DEVICES = 1 << 20


def moves_rightly(spec: tensor_specs.DTensorSpec, target: Cuts) -> bool:
    """Whether torch takes ``spec`` to ``target`` rightly, into local tensors that a view can follow
    on.

    - A spec that a user makes with _StridedShard placements is read as a shard order; split factors
      that no order has give wrong data (:func:`tensor_specs.decodes_to_shard_order`).
    - On a mesh of several dims torch plans each rank by the rank's own sizes. With _StridedShard
      placements, sizes that do not divide and mesh dims that share a tensor dim, ranks take
      different paths, and raise or wait for one another.
    - Its all-to-all leaves a local tensor that cannot be viewed where it had to pad.
    """
    source = tuple([cut_of(p) for p in spec.placements])
    mesh = tuple(spec.mesh.shape)
    if source == target:
        return True
    if len(mesh) > 1 and not tensor_specs.decodes_to_shard_order(spec):
        return False
    strided = any(cut is not None and cut[1] > 1 for cut in (*source, *target))
    wary = strided and (len(mesh) > 2 or (len(mesh) == 2 and (_nested(source) or _nested(target))))
    return all(
        _evenly_enough(spec.shape, cuts, source, target, mesh, wary) for cuts in (source, target)
    )


def is_torchs(spec: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch is to move ``spec`` to ``target``, by itself: all that a program without our
    views may come to, but for what torch is known to get wrong; and what it gets right of the rest.
    """
    strided = tensor_specs.split_factors(spec) or tensor_specs.split_factors(target)
    if not strided and process_groups.is_ascending(spec.mesh):
        return True  # by far the most redistributions
    return _is_torchs(spec.mesh, tuple(spec.shape), *(_key(s) for s in (spec, target)))


def is_torchs_alone(current: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch does it rightly and without a message, so that a rank may leave it to torch by
    itself. Of what is replicated torch cuts the local tensor, whatever the spec says of its shape:
    programs that shard a local tensor over one more mesh dim (torchtitan's SimpleFSDP) rely on it.
    """
    cuts = [tensor_specs.cut_of(placement) for placement in target.placements]
    dims = [cut[0] for cut in cuts if cut is not None]
    # A dim that is cut over several mesh dims may have to be dealt anew.
    return is_torchs(current, target) and all(
        before == after or (before.is_replicate() and (cut is None or dims.count(cut[0]) == 1))
        for before, after, cut in zip(current.placements, target.placements, cuts)
    )


def _key(spec: tensor_specs.DTensorSpec) -> tuple[Any, ...]:
    return (
        spec.mesh,
        tuple(spec.placements),
        spec.use_strided_shard_as_shard_order,
        spec.shard_order,
    )


@lru_cache(maxsize=1 << 12)
def _is_torchs(
    mesh: Any, shape: tuple[int, ...], source: tuple[Any, ...], target: tuple[Any, ...]
) -> bool:
    specs = []
    for on, placements, as_order, order in (source, target):
        if on != mesh or (
            order is not None
            and not as_order
            and not tensor_specs.DTensorSpec.is_default_device_order(order)
        ):
            return True
        specs.append(
            tensor_specs.with_shape(
                tensor_specs.DTensorSpec(
                    mesh, placements, use_strided_shard_as_shard_order=as_order
                ),
                shape,
            )
        )
    if not process_groups.is_ascending(mesh):
        return False
    made_here = any(
        tensor_specs.split_factors(spec) and not spec.use_strided_shard_as_shard_order
        for spec in specs
    )
    if len(mesh.shape) > 1 and not all(map(tensor_specs.decodes_to_shard_order, specs)):
        return source == target
    if made_here:
        return moves_rightly(specs[0], tuple([cut_of(p) for p in specs[1].placements]))
    return True


def _nested(cuts: Cuts) -> bool:
    dims = [cut[0] for cut in cuts if cut is not None]
    return len(dims) != len(set(dims))


def _evenly_enough(
    shape: Sequence[int], cuts: Cuts, source: Cuts, target: Cuts, mesh: Sequence[int], wary: bool
) -> bool:
    """Whether sizes divide under ``cuts`` where they must: everywhere if ``wary``, and where a mesh
    dim goes from one dim to another.
    """
    sizes = list(shape)
    for cut, before, after, parts in zip(cuts, source, target, mesh, strict=True):
        if (
            before is not None
            and after is not None
            and before != after
            and (sizes[before[0]] % parts or sizes[after[0]] % parts)
        ):
            return False
        if cut is not None:
            if wary and sizes[cut[0]] % (cut[1] * parts):
                return False
            sizes[cut[0]] = local_size(sizes[cut[0]], cut[1], parts, 0)
    return True


@dataclass(frozen=True)
class StockStep:
    """One step of torch's, on one mesh dim. ``latencies``: how often the devices wait for one
    another; 0 where they do not.
    """

    kind: str
    mesh_dim: int
    change: str
    latencies: int
    received_elements: int
    peak_elements: int

    @property
    def communicates(self) -> bool:
        return self.latencies > 0


@dataclass(frozen=True)
class StockPlan:
    """What torch's own redistribution does, counted for the busiest rank, as of a
    :class:`RedistributionPlan`.

    ``error``: where torch raises, why; there are no steps then. ``misread``: the placements have
    split factors that no shard order has, which torch may take for others on a mesh of several
    dims; it may then do something else than this, raise half way, or give wrong data.
    """

    shape: tuple[int, ...]
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
        return sum(step.communicates for step in self.steps)

    @property
    def peak_elements(self) -> int:
        """The most elements held at once: the source, which stays, what a step starts from, its
        buffers and its result. Where sizes do not divide, to within the padding.
        """
        return max(
            [
                step.peak_elements + (self.source_elements if i else 0)
                for i, step in enumerate(self.steps)
            ],
            default=self.source_elements,
        )

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

    def to_dict(self, network: Network, mesh_names: Sequence[str] | None = None) -> dict[str, Any]:
        """The plan as plain data, with the names of :meth:`RedistributionPlan.to_dict`; null where
        torch raises.
        """
        if self.error is not None:
            return {
                "error": self.error,
                **dict.fromkeys(
                    (
                        "misread",
                        "steps",
                        "collectives",
                        "received_elements",
                        "peak_elements",
                        "seconds",
                    )
                ),
            }
        steps = [
            {
                "kind": step.kind,
                "mesh_dims": [mesh_names[step.mesh_dim] if mesh_names else step.mesh_dim],
                "change": step.change,
                "communicates": step.communicates,
                "received_elements": step.received_elements,
                "peak_elements": step.peak_elements,
                "seconds": self._seconds(step, network),
            }
            for step in self.steps
        ]
        totals = {
            "collectives": self.collectives,
            "received_elements": self.received_elements,
            "peak_elements": self.peak_elements,
        }
        return {
            "error": None,
            "misread": self.misread,
            "steps": steps,
            **totals,
            "seconds": self.seconds(network),
        }

    def __str__(self) -> str:
        if self.error is not None:
            return f"torch raises: {self.error}"
        if not self.steps:
            return "nothing to do"
        lines = [
            f"{step.kind} on mesh dim {step.mesh_dim}, {step.change}: receives "
            f"{step.received_elements:,} elements"
            for step in self.steps
        ]
        return "\n".join(
            [
                *lines,
                f"in all: {self.collectives} collectives, {self.received_elements:,} elements "
                f"received, at most {self.peak_elements:,} held",
            ]
        )


def stock_plan(
    shape: Sequence[int], mesh: Sequence[int], src: Sequence[Placement], dst: Sequence[Placement]
) -> StockPlan:
    """What torch's own DTensor redistribution does to get a tensor of global ``shape`` on a mesh of
    those sizes from the placements ``src`` to ``dst``.

    torch is asked for its steps; nothing is communicated, and no process group is needed. Rank 0 is
    counted, which holds the most. An all-to-all counts as one, as it is on GPUs (over gloo torch
    gathers instead), and mesh dims that a program has flattened are not known here: torch may join
    collectives on those.

    Raises:
        RuntimeError: this torch cannot be asked.
    """
    redistribution_hook.require_planner()  # what this torch lacks is no refusal of torch's
    shape, mesh = tuple(map(int, shape)), tuple(map(int, mesh))
    try:
        before, after = (_as_taken(placements, shape, mesh) for placements in (src, dst))
        local = list(shape)
        for placement, parts in zip(before, mesh):
            if (cut := cut_of(placement)) is not None:
                local[cut[0]] = local_size(local[cut[0]], cut[1], parts, 0)
        held, steps = prod(local), []
        source, target = (
            tensor_specs.unbound_spec(shape, mesh, placements) for placements in (before, after)
        )
        for info in redistribution_hook.stock_transforms(source, target):
            if mesh[info.mesh_dim] > 1:
                step, local = _step(info, mesh[info.mesh_dim], local)
                steps.append(step)
    except Exception as error:  # whatever torch raises is what it says to this redistribution
        return StockPlan(
            shape, mesh, error=next(iter(str(error).splitlines()), "") or type(error).__name__
        )
    misread = len(mesh) > 1 and not all(map(tensor_specs.decodes_to_shard_order, (source, target)))
    return StockPlan(shape, mesh, tuple(steps), held, misread=misread)


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
            f"torch lists the ranks of a mesh one by one: not asked about {prod(mesh):,} devices"
        )
    tensor_specs.check_no_mixed_partials(placements)
    return tuple([counted_from_0(placement, len(shape)) for placement in placements])


class _Collective(NamedTuple):
    """A collective of torch's on the first rank: the elements received, those of its buffers and
    result, and the local shape that it leaves.
    """

    kind: str
    latencies: int
    received: int
    buffers: int
    local: list[int]


def _step(transform: Any, parts: int, local: list[int]) -> tuple[StockStep, list[int]]:
    """What ``redistribute_local_tensor`` makes of one of torch's transforms from the local shape
    ``local``, and the shape it leads to.
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
        cut = cut_of(after)
        if cut is not None:
            result = _with(result, cut[0], local_size(result[cut[0]], cut[1], parts, 0))
        kinds.append("local share" if cut is None else "local slice")
        # What comes of the collective, and, where the pieces are strided, the slices of all
        # devices.
        peak = max(
            peak,
            prod(local)
            + prod(result)
            + prod(done.local) * (bool(done.kind) + isinstance(after, StridedShard)),
        )
    return StockStep(
        ", ".join(kinds),
        transform.mesh_dim,
        f"{before} -> {after}",
        done.latencies,
        done.received,
        peak,
    ), result


def _reduction(op: str, parts: int, dim: int | None, local: list[int]) -> _Collective:
    """A pending reduction done, to Shard(dim) or to Replicate."""
    if dim is None:
        return _Collective(
            f"all-reduce ({op})", 2, -(-2 * (parts - 1) * prod(local) // parts), prod(local), local
        )
    rows = -(-local[dim] // parts)
    result = _with(local, dim, rows)
    # Blocks of equal size are made by padding, which copies twice, and laid one after the other.
    copies = 2 * (rows * parts != local[dim]) + _apart(local, dim)
    return _Collective(
        f"reduce-scatter ({op})",
        1,
        (parts - 1) * prod(result),
        (parts * copies + 1) * prod(result),
        result,
    )


def _exchange(
    before: Placement, parts: int, to: int | None, local: list[int], logical: Sequence[int]
) -> _Collective:
    """From one Shard to Shard(to), or to Replicate. Torch takes the rows to gather from
    ``logical``, which in other dims may be longer than the local tensor.
    """
    dim, split_factor = cut_of(before)  # type: ignore[misc]  # a Shard
    rows, padded = (
        local_size(logical[dim], split_factor, parts, 0),
        logical[dim] % (parts * split_factor) != 0,
    )
    if to is None:
        block = prod(_with(local, dim, rows))
        # What is gathered comes block after block, and is copied once more unless it lies as the
        # tensor does.
        copies = 1 + (isinstance(before, StridedShard) or _apart(local, dim))
        return _Collective(
            "all-gather",
            1,
            (parts - 1) * block,
            (parts * copies + padded) * block,
            _with(local, dim, logical[dim]),
        )
    columns = -(-local[to] // parts)
    block = prod(_with(_with(local, dim, rows), to, columns))
    # Padded, cut into blocks unless they lie so, received, and joined.
    copies = 2 + (padded or columns * parts != local[to]) + _apart(local, to)
    return _Collective(
        "all-to-all",
        1,
        (parts - 1) * block,
        parts * copies * block,
        _with(_with(local, dim, logical[dim]), to, columns),
    )


def _with(shape: Sequence[int], dim: int, n: int) -> list[int]:
    return [*shape[:dim], n, *shape[dim + 1 :]]


def _apart(shape: Sequence[int], dim: int) -> bool:
    """Whether a block of rows of ``dim`` lies in pieces."""
    return prod(shape[:dim]) > 1

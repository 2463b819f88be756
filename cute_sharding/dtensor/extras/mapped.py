"""Inputs of functions with fixed placements: DTensors that our views and slices keep sharded, where
torch's make replicas, are gathered. And results of ``local_map`` on uneven shards: torch takes each
rank's result as a part with as many rows as all others, so ranks would disagree about the global
shape. A rank cannot know how many rows the function gives on other ranks, so ranks exchange their
local shapes. For ``from_local`` they do so where a program asks for a check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from itertools import product
from typing import Any
from zlib import crc32

import torch

from cute_sharding.dtensor.door.held import local_shape
from cute_sharding.dtensor.replaced import communication, tensor_specs
from cute_sharding.dtensor.replaced.communication import is_ascending
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.local_tensors import leaves, tree_map
from cute_sharding.dtensor.replaced.scatters import scatter_parts
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorMeta,
    decoded_order,
    dtensor_of,
    is_dtensor,
    may_be_uneven,
    placed_as,
)
from cute_sharding.dtensor.run.groups import on_each_rank, place
from cute_sharding.dtensor.run.packing import CHUNKS
from cute_sharding.dtensor.run.placements import counted_from_0, text
from cute_sharding.exchange import Mesh, Placed
from cute_sharding.layout.layout import row_major
from cute_sharding.sharding.rows import chains_of


def gather_to_distribute(tensor: Any, mesh: Any, placements: Any) -> Any:
    """A DTensor to distribute; redistributed first if that only takes gathers."""
    wanted = (Replicate(),) * tensor.device_mesh.ndim if placements is None else (*placements,)
    if mesh in (None, tensor.device_mesh) and _gathers(tensor.placements, wanted):
        return tensor.redistribute(placements=wanted)
    return tensor


def distributed(tensor: torch.Tensor, mesh: Any, placements: Any, source: int | None) -> Any | None:
    """The DTensor of a plain tensor: that of the rank ``source`` of each process group, each part
    on the rank at its coordinate; for ``source`` None, each rank's own tensor. None if torch
    distributes it like this, or refuses to.
    """
    if is_dtensor(tensor) or placements is None or len(placements) != mesh.ndim:
        return None
    strided = any(isinstance(p, StridedShard) for p in placements)
    if (
        not (strided or (source is not None and _is_cut_on_others(placements, mesh)))
        or not tensor.is_leaf
        or tensor.device.type != mesh.device_type
        or mesh.get_coordinate() is None
    ):
        return None
    local = on_each_rank(lambda rank, x: x, tensor.detach())
    placements = tuple([counted_from_0(p, tensor.ndim) for p in placements])
    for m, p in decoded_order(placements, mesh.shape) or enumerate(placements):
        if isinstance(p, (Shard, StridedShard)):
            parts, _ = p._split_tensor(local, mesh.size(m), with_padding=False, contiguous=True)
            local = (
                _own_part(parts, mesh, m)
                if source is None
                else scatter_parts(parts, p.dim, mesh, m, source)
            )
        else:
            local = Replicate._make_replicate_tensor(local, mesh, m, source)
            if isinstance(p, Partial):
                local = p._partition_value(local, mesh, m)
    meta = TensorMeta(tensor.size(), tensor.stride(), tensor.dtype)
    spec = DTensorSpec(mesh, placements, meta)
    return dtensor_of(
        local.requires_grad_(tensor.requires_grad), spec, requires_grad=tensor.requires_grad
    )


def _is_cut_on_others(placements: Sequence[Placement], mesh: Any) -> bool:
    """Whether the placements shard on a mesh whose ranks do not ascend."""
    return any(p.is_shard() for p in placements) and not is_ascending(mesh)


def _own_part(parts: Sequence[torch.Tensor], mesh: Any, m: int) -> torch.Tensor:
    """The part at this rank's coordinate."""
    return on_each_rank(lambda rank, *some: some[place(mesh, rank)[m]].clone(), *parts)


def _gathers(given: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether redistributing from the one to the other only replicates."""
    return tuple(given) != tuple(wanted) and all(
        p == q or q.is_replicate() for p, q in zip(given, wanted)
    )


def lenient_local_map(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function behind local_map; it redistributes inputs that only have to be gathered, and
    gives results of uneven shards their global shape.
    """
    # Since 2.14 it takes one more setting, before the program's arguments.
    named = [p for p in signature(stock).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = len(named) - 6

    # The parameters have torch's names, so that the program's keywords are in kwargs.
    def _local_map_wrapped(
        func: Any,
        out_placements: Any,
        in_placements: Any,
        in_grad_placements: Any,
        device_mesh: Any,
        redistribute_inputs: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        uneven = _some_are_uneven(args[others:], in_placements)
        if in_placements is not None and not redistribute_inputs:
            differing = [
                (x.placements, wanted)
                for x, wanted in zip(leaves(args[others:]), in_placements)
                if is_dtensor(x) and wanted is not None and tuple(x.placements) != tuple(wanted)
            ]
            redistribute_inputs = all(_gathers(*each) for each in differing)
        settings = in_grad_placements, device_mesh, redistribute_inputs
        found = stock(func, out_placements, in_placements, *settings, *args, **kwargs)
        return tree_map(_with_global_shape, found) if uneven else found

    return _local_map_wrapped


def _some_are_uneven(args: Any, in_placements: Any) -> bool:
    """Whether ranks get different numbers of rows of some DTensor. DTensors of symbolic sizes do
    not count: a compiled program behaves as in torch.
    """
    given = leaves(args)
    for x, wanted in zip(given, in_placements or [None] * len(given)):
        if is_dtensor(x) and all(type(n) is int for n in x.shape):
            spec = x._spec if wanted is None else placed_as(x._spec, tuple(wanted))
            if may_be_uneven(spec):
                return True
    return False


def _with_global_shape(tensor: Any) -> Any:
    """A DTensor that ``local_map`` made of this rank's local tensor, with the global shape that the
    local tensors of all ranks add up to; unchanged if it is not sharded, or no DTensor.

    One collective of a few numbers for each mesh dim, on all ranks of the mesh.

    Raises:
        RuntimeError: no tensor has such local tensors in these placements; on all ranks alike.
    """
    if not is_dtensor(tensor):
        return tensor
    spec, mesh = tensor._spec, tensor.device_mesh
    cuts = [tensor_specs.cut_of(p) for p in spec.placements]
    if not any(cuts) or not mesh._is_current_rank_part_of_mesh():
        return tensor
    local = tensor.to_local()
    of_ranks = _gathered([*local.shape, *local.stride()], local.device, mesh)
    sizes, ndim = tuple(mesh.shape), local.ndim
    shape = []
    for d in range(ndim):
        ways = [range(n) if cut and cut[0] == d else range(1) for n, cut in zip(sizes, cuts)]
        shape.append(sum(of_ranks[where][d] for where in product(*ways)))
    placed = Placed(tuple(shape), Mesh.numbered(sizes), chains_of(cuts, ndim, sizes))
    for where, of in of_ranks.items():
        if tuple(of[:ndim]) != placed.shape_of(where):
            raise RuntimeError(
                "the results of local_map have local shapes "
                f"{[some[:ndim] for some in of_ranks.values()]}, but are not the shards of one "
                f"tensor with placements {text(spec.placements)} on mesh {sizes}. The first ranks "
                "need ceil(rows / ranks) rows each, and the last ranks need the other rows. Pass "
                "other out_placements, or redistribute the inputs to even shards."
            )
    steps = of_ranks[(0,) * len(sizes)][ndim:]
    order = sorted(range(ndim), key=lambda d: -steps[d])  # as on the rank with the most rows
    in_order = dict(zip(order, row_major(tuple([shape[d] for d in order]))))
    return type(tensor).from_local(
        local,
        mesh,
        spec.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple([in_order[d] for d in range(ndim)]),
    )


def check_locals(
    local: torch.Tensor,
    mesh: Any,
    placements: Sequence[Placement] | None,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> None:
    """Check for ``from_local(..., run_check=True)`` that all ranks have given the same global shape
    and placements, and local tensors of the shapes that these say.

    One collective of two numbers for each mesh dim, on all ranks of the mesh.

    Raises:
        ValueError: some rank has not; on all ranks alike.
    """
    if is_tracing() or not mesh._is_current_rank_part_of_mesh():
        return
    some = (Replicate(),) * mesh.ndim if placements is None else placements
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple([counted_from_0(p, len(shape)) for p in some]), meta)
    is_known = tensor_specs.are_known(spec.placements) and type(local) is torch.Tensor
    wanted = local_shape(spec) if is_known else tuple(local.shape)
    said = crc32(f"{shape} {stride} {text(spec.placements)}".encode())
    numbers, on = [said, tuple(local.shape) == wanted], torch.device(mesh.device_type)
    of_ranks = _gathered(numbers, on, mesh)
    if len({given for given, _ in of_ranks.values()}) > 1:
        raise ValueError(
            "from_local got different shapes, strides or placements on different ranks. On this "
            f"rank: shape {shape}, placements {text(spec.placements)}. Pass the same shape=, "
            "stride= and placements on all ranks"
        )
    wrong = [where for where, (_, is_right) in of_ranks.items() if not is_right]
    if wrong:
        names = mesh.mesh_dim_names
        raise ValueError(
            f"from_local got a local tensor of another shape than a DTensor of shape {shape} with "
            f"placements {text(spec.placements)} has on mesh "
            f"{tensor_specs.mesh_text(tuple(mesh.shape), names)}, at the coordinates {wrong}. This "
            f"rank has shape {tuple(local.shape)}, and {wanted} is right. {CHUNKS}"
        )


def _gathered(
    numbers: Sequence[int], device: torch.device, mesh: Any
) -> dict[tuple[int, ...], list[int]]:
    """Coordinates -> the numbers of that rank, for each rank of the mesh."""
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    for m in reversed(range(mesh.ndim)):
        group = communication.group_of_dim(mesh, m)
        parts = communication.all_gather(found.unsqueeze(0), group)
        order = communication.coordinates_in_groups(mesh, m)[communication.this_rank()]
        found = parts[[order.index(k) for k in range(len(order))]]
    return {
        where: found[where].tolist() for where in product(*[range(n) for n in tuple(mesh.shape)])
    }

"""What ``local_map`` gives where some input is cut unevenly. torch takes what each rank's function
gave for a part of as many rows as all others, so that ranks disagree about the global shape. Which
rows the function gives on other ranks nobody knows: so they tell one another their local shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from cute_sharding.dtensor.replaced import collective_ops, process_groups, tensor_specs
from cute_sharding.dtensor.run.placements import text
from cute_sharding.layout.layout import row_major
from cute_sharding.sharding.deal import local_size


def with_global_shapes(tensor: Any) -> Any:
    """A DTensor that ``local_map`` made of this rank's local tensor, with the shape that the local
    tensors of all ranks have together; as it is where it is cut nowhere.

    One collective for each mesh dim, of a few numbers, on all ranks of the mesh.

    Raises:
        RuntimeError: no tensor has such local tensors in these placements; on all ranks alike.
    """
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
    for where, of in of_ranks.items():
        if of[:ndim] != _local_shape(shape, cuts, sizes, where):
            raise RuntimeError(
                f"local_map: local tensors of shapes {[some[:ndim] for some in of_ranks.values()]} "
                f"are those of no tensor with placements {text(spec.placements)} on mesh {sizes}: "
                "the first ranks have as many rows as divided and rounded up, and the last what is "
                "left. Name other out_placements, or redistribute the inputs so that sizes divide."
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


def _gathered(
    numbers: Sequence[int], device: torch.device, mesh: Any
) -> dict[tuple[int, ...], list[int]]:
    """The numbers that each rank of the mesh gives, by its coordinates."""
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    for m in reversed(range(mesh.ndim)):
        group = process_groups.group_of_dim(mesh, m)
        parts = collective_ops.all_gather(found.unsqueeze(0), group)
        order = process_groups.coordinates_in_groups(mesh, m)[process_groups.this_rank()]
        found = parts[[order.index(k) for k in range(len(order))]]
    return {
        where: found[where].tolist() for where in product(*[range(n) for n in tuple(mesh.shape)])
    }


def _local_shape(
    shape: Sequence[int],
    cuts: Sequence[tuple[int, Any] | None],
    mesh: Sequence[int],
    where: Sequence[int],
) -> list[int]:
    sizes = list(shape)
    for cut, n, k in zip(cuts, mesh, where):
        if cut is not None:
            sizes[cut[0]] = local_size(sizes[cut[0]], cut[1], n, k)
    return sizes

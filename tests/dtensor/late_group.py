"""A process group whose results come late, from threads, and are not a number until then. Every
rank sends ones, so that ones arrive, whatever is sent to whom.
"""

import threading

import torch
import torch.distributed as dist
from recording_group import Recording
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future
from torch.utils._pytree import tree_leaves

SECONDS = 0.05


class Late(Recording):
    def _run(self, kind, received, names, *args):
        future, results = Future(), tree_leaves(args[0])
        for x in results:
            x.fill_(float("nan"))

        def arrive():
            for x in results:
                x.fill_(1.0)
            future.set_result(args[0])

        threading.Timer(SECONDS, arrive).start()
        return _create_work_from_future(future)


def late_meshes():
    """A mesh of four, and one of two by two, of which this process is the first rank."""
    create = lambda store, rank, world, timeout: Late(rank, world)  # noqa: E731
    if "late" not in dist.Backend.backend_list:
        dist.Backend.register_backend("late", create, devices=["cpu"])
    groups = [dist.new_group(ranks, backend="late") for ranks in ([0, 1, 2, 3], [0, 2], [0, 1])]
    ranks = torch.arange(4).reshape(2, 2)
    return [
        DeviceMesh.from_group(groups[0], "cpu"),
        DeviceMesh.from_group(groups[1:], "cpu", mesh=ranks, mesh_dim_names=("a", "b")),
    ]


def ones(mesh, placements, rows=8):
    """Rank 0's part of a tensor of (rows, 8) ones."""
    local = torch.ones(rows, 8)
    for p, n in zip(placements, mesh.shape):
        if isinstance(p, Shard | _StridedShard):
            local = local.narrow(p.dim, 0, -(-local.shape[p.dim] // n))
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=(rows, 8), stride=(8, 1)
    )

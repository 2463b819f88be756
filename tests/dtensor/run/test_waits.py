"""A rank reads what a collective brings after it has arrived: on a group whose results come late,
from threads, and are not a number until then. (Where all ranks are in one process, nothing is ever
late.)
"""

import threading
from itertools import product

import pytest
import torch
import torch.distributed as dist
from recording_group import Recording
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future
from torch.utils._pytree import tree_leaves

import cute_sharding

SECONDS = 0.05
KINDS = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), Partial()]


class Late(Recording):
    """Every rank sends ones, so that ones arrive, whatever is sent to whom."""

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


@pytest.fixture(scope="module")
def meshes():
    create = lambda store, rank, world, timeout: Late(rank, world)  # noqa: E731
    if "late" not in dist.Backend.backend_list:
        dist.Backend.register_backend("late", create, devices=["cpu"])
    groups = [dist.new_group(ranks, backend="late") for ranks in ([0, 1, 2, 3], [0, 2], [0, 1])]
    ranks = torch.arange(4)
    return [
        DeviceMesh.from_group(groups[0], "cpu"),
        DeviceMesh.from_group(
            groups[1:], "cpu", mesh=ranks.reshape(2, 2), mesh_dim_names=("a", "b")
        ),
    ]


def ones(mesh, placements):
    """Rank 0's part of a tensor of (8, 8) ones."""
    local = torch.ones(8, 8)
    for p, n in zip(placements, mesh.shape):
        if isinstance(p, Shard | _StridedShard):
            local = local.narrow(p.dim, 0, local.shape[p.dim] // n)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=(8, 8), stride=(8, 1)
    )


def assert_arrived(x, case):
    """As an op reads it, and not only a program that asks for a plain tensor."""
    local = getattr(x._local_tensor, "elem", x._local_tensor)
    is_late = local is not x._local_tensor
    assert is_late or bool((local.detach() == 1).all()), case
    assert bool((x.to_local().detach() + 0 == 1).all()), case


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dims", [1, 2])
def test_redistributions(meshes, dims):
    mesh = meshes[dims - 1]
    with cute_sharding.enabled(redistribution=True, movement=True):
        for before, after in product(KINDS, KINDS):
            if isinstance(after, Partial):
                continue
            rest = [Replicate()] * (dims - 1)
            x = ones(mesh, [before, *rest])
            assert_arrived(x.redistribute(placements=[after, *rest]), (before, after))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize(
    "op",
    [
        lambda x: x[1:],
        lambda x: x.roll(1, 0),
        lambda x: x.reshape(4, 16),
        lambda x: x * x.T,
        lambda x: torch.cat([x, x]),
    ],
    ids=["slice", "roll", "view", "operands", "cat"],
)
def test_ops(meshes, op, dims):
    mesh = meshes[dims - 1]
    with cute_sharding.enabled(redistribution=True, movement=True):
        for placement in KINDS[1:4]:
            x = ones(mesh, [placement, *[Shard(1)] * (dims - 1)])
            assert_arrived(op(x), placement)

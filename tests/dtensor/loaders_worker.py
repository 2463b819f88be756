"""What the processes of test_loaders.py run: a trainer on the first ranks and engines on the last,
or both on the same. Each rank of an engine compares what a plan has written with what its loader
makes of whole tensors, and what it receives with a count.
"""

import engine_loaders as loaders
import torch
import torch.distributed as dist
from processes_worker import part_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

TRAINERS = (0, 1, 2, 3)


class Meshes:
    """Those of the trainer, made on every rank of the world."""

    def __init__(self):
        self.line = DeviceMesh("cpu", list(TRAINERS))
        self.square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        self.turned = DeviceMesh("cpu", [3, 1, 0, 2])
        self.halves = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]


def dtensor(whole, mesh, placements):
    """Of this rank, which may be outside of the mesh."""
    local = part_of(whole, mesh, placements)
    return DTensor.from_local(
        whole.new_empty(0) if local is None else local.clone(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


# How a trainer has the k-th of its tensors.


def fsdp(meshes, k, whole):
    return dtensor(whole, meshes.line, [Shard(0)])


def tensor_parallel(meshes, k, whole):
    return dtensor(whole, meshes.turned, [Shard(k % whole.ndim)])


def fsdp_and_tensor_parallel(meshes, k, whole):
    """As fully_shard makes of both ways of tensor parallelism, and of what has none."""
    first = (_StridedShard(0, split_factor=2), Shard(0))
    placements = (first, (Shard(0), Shard(whole.ndim - 1)), (Shard(0), Replicate()))
    chosen = placements[k % 3] if whole.ndim > 1 or k % 3 == 2 else first
    return dtensor(whole, meshes.square, chosen)


def strided(meshes, k, whole):
    return dtensor(whole, meshes.line, [_StridedShard(k % whole.ndim, split_factor=2 + k % 2)])


def slices_and_plain(meshes, k, whole):
    """On a slice of the mesh, each as large; or on no mesh at all."""
    if k % 3 == 2:
        return whole.clone()
    if k % 3 == 1:
        return dtensor(whole, meshes.square["tp"], [Shard(whole.ndim - 1)])
    return dtensor(whole, meshes.square["dp"], [Replicate() if whole.ndim == 1 else Shard(0)])


def meshes_of_their_own(meshes, k, whole):
    return dtensor(whole, meshes.halves[k % 2], [Shard(k // 2 % whole.ndim)])


def plain(meshes, k, whole):
    return whole.clone()


WAYS = [
    fsdp,
    tensor_parallel,
    fsdp_and_tensor_parallel,
    strided,
    slices_and_plain,
    meshes_of_their_own,
    plain,
]


def state(way, meshes, whole):
    return {name: way(meshes, k, x) for k, (name, x) in enumerate(whole.items())}


def local_of(x):
    return x.to_local() if isinstance(x, DTensor) else x


def bits(x):
    return x.detach().contiguous().view(torch.uint8)


def counted(name, place, source):
    """Bytes that a rank of the engine needs and does not hold, each element once: the loader runs
    on numbers of elements in place of values. ``source``: what the rank holds as a trainer, by
    numbers.
    """
    sized, _ = loaders.KINDS[name]
    one = loaders.engine(name, *place, loaders.numbered())
    one.load(loaders.numbers(sized))
    sizes = loaders.engine(name, *place, loaders.parameter(0)).into
    bytes_of = {}
    for key, x in one.into.items():
        for number in x.flatten().tolist():
            size = sizes[key].dtype.itemsize
            bytes_of[number] = min(size, bytes_of.get(number, size))
    bytes_of.pop(0, None)
    for x in source.values():
        for number in local_of(x).flatten().tolist():
            bytes_of.pop(number, None)
    return sum(bytes_of.values())


def check(name, way, meshes, engines):
    """A kind, a way to have it, and the ranks of the engine."""
    rank, case = dist.get_rank(), f"{name} from {way.__name__}"
    sized, _ = loaders.KINDS[name]
    trains, place = rank in TRAINERS, None
    if rank in engines:
        place = engines.index(rank), len(engines)
        one, expected = (loaders.engine(name, *place, loaders.parameter(7.0)) for _ in range(2))
    source = state(way, meshes, loaders.values(sized)) if trains else None
    plan = cute_sharding.plan_load(one.load if place else None, one.into if place else None, source)
    for step in range(2):
        whole = loaders.values(sized, step)
        if place and step == 0:
            for key, x in one.into.items():
                assert torch.equal(bits(x), bits(expected.into[key])), f"{case}: planning wrote"
        plan.run(state(way, meshes, whole) if trains else None)
        if place:
            expected.load(whole)
            for key, x in one.into.items():
                assert torch.equal(bits(x), bits(expected.into[key])), (
                    f"{case}, step {step}, rank {rank}: {key} is {x}, not {expected.into[key]}"
                )
    held = state(way, meshes, loaders.numbers(sized)) if trains else {}
    wanted = counted(name, place, held) if place else 0
    assert plan.received_bytes == wanted, (
        f"{case}: rank {rank} receives {plan.received_bytes} bytes, not {wanted}"
    )


def loads(engines, names=None, ways=WAYS):
    meshes = Meshes()
    for name in names or loaders.KINDS:
        for way in ways:
            check(name, way, meshes, engines)

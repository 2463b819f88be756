"""What the processes of test_reshard.py run: every rank draws the same models, meshes and
placements, and compares its own part with what one device has.
"""

import random
from collections import Counter

import torch
import torch.distributed as dist
from across_worker import as_dtensor, draw_mesh, draw_ranks, local_of
from drawing import contributions, draw_placements, reduced
from simulation import is_partial
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import cute_sharding
from cute_sharding.exchange import bundle

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int16,
    torch.complex64,
    torch.complex128,
)
_meshes = {}


def mesh_of(sizes, ranks):
    key = (tuple(sizes), *ranks)
    if key not in _meshes:
        _meshes[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(tuple(sizes)))
    return _meshes[key]


class Sent(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank is sent by all-to-alls."""

    def __init__(self):
        super().__init__()
        self.counts, self.received = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            self.counts[name] += 1
            self.received += sum(args[1]) if name.startswith("all_to_all") else 0
        if name.startswith("alltoall_base"):  # into memory that is there
            self.counts[name] += 1
            self.received += args[0].numel()
        return result


def draw_shape(rng):
    return tuple(rng.choice([0, 1, 2, 3, 4, 5, 6, 8]) for _ in range(rng.choice([0, 1, 2, 2, 3])))


def as_dtype(whole, dtype):
    if isinstance(whole, dict):
        return {key: as_dtype(value, dtype) for key, value in whole.items()}
    return (whole % 2 if dtype in (torch.bool, torch.float8_e4m3fn) else whole).to(dtype)


def draw_tensor(rng, one, sizes, target, others, pending):
    """(the tensor on this rank, its placements to be, what this rank is to have)"""
    shape = draw_shape(rng)
    dtype = rng.choice(DTYPES)
    op = "sum" if pending and rng.random() < 0.5 else None
    before = draw_placements(rng, sizes, shape, pending=op, chance=0.4 if op else 0.0)
    after = draw_placements(rng, others, shape)
    given = contributions(rng, shape, sizes, before)
    if not any(map(is_partial, before)):
        given = as_dtype(given, dtype)
    whole = reduced(given, sizes, before, [Replicate() for _ in before])[0]
    source = mesh_of(sizes, one)
    x = as_dtensor(
        local_of(given, sizes, one, before, dist.get_rank()), shape, source, before, whole.dtype
    )
    other = [*map(int, target.mesh.flatten())]
    return x, after, local_of(whole, others, other, after, dist.get_rank()), whole.dtype


def drawn_models(first, stop, prepared=False, limited=False, long=None):
    """Draws in [first, stop); ``prepared``: the ranks of both meshes get a group; ``long``: from so
    many bytes on a message goes by itself.
    """
    bundle.LONG = long or bundle.LONG
    world = dist.get_world_size()
    for seed in range(first, stop):
        rng = random.Random(seed)
        one = draw_ranks(rng, world)
        other = rng.choice([draw_ranks(rng, world), one, rng.sample(one, len(one))])
        sizes, others = draw_mesh(rng, one), draw_mesh(rng, other)
        target = mesh_of(others, other)
        if prepared:
            cute_sharding.prepare_groups(mesh_of(sizes, one), target)
        drawn = [
            draw_tensor(rng, one, sizes, target, others, pending=seed % 3 == 0)
            for _ in range(rng.randint(1, 9))
        ]
        state = {f"w{k}": x for k, (x, *_) in enumerate(drawn)}
        placements = {f"w{k}": after for k, (_, after, *_) in enumerate(drawn)}
        said = f"seed {seed}: {one} as {sizes} -> {other} as {others} {placements}"
        once(state, placements, target, [wanted for *_, wanted, _ in drawn], said, limited)


def once(state, placements, target, wanted, said, limited):
    plan = cute_sharding.plan_reshard(state, placements, target)
    assert plan.coverage.is_whole, said
    limit = None
    if limited:
        try:
            cute_sharding.plan_reshard(state, placements, target, memory_limit=-1)
        except ValueError as error:
            limit = int(str(error).split("at least ")[1].split()[0])
    pending = any(is_partial(p) for x in state.values() for p in x.placements)
    before = dict(state)
    with Sent() as sent:
        result = cute_sharding.reshard(state, placements, target, memory_limit=limit)
    assert result is state, said
    if not pending and not limited:
        assert sum(sent.counts.values()) <= 1, (said, sent.counts)
    for (name, x), expected in zip(state.items(), wanted):
        assert x.device_mesh == target, said
        assert tuple(x.placements) == tuple(placements[name]), (said, name)
        assert x.requires_grad == before[name].requires_grad, said
        assert x.dtype == before[name].dtype and x.shape == before[name].shape, said
        local = x.to_local()
        if expected is None:
            assert local.numel() == 0, said
        else:
            assert local.dtype == expected.dtype, said
            assert torch.equal(as_bytes(local), as_bytes(expected)), (said, name)
    if not pending and sent.counts and not limited:
        received = sent.received + alone(plan) - room(plan)
        assert received == sum(
            plan.packed[k].bundle.received_by(dist.get_rank()) for k in range(len(plan.packed))
        ), said


def mine(plan):
    """What this rank does in each bucket, and the bucket."""
    rank, runner = dist.get_rank(), plan._runner
    return [
        (runner.part(k), each.bundle) for k, each in enumerate(plan.packed) if rank in each.bundle
    ]


def alone(plan):
    """The bytes that this rank is sent in messages of one tensor by themselves."""
    return sum(
        single.size * item.itemsize
        for part, bundle_ in mine(plan)
        for item, of in zip(bundle_.items, part.alone)
        for single in of.taken
    )


def room(plan):
    """What there is beside the elements in the messages to this rank: seals, and up to the widest
    element.
    """
    sent = sum(sum(part.receives) for part, _ in mine(plan)) + alone(plan)
    return sent - sum(bundle_.received_by(dist.get_rank()) for _, bundle_ in mine(plan))


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)

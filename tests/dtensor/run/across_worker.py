"""What the processes of test_across_meshes.py run: every rank draws the same pairs of meshes and
placements, and compares its own part with what one device has, forward and backward.
"""

import random
from collections import Counter

import torch
import torch.distributed as dist
from drawing import contributions, draw_placements, draw_shape, reduced
from enumeration import devices, held
from simulation import cuts_of, is_partial
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode

import cute_sharding


def draw_mesh(rng, ranks):
    sizes, left = [], len(ranks)
    while left > 1:
        n = rng.choice([k for k in range(2, left + 1) if left % k == 0])
        sizes.append(n)
        left //= n
    if rng.random() < 0.2:
        sizes.insert(rng.randrange(len(sizes) + 1), 1)
    return tuple(sizes or [1])


def draw_ranks(rng, world):
    ranks = rng.sample(range(world), rng.randint(1, world))
    return ranks if rng.random() < 0.3 else sorted(ranks)


def local_of(full, mesh, ranks, placements, rank):
    """What a rank of that mesh holds; nothing where it is not on it."""
    if rank not in ranks:
        return None
    at = ranks.index(rank)
    whole = full[at] if isinstance(full, dict) else full
    index = held(tuple(whole.shape), mesh, cuts_of(placements), devices(mesh)[at])
    return whole.reshape(-1)[torch.from_numpy(index)]


def as_dtensor(local, shape, mesh, placements, dtype):
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    local = torch.empty(0, dtype=dtype) if local is None else local
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local.requires_grad_(), spec, requires_grad=True)


class Sent(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def across(first, stop, prepared=False, pending=0.2):
    """Draws in [first, stop); ``prepared``: the ranks of both meshes get a group."""
    world, rank = dist.get_world_size(), dist.get_rank()
    meshes = {}
    for seed in range(first, stop):
        rng = random.Random(seed)
        shape = draw_shape(rng)
        one = draw_ranks(rng, world)
        other = rng.choice([draw_ranks(rng, world), one, rng.sample(one, len(one))])
        sizes, others = draw_mesh(rng, one), draw_mesh(rng, other)
        for key in ((sizes, *one), (others, *other)):
            if key not in meshes:
                meshes[key] = DeviceMesh("cpu", torch.tensor(key[1:]).reshape(key[0]))
        source, target = meshes[(sizes, *one)], meshes[(others, *other)]
        if prepared:
            cute_sharding.prepare_groups(source, target)
        op = rng.choice(["sum", "max", "avg"])
        before = draw_placements(rng, sizes, shape, pending=op, chance=pending)
        after = draw_placements(rng, others, shape)
        given = contributions(rng, shape, sizes, before)
        whole = reduced(given, sizes, before, [Replicate() for _ in before])[0]
        said = f"seed {seed}: {shape} {one} as {sizes} {before} -> {other} as {others} {after}"
        x = as_dtensor(
            local_of(given, sizes, one, before, rank), shape, source, before, whole.dtype
        )
        once(x, target, after, said, local_of(whole, others, other, after, rank), rng, one, sizes)


def once(x, target, after, said, wanted, rng, one, sizes):
    rank = dist.get_rank()
    try:
        with Sent() as sent:
            result = cute_sharding.redistribute(x, target, after)
    except RuntimeError as error:
        assert "can be read left to right or as a shard order" in str(error), said
        return
    assert result.device_mesh == target and tuple(result.placements) == tuple(after), said
    assert sum(sent.counts.values()) <= 1 + sum(map(is_partial, x.placements)), (said, sent.counts)
    if wanted is None:
        assert result.to_local().numel() == 0, said
    else:
        assert torch.equal(result.to_local(), wanted), said
    # The gradient is another tensor's values, in the placements of the result.
    weights = torch.randint(1, 9, tuple(x.shape), generator=torch.Generator().manual_seed(7))
    weights = weights.to(x.dtype)
    at = [*map(int, target.mesh.flatten())]
    part = local_of(weights, tuple(target.shape), at, after, rank)
    meta = result._spec.tensor_meta
    gradient = DTensor(
        torch.empty(0, dtype=x.dtype) if part is None else part,
        DTensorSpec(target, tuple(after), tensor_meta=meta),
        requires_grad=False,
    )
    (back,) = torch.autograd.grad(result, x, gradient)
    plain = [Replicate() if isinstance(p, Partial) else p for p in x.placements]
    assert tuple(back.placements) == tuple(plain), said
    expected = local_of(weights, sizes, one, plain, rank)
    if expected is not None:
        assert torch.equal(back.to_local(), expected), said

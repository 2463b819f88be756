"""What the processes of test_across_meshes.py run: every rank draws the same pairs of meshes and
placements, and compares its own part with what one device has, forward and backward.
"""

import random
import re
from collections import Counter

import torch
import torch.distributed as dist
from drawing import contributions, draw_placements, draw_shape, reduced
from enumeration import devices, held_by_a_dtensor
from simulation import cuts_of, is_partial
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
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
    cuts = cuts_of(placements)
    index = held_by_a_dtensor(tuple(whole.shape), mesh, cuts, devices(mesh)[at])
    return whole.reshape(-1)[torch.from_numpy(index)]


def as_dtensor(local, shape, mesh, placements, dtype):
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    local = torch.empty(0, dtype=dtype) if local is None else local
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    has_gradient = dtype.is_floating_point
    return DTensor(local.requires_grad_(has_gradient), spec, requires_grad=has_gradient)


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


def across(first, stop, prepared=False, pending=0.2, limited=False):
    """Draws in [first, stop); ``prepared``: the ranks of both meshes get a group; ``limited``: with
    the least memory that will do.
    """
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
        limit = least_memory(x, target, after) if limited else None
        wanted = local_of(whole, others, other, after, rank)
        once(x, target, after, said, wanted, rng, one, sizes, limit)


def least_memory(x, target, placements):
    """What a redistribution, and its gradient, may hold at the least, as the errors say; one and
    the same on all ranks.
    """
    limit = 0
    while True:
        try:
            cute_sharding.redistribute(x, target, placements, memory_limit=limit)
        except ValueError as error:
            limit = int(re.search(r"memory_limit=(\d+)", str(error))[1])
        else:
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, limit)
            of_meshes = {
                every[int(r)] for mesh in (x.device_mesh, target) for r in mesh.mesh.flatten()
            }
            assert len(of_meshes) == 1, (x._spec, target, placements, every)
            return of_meshes.pop()


def once(x, target, after, said, wanted, rng, one, sizes, limit=None):
    rank = dist.get_rank()
    with Sent() as sent:
        result = cute_sharding.redistribute(x, target, after, memory_limit=limit)
    assert result.device_mesh == target and tuple(result.placements) == tuple(after), said
    if x.device_mesh != target and limit is None:
        most = 1 + sum(map(is_partial, x.placements))
        assert sum(sent.counts.values()) <= most, (said, sent.counts)
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


# -- programs --------------------------------------------------------------------------------------


def trainer_and_generator():
    """Weights are trained on two ranks and used on two others, and the loss on the latter trains
    them: as on one device.
    """
    trainer, generator = (DeviceMesh("cpu", torch.tensor(r)) for r in ([0, 1], [2, 3]))
    torch.manual_seed(0)
    start, inputs = torch.randn(6, 5, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    alone = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([alone], 0.1)
    weight = distribute_tensor(start.clone(), trainer, [Shard(0)]).requires_grad_()
    here = torch.optim.SGD([weight], 0.1)
    x = distribute_tensor(inputs, generator, [Replicate()])
    for _ in range(3):
        optimizer.zero_grad()
        (inputs @ alone).pow(2).sum().backward()
        optimizer.step()
        here.zero_grad()
        used = cute_sharding.redistribute(weight, generator, [Shard(1)])
        (x @ used).pow(2).sum().backward()
        assert weight.grad.device_mesh == trainer
        here.step()
    if dist.get_rank() < 2:
        rows = alone.detach().chunk(2)[dist.get_rank()]
        assert torch.allclose(weight.to_local(), rows)


def by_the_tensors_own_method():
    """With the flag, tensor.redistribute takes another mesh, and its gradient comes back."""
    line, square = (
        DeviceMesh("cpu", torch.arange(4)),
        DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]])),
    )
    full = torch.arange(35.0).reshape(7, 5)
    with cute_sharding.enabled(redistribution=True):
        x = distribute_tensor(full, line, [Shard(0)]).requires_grad_()
        moved = x.redistribute(square, [Shard(1), Shard(0)])
        assert torch.equal(moved.full_tensor(), full)
        (moved * moved).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * full)
        assert x.grad.device_mesh == line


def between_graphs():
    """A compiled program breaks its graph there, and goes on."""
    line, square = (
        DeviceMesh("cpu", torch.arange(4)),
        DeviceMesh("cpu", torch.arange(4).reshape(2, 2)),
    )
    full = torch.arange(24.0).reshape(6, 4)

    def program(x):
        return cute_sharding.redistribute(x * 2, square, "S(1), R") + 1

    x = distribute_tensor(full, line, [Shard(0)])
    result = torch.compile(program, backend="aot_eager")(x)
    assert result.device_mesh == square
    assert torch.equal(result.full_tensor(), full * 2 + 1)


def slices_of_meshes():
    """Of each half its own: two exchanges at once, on the ranks of each."""
    whole = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("half", "rank"))
    other = DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]), mesh_dim_names=("half", "rank"))
    full = torch.arange(12.0).reshape(6, 2) + 100 * (dist.get_rank() // 2)
    x = DTensor.from_local(
        full.chunk(2)[dist.get_rank() % 2], whole["rank"], [Shard(0)], run_check=False
    )
    cute_sharding.prepare_groups(whole["rank"], other["rank"])
    moved = cute_sharding.redistribute(x, other["rank"], [Shard(0)])
    assert torch.equal(moved.to_local(), full.chunk(2)[1 - dist.get_rank() % 2])
    full = torch.arange(12.0).reshape(6, 2)
    y = distribute_tensor(full, whole, [Replicate(), Shard(0)])
    for after in (Shard(0), Shard(1)):  # each half has the tensor; the former is a relabelling
        with Sent() as sent:
            half = cute_sharding.redistribute(y, whole["rank"], [after])
        assert torch.equal(half.full_tensor(), full)
        assert sum(sent.counts.values()) == (after == Shard(1))
    try:
        cute_sharding.redistribute(x, whole["half"], [Shard(0)])
    except ValueError as error:
        assert "instead of the mesh slice of ranks" in str(error)
    else:
        raise AssertionError("slices that do not belong together")


def of_every_dtype():
    line, other = DeviceMesh("cpu", torch.arange(2)), DeviceMesh("cpu", torch.tensor([1, 2, 3]))
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float64):
        full = (torch.arange(14) % 3).reshape(7, 2).to(dtype)
        part = full.chunk(2)[dist.get_rank() % 2]
        x = as_dtensor(part if dist.get_rank() < 2 else None, (7, 2), line, [Shard(0)], dtype)
        moved = cute_sharding.redistribute(x, other, "S(0)")
        if dist.get_rank():
            assert torch.equal(moved.to_local(), full.chunk(3)[dist.get_rank() - 1]), dtype
            assert moved.dtype == dtype == moved.to_local().dtype


def groups_are_made_once():
    one, two = DeviceMesh("cpu", torch.tensor([0, 1])), DeviceMesh("cpu", torch.tensor([1, 2]))
    x = distribute_tensor(torch.arange(6.0), one, [Shard(0)])
    with Sent() as sent:
        cute_sharding.redistribute(x, two, [Shard(0)])
    assert not sent.counts  # messages
    cute_sharding.prepare_groups(one, two)
    made = dist.distributed_c10d._world.group_count
    cute_sharding.prepare_groups(one, two)
    assert dist.distributed_c10d._world.group_count == made
    with Sent() as sent:
        cute_sharding.redistribute(x, two, [Shard(0)])
    assert sum(sent.counts.values()) == (dist.get_rank() < 3)


def gradients_lie_as_their_tensors():
    """Also where they come with other strides: of a sum, expanded, and of a transposed leaf."""
    one, two = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3]))
    x = distribute_tensor(torch.ones(6, 4), one, [Shard(0)]).requires_grad_()
    cute_sharding.redistribute(x, two, [Shard(1)]).sum().backward()
    turned = distribute_tensor(torch.arange(24.0).reshape(4, 6), one, [Shard(1)]).t().detach()
    turned.requires_grad_()
    moved = cute_sharding.redistribute(turned, two, [Shard(0)])
    (moved.contiguous() * 3).sum().backward()
    assert turned.grad.stride() == turned.stride() == (1, 6)
    if dist.get_rank() < 2:
        assert torch.equal(x.grad.to_local(), torch.ones(3, 4))
        assert torch.equal(turned.grad.to_local(), torch.full((3, 4), 3.0))


def an_order_of_shards_of_its_own():
    """The second mesh dim cuts first: that is read, and the gradient lies so too."""
    square, other = DeviceMesh("cpu", torch.arange(4).reshape(2, 2)), DeviceMesh("cpu", [2, 3])
    full = torch.arange(32.0).reshape(8, 4)
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    order = (ShardOrderEntry(0, (1, 0)),)
    spec = DTensorSpec(square, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    row, column = square.get_coordinate()
    k = 2 * column + row
    rows = full[2 * k : 2 * k + 2].clone()
    assert torch.equal(DTensor(rows, spec, requires_grad=False).full_tensor(), full)
    x = DTensor(rows.requires_grad_(), spec, requires_grad=True)
    moved = cute_sharding.redistribute(x, other, [Shard(0)])
    if dist.get_rank() > 1:
        assert torch.equal(moved.to_local(), full.chunk(2)[dist.get_rank() - 2])
    part = full.chunk(2)[dist.get_rank() - 2] if dist.get_rank() > 1 else torch.empty(0)
    (back,) = torch.autograd.grad(moved, x, DTensor(part, moved._spec, requires_grad=False))
    assert torch.equal(back.to_local(), full[2 * k : 2 * k + 2])


def what_ranks_outside_take_for_something_else():
    """Of a square, of which messages have the same sizes either way."""
    one, two = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3]))
    for dtype in (torch.float32, torch.bool, torch.complex128, torch.int8):
        full = (torch.arange(16) % 2).reshape(4, 4).to(dtype)
        inside = dist.get_rank() < 2
        rows = full.chunk(2)[dist.get_rank() % 2]
        x = as_dtensor(rows if inside else None, (4, 4), one, [Shard(0)], dtype)
        moved = cute_sharding.redistribute(x, two, [Replicate()])
        assert inside or torch.equal(moved.to_local(), full), dtype
        told = [Shard(0) if inside else Shard(1)]
        x = as_dtensor(rows if inside else None, (4, 4), one, told, dtype)
        try:
            cute_sharding.redistribute(x, two, [Replicate()])
        except RuntimeError as error:
            assert not inside and "different placements on the ranks of the mesh" in str(error)
        else:
            assert inside, dtype


PROGRAMS = (
    what_ranks_outside_take_for_something_else,
    gradients_lie_as_their_tensors,
    an_order_of_shards_of_its_own,
    trainer_and_generator,
    by_the_tensors_own_method,
    between_graphs,
    slices_of_meshes,
    of_every_dtype,
    groups_are_made_once,
)

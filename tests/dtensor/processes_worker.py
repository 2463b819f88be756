"""What the processes of test_processes.py run: every rank draws the same cases, and compares its
own part with what one device computes.
"""

import os
import random
import time
from datetime import timedelta
from itertools import product
from math import prod
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from drawing import (
    contributions,
    draw_placements,
    draw_program,
    draw_shape,
    draw_view,
    reduced,
    run,
)
from simulation import cuts_of, is_partial, locals_of, number, placements_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

PATIENCE = timedelta(seconds=200)


def start(rank, world, rendezvous, compares, *jobs):
    torch.set_num_threads(1)
    if compares:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=PATIENCE
    )
    try:
        for job, *args in jobs:
            job(*args)
        dist.barrier()  # whoever is done first waits for the others: its threads serve them still
    finally:
        dist.destroy_process_group()
        wait_for_others(world, f"{rendezvous}-left")


def wait_for_others(world, file, seconds=0.5):
    """Until all have left the process group, or one has failed: gloo aborts where the process at
    the other end is gone before its own threads are.
    """
    store, deadline = dist.FileStore(file, world), time.monotonic() + seconds
    left = store.add("left", 1)
    while left < world and time.monotonic() < deadline:
        time.sleep(0.01)
        left = store.add("left", 0)


def mesh_of_ranks(ranks):
    return DeviceMesh("cpu", torch.tensor(ranks))


def part_of(full, mesh, placements):
    """What this rank holds of ``full``, or of its own ``full`` as for locals_of; None where it is
    not on the mesh.
    """
    ranks = mesh.mesh.flatten().tolist()
    me = dist.get_rank()
    return (
        locals_of(full, tuple(mesh.shape), cuts_of(placements))[ranks.index(me)]
        if me in ranks
        else None
    )


def distribute(full, mesh, placements):
    """As a program would: each rank gives its local tensor, those outside the mesh one that nobody
    wants.
    """
    some = full[0] if isinstance(full, dict) else full
    part = part_of(full, mesh, placements)
    local = torch.full((3,), torch.nan) if part is None else part
    return (
        DTensor.from_local(
            local, mesh, placements, run_check=False, shape=some.shape, stride=some.stride()
        )
        .detach()
        .requires_grad_()
    )


def assert_holds(tensor, full, case):
    wanted = part_of(full, tensor.device_mesh, tensor.placements)
    got = tensor.to_local()
    if wanted is None:
        assert got.numel() == 0, case
    else:
        assert got.shape == wanted.shape and torch.equal(got, wanted), (
            f"rank {dist.get_rank()}: {case}: {got} is not {wanted}"
        )


# -- jobs ------------------------------------------------------------------------------------------


def views(ranks, count):
    """Drawn programs, forward and backward, most of which have to redistribute."""
    mesh = mesh_of_ranks(ranks)
    sizes = tuple(mesh.shape)
    rng = random.Random(f"processes {ranks}")
    with cute_sharding.enabled():
        cute_sharding.stats(reset=True)
        for _ in range(count):
            shape, target, cuts = draw_view(
                rng, sizes, range(49), wants_communication=rng.random() < 0.7
            )
            single = number(shape).requires_grad_()
            program = draw_program(rng, single, target)
            case = (shape, placements_of(cuts), ranks, program)
            expected = run(program, single)
            gradient = number(expected.shape) + 0.5
            expected.backward(gradient)
            tensor = distribute(number(shape), mesh, placements_of(cuts))
            result = run(program, tensor)
            assert_holds(result, expected.detach(), case)
            if (
                dist.get_rank() in mesh.mesh
                # outside of it torch 2.13 itself cannot always put a gradient away:
                # new_empty_strided fails
            ):
                result.backward(distribute(gradient, mesh, result.placements).detach())
                assert_holds(tensor.grad, single.grad, case)
        outcomes = [
            sum(counts[outcome] for counts in cute_sharding.stats().values())
            for outcome in ("redistribution", "stock")
        ]
    # Where a rank is outside of the mesh, DTensor asks no rule anything.
    assert outcomes[0] > count // 3 or dist.get_rank() not in mesh.mesh
    assert outcomes[1] == 0


def redistributions(ranks, count):
    """Drawn pairs of placements, values and gradients, waited for or not."""
    mesh = mesh_of_ranks(ranks)
    sizes = tuple(mesh.shape)
    rng = random.Random(f"processes {ranks}")
    with cute_sharding.enabled(redistribution=True):
        for k in range(count):
            shape = draw_shape(rng)
            before = draw_placements(
                rng, sizes, shape, pending=rng.choice(("sum", "max")), chance=rng.choice((0, 0.5))
            )
            after = draw_placements(rng, sizes, shape)
            given = (
                contributions(rng, shape, sizes, before)
                if any(map(is_partial, before))
                else number(shape).double()
            )
            case = (shape, before, after, ranks)
            tensor = distribute(given, mesh, before)
            result = tensor.redistribute(placements=after, async_op=k % 2 == 1)
            each = given if isinstance(given, dict) else dict.fromkeys(range(prod(sizes)), given)
            assert_holds(result, reduced(each, sizes, before, after), case)
            gradient = number(shape).double() + 0.5
            result.backward(distribute(gradient, mesh, after).detach())
            assert list(tensor.grad.placements) == [
                Replicate() if is_partial(p) else p for p in before
            ]
            assert_holds(tensor.grad, gradient, case)
            full = tensor.full_tensor()
            if dist.get_rank() in mesh.mesh:
                assert torch.equal(
                    full, reduced(each, sizes, before, [Replicate()] * len(sizes))[0]
                ), case


def distributed(ranks):
    """What torch itself distributes lies as placements say, and comes back, under every flag."""
    mesh = mesh_of_ranks(ranks)
    everywhere = [Replicate()] * mesh.ndim
    cuts = [Replicate(), Shard(0), Shard(1)]
    for settings in (
        {},
        {"ops": False},
        {"redistribution": True, "movement": True},
        {"views": False, "redistribution": True},
    ):
        with cute_sharding.enabled(**settings):
            for shape in [(8, 2), (7, 3), (1, 3), (0, 2)]:
                full = number(shape).double()
                for placements in product(cuts, repeat=mesh.ndim):
                    case = (ranks, settings, shape, placements)
                    x = distribute_tensor(full, mesh, placements)
                    assert_holds(x, full, case)
                    whole = DTensor.from_local(full, mesh, everywhere, run_check=False)
                    for tensor, expected in (
                        (x, full),
                        (whole.redistribute(placements=placements), full),
                        (x.cumsum(0), full.cumsum(0)),
                        (x.softmax(1), full.softmax(1)),
                    ):
                        found = tensor.full_tensor()
                        if dist.get_rank() in mesh.mesh:
                            assert torch.allclose(found, expected), case


def slices():
    """Two slices of a mesh side by side, of other values: nothing of one reaches the other."""
    whole = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        mesh = whole[name]
        full = number((5, 7)) + 100 * mesh.mesh[0]
        with cute_sharding.enabled(redistribution=True):
            tensor = distribute(full, mesh, [Shard(0)])
            assert_holds(
                tensor.redistribute(placements=[_StridedShard(1, split_factor=2)]), full, name
            )
            assert_holds(distribute(full, mesh, [Shard(1)]).view(35, 1), full.view(35, 1), name)


def natively(ranks, count):
    """The same draws with the collectives that other backends than gloo have, padded where that is
    little; on the groups at hand, then with those of all mesh dims together.
    """
    with patch(
        "cute_sharding.dtensor.replaced.communication.backend_name",
        lambda group, device_type: "nccl",
    ):
        redistributions(ranks, count)
        cute_sharding.prepare_groups(mesh_of_ranks(ranks))
        redistributions(ranks, count)


def written(x):
    """Writes to detached slices, to several of one tensor, one after the other and at once, to what
    is pending and its aliases, and ``out=``; x is of shape (6, 4).
    """
    v = x.view(2, 12)
    v[0:1].detach().add_(7.0)
    v[:, 3:9].data.mul_(2.0)
    v.mul_(2.0)
    v[:, 0:8].add_(1.0)
    v[:, 4:12].sub_(3.0)
    for part in v.split(7, 1):
        part.mul_(2.0)
    torch._foreach_mul_(list(v.split(5, 1)), 2.0)
    product = v @ v.t()
    alias = product.detach()
    product.view(-1)[1:].add_(1.0)
    alias[0].mul_(0.5)
    out = torch.empty_like(v)
    torch.mul(v, 3.0, out=out)
    return x, v, product, alias, out


def writes(ranks):
    mesh = mesh_of_ranks(ranks)
    expected = written(number((6, 4)))
    replicated = [Replicate()] * mesh.ndim
    with cute_sharding.enabled(redistribution=True):
        for placements in ([Shard(1)], [Shard(0)]):
            x = distribute(number((6, 4)), mesh, [*replicated[1:], *placements]).detach()
            for i, (got, wanted) in enumerate(zip(written(x), expected)):
                assert_holds(got.redistribute(placements=replicated), wanted, (placements, i))
        for keeps in (False, True):  # what one rank alone holds on to changes nothing
            v = distribute(number((6, 4)), mesh, [*replicated[1:], Shard(1)]).detach().view(2, 12)
            product = v @ v.t()
            kept = product.detach() if keeps and dist.get_rank() == 0 else None
            product.relu_()
            assert any(map(is_partial, product.placements)), product.placements
            single = number((6, 4)).view(2, 12)
            assert_holds(product.redistribute(placements=replicated), single @ single.t(), keeps)
            del kept


def gathered(ranks):
    """What an op gathers is kept for the next, whatever one rank alone holds on to."""
    mesh = mesh_of_ranks(ranks)
    full, replicated, held = number((4, 3, 8)), [Replicate()] * mesh.ndim, []
    with cute_sharding.enabled():
        x = distribute(full, mesh, [*replicated[1:], Shard(2)]).detach()
        for turn in range(4):
            v = x.view(4, 24)
            for _ in range(2):
                got = v.cumsum(-1)
                assert_holds(
                    got.redistribute(placements=replicated), full.view(4, 24).cumsum(-1), turn
                )
            parts = [v[:, :5], v[:, 5:]]
            if turn == dist.get_rank():
                held += [v, parts.pop()]
            parts[0].mul_(3.0)
            full.view(4, 24)[:, :5] *= 3
            if turn == 2:
                v.mul_(2.0)
                full = full * 2


COMPILED, COMPILED_ONCE = 3, 5  # cases of each


def compiled(case):
    """The same plan in a graph: uneven shards, two mesh dims at once, a gather; forward and
    backward, equal to eager.
    """
    R, flat, square = Replicate(), mesh_of_ranks([0, 1, 2, 3]), mesh_of_ranks([[0, 1], [2, 3]])
    cases = [
        (flat, 9, [Shard(0)], [Shard(1)], "aot_eager"),
        (square, 9, [R, Shard(0)], [Shard(0), R], "aot_eager"),
        (square, 8, [Shard(0), Shard(1)], [Shard(1), R], "inductor"),
    ]
    assert len(cases) == COMPILED
    mesh, n, before, after, backend = cases[case]
    with cute_sharding.enabled(redistribution=True):
        tensor = distribute(number((n, n)), mesh, before)

        def program(x):
            return (x * 2).redistribute(placements=after).square()

        for function in (program, torch.compile(program, backend=backend, fullgraph=True)):
            result = function(tensor)
            assert_holds(result.detach(), (number((n, n)) * 2).square(), (before, after, backend))
            (gradient,) = torch.autograd.grad(result.sum(), tensor)
            assert torch.equal(gradient.full_tensor(), number((n, n)) * 8), (before, after, backend)


def compiled_once(case):
    """One dynamic graph for several shapes: elements move in blocks whose number is known and whose
    length is not. Equal to eager, beside ranks that run eagerly, and right; also where a shape does
    not divide.
    """
    R, flat, square = Replicate(), mesh_of_ranks([0, 1, 2, 3]), mesh_of_ranks([[0, 1], [2, 3]])
    cases = [
        (flat, [Shard(0)], [Shard(1)], lambda x: x),
        (square, [Shard(0), Shard(1)], [Shard(1), Shard(0)], lambda x: x),
        (square, [Shard(0), Shard(0)], [R, Shard(0)], lambda x: x),
        (flat, [Shard(1)], [R], lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2])),
        (flat, [Shard(1)], [Shard(0)], lambda x: x.sum(1)),
    ]
    assert len(cases) == COMPILED_ONCE
    mesh, before, after, view = cases[case]
    with cute_sharding.enabled(redistribution=True):

        def program(x):
            return view(x * 2).redistribute(placements=after).square()

        run = (
            torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
            if dist.get_rank() in (0, 3)
            else program
        )
        for shape in ((8, 12, 3), (16, 8, 5), (9, 7, 3)):
            tensor = distribute(number(shape), mesh, before)
            for function in (program, run):
                result = function(tensor)
                assert_holds(
                    result.detach(),
                    view(number(shape) * 2).square(),
                    (before, after, shape, function is run),
                )
                (gradient,) = torch.autograd.grad(result.sum(), tensor)
                expected = number(shape).requires_grad_()
                (wanted,) = torch.autograd.grad(view(expected * 2).square().sum(), expected)
                assert torch.equal(gradient.full_tensor(), wanted), (
                    before,
                    after,
                    shape,
                    function is run,
                )


def dying(rank, world, rendezvous, folder):
    """The last rank dies before it sends anything. The others get the backend's error within its
    timeout, with their own tensors as they were.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=10),
    )
    mesh = mesh_of_ranks(list(range(world)))
    tensor = distribute(number((8, 9)), mesh, [Shard(0)]).detach()
    tensor.redistribute(placements=[Shard(1)])  # connections are made
    dist.barrier()
    if rank == world - 1:
        os._exit(0)
    with cute_sharding.enabled(redistribution=True):
        begin = time.monotonic()
        try:
            tensor.redistribute(placements=[Shard(1)])
            outcome = "no error"
        except RuntimeError as error:
            outcome = type(error).__name__
        took = time.monotonic() - begin
    assert_holds(tensor, number((8, 9)), "after a peer died")
    Path(folder, str(rank)).write_text(f"{outcome} {took < 20}")
    os._exit(0)  # what is left of the group cannot be taken down in order


def fully_sharded():
    """fully_shard over tensor parallelism, of rows that do not divide: the parameters come whole,
    and train as on one device.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = DeviceMesh("cpu", torch.arange(6).reshape(3, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    single = torch.nn.Linear(4, 7)
    model = torch.nn.Linear(4, 7)
    model.load_state_dict(single.state_dict())
    parallelize_module(model, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    fully_shard(model, mesh=mesh["dp"])
    batch = number((3, 4))
    with cute_sharding.enabled(redistribution=True):
        for _ in range(2):
            for module in (single, model):
                module(batch).square().sum().backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter -= 1e-4 * parameter.grad
                        parameter.grad = None
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.full_tensor(), dict(single.named_parameters())[name]), (
                name
            )

"""What the processes of test_cluster.py run: redistributions while ranks, slices, stages and
threads each do something else. Whoever waits for a rank that takes no part, waits for ever.
"""

import threading

import torch
import torch.distributed as dist
from processes_worker import PATIENCE, assert_holds, distribute, mesh_of_ranks
from simulation import number
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding

R = Replicate()


def replicas_out_of_step():
    """One replica takes three steps, the other two."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    with cute_sharding.enabled(redistribution=True):
        for prepared in (False, True):
            if prepared:
                cute_sharding.prepare_groups(mesh)
            for before, after in (
                ([R, Shard(0), Shard(1)], [R, Shard(1), Shard(0)]),
                ([R, Shard(0), Shard(0)], [R, R, R]),
                ([R, R, Shard(1)], [R, Shard(0), R]),
            ):
                tensor = distribute(number((6, 5)), mesh, before)
                for _ in range(3 if mesh.get_local_rank("dp") == 0 else 2):
                    assert_holds(
                        tensor.redistribute(placements=after).detach(),
                        number((6, 5)),
                        (before, after),
                    )
            dist.barrier()


def stages_alone():
    """A mesh over a part of the ranks, in a program of its own; the others do nothing, or something
    else at the same time.
    """
    meshes = [
        DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([[0, 1], [2, 3]], [[5, 4], [7, 6]])
    ]
    mine = meshes[dist.get_rank() // 4]
    with cute_sharding.enabled(redistribution=True):
        for before, after in (
            ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
            ([Shard(1), Shard(1)], [R, R]),
            ([Partial(), Shard(0)], [Shard(0), R]),
        )[: 3 if dist.get_rank() < 4 else 2]:
            full = number((7, 9))
            if isinstance(before[0], Partial):
                tensor = DTensor.from_local(
                    part(full, mine),
                    mine,
                    before,
                    run_check=False,
                    shape=full.shape,
                    stride=full.stride(),
                )
                assert_holds(tensor.redistribute(placements=after), 2 * full, (before, after))
            else:
                assert_holds(
                    distribute(full, mine, before).redistribute(placements=after).detach(),
                    full,
                    (before, after),
                )


def part(full, mesh):
    return (
        full.chunk(2)[mesh.get_coordinate()[1]].contiguous()
        if mesh.get_coordinate() is not None
        else full
    )


def one_rank_eager(dynamic, count):
    """Ranks 0 and 2 run eagerly what the others have compiled, on a mesh of four of five ranks;
    sizes that divide and that do not. So many of the cases.
    """
    mesh = mesh_of_ranks([[0, 1], [2, 3]])
    flat = mesh_of_ranks([0, 1, 2, 3])
    cases = [
        (mesh, [Shard(0), Shard(1)], [Shard(1), Shard(0)]),
        (mesh, [Shard(0), Shard(0)], [R, Shard(0)]),
        (mesh, [Shard(0), Shard(1)], [R, R]),
        (flat, [Shard(0)], [Shard(1)]),
        (flat, [Shard(1)], [R]),
        (flat, [Shard(0)], [_StridedShard(1, split_factor=2)]),  # messages of several blocks
        (flat, [_StridedShard(1, split_factor=2)], [R]),
    ]
    shapes = ((8, 16), (9, 7), (13, 11)) if dynamic else ((8, 12), (9, 7))
    cases = [cases[5], *cases[:5:2], cases[6]] if dynamic else cases[:5]
    with cute_sharding.enabled(redistribution=True):
        for on, before, after in cases[:count]:
            for shape in shapes:

                def program(x, after=after):
                    return (x * 2).redistribute(placements=after).square()

                run = (
                    program
                    if dist.get_rank() % 2 == 0
                    else torch.compile(program, backend="aot_eager", dynamic=dynamic)
                )
                tensor = distribute(number(shape), on, before)
                if dist.get_rank() < 4:
                    result = run(tensor)
                    assert_holds(
                        result.detach(), (number(shape) * 2).square(), (before, after, shape)
                    )
                    if not any(
                        isinstance(p, _StridedShard) for p in (*before, *after)
                    ):  # torch gathers for ops on uneven ones, here and there
                        (gradient,) = torch.autograd.grad(result.sum(), tensor)
                        assert torch.equal(gradient.to_local(), tensor.to_local() * 8), (
                            before,
                            after,
                            shape,
                        )
            torch._dynamo.reset()


def threads():
    """Two threads of each rank redistribute on meshes of their own at once. (Of four of five ranks:
    the default group of a world is one for all threads.)
    """
    meshes = [mesh_of_ranks([[0, 1], [2, 3]]) for _ in range(2)]
    failures = []

    def work(mesh, shape):
        try:
            for _ in range(5):
                tensor = distribute(number(shape), mesh, [Shard(0), Shard(1)])
                assert_holds(
                    tensor.redistribute(placements=[Shard(1), Shard(0)]).detach(),
                    number(shape),
                    shape,
                )
        except BaseException as error:
            failures.append(error)

    with cute_sharding.enabled(redistribution=True):
        running = (
            []
            if dist.get_rank() == 4
            else [
                threading.Thread(target=work, args=case) for case in zip(meshes, ((6, 5), (9, 8)))
            ]
        )
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(PATIENCE.total_seconds())
            assert not thread.is_alive()
    if failures:
        raise failures[0]


# What is redistributed is a view of something that the graph computes, which Inductor lays out as
# it likes: the program, and the placements of its operand.
OF_INDUCTORS = {
    "chunk": (
        lambda d: d.relu().chunk(3, dim=2)[1].redistribute(placements=[Shard(1)]),
        [Shard(0)],
    ),
    "select": (lambda d: (d + 1)[:, 1].redistribute(placements=[Shard(1)]), [Shard(0)]),
    "expand": (
        lambda d: (d + 1)[:, :1].expand(-1, 6, -1).redistribute(placements=[Shard(1)]),
        [Shard(0)],
    ),
    "sliced locally": (
        lambda d: d.relu().chunk(3, dim=2)[2].redistribute(placements=[Shard(1)]),
        [R],
    ),
    "pending": (
        lambda d: d.sum(0).chunk(2, dim=0)[1].redistribute(placements=[Shard(1)]),
        [Shard(0)],
    ),
    "transpose": (
        lambda d: (d * 2).transpose(1, 2)[:, 1:4].redistribute(placements=[Shard(2)]),
        [Shard(0)],
    ),
    "to a gather": (lambda d: (d * 2)[:, 2:5].redistribute(placements=[R]), [Shard(0)]),
    "gather in the middle": (
        lambda d: (d * 2).transpose(0, 1)[1:4].redistribute(placements=[R]),
        [Shard(0)],
    ),
    "mean": (
        lambda d: (d * 2).permute(2, 0, 1)[3:].redistribute(placements=[Shard(2)]),
        [Shard(1)],
    ),
}


def under_inductor(dynamic, names):
    mesh = mesh_of_ranks([0, 1])
    for turn, name in enumerate(names):
        program, before = OF_INDUCTORS[name]
        for shape in ((5, 6, 6),) if dynamic or turn % 2 else ((4, 6, 6),):
            torch._dynamo.reset()
            full = number(shape) - 40
            with cute_sharding.enabled(redistribution=True):
                tensor = distribute(full, mesh, before).detach()
                result = torch.compile(program, backend="inductor", dynamic=dynamic)(tensor)
            plain = DTensor.from_local(full, mesh, [R], run_check=False)
            assert_holds(result, program(plain).full_tensor(), (name, shape))


def lying_otherwise():
    """Local tensors whose memory is not in the order of their rows, on ranks that run eagerly and
    on those that have compiled a graph for many sizes.
    """
    mesh, full = mesh_of_ranks([0, 1, 2, 3]), number((8, 12))
    with cute_sharding.enabled(redistribution=True):
        for before, after, whole in (
            ([Shard(0)], [R], full),
            ([Shard(1)], [R], full),
            ([Partial()], [Shard(0)], 4 * full),
            ([Partial()], [Shard(1)], 4 * full),
            ([Partial()], [R], 4 * full),
        ):

            def program(x, after=after):
                return x.redistribute(placements=after)

            run = (
                program
                if dist.get_rank() % 2
                else torch.compile(program, backend="aot_eager", dynamic=True)
            )
            if dist.get_rank() < 4:
                part = (
                    full if before == [Partial()] else full.chunk(4, before[0].dim)[dist.get_rank()]
                )
                tensor = DTensor.from_local(
                    part.t().contiguous().t(), mesh, before, run_check=False
                )
                assert_holds(run(tensor), whole, (before, after))


def averages():
    """Averages of halves do not overflow on the way."""
    mesh = mesh_of_ranks([0, 1, 2, 3])
    for n in (8, 9):
        local = torch.full((n, 3), 60000.0, dtype=torch.float16)
        with cute_sharding.enabled(redistribution=True):
            tensor = DTensor.from_local(local, mesh, [Partial("avg")], run_check=False)
            for after in ([R], [Shard(0)]):
                assert (tensor.redistribute(placements=after).to_local() == 60000).all()

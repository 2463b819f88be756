"""What the processes of test_lists.py run: lists of tensors on real ranks, whose collectives gloo
compares with the others' (``TORCH_DISTRIBUTED_DEBUG=DETAIL``).
"""

import random

import torch
import torch.distributed as dist
from drawing import draw_placements, draw_shape
from processes_worker import assert_holds, distribute, mesh_of_ranks
from simulation import number
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding

R, S0, S1 = Replicate(), Shard(0), Shard(1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def all_of_it():
    pairs()
    for ranks in ([0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [2, 0]], [2, 0, 1]):
        drawn(ranks)
    for flags in ({}, {"redistribution": True}):
        optimizers(flags)
    for dynamic in (False, True):
        one_rank_eager(dynamic)


COMPARED = torch.ops.c10d.allgather_


def pairs():
    """Eight pairs are one exchange."""
    mesh = mesh_of_ranks([0, 1, 2, 3])
    full = [number((8, 12)) + i for i in range(8)]
    a, b = ([distribute(x, mesh, [p]).detach() for x in full] for p in (S0, S1))
    for flags in ({}, {"redistribution": True}):
        with cute_sharding.enabled(**flags), CommDebugMode() as communication:
            results = torch._foreach_add(a, b)
        counts = communication.get_comm_counts()  # specs are compared, too, at the level DETAIL
        assert counts[torch.ops.c10d_functional.all_to_all_single] == 1, counts
        assert counts.keys() <= {torch.ops.c10d_functional.all_to_all_single, COMPARED}, counts
        for got, x in zip(results, full):
            assert_holds(got, 2 * x, flags)


def drawn(ranks):
    """Lists of several dtypes, to the cuts of the first list, which is written to."""
    mesh, rng = mesh_of_ranks(ranks), random.Random(f"lists {ranks}")
    sizes = tuple(mesh.shape)
    with cute_sharding.enabled(redistribution=True):
        for _ in range(6):
            fulls, lists = [], ([], [])
            for _ in range(rng.randint(2, 6)):
                shape = () if rng.random() < 0.1 else draw_shape(rng)
                fulls.append((number(shape) % 50).to(rng.choice(DTYPES)))
                for some in lists:
                    placements = draw_placements(rng, sizes, shape) if shape else [R for _ in sizes]
                    some.append(of(fulls[-1], mesh, placements))
            torch._foreach_add_(*lists)
            for got, other, full in zip(*lists, fulls):
                assert_holds(got, full + full, (ranks, got.placements, other.placements))


def of(full, mesh, placements):
    """A DTensor of any dtype, which has no gradient."""
    tensor = distribute(full.double(), mesh, placements)
    local = tensor.to_local().detach().to(full.dtype)
    options = {"run_check": False, "shape": full.shape, "stride": full.stride()}
    return DTensor.from_local(local, mesh, placements, **options)


def optimizers(flags):
    """Steps whose gradients lie otherwise than the parameters, which are on two meshes."""
    line, grid = mesh_of_ranks([0, 1, 2, 3]), mesh_of_ranks([[0, 1], [2, 3]])
    torch.manual_seed(0)
    shapes = [(8, 4), (5, 6), (8, 12), (7, 3), (4, 4), (6, 5)]
    where = [(line, [S0], [S1]), (grid, [S0, R], [S1, R]), (line, [S0], [S0])] * 2
    for made in (
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    ):
        full = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        many = [
            torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, before))
            for p, (mesh, before, _) in zip(full, where)
        ]
        one, other = made(full), made(many)
        with cute_sharding.enabled(**flags):
            for _ in range(2):
                for p, q, (mesh, _, after) in zip(full, many, where):
                    p.grad = torch.randn(p.shape)
                    q.grad = distribute_tensor(p.grad.clone(), mesh, after)
                one.step()
                with CommDebugMode() as communication:
                    other.step()
                # of each op one on each mesh: four of the six gradients are moved
                counts = communication.get_comm_counts()
                assert 0 < sum(counts.values()) - counts.get(COMPARED, 0) <= 4, counts
            for p, q in zip(full, many):
                torch.testing.assert_close(q.detach().full_tensor(), p.detach())


def one_rank_eager(dynamic):
    """Ranks 0 and 2 run eagerly what the others have compiled. (With dynamic shapes ``cat`` may
    have other placements than eagerly: docs/compiled.md.)
    """
    mesh = mesh_of_ranks([0, 1, 2, 3])

    def program(a, b):
        found = [x * 2 for x in torch._foreach_add([x + 1 for x in a], b)]
        return found[-1] if dynamic else torch.cat(found)

    run = program
    if dist.get_rank() % 2:
        run = torch.compile(program, backend="aot_eager", dynamic=dynamic)
    with cute_sharding.enabled(redistribution=True):
        for shape in ((8, 12), (9, 7)) if dynamic else ((9, 7),):
            full = number(shape)
            a, b = ([distribute(full, mesh, [p]).detach() for _ in range(3)] for p in (S0, S1))
            got = run(a, b)
            wanted = torch.cat([4 * full + 2] * (1 if dynamic else 3))
            assert_holds(got.redistribute(placements=[R]).detach(), wanted, (shape, dynamic))
    torch._dynamo.reset()

"""What the processes of test_given_placements.py run: programs that hand to functions of torch what
is replicated there, and cut here.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes_worker import distribute, mesh_of_ranks, part_of
from simulation import number
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import loss_parallel

import cute_sharding

R = Replicate()


def next_tokens():
    """Logits that are cut by tokens and vocabulary, and targets that are cut by tokens or not."""
    mesh = mesh_of_ranks([[0, 1], [2, 3]])
    ids = torch.arange(14).reshape(2, 7) * 5 % 8
    for tokens in (R, Shard(1)):
        for reduction in ("sum", "none"):
            single = (number((2, 7, 8)) / 10).requires_grad_()
            wanted = loss_of(single, ids, reduction)
            wanted.sum().backward()
            logits = distribute(number((2, 7, 8)) / 10, mesh, [Shard(1), Shard(2)])
            labels = DTensor.from_local(
                part_of(ids, mesh, [tokens, R]),
                mesh,
                [tokens, R],
                run_check=False,
                shape=ids.shape,
                stride=ids.stride(),
            )
            with cute_sharding.enabled(movement=True), loss_parallel():
                loss = loss_of(logits, labels, reduction)
                loss.sum().backward()
            what = tokens, reduction
            assert torch.allclose(loss.full_tensor(), wanted, rtol=1e-5), what
            assert torch.allclose(logits.grad.full_tensor(), single.grad, rtol=1e-5), what


def loss_of(logits, labels, reduction):
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, 8), labels[:, 1:].reshape(-1), reduction=reduction
    )


def mapped():
    mesh = mesh_of_ranks([*range(dist.get_world_size())])

    def run(x):
        function = local_map(
            lambda a: a.cumsum(0), out_placements=[R], in_placements=([R],), device_mesh=mesh
        )
        return function(x)

    whole = number((12, 3))
    x = distribute(whole, mesh, [Shard(0)])
    with cute_sharding.enabled(movement=True):
        for what in (lambda x: x.roll(1, 0), lambda x: x[1:10]):
            rows = what(x)
            assert rows.placements == (Shard(0),)
            result = run(rows)
            assert torch.equal(result.full_tensor(), what(whole).cumsum(0))
            (found,) = torch.autograd.grad(result.sum(), x)
            assert found.shape == x.shape
        for other in ([Shard(1)], [Shard(0)]):
            function = local_map(
                lambda a: a * 2, out_placements=other, in_placements=(other,), device_mesh=mesh
            )
            rows = x.redistribute(placements=[Shard(1 - other[0].dim)])
            try:
                function(rows)
            except ValueError:  # torch's own error, for what is cut otherwise
                continue
            raise AssertionError("torch's own error is gone")


def mapped_unevenly():
    """Rows that do not divide: what comes of them has the shape that it has on one device."""
    flat, grid = mesh_of_ranks([0, 1, 2, 3]), mesh_of_ranks([[3, 1], [0, 2]])
    cases = [
        (flat, [Shard(0)], (7, 4)),
        (flat, [Shard(0)], (2, 4)),  # some rank has none
        (flat, [Shard(1)], (4, 6)),
        (grid, [Shard(0), Shard(1)], (7, 5)),
        (grid, [Shard(0), Shard(0)], (7, 4)),
        (grid, [R, Shard(0)], (7, 4)),
    ]
    for mesh, placements, shape in cases:
        whole, single = number(shape) / 7, (number(shape) / 7).requires_grad_()
        wanted = single.sin() * 2, (single * 3).t()
        torch.autograd.backward(wanted, [torch.ones_like(each) for each in wanted])
        turned = [Shard(1 - p.dim) if p.is_shard() else p for p in placements]
        with cute_sharding.enabled():
            function = local_map(
                lambda a: (a.sin() * 2, (a * 3).t()),
                out_placements=(placements, turned),
                in_placements=(placements,),
            )
            x = distribute(whole, mesh, placements).requires_grad_()
            found = function(x)
            for got, want in zip(found, wanted, strict=True):
                assert got.shape == want.shape, (placements, shape)
                assert got.stride() == want.stride(), (placements, shape)
                assert torch.allclose(got.full_tensor(), want), (placements, shape)
            torch.autograd.backward(found, [torch.ones_like(each) for each in found])
            assert torch.allclose(x.grad.full_tensor(), single.grad), (placements, shape)
    with cute_sharding.enabled():
        x = distribute(number((7, 4)), flat, [Shard(0)])
        first = local_map(lambda a: a.new_ones(1), out_placements=[Shard(0)])
        assert first(x).shape == (4,)  # as many on each rank
        more = local_map(lambda a: torch.cat([a, a[:1]]), out_placements=[Shard(0)])
        assert more(x).shape == (11, 4)  # 3, 3, 3 and 2
        try:
            local_map(lambda a: a.new_ones(2 - len(a)), out_placements=[Shard(0)])(x)
        except RuntimeError as error:
            assert "are not the shards of one tensor" in str(error)
        else:
            raise AssertionError("0, 0, 0 and 1 rows were taken")

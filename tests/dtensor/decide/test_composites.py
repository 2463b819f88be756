"""Ops that torch takes apart before a DTensor meets them, which it meets whole in inference mode:
there as with gradients.
"""

import pytest
import torch
import torch.nn.functional as F
from op_programs import assert_close, values
from simulation import assert_holds, distribute, number, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding

R, S = Replicate(), Shard
# Of rows x and y, as many as devices cut evenly or not.
PROGRAMS = {
    "soft labels": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "l1": F.l1_loss,
    "kl": lambda x, y: F.kl_div(x, y.softmax(1)),
    "poisson": F.poisson_nll_loss,
    "margin": lambda x, y: F.margin_ranking_loss(x, y, y.sign()),
    "triplet": lambda x, y: F.triplet_margin_loss(x, y, x * y),
    "embedding": lambda x, y: F.hinge_embedding_loss(x, y.sign()),
    "covariance": lambda x, y: torch.cov(x),
    "differences": lambda x, y: torch.gradient(x, dim=0)[0],
    "repeated": lambda x, y: x.repeat_interleave(2, 0),
    "kron": torch.kron,
    "unflattened": lambda x, y: x.unflatten(1, (2, 3)) + y.unflatten(1, (2, 3)),
    "products": lambda x, y: torch.einsum("ab,cb->ac", x, y),
    "normalized": lambda x, y: F.layer_norm(x, (6,)),
}
LAID = [([S(0)], [S(0)]), ([S(1)], [S(1)]), ([S(0)], [S(1)]), ([S(1)], [Partial()]), ([R], [S(0)])]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("placements", LAID, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_values_are_those_of_one_device(program, placements, rows):
    mesh, run = (2,), PROGRAMS[program]
    full = values(rows, 6).float() / 9, values(rows, 6).float().flip(0) / 7 + 0.1
    with plain():
        wanted = run(*full)
    with ranks_of(mesh), cute_sharding.enabled(), torch.inference_mode():
        x, y = (
            distribute(t / 2 if p == [Partial()] else t, mesh, p) for t, p in zip(full, placements)
        )
        found = run(x, y)
        assert isinstance(found, DTensor)
        assert_close(found, wanted, program)


@pytest.mark.one_in(1)
def test_what_is_right_whole_stays_so():
    """An op of even blocks, with results of them: torch's way with it is several times faster."""
    met = []

    class Seen(CommDebugMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            met.append(func._opname)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with ranks_of((2,)), cute_sharding.enabled(), torch.inference_mode():
        x, w = (distribute(values(4, 6), (2,), p) for p in ([R], [S(0)]))
        F.linear(x, w)  # then torch has derived its rule
        with Seen():
            F.linear(x, w)
    assert "linear" in met
    assert "t" not in met


def test_ops_whose_parts_are_composite_are_taken_apart(monkeypatch):
    """torch tries all placements of each part, and for each of these of its parts."""
    searched, search = set(), DecompShardingStrategy.propagate_strategy

    def counted(self, schema, *args):
        searched.add(schema.op.overloadpacket.__name__)
        return search(self, schema, *args)

    monkeypatch.setattr(DecompShardingStrategy, "propagate_strategy", counted)
    for program, *shapes in (
        (lambda x, y: F.cross_entropy(x, y.round().long()), (4, 6, 2, 2), (4, 2, 2)),
        (lambda x, y: F.nll_loss(x, y.round().long()), (4, 6), (4,)),
        (lambda x, y: F.scaled_dot_product_attention(x, y, y), (4, 6, 2), (4, 3, 2)),
    ):
        with plain():
            torch.manual_seed(0)
            full = torch.rand(shapes[0]), torch.rand(shapes[1]) * 5
            wanted = program(*full)
        for mesh, placements in (((2,), [S(0)]), ((2,), [S(1)]), ((2, 1, 2), [R, S(0), R])):
            with ranks_of(mesh), cute_sharding.enabled(), torch.inference_mode():
                x = distribute(full[0], mesh, placements)
                y = distribute(full[1], mesh, [R] * len(mesh))
                assert_close(program(x, y), wanted, shapes)
    assert not any("loss" in name or "attention" in name for name in searched), searched


@pytest.mark.parametrize("settings", [{}, {"ops": False, "movement": False}], ids=str)
@pytest.mark.parametrize("view", [torch.flatten, torch.ravel], ids=lambda view: view.__name__)
def test_views_that_are_told_no_sizes_are_views_in_inference_mode(view, settings):
    """torch tries a rule for them on a few devices, and takes rows for those of others."""
    placements = [Shard(0), Shard(1)]
    with plain():
        expected = view(number((8, 4)))
    with ranks_of((2, 2)), cute_sharding.enabled(**settings):
        x = distribute(number((8, 4)), (2, 2), placements)
        outside = view(x).placements
        with torch.inference_mode():
            result = view(x)
            assert result.placements == outside != tuple(placements)
            assert_holds(result, expected)

"""Ops beside views on cuts that only views make: values and gradients as on one device, whatever
the cut; and what has no signature gets what torch would have had.
"""

import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from op_programs import (
    MESHES,
    PROGRAMS,
    S,
    assert_close,
    compare,
    values,
)
from simulation import assert_holds, distribute, number, plain, ranks_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.relations.table import OF_TORCH, SIGNATURES, VIEWS

# -- what is on the wire ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "placements", "after"),
    [
        ("mm", [[Replicate()], [S(1, 5)]], [S(1, 5)]),
        ("mm", [[S(0, 3)], [Replicate()]], [S(0, 3)]),
        ("mm", [[S(1, 4)], [S(0, 4)]], [Partial()]),
        ("linear", [[Replicate()], [S(0, 5)], [S(0, 5)]], [S(2, 5)]),
        ("bmm", [[S(0)], [S(0)]], [S(0)]),
        ("softmax", [[S(0)]], [S(0)]),
        ("layer_norm", [[S(0)], [Replicate()], [Replicate()]], [S(0)]),
        ("embedding", [[S(0)], [Replicate()]], [S(0)]),
        ("embedding", [[Replicate()], [S(1, 3)]], [S(2, 3)]),
        ("sum", [[S(1, 3)]], [Replicate()]),
        ("sum along a dim", [[S(0)]], [S(0)]),
        ("gather", [[S(0)], [S(0)]], [S(0)]),
        ("cat", [[S(0)], [S(0)]], [S(0)]),
        ("select", [[S(0)]], [S(0)]),
        ("slice with steps", [[S(0)]], [S(0)]),
        ("a whole slice", [[S(1, 3)]], [S(1, 3)]),
    ],
)
def test_free_dims_carry_any_cut(name, placements, after):
    function, *shapes = PROGRAMS[name]
    fulls = [shape if isinstance(shape, torch.Tensor) else values(*shape) for shape in shapes]
    with ranks_of((2,)), cute_sharding.enabled():
        tensors = [distribute(full, (2,), p) for full, p in zip(fulls, placements)]
        with CommDebugMode() as communicated:
            result = function(*tensors)
        assert list(result.placements) == after
        assert communicated.get_total_counts() == (not result.shape), "a number is finished"


def test_fused_products_gather_no_weight():
    """A fused gate and up projection, or queries, keys and values in one: the columns of each rank
    are a _StridedShard of the whole.
    """
    with ranks_of((2,)), cute_sharding.enabled():
        x, w = (
            distribute(values(4, 6), (2,), [Replicate()]),
            distribute(values(6, 16), (2,), [S(1)], requires_grad=True),
        )
        with CommDebugMode() as communicated:
            gate, up = (x @ w).view(4, 2, 8).unbind(1)
            result = F.silu(gate) * up
            result.backward(distribute(values(4, 8), (2,), result.placements))
        assert list(result.placements) == [Shard(1)] and list(w.grad.placements) == [S(1)]
        assert communicated.get_total_counts() == 0


# -- the gate --------------------------------------------------------------------------------------


def test_rules_that_torch_would_derive_are_not_asked_for(monkeypatch):
    """It tries all placements of all operands of all ops within: half a minute for attention."""

    def derive(*_):
        raise AssertionError("derived")

    strategy = DTensor._op_dispatcher.sharding_propagator.decomp_strategy
    monkeypatch.setattr(strategy, "propagate_strategy", derive)
    with ranks_of((2, 2)), cute_sharding.enabled():
        given = [distribute(values(2, 4, 6, 8), (2, 2), [Shard(0), Shard(1)]) for _ in range(3)]
        assert F.scaled_dot_product_attention(*given).placements == (Shard(0), Shard(1))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("training", [True, False])
def test_statistics_of_batches_are_written_to_where_they_are(training):
    """Channels are free; what is cut otherwise is moved, and what is written to the copies is taken
    back.
    """
    cuts = {
        "of one cut": ([S(1)], [S(0)], [S(0)]),
        "of several": ([S(0)], [S(0)], [Replicate()]),
        "of factors": ([Replicate()], [S(0)], [_StridedShard(0, split_factor=3)]),
    }
    for name, (images, of_mean, of_variance) in cuts.items():
        with plain():
            single, expected = values(3, 6, 2).requires_grad_(), [values(6), values(6).abs()]
            y = F.batch_norm(single, *expected, training=training)
            (gradient,) = torch.autograd.grad((y * y * y).sum(), single)
        with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
            x = distribute(values(3, 6, 2), (2,), images, requires_grad=True)
            mean, variance = (
                distribute(values(6), (2,), of_mean),
                distribute(values(6).abs(), (2,), of_variance),
            )
            z = F.batch_norm(x, mean, variance, training=training)
            (found,) = torch.autograd.grad((z * z * z).sum(), x)
            for got, wanted in (
                (z.detach(), y.detach()),
                (found, gradient),
                (mean, expected[0]),
                (variance, expected[1]),
            ):
                for part in got.redistribute(
                    placements=[Replicate()]
                )._local_tensor._local_tensors.values():
                    with plain():
                        assert torch.allclose(part, wanted, atol=1e-5), name
            assert list(mean.placements) == of_mean and list(variance.placements) == of_variance


def test_statistics_that_are_only_read_are_not_sent_back():
    with ranks_of((2,)), cute_sharding.enabled():
        x, mean, variance = (
            distribute(values(*s), (2,), [Replicate()]) for s in ((3, 6), (6,), (6,))
        )
        weight = distribute(values(6), (2,), [Shard(0)])
        with CommDebugMode() as communication:
            y = F.batch_norm(x, mean, variance.abs(), weight, training=False)
        assert list(y.placements) == [Shard(1)]
        assert communication.get_total_counts() == 0


# Of these torch has no rule for the gradient, on any placements.
UNKNOWN_TO_TORCH = {
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "logsigmoid": F.logsigmoid,
    "prelu": lambda x: torch._prelu_kernel(x, x.detach()[:1, :1]),
    "median": lambda x: x.median(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 0).values,
}


@pytest.mark.parametrize("name", UNKNOWN_TO_TORCH)
def test_what_torch_has_no_rule_for(name):
    for mesh, placements in (
        ((2,), [Shard(0)]),
        ((2,), [S(1)]),
        ((2, 2), [S(0), Shard(1)]),
        ((2, 2), [Replicate(), Shard(1)]),
    ):
        with plain():
            single = values(5, 6).requires_grad_()
            y = UNKNOWN_TO_TORCH[name](single)
            (gradient,) = torch.autograd.grad((y * y).sum(), single)
        with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
            x = distribute(values(5, 6), mesh, placements, requires_grad=True)
            z = UNKNOWN_TO_TORCH[name](x)
            (found,) = torch.autograd.grad((z * z).sum(), x)
            for got, wanted in ((z.detach(), y.detach()), (found, gradient)):
                assert_holds(got.redistribute(placements=[Replicate()] * len(mesh)), wanted)


@pytest.mark.parametrize("others", [(4,), (8, 2), (2, 8, 1), ()], ids=str)
@pytest.mark.parametrize("placement", [Shard(1), S(1)])
def test_tensors_of_other_shapes_are_not_equal(placement, others):
    """torch would cut the one as the other is, which may not have that dim. Two of these have a
    part of the same shape; nothing is received.
    """
    with ranks_of((2,)), cute_sharding.enabled(), CommDebugMode() as collectives:
        x = distribute(torch.zeros(2, 8), (2,), [placement])
        assert not torch.equal(x, distribute(torch.zeros(others), (2,), [Replicate()]))
        assert not torch.equal(distribute(torch.zeros(others), (2,), [Replicate()]), x)
    assert not any("gather" in str(op) for op in collectives.get_comm_counts())


def test_it_can_be_left_off():
    with ranks_of((2,)), cute_sharding.enabled(ops=False):
        x, w = (
            distribute(values(4, 6), (2,), [Replicate()]),
            distribute(values(6, 16), (2,), [S(1)]),
        )
        cute_sharding.stats(reset=True)
        assert_holds(x @ w, x.full_tensor() @ w.full_tensor())
        counts = cute_sharding.stats()["mm.default"]
        assert (counts["signature"], counts["gate"]) == (0, 1)


def test_torchs_own_is_back_afterwards():
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (
        "op_to_schema_info",
        "op_to_schema_info_for_single_dim_strategy",
        "op_strategy_funcs",
        "op_single_dim_strategy_funcs",
    )
    handlers = DTensor._op_dispatcher._custom_op_handlers

    def state():
        return (
            [dict(getattr(propagator, name)) for name in tables],
            dict(handlers),
            "propagate_op_sharding_non_cached" in vars(propagator),
        )

    before = state()
    with cute_sharding.enabled():
        assert state() != before
    assert state() == before


@pytest.mark.parametrize("op", [torch.argmax, torch.argmin])
def test_an_uncut_dim_is_searched_where_it_lies(op):
    """Also where some devices have nothing, for which it cannot be searched along the cut dim."""
    full = values(6, 2)
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(full, (4,), [Shard(1)])
        with CommDebugMode() as communicated:
            found = op(x, 0)
        assert_close(found, op(full, 0), "along the rows")
        assert communicated.get_total_counts() == 0 and list(found.placements) == [Shard(0)]
        assert_close(op(x, 1), op(full, 1), "along the columns")
        assert_close(op(x), op(full), "of all")


def test_a_rule_of_the_program_comes_first():
    """Also one for a view."""
    op = torch.ops.aten.permute.default
    held = {id(table): {op: table[op]} for table in op_schemas.tables() if op in table}
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(4, 6), (2,), [Shard(0)])

        @register_sharding(op)
        def rule(x, dims):
            return [([Replicate()], [Replicate(), None])]

        try:
            assert x.permute(1, 0).placements == (Replicate(),)
        finally:
            for table in op_schemas.tables():
                table.pop(op, None)
                table.update(held.get(id(table), {}))
            op_schemas.clear_propagation_caches()
        assert x.permute(1, 0).placements == (Shard(1),)


@pytest.mark.parametrize("op", [torch.argmax, torch.argmin])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_what_a_search_leaves_is_said_as_it_is(op, mesh):
    """Whatever torch's rule would have moved."""
    full = values(4, 6, 4)
    places = [Replicate(), Shard(0), Shard(1), Shard(2)]
    with ranks_of(mesh), cute_sharding.enabled():
        for placements, keeps in product(product(places, repeat=len(mesh)), (False, True)):
            x = distribute(full, mesh, placements)
            for dim in (None, 0, 1, -1):
                case = f"{placements}, {dim}, {keeps}"
                assert_close(op(x, dim, keeps), op(full, dim, keeps), case)


def test_what_is_answered_is_counted():
    with ranks_of((2,)), cute_sharding.enabled():
        cute_sharding.stats(reset=True)
        x = distribute(values(4, 6), (2,), [S(0)])
        x.softmax(1)
        x.argmax(0)
        rows = distribute(torch.tensor([0, 1]), (2,), [Replicate()])
        x.index_reduce(0, rows, distribute(values(2, 6), (2,), [Replicate()]), "amax")
        counts = cute_sharding.stats()
        answered = {
            name: who for name, some in counts.items() for who in ("signature", "gate") if some[who]
        }
        assert answered == {
            "_softmax.default": "signature",
            "argmax.default": "signature",
            "index_reduce.default": "gate",
        }


def test_rows_are_of_ops_that_torch_has():
    for name in SIGNATURES:
        assert op_schemas.overload(name) is not None, name
        assert name not in VIEWS and name not in OF_TORCH


def test_numbers_are_not_in_the_way():
    with ranks_of((2,)), cute_sharding.enabled():
        assert (distribute(number((4, 6)), (2,), [S(0)]) + 1).placements == (S(0),)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str
)
def test_parameters_are_drawn_clipped_and_trained(options):
    """As fully_shard over tensor parallelism has them."""
    with plain():
        single = values(9, 6).requires_grad_()
        single.grad = values(9, 6) + 0.5
        norm = torch.nn.utils.clip_grad_norm_([single], 0.7)
        torch.optim.AdamW([single], lr=0.1, **options).step()
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(9, 6), (2,), [S(0)], requires_grad=True)
        x.grad = distribute(values(9, 6) + 0.5, (2,), [S(0)])
        with CommDebugMode() as communicated:
            torch.nn.utils.clip_grad_norm_([x], 0.7)
            total = communicated.get_total_counts()
            torch.optim.AdamW([x], lr=0.1, **options).step()
        assert communicated.get_total_counts() == total <= 1
        assert_close(x.detach(), single.detach(), f"{options}, {norm}")
        for draw in (torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.zeros_):
            assert draw(x).placements == (S(0),)


def test_what_is_made_anew_is_not_pending():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(4, 6), (2,), [Partial()])
        assert list(torch.empty_like(x).placements) == [Replicate()]
        filled = distribute(values(4, 6), (2,), [Partial()]).fill_(3.0)
        assert_close(filled, torch.full((4, 6), 3.0), "filled")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.costly
def test_convolutions_on_any_cut(mesh):
    """Also with groups, transposed and with a bias, on plain shards, even or not: torch looks at
    the placements of the images alone.
    """
    rng = random.Random(f"convolutions {mesh}")
    cases = {
        "groups": (lambda x, w, b: F.conv2d(x, w, b, groups=2), (4, 4, 5, 5), (6, 2, 3, 3), (6,)),
        "transposed": (
            lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
            (4, 4, 3, 3),
            (4, 6, 2, 2),
            (6,),
        ),
        "padded": (lambda x, w: F.conv1d(x, w, padding=1), (3, 4, 6), (5, 4, 3)),
        "one dim": (lambda x, w, b: F.conv1d(x, w, b), (2, 4, 6), (6, 4, 3), (6,)),
    }
    for name, (function, *shapes) in cases.items():
        for kind in (Shard, lambda d: _StridedShard(d, split_factor=2)):
            for _ in range(3):
                placements = [
                    [rng.choice([Replicate(), kind(rng.randrange(len(shape)))]) for _ in mesh]
                    for shape in shapes
                ]
                with ranks_of(mesh):
                    compare(
                        function,
                        [values(*shape) for shape in shapes],
                        mesh,
                        placements,
                        f"{name} {placements}",
                    )


def test_reductions_that_name_no_dim():
    """An empty list stands for all dims; torch takes it for none, and calls the sum of a shard a
    shard.
    """
    reductions = (
        *(torch.sum, torch.mean, torch.amax, torch.linalg.vector_norm, torch.norm),
        lambda x, **dims: sum(torch.var_mean(x.detach(), **dims)),
    )
    for reduce in reductions:
        for keep in (False, True):
            with ranks_of((2,)):
                compare(
                    lambda x, reduce=reduce, keep=keep: reduce(x, dim=[], keepdim=keep),
                    [values(4, 6)],
                    (2,),
                    [[Shard(0)]],
                    f"{reduce} {keep}",
                )


def test_convolutions_with_plain_tensors():
    from torch.distributed.tensor.experimental import implicit_replication

    image, weight, bias = values(4, 2, 5, 5), values(3, 2, 3, 3), values(3)
    with plain():
        expected = F.conv2d(image, weight, bias, padding=1)
    for cut in (Shard(0), Shard(1), _StridedShard(0, split_factor=2), Replicate()):
        with ranks_of((2,)), cute_sharding.enabled(), implicit_replication():
            assert_close(
                F.conv2d(distribute(image, (2,), [cut]), weight, bias, padding=1), expected, cut
            )


def test_ops_that_torch_refuses():
    """Of shards along the dim that is taken apart."""
    with plain():
        expected = values(6, 4).unbind(1)
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(6, 4), (2,), [Shard(1)])
        for i, (got, wanted) in enumerate(zip(x.unbind(1), expected, strict=True)):
            assert_close(got, wanted, f"row {i}")
        with pytest.raises(RuntimeError, match="out of range"):
            x.unbind(2)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), S(0)], ids=str)
def test_gradients_of_norms_of_groups(placement):
    """torch tells the op the global sizes, and it raises on shards."""
    function, *shapes = PROGRAMS["group_norm"]
    placements = [[placement], [Replicate()], [Replicate()]]
    with ranks_of((2,)):
        compare(function, [values(*s) for s in shapes], (2,), placements, "norm of groups")

"""Losses: what a mean is taken of, what a gradient reads, and rows that are ignored."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from op_programs import S, assert_close, compare, values
from simulation import assert_holds, distribute, plain, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

import cute_sharding
from cute_sharding.dtensor.replaced.op_schemas import unseen_writers


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_means_on_even_shards(reduction):
    """torch divides by the elements of a shard."""
    for cut in ([Shard(0)], [Shard(1)]):
        with ranks_of((2,)):
            compare(
                lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
                [values(4, 6), values(4, 6)],
                (2,),
                [[Replicate()], cut],
                f"{cut} {reduction}",
            )


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_gradients_of_mean_losses_on_even_shards(loss):
    for cut in ([Shard(0)], [Shard(1)]):
        with ranks_of((2,)):
            compare(
                loss,
                [values(4, 6), values(6, 4).t() + 1],
                (2,),
                [cut, [Replicate()]],
                f"{loss} {cut}",
            )


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("cut", [Shard(0), S(0)], ids=str)
def test_the_weight_of_all_rows_is_not_finished_for_gradients_that_do_not_read_it(cut, reduction):
    target = torch.tensor([0, 1, 2, -100, 1, 0, 2, 2])
    with plain():
        expected = values(8, 3).requires_grad_()
        F.cross_entropy(expected, target, reduction=reduction).sum().backward()
    with ranks_of((5,)), cute_sharding.enabled(), CommDebugMode() as sent:
        x = distribute(values(8, 3), (5,), [cut], True)
        F.cross_entropy(x, distribute(target, (5,), [cut]), reduction=reduction).sum().backward()
        assert sent.get_total_counts() == 1  # the loss
    with ranks_of((5,)):
        assert x.grad.placements == x.placements
        assert_holds(x.grad, expected.grad)


def test_ignored_rows_after_a_view_that_is_free_here_alone():
    with plain():
        target = torch.tensor([-100, -100, 1, 2])
        expected = F.cross_entropy(values(6, 4).t(), target)
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(6, 4), (2,), [Shard(1)]).view(2, 12).view(6, 4).t()
        assert_close(
            F.cross_entropy(x, distribute(target, (2,), [Replicate()])), expected, "ignored rows"
        )


# (where the devices' own means are of different numbers of rows or elements, what is cut)
CUTS = [[Shard(0)], [Shard(1)], [S(0, 2)], [S(1, 3)], [Replicate()]]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize(
    "mean",
    [
        lambda x, y: (x * y).mean(),
        lambda x, y: (x * y).mean(0),
        lambda x, y: (x * y).mean((0, 1), keepdim=True),
        F.mse_loss,
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        lambda x, y: F.soft_margin_loss(x, y.sign()),
    ],
    ids=["of all", "of rows", "kept", "mse_loss", "binary_cross_entropy", "soft_margin_loss"],
)
def test_means_of_blocks_of_different_sizes_receive_one_number(mean, devices, cut):
    """Of more blocks than rows as well. And their gradients: each element's is its own."""
    full, other = values(5, 7), values(7, 5).t() + 1.5
    with plain():
        alone = full.clone().requires_grad_()
        expected = mean(alone, other)
        expected.sum().backward()
    with ranks_of((devices,)), cute_sharding.enabled():
        x = distribute(full, (devices,), cut, requires_grad=True)
        y = distribute(other, (devices,), cut)
        with CommDebugMode() as sent:
            result = mean(x, y)
            result.backward(torch.ones_like(result))
        assert sent.get_total_counts() == (not result.shape and cut != [Replicate()])
        assert_close(result, expected, f"mean, {cut}")
        assert_close(x.grad, alone.grad, f"gradient, {cut}")


@pytest.mark.parametrize("cut", [Shard(0), S(0, 3), S(0, 2)], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["rows", "weighted"])
@pytest.mark.parametrize("ignored", [0, 1, 5, 8], ids=str)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_mean_losses_of_classes_where_rows_are_ignored(devices, ignored, weighted, cut):
    """Of any share of a device's rows, and of all that it has."""
    target = torch.tensor([1, 0, 2, 1, 1, 2, 0, 0, 2])
    target[:ignored] = -100
    weight = torch.tensor([1.0, 0.0, 2.5]) if weighted else None
    with plain():
        alone = values(9, 3).requires_grad_()
        expected = F.cross_entropy(alone, target, weight)
        expected.backward()
    with ranks_of((devices,)), cute_sharding.enabled():
        x, rows = (distribute(full, (devices,), [cut]) for full in (values(9, 3), target))
        x.requires_grad_()
        given = None if weight is None else distribute(weight, (devices,), [Replicate()])
        with CommDebugMode() as sent:
            loss = F.cross_entropy(x, rows, given)
            assert sent.get_total_counts() == 2  # the weight of all rows, and the loss
            loss.backward()
        assert sent.get_total_counts() == 2
        assert loss.placements == (Replicate(),)
        assert x.grad.placements == (cut,)
        assert_close(loss, expected, "loss")
        assert_close(x.grad, alone.grad, "gradient")


def test_a_mean_of_no_rows_is_none():
    with ranks_of((2,)), cute_sharding.enabled():
        x, rows = (
            distribute(full, (2,), [Shard(0)]) for full in (values(4, 3), torch.full((4,), -100))
        )
        whole = F.cross_entropy(x, rows).full_tensor()
    assert all(value.isnan() for value in whole._local_tensors.values())


def test_weights_that_come_to_nothing_on_a_device():
    """No weight is nothing there, and they count."""
    target, weight = torch.tensor([0, 1, 0, 0]), torch.tensor([1.0, -1.0])
    with plain():
        expected = F.cross_entropy(values(4, 2), target, weight)
    with ranks_of((2,)), cute_sharding.enabled():
        x, rows = (distribute(full, (2,), [Shard(0)]) for full in (values(4, 2), target))
        loss = F.cross_entropy(x, rows, distribute(weight, (2,), [Replicate()]))
        assert_close(loss, expected, "loss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("devices", [2, 3, 7])
def test_a_mean_loss_that_is_right_on_stock_is_so_to_the_last_bit(devices, dtype):
    """Where torch averages the devices' own: since 2.14 it gathers the scores."""
    full, target = values(42, 5).to(dtype), torch.arange(42) % 5

    def train():
        with ranks_of((devices,)):
            x = distribute(full, (devices,), [Shard(0)], requires_grad=True)
            loss = F.cross_entropy(x, distribute(target, (devices,), [Shard(0)]))
            loss.backward()
            return loss.placements, loss.full_tensor(), x.grad.full_tensor()

    with plain():
        averages, *stock = train()
        with cute_sharding.enabled():
            placements, *ours = train()
    assert placements == (Replicate(),)
    for expected, found in zip(stock, ours):
        for rank, value in expected._local_tensors.items():
            if averages == (Partial("avg"),):
                assert torch.equal(value, found._local_tensors[rank])
            else:
                assert torch.allclose(value, found._local_tensors[rank], rtol=1e-2)


def test_a_mean_of_half_precision_does_not_overflow():
    """Not though its sum would."""
    full = torch.full((5, 40), 60000.0, dtype=torch.float16)
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(full, (2,), [S(0)])
        assert_close(x.mean(), torch.tensor(60000.0, dtype=torch.float16), "mean")


def test_a_loss_of_what_is_broadcast():
    """The op itself, without F.mse_loss, which expands first: all is of the other operand."""
    for op in (torch.ops.aten.mse_loss, torch.ops.aten.smooth_l1_loss, torch.ops.aten.huber_loss):
        for shape, cut in (((1, 4), Shard(0)), ((1, 4), S(0)), ((), S(0)), ((5, 1), Shard(1))):
            with plain():
                expected = op(values(*shape), values(5, 4))
            with ranks_of((2,)), cute_sharding.enabled():
                x = distribute(values(*shape), (2,), [Replicate()])
                loss = op(x, distribute(values(5, 4), (2,), [cut]))
                assert_close(loss, expected, f"{op} of {shape}, {cut}")


@pytest.mark.parametrize("cut", [Shard(0), S(0), S(0, 3), Shard(1)], ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_gradients_that_are_written_to_what_is_given(reduction, cut):
    """Under another name than out=, which torch's dispatcher does not see."""
    op = torch.ops.aten.mse_loss_backward
    full, other = values(5, 4), values(4, 5).t().contiguous()
    gradient = torch.tensor(1.5) if reduction else torch.ones(5, 4)
    with plain():
        expected = op(gradient, full, other, reduction)
    with ranks_of((2,)), cute_sharding.enabled():
        given = distribute(gradient, (2,), [Replicate() if reduction else cut])
        x, y, out = (distribute(t, (2,), [cut]) for t in (full, other, torch.zeros(5, 4)))
        assert op.grad_input(given, x, y, reduction, grad_input=out) is out
        assert_close(out, expected, f"{reduction} {cut}")


def test_smoothed_labels_within_loss_parallel_are_refused():
    """As by torch: the gradient would be wrong."""
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(4, 6), (2,), [Shard(1)], requires_grad=True)
        rows = distribute(torch.arange(4), (2,), [Replicate()])
        F.cross_entropy(x, rows, label_smoothing=0.1).backward()
        with loss_parallel():
            with pytest.raises(RuntimeError, match="label_smoothing would be wrong"):
                F.cross_entropy(x, rows, label_smoothing=0.1)
            F.cross_entropy(x, rows).backward()
            written = x.detach().sum(1).add_(1.0)  # has nothing to do with it
        with plain():
            expected = values(4, 6).sum(1) + 1
        assert_close(written, expected, "written to")


def test_ops_that_are_given_out_by_another_name_are_known():
    """torch's dispatcher takes them for ops that make a new tensor."""
    aten, found = torch.ops.aten, unseen_writers()
    assert {aten.tanh_backward.grad_input, aten.sort.values, aten.max.dim_max} <= {*found}
    assert aten.native_batch_norm.default in found and aten.add.out not in found
    by_schema = {
        f"{schema.name}.{schema.overload_name}"
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and "out" not in schema.overload_name
        if schema.is_mutable and any(argument.is_out for argument in schema.arguments)
    }
    assert by_schema == {op._name for op in found if any(a.is_out for a in op._schema.arguments)}


def test_smoothed_labels_of_what_is_pending_and_strided():
    """The sum over classes is finished to be written to, and its rows are read as before."""
    target, weight = torch.tensor([1]), torch.tensor([0.5, 1.0, 2.0, 0.25])
    smoothed = partial(F.cross_entropy, reduction="sum", label_smoothing=0.1)
    with plain():
        expected = smoothed(values(1, 4), target, weight)
    with ranks_of((2, 2)), cute_sharding.enabled():
        full = [values(1, 4), target, weight]
        cuts = [Replicate(), S(0, 3)], [S(0, 3), Shard(0)], [S(0), Replicate()]
        given = [distribute(x, (2, 2), cut) for x, cut in zip(full, cuts)]
        for x in given:  # left to right, as what comes of a view
            spec = x._spec
            x._spec = DTensorSpec(
                spec.mesh,
                spec.placements,
                spec.tensor_meta,
                use_strided_shard_as_shard_order=False,
            )
        assert_close(smoothed(*given), expected, "smoothed")


@pytest.mark.parametrize("cut", [Shard(0), S(0)], ids=str)
def test_gradients_of_means_of_many_elements_do_not_vanish_in_half_precision(cut):
    """An n-th of one is hardly a number there, and what it is multiplied with is large. (On one
    device the kernel rounds that number as well, but of all elements.)
    """
    full = values(1500, 2001).half() * 500
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(full, (4,), [cut], requires_grad=True)
        F.mse_loss(x, x.detach() * 0).backward()
        found = x.grad.full_tensor()
    expected = 2 * full.double() / full.numel()
    for value in found._local_tensors.values():
        assert torch.allclose(value.double(), expected, rtol=2e-2, atol=2**-24)

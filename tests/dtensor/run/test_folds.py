"""Ops along sharded dims that exchange states: values and gradients beside one device, on drawn
shapes and placements, and what they receive.
"""

import random
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compiling import compiled, fresh_compiler, sharded  # noqa: F401
from functorch.compile import make_boxed_func
from op_programs import assert_close
from simulation import distribute, plain, ranks_of
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cute_sharding
from benchmarks.received import Received
from cute_sharding.dtensor.run.folds import FOLDS
from cute_sharding.relations.table import SIGNATURES

PACKAGE = str(Path(cute_sharding.__file__).parent)

OPS = {
    "softmax": lambda x, *_: x.softmax(1),
    "log_softmax": lambda x, *_: F.log_softmax(x, 1),
    "logsumexp": lambda x, *_: x.logsumexp(1),
    "logsumexp of all": lambda x, *_: x.logsumexp((0, 1), keepdim=True),
    "var": lambda x, *_: x.var(1),
    "std": lambda x, *_: x.std(1, keepdim=True, correction=0),
    "var of all": lambda x, *_: x.var(),
    "var_mean": lambda x, *_: torch.stack(torch.var_mean(x, 1)),
    "layer_norm": lambda x, w, b, _: F.layer_norm(x, x.shape[1:], w, b),
    "layer_norm without weights": lambda x, *_: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x, w, *_: F.rms_norm(x, x.shape[1:], w),
    "cross_entropy": lambda x, w, b, t: F.cross_entropy(x, t),
    "cross_entropy, weights": lambda x, w, b, t: F.cross_entropy(
        x, t, w.detach().square(), ignore_index=1
    ),
    "cross_entropy, sum": lambda x, w, b, t: F.cross_entropy(x, t, reduction="sum"),
    "cross_entropy, rows": lambda x, w, b, t: F.cross_entropy(
        x, t, reduction="none", label_smoothing=0.1
    ),
}


def drawn(rng, mesh):
    """Placements that shard dim 1 on some mesh dim."""
    kinds = [Shard(1), Shard(1), Shard(0), Replicate(), _StridedShard(1, split_factor=2)]
    while True:
        found = [rng.choice(kinds) for _ in mesh]
        if any(p.is_shard(1) or isinstance(p, _StridedShard) for p in found):
            return found


def beside(placement, dim):
    """The placement for a tensor that has dim ``dim`` alone."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor) if dim == 1 else Replicate()
    return Shard(0) if placement.is_shard(dim) else Replicate()


def with_gradients(function, x, w, b, t):
    x, w, b = (each.detach().requires_grad_() for each in (x, w, b))
    y = function(x, w, b, t)
    ((y * y).sum() + y.sum()).backward()
    return [each for each in (y, x.grad, w.grad, b.grad) if each is not None]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(OPS))
def test_values_and_gradients_are_those_of_one_device(name, dtype):
    """Even and uneven shards, strided ones, several on one dim, devices without rows."""
    rng = random.Random(name)
    for mesh in [(4,), (2, 3), (2, 2, 2)]:
        for shape in rng.sample([(3, 8), (5, 13), (4, 3), (1, 24), (7, 1)], 3):
            placements = drawn(rng, mesh)
            with plain():
                torch.manual_seed(0)
                x, w, b = (torch.randn(s) for s in (shape, shape[1:], shape[1:]))
                t = torch.randint(0, shape[1], shape[:1])
                wanted = with_gradients(OPS[name], *(v.double() for v in (x, w, b)), t)
                x, w, b = (v.to(dtype) for v in (x, w, b))
                alone = with_gradients(OPS[name], x, w, b, t)
            case = name, mesh, shape, placements
            with ranks_of(mesh), cute_sharding.enabled(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of one row: no degrees of freedom
                row, column = ([beside(p, dim) for p in placements] for dim in (1, 0))
                found = with_gradients(
                    OPS[name],
                    distribute(x, mesh, placements),
                    distribute(w, mesh, row),
                    distribute(b, mesh, row),
                    distribute(t, mesh, column),
                )
                full = [each.full_tensor() for each in found]
            for each, whole, one in zip(full, wanted, alone, strict=True):
                assert each.dtype == one.dtype, case
                local = each._local_tensors[0] if hasattr(each, "_local_tensors") else each
                with plain():
                    error, of_one = ((v.double() - whole).abs() for v in (local, one))
                    slack = torch.finfo(dtype).eps * (8 + whole.abs() * 16)
                    is_nan = whole.isnan() & local.isnan()
                    assert (is_nan | (error <= 2 * of_one + slack)).all(), (case, local, one)


def of_images(name, x, w, b, weights, groups):
    """A norm of images, its gradients, and the running statistics after it."""
    x, w, b = (each.detach().requires_grad_() for each in (x, w, b))
    running = [w.detach() + 1, b.detach().square() + 1]
    given = (w, b) if "weights" in name else (None, None)
    match name.split(",")[0]:
        case "batch_norm":
            y = F.batch_norm(x, *running, *given, True, 0.3)
        case "batch_norm in use":
            y = F.batch_norm(x, *running, *given, False)
        case "instance_norm":
            y = F.instance_norm(x, None, None, *given)
        case "group_norm":
            y = F.group_norm(x, groups, *given)
    y.backward(weights)
    return [each for each in (y, x.grad, w.grad, b.grad, *running) if each is not None]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        f"{name}{weights}"
        for name in ("batch_norm", "batch_norm in use", "instance_norm", "group_norm")
        for weights in ("", ", weights")
    ],
)
def test_norms_of_images_are_those_of_one_device(name):
    """Whatever is sharded: images, channels within and across groups, heights."""
    rng = random.Random(name)
    for _ in range(10):
        mesh = rng.choice([(4,), (2, 3), (2, 2, 2), (1, 3)])
        channels = rng.choice([1, 2, 3, 4, 6, 8, 12])
        groups = rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
        inner = [rng.choice([2, 5, 8]) for _ in range(rng.choice([1, 2]))]
        shape = (rng.choice([2, 3, 8]), channels, *inner)

        def placements(ndim):
            dims = [rng.randrange(ndim) for _ in mesh]
            kinds = [
                Shard,
                Shard,
                lambda _: Replicate(),
                lambda d: _StridedShard(d, split_factor=2),
            ]
            return [rng.choice(kinds)(d) for d in dims]

        with plain():
            torch.manual_seed(0)
            x, weights = torch.randn(shape) * 2 + 1, torch.randn(shape)
            w, b = torch.randn(channels), torch.randn(channels)
            wanted = of_images(name, *(v.double() for v in (x, w, b, weights)), groups)
            alone = of_images(name, x, w, b, weights, groups)
        whole = [Replicate()] * len(mesh)
        places = placements(len(shape))
        with ranks_of(mesh), cute_sharding.enabled():
            given = [distribute(x, mesh, places), distribute(w, mesh, whole)]
            given += [distribute(b, mesh, whole), distribute(weights, mesh, placements(len(shape)))]
            full = [each.full_tensor() for each in of_images(name, *given, groups)]
        for each, exact, one in zip(full, wanted, alone, strict=True):
            for local in each._local_tensors.values():
                with plain():
                    error, of_one = ((v.double() - exact).abs().max() for v in (local, one))
                    slack = torch.finfo(torch.float32).eps * 32 * (1 + exact.abs().max())
                    assert error <= 2 * of_one + slack, (name, mesh, shape, groups, places)


def test_running_statistics_of_infinity():
    """With momentum 1 nothing is left of the statistics before, as infinity less infinity."""
    with plain():
        full = torch.randn(6, 3).index_fill(1, torch.tensor([1]), -torch.inf)
        wanted = [torch.zeros(3), torch.ones(3)]
        F.batch_norm(full, *wanted, None, None, True, 1.0)
    with ranks_of((4,)), cute_sharding.enabled():
        x = distribute(full, (4,), [Shard(0)])
        found = [distribute(each, (4,), [Replicate()]) for each in (torch.zeros(3), torch.ones(3))]
        F.batch_norm(x, *found, None, None, True, 1.0)
        check_alike(found[:1], wanted[:1], "infinity")


def test_batch_norms_of_other_forms_and_backends_are_the_same():
    """Kernels of a GPU do not run, since the batch is folded on each device."""
    aten, mesh, eps = torch.ops.aten, (4,), 1e-5
    torch.manual_seed(0)
    x, grad, w, b = (torch.randn(shape) for shape in ((6, 3, 5), (6, 3, 5), (3,), (3,)))
    mean, variance = torch.randn(3), torch.rand(3)

    def running():
        return mean.clone(), variance.clone()

    alone, statistics = [*running()], (None, None)
    y, m, s = aten.native_batch_norm(x, w, b, *alone, True, 0.3, eps)
    kept = grad, x, w, *statistics, m, s
    gradients = aten.native_batch_norm_backward(*kept, True, eps, [True] * 3)
    with ranks_of(mesh), cute_sharding.enabled():
        rows, whole = [Shard(0)], [Replicate()]

        def given(*tensors):
            return [t if t is None else distribute(t, mesh, whole) for t in tensors]

        xs, grads = distribute(x, mesh, rows), distribute(grad, mesh, rows)
        weights, saved = given(w, b), given(None, None, m, s)
        empty = distribute(torch.empty(0, dtype=torch.uint8), mesh, whole)
        for op, more, wanted in (
            (aten._native_batch_norm_legit.no_stats, (True, 0.3, eps), (y, m, s)),
            (
                aten._native_batch_norm_legit_functional,
                (*given(*running()), True, 0.3, eps),
                (y, m, s, *alone),
            ),
            (aten.cudnn_batch_norm, (*given(*running()), True, 0.3, eps), (y, m, s)),
        ):
            check_alike(op(xs, *weights, *more), wanted, op)
        found = aten.cudnn_batch_norm_backward(xs, grads, weights[0], *saved, eps, empty)
        check_alike(found, gradients, "cudnn")


def check_alike(found, wanted, case):
    for one, other in zip(found, wanted):
        for local in one.full_tensor()._local_tensors.values():
            with plain():
                assert torch.allclose(local, other, atol=1e-5), case


def test_groups_that_no_rank_shares_exchange_nothing():
    with ranks_of((8,)), cute_sharding.enabled():
        for groups, most in ((8, 0), (16, 0), (4, 224)):
            x = distribute(torch.randn(4, 64, 8, 8), (8,), [Shard(1)])
            with Received() as received:
                y = F.group_norm(x, groups)
            assert received.most == most and y.placements == (Shard(1),)


@pytest.mark.parametrize(
    "name, states",
    [
        ("softmax", 4),  # two of the forward and one of the gradient; log_softmax alike
        ("log_softmax", 4),
        ("layer_norm", 4),
        ("cross_entropy", 4),
    ],
)
def test_only_states_are_received(name, states):
    """A number of each row for each state, of eight ranks, in all-reduces."""
    mesh, shape = (8,), (16, 512)
    x, w, b = torch.randn(shape), torch.randn(512), torch.randn(512)
    t = torch.randint(0, 512, (16,))
    with ranks_of(mesh), cute_sharding.enabled():
        given = (
            distribute(x, mesh, [Shard(1)]),
            *(distribute(v, mesh, [Shard(0)]) for v in (w, b)),
        )
        target = distribute(t, mesh, [Replicate()])
        with Received() as counted:
            leaf = given[0].detach().requires_grad_()
            y = OPS[name](leaf, *given[1:], target)
            gradient = torch.ones_like(y)
            torch.autograd.grad(y, leaf, gradient)
    each = 2 * 7 * shape[0] // 8
    assert max(counted.by_rank.values()) <= states * each
    assert set(counted.collectives) == {"all_reduce"}


@pytest.mark.parametrize("name", list(OPS))
def test_ops_that_are_taken_apart_are_right_whole(name):
    """In inference mode a DTensor meets ``softmax`` itself, for which torch tries its steps on one
    device.
    """
    mesh, shape = (4,), (6, 8)
    with plain():
        torch.manual_seed(0)
        x, w, b = (torch.randn(s) for s in (shape, shape[1:], shape[1:]))
        t = torch.randint(0, shape[1], shape[:1])
        wanted = OPS[name](x, w, b, t)
    with ranks_of(mesh), cute_sharding.enabled(), torch.inference_mode():
        found = OPS[name](
            distribute(x, mesh, [Shard(1)]),
            *(distribute(each, mesh, [Shard(0)]) for each in (w, b)),
            distribute(t, mesh, [Replicate()]),
        )
        assert_close(found, wanted, name)


def test_huge_and_lost_numbers():
    """Rows of minus infinity, with NaN, with infinity, and of large logits."""
    inf, nan = float("inf"), float("nan")
    rows = [[-inf] * 4, [nan, 0, 1, 2], [inf, 0, 1, 2], [1e30, 1e30, 0, -1e30], [80, 90, 100, 0]]
    full = torch.tensor(rows)
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(full, (2,), [Shard(1)])
        for function in (
            lambda x: x.softmax(1),
            lambda x: F.log_softmax(x, 1),
            lambda x: x.logsumexp(1),
        ):
            with plain():
                wanted = function(full)
            assert_close(function(x), wanted, "row")


def test_a_target_that_is_no_class_raises_on_all_ranks():
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(torch.randn(3, 4), (2,), [Shard(1)])
        for wrong in (4, -1):
            target = distribute(torch.tensor([0, wrong, 1]), (2,), [Replicate()])
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                F.nll_loss(x, target)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_graph_shows_the_all_reduces_of_states(dynamic):
    """And nothing else: a compiler can put them together with others."""
    nodes = []

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    program = compiled(
        lambda x: F.log_softmax(x, 1) + x.softmax(1), dynamic, aot_autograd(fw_compiler=backend)
    )
    for shape in ((4, 16), (6, 24)):
        x = sharded(shape, [Shard(1)])
        assert program(x).placements == (Shard(1),)
    found = Counter(node for node in nodes if "c10d" in node or "cute" in node)
    graphs = 1 if dynamic else 2
    assert found == {
        "_c10d_functional.all_reduce.default": 4 * graphs,
        "_c10d_functional.wait_tensor.default": 4 * graphs,
    }


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, torch.inf, 0])
def test_distances_and_norms_of_rows_gather_no_columns(order):
    """Of columns that mesh dims shard, evenly or not, or of which a rank has none."""

    def computed(x, y):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        found = [torch.cdist(x, y, order, mode) for mode in ("use_mm_for_euclid_dist", MODE)]
        found += [x.renorm(order, 0, 0.7)] if order else []
        sum([each.square().sum() for each in found]).backward()
        return [*found, x.grad, y.grad]

    for mesh, columns in [((4,), 64), ((2, 2), 67), ((2, 3), 62), ((4,), 3)]:
        cut = [Shard(1)] * len(mesh)
        with plain():
            torch.manual_seed(columns)
            x, y = (torch.randn(n, columns, dtype=torch.float64) for n in (3, 5))
            y[2] = x[1]
            wanted = computed(x, y)
        with ranks_of(mesh), cute_sharding.enabled(), Received() as counted:
            found = computed(distribute(x, mesh, cut), distribute(y, mesh, cut))
        assert columns < 8 or set(counted.collectives) == {"all_reduce"}
        with ranks_of(mesh):
            for each, whole in zip(found, wanted, strict=True):
                assert_close(each.detach(), whole.detach(), (order, mesh))


@pytest.mark.parametrize("padding", [None, 0, -2])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted", "max"])
def test_bags_take_the_rows_that_a_rank_has(mode, padding):
    """And receive a sum of the size of the result; of maxima, which need all rows, the table."""
    rng = random.Random(f"{mode} {padding}")

    def computed(table, indices, offsets, weights):
        table, weights = (each.detach().requires_grad_() for each in (table, weights))
        of_each = weights if mode == "weighted" else None
        how = {"mode": "sum" if of_each is not None else mode, "per_sample_weights": of_each}
        found = F.embedding_bag(indices, table, offsets, padding_idx=padding, **how)
        with Received() as counted:
            F.embedding_bag(indices, table.detach(), offsets, padding_idx=padding, **how)
        found.square().sum().backward()
        each = [found, table.grad, *([weights.grad] if of_each is not None else [])]
        return each, counted

    for mesh in [(4,), (2, 2), (8,)]:
        rows, count = rng.choice([5, 41, 96]), rng.choice([1, 9])
        with plain():
            given = (
                torch.randn(rows, 6, dtype=torch.float64),
                torch.randint(0, rows, (count,)),
                torch.tensor([0, count // 2, count // 2]),  # the second bag is empty
                torch.randn(count, dtype=torch.float64),
            )
            wanted, _ = computed(*given)
        with ranks_of(mesh), cute_sharding.enabled():
            placements = [drawn_of_rows(rng, mesh), *[[Replicate()] * len(mesh)] * 3]
            found, counted = computed(*map(distribute, given, [mesh] * 4, placements))
            for each, whole in zip(found, wanted, strict=True):
                assert_close(each.detach(), whole.detach(), (mesh, rows, count, placements[0]))
        if rows > 5 and mode != "max":
            assert max(counted.by_rank.values()) <= 2 * 3 * 6, placements[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", ["cumsum", "logcumsumexp", "topk", "smallest"])
def test_scans_and_greatest_rows_gather_no_rows(name, dtype):
    """But states: of each piece of rows, which strided shards have several of, or the greatest of
    each rank.
    """
    if name == "logcumsumexp" and dtype in (torch.int64, torch.bfloat16):
        return
    rng = random.Random(f"{name} {dtype}")

    def computed(x):
        match name:
            case "cumsum":
                return x.cumsum(1)
            case "logcumsumexp":
                return x.logcumsumexp(1)
            case _:
                return x.topk(min(3, x.shape[1]), 1, name == "topk")[0]

    for mesh in [(4,), (2, 3), (2, 2, 2), (8,)]:
        for columns in (64, rng.choice([1, 5, 61])):
            placements = drawn(rng, mesh)
            case = name, mesh, columns, placements
            with plain():
                torch.manual_seed(columns)
                x = (torch.randn(2, columns) * 5).to(dtype)
                wanted = computed(x)
                exact = computed(x.double()) if dtype.is_floating_point else wanted
            with ranks_of(mesh), cute_sharding.enabled(), Received() as counted:
                given = distribute(x, mesh, placements)
                found = computed(given)
                most = max(counted.by_rank.values(), default=0)
                local = found.full_tensor()._local_tensors[0]
                if name == "smallest":
                    _, at = given.topk(min(3, columns), 1, False)
                    back = given.full_tensor().gather(1, at.full_tensor())._local_tensors[0]
                    assert torch.equal(back, local), case
            assert local.dtype == wanted.dtype
            if dtype.is_floating_point:
                with plain():
                    slack = torch.finfo(dtype).eps * exact.abs().max() * 4
                    errors = [(each.double() - exact).abs().max() for each in (local, wanted)]
                    assert errors[0] <= 2 * errors[1] + slack, case
            else:
                assert torch.equal(local, wanted), case
            is_plain = all(type(p) is not _StridedShard for p in placements)
            may_turn = dtype.is_floating_point and name in ("cumsum", "logcumsumexp")
            if columns == 64 and is_plain and not may_turn:
                assert most <= 2 * 8 * 3 * 12, case


def test_a_scan_whose_gradient_turns_rows_around_is_weighed_with_that():
    """A gradient of ``cumsum`` flips the rows twice: another dim may rather be sharded. Integers
    have none, and one dim alone has no other.
    """
    with ranks_of((8,)), cute_sharding.enabled():
        x = distribute(torch.randn(64, 512), (8,), [Shard(1)])
        assert x.cumsum(1).placements == (Shard(0),)
        assert (x > 0).cumsum(1).placements == (Shard(1),)
        assert distribute(torch.randn(4096), (8,), [Shard(0)]).cumsum(0).placements == (Shard(0),)


def drawn_of_rows(rng, mesh):
    """Placements that shard dim 0 on each mesh dim."""
    return [rng.choice([Shard(0), _StridedShard(0, split_factor=2)]) for _ in mesh]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_mask_fills_the_elements_that_a_rank_has(in_place):
    """In the order of all elements. The mask and what it takes are whole, and x stays as it is."""
    rng = random.Random(in_place)

    def computed(x, mask, source):
        x, source = (each.detach().requires_grad_() for each in (x, source))
        y = x * 1
        found = y.masked_scatter_(mask, source) if in_place else y.masked_scatter(mask, source)
        found.square().sum().backward()
        return [found, x.grad, source.grad]

    for mesh in [(4,), (2, 3), (2, 2, 2)]:
        shape = rng.choice([(6, 7), (2, 3, 8), (13,)])
        cuts = [Shard(d) for d in range(len(shape))]
        cuts += [Replicate(), _StridedShard(0, split_factor=2)]
        of_mask = shape if rng.random() < 0.5 else (1, *shape[1:])
        with plain():
            x = torch.randn(shape, dtype=torch.float64)
            mask, source = torch.rand(of_mask) < 0.5, torch.randn(90, dtype=torch.float64)
            wanted = computed(x, mask, source)
        with ranks_of(mesh), cute_sharding.enabled():
            placements = [rng.choice(cuts) for _ in mesh]
            whole = [Replicate()] * len(mesh)
            given = [distribute(x, mesh, placements)]
            given += [distribute(each, mesh, whole) for each in (mask, source)]
            with Received() as counted:
                result = given[0].masked_scatter(*given[1:])
            assert list(result.placements) == placements and not counted.collectives
            for each, one in zip(computed(*given), wanted, strict=True):
                assert_close(each.detach(), one.detach(), (mesh, shape, placements))
            with pytest.raises(RuntimeError, match="source"):
                short = distribute(source[:0], mesh, whole)
                given[0].masked_scatter(given[1] | True, short)


MODE = "donot_use_mm_for_euclid_dist"


def test_each_fold_is_in_the_table():
    """And says what its states are, unless it exchanges none."""
    folds = {row.fold for row in SIGNATURES.values() if row.fold.name}
    assert {fold.name for fold in folds} == {*FOLDS}
    assert {fold.name for fold in folds if not fold.states} == {
        "nll_loss_backward",
        "masked_scatter",
        "flash_attention_backward",
        "flash_attention_for_cpu_backward",
    }


class Passes(TorchDispatchMode):
    """Counts the ops on local tensors of so many elements, other than views."""

    def __init__(self, size):
        super().__init__()
        self.size, self.ops = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if type(x) is torch.Tensor]
        if not func.is_view and any(x.numel() >= self.size and not x.is_meta for x in tensors):
            self.ops.append(func)
        return result


@pytest.mark.parametrize(
    ("function", "passes"),
    [
        (lambda x: x.argmax(1), 2),
        (lambda x: x.min(1), 2),
        (lambda x: torch.aminmax(x, dim=1), 2),
        (lambda x: x.softmax(1), 7),
        (lambda x: x.logsumexp(1), 4),
    ],
    ids=["argmax", "min", "aminmax", "softmax", "logsumexp"],
)
def test_a_rank_reads_its_rows_a_few_times(function, passes):
    x = sharded((8, 64), [Shard(1)])
    with Passes(x.to_local().numel()) as counted:
        function(x)
    assert 0 < len(counted.ops) <= passes, counted.ops


def test_a_warm_fold_is_little_but_its_kernels_and_collectives():
    """Few functions of the package: how states are combined is not found out again."""
    x, calls = sharded((8, 64), [Shard(1)]), []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_name)

    for _ in range(3):
        x.softmax(1)
    before = sys.getprofile()
    sys.setprofile(note)
    x.softmax(1)
    sys.setprofile(before)
    assert 0 < len(calls) < 110, Counter(calls)

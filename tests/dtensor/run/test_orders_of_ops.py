"""Of every op of torch's database and its gradients, whatever the order of the operands' dims:
local tensors lie in the order of the strides of the whole, also where torch says other strides than
kernels make.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from drawing import draw_placements
from op_programs import assert_close, values
from orders import lies_otherwise
from simulation import distribute, plain, ranks_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

import cute_sharding
from cute_sharding.dtensor.run import op_plan
from cute_sharding.dtensor.run.packing import memory_order

PARTS, SEED = 150, 0
MESHES = [(2,), (3,), (2, 2)]
SETTINGS = [{}, {"redistribution": True, "movement": True}]

# Of a tensor one that is laid out otherwise, and what makes that one the tensor.
LAYOUTS = {
    "rows": (lambda x: x, lambda y: y),
    "transposed": (lambda x: x.transpose(-1, -2), lambda y: y.transpose(-1, -2)),
    "channels last": (lambda x: x.movedim(1, -1), lambda y: y.movedim(-1, 1)),
    "turned": (lambda x: x.movedim(0, -1), lambda y: y.movedim(-1, 0)),
    "expanded": (lambda x: x[:1], lambda y: None),
    "with gaps": (lambda x: torch.cat([x, x[..., :1]], -1), lambda y: y[..., :-1]),
    "every other": (lambda x: x.repeat_interleave(2, -1), lambda y: y[..., ::2]),
}


def _laid_out(x, layout, made):
    """The tensor, or a DTensor of it, as (it, what it was ``made`` of)."""
    if x.ndim < 2 or not x.numel():
        layout = "rows"
    before, after = LAYOUTS[layout]
    base = made(before(x.detach()).contiguous())
    return (base.expand(x.shape) if layout == "expanded" else after(base)), base


def _results(op, sample, layouts, made):
    """What the op gives, and the gradients of that."""
    numbers, bases = iter(range(100)), []

    def given(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        i = next(numbers)
        x, base = _laid_out(leaf, layouts[i % len(layouts)], lambda x: made(i, x))
        bases.append(base)
        return x

    first, args, kwargs = tree_map(given, (sample.input, sample.args, sample.kwargs))
    results = [x for x in tree_leaves(op(first, *args, **kwargs)) if isinstance(x, torch.Tensor)]
    bases = [x for x in bases if x.requires_grad]
    sums = [(x * x.abs()).sum().abs() for x in results if x.requires_grad]
    return results + list(torch.autograd.grad(sum(sums), bases, allow_unused=True) if sums else [])


def _sample(op, rng):
    """One of small tensors of numbers, of several dims."""
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in op.dtypes), None)
    if dtype is None:
        return None
    has_gradients = op.supports_autograd and dtype.is_floating_point
    return rng.choice(
        [
            sample
            for sample in op.sample_inputs("cpu", dtype, requires_grad=has_gradients)
            if (tensors := _tensors(sample))
            and all(x.layout is torch.strided and x.dtype is not torch.float16 for x in tensors)
            and max(x.ndim for x in tensors) > 1
            and sum(x.numel() for x in tensors) < 3000
        ]
        or [None]
    )


def _tensors(sample):
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _assert_lie_as_they_say(op, sample, rng):
    mesh, settings = rng.choice(MESHES), rng.choice(SETTINGS)
    layouts = rng.choices(list(LAYOUTS), k=rng.randint(1, 2))
    tensors, placed = _tensors(sample), {}

    def made(i, x):
        shape = tuple(x.shape)
        if shape not in placed:
            placed[shape] = draw_placements(rng, mesh, shape, strided=rng.random() < 0.2)
        return distribute(x, mesh, placed[shape], requires_grad=tensors[i].requires_grad)

    with ranks_of(mesh), cute_sharding.enabled(**settings):
        try:
            results = _results(op, sample, layouts, made)
        except Exception:  # what ops raise is another matter
            return
        for i, result in enumerate(results):
            if isinstance(result, DTensor):
                said = f"{op.name} of {layouts}: {placed} on {mesh}, {settings}, result {i}"
                assert lies_otherwise(result) is None, (lies_otherwise(result), said)


# Ops that draw, or make what nothing was written to; of some others it takes long to try
# placements; and of sgn torch reads zeros that have no memory.
LEFT_OUT = (
    *("linalg", "svd", "rand", "empty", "dropout", "multinomial", "resize", "as_strided", "sgn"),
)


@pytest.mark.one_in(150)
@pytest.mark.parametrize("part", range(PARTS))
def test_local_tensors_lie_as_their_dtensors_say(part):
    from torch.testing._internal.common_methods_invocations import op_db  # takes long to import

    for op in op_db[part::PARTS]:
        rng = random.Random(f"{op.name} {SEED}")
        sample = None if any(word in op.name for word in LEFT_OUT) else _sample(op, rng)
        for _ in range(0 if sample is None else 3):
            _assert_lie_as_they_say(op, sample, rng)


aten = torch.ops.aten
# Ops of which torch says other strides than their kernels make.
SAID_OTHERWISE = {
    "copysign": (
        lambda x: torch.copysign(x[:, :1].permute(2, 1, 0), x.transpose(0, 2)[:1]),
        (4, 6, 8),
    ),
    "logical_and": (lambda x: torch.logical_and(x[:, :1].transpose(0, 2), x[:1]), (4, 6, 4)),
    "floor_divide": (lambda x: x.mT // x[0].t().contiguous(), (2, 6, 8)),
    "power": (lambda x: 2 ** x.t(), (4, 6)),
    "isin": (lambda x: torch.isin(x.t(), x[0]), (4, 6)),
    "mse_loss": (lambda x: aten.mse_loss_backward(x.sum(), x.t(), x.t() * 2, 1), (4, 6)),
    "smooth_l1_loss": (
        lambda x: aten.smooth_l1_loss_backward(x.sum(), x.t(), x.t() * 2, 1, 1.0),
        (4, 6),
    ),
    "log_softmax": (
        lambda x: aten._log_softmax_backward_data(x.t(), x.t(), 0, torch.float32),
        (4, 6),
    ),
    "batch_norm": (lambda x: F.batch_norm(x.mT, None, None, training=True), (3, 2, 4, 6)),
    "batch norm's statistics": (
        lambda x: aten._batch_norm_with_update(
            x.mT, *[x[0, :, i].clone() for i in range(4)], 0.5, 0.1
        )[0],
        (5, 6, 6),
    ),
    "replicated rows": (
        lambda x: F.pad(x.movedim(-1, 1), (1,) * 6, mode="replicate"),
        (2, 3, 4, 4, 3),
    ),
    "channel_shuffle": (lambda x: aten.channel_shuffle(x.movedim(-1, 1), 2), (2, 4, 3, 4)),
    "every other column": (lambda x: x[:, ::2], (5, 10)),
    "amax": (  # a dim with one row on each device no longer decides the order of the others
        lambda x: x.movedim(-1, 0).amax(-1, keepdim=True) == x.movedim(-1, 0),
        (2, 1, 2, 3),
    ),
}


@pytest.mark.parametrize("name", SAID_OTHERWISE)
def test_where_torch_says_other_strides(name):
    op, shape = SAID_OTHERWISE[name]
    with plain():
        want = op(values(*shape))
    for settings in SETTINGS:
        for mesh in [(2,), (3,), (2, 2)]:
            for placement in [Replicate(), *map(Shard, range(len(shape)))]:
                with ranks_of(mesh), cute_sharding.enabled(**settings):
                    x = distribute(values(*shape), mesh, [placement, Replicate()][: len(mesh)])
                    result = op(x)
                    case = (name, settings, mesh, placement)
                    assert lies_otherwise(result) is None, (lies_otherwise(result), case)
                    assert_close(result, want, case)
                    order = memory_order(tuple(result.shape), result.stride())
                    assert result.permute(order).view(-1).shape == (want.numel(),)


HOT = {
    "product": lambda x: x.t() @ x,
    "linear": lambda x: F.linear(x, x),
    "elements": lambda x: x.t() * x.t(),
    "where": lambda x: torch.where(x.t() > 0, x.t(), 0.0),
    "copy": lambda x: x.t().contiguous(),
    "another dtype": lambda x: x.t().to(torch.float64),
}


@pytest.mark.parametrize("name", HOT)
def test_other_ops_run_as_torch_runs_them(name, monkeypatch):
    """An op is run by a function of ours only where it has to be: that takes twice the time."""
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(6, 6), (2,), [Replicate()])
        HOT[name](x)
        monkeypatch.setattr(op_plan, "lay_out", None)
        HOT[name](x)

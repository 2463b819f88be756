"""What the processes of test_forward_mode.py run: functions of two sharded matrices, and their
derivatives in forward mode, beside one device.
"""

import random

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.func import hessian, jacfwd, jvp
from torch.utils._pytree import tree_leaves

import cute_sharding

R = Replicate()
SIZES = [(4,), (2, 2)]
PLACED = [Shard(0), Shard(0), Shard(1), R, Partial(), _StridedShard(0, split_factor=2)]


def written(x, w):
    y = torch.zeros_like(x)
    y[1] = w[0].sin()
    y[:, 1:3].mul_(2)
    return y * x


def written_in_place(x, w):
    y = x * 1
    y[:2] = w[:2] * 2
    y.mul_(w[0])
    return y[:, 1:] + 1


FUNCTIONS = {
    "pointwise": lambda x, w: x.sin() * w[0] / w.exp().sum() - 2 * x,
    "infinite": lambda x, w: torch.where(x > 0, x, float("inf")).mul(2).reciprocal() * w[0],
    "complex number": lambda x, w: ((x * 2j + w[0]) * 3j).abs(),
    "product": lambda x, w: F.gelu(x @ w) @ w.T,
    "attention": lambda x, w: (x @ w @ x.T).softmax(-1) @ x,
    "layer norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "norms": lambda x, w: x / x.norm(dim=0) + w.norm(),
    "sums": lambda x, w: x.sum(0) * w.mean(1) + x.var(0) + x.amax(0),
    "views": lambda x, w: x.reshape(-1).view(4, -1).tanh() + w[:, :1],
    "rows": lambda x, w: x[1:4],
    "columns": lambda x, w: x[:, 1:4] * w[0, 1:4] + x[1, :3],
    "joined": lambda x, w: torch.cat([x[2:], w, x[:2]]),
    "parts": lambda x, w: x.split(2)[1] * w[0] + x.roll(1, 0)[:2],
    "losses": lambda x, w: F.cross_entropy(x @ w, x.argmax(1)) + F.mse_loss(x, w[:1].expand_as(x)),
    "indexed": lambda x, w: x.gather(1, x.argsort(1)) + w[0].masked_fill(w[1] > 0, 2),
    "written": written,
    "written in place": written_in_place,
}


def placed(whole, mesh, placements):
    """The tensor with these placements; pending contributions are not equal."""
    kept = [p if isinstance(p, Shard) else R for p in placements]
    x = distribute_tensor(whole, mesh, kept)
    x = x.redistribute(mesh, [R if isinstance(p, Partial) else p for p in placements])
    pending = [i for i, p in enumerate(placements) if isinstance(p, Partial)]
    if not pending:
        return x
    is_first = not any(mesh.get_coordinate()[i] for i in pending)
    count = 1
    for i in pending:
        count *= mesh.shape[i]
    share = 1.5 if is_first else -0.5 / (count - 1)
    local = x.to_local() * share
    return DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())


def derivative(kind, f, x, w, t, s):
    if kind == "jvp":
        return jvp(lambda x: f(x, w), (x,), (t,))
    if kind == "jvp by both":
        return jvp(f, (x, w), (t, s))
    if kind == "make_dual":
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(f(x, forward_ad.make_dual(w, s)))
            return [each for each in result if each is not None]
    if kind == "jacfwd":
        return jacfwd(f, argnums=(0, 1))(x, w)
    return hessian(lambda x: (f(x, w) ** 2).sum())(x)


KINDS = ["jvp", "jvp by both", "make_dual", "jacfwd", "hessian"]


def compare(flags):
    drawn = random.Random(str(flags))
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes in SIZES}
    for number, (name, f) in enumerate(FUNCTIONS.items()):
        for kind in drawn.sample(KINDS, 2):
            sizes, rows = drawn.choice(SIZES), drawn.choice([5, 7, 8])
            torch.manual_seed(number)
            full = [torch.randn(rows, 4), torch.randn(4, 4), torch.randn(rows, 4)]
            full.append(torch.randn(4, 4))
            given = [[drawn.choice(PLACED) for _ in sizes] for _ in full]
            expected = tree_leaves(derivative(kind, f, *full))
            with cute_sharding.enabled(**flags):
                dtensors = [placed(x, meshes[sizes], ps) for x, ps in zip(full, given)]
                found = tree_leaves(derivative(kind, f, *dtensors))
                assert len(found) == len(expected)
                for one, other in zip(found, expected):
                    case = f"{kind} of {name} on {sizes}, {rows} rows, as {given}: {type(one)} "
                    assert type(one) is DTensor, case
                    torch.testing.assert_close(
                        one.full_tensor(), other, atol=1e-4, rtol=1e-3, msg=lambda m: case + m
                    )

"""What the processes of test_forward_mode.py run: functions of two sharded matrices, and their
derivatives in forward mode, beside one device.
"""

import torch
import torch.nn.functional as F
from processes_worker import start
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import hessian, jacfwd, jvp
from torch.utils._pytree import tree_leaves

import cute_sharding

R = Replicate()
PLACED = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [R]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [R, Shard(0)]),
]


FUNCTIONS = {
    "pointwise": lambda x, w: x.sin() * w[0] / w.exp().sum(),
    "product": lambda x, w: x @ w,
    "softmax": lambda x, w: (x * w[0]).softmax(-1),
    "layer norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "sums": lambda x, w: x.sum(0) * w.mean(1),
    "views": lambda x, w: x.reshape(-1).view(4, 5).tanh() + w[:, :1],
    "joined": lambda x, w: torch.cat([x, w]),
}


def several(rank, world, rendezvous):
    start(rank, compare, world, rendezvous)


def derivatives(f, x, w, t, whole):
    """``whole``: also Jacobians."""
    yield "jvp", jvp(lambda x: f(x, w), (x,), (t,))
    yield "jvp by both", jvp(f, (x, w), (t, w))
    with forward_ad.dual_level():
        yield "make_dual", tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(x, t), w)))
    if whole:
        yield "jacfwd", jacfwd(f)(x, w)
        yield "hessian", hessian(lambda x: (f(x, w) ** 2).sum())(x)


def compare():
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes, _ in PLACED}
    torch.manual_seed(0)
    x, w, t = torch.randn(5, 4), torch.randn(4, 4), torch.randn(5, 4)
    for i, (name, f) in enumerate(FUNCTIONS.items()):
        for k, (sizes, placements) in enumerate(PLACED):
            whole = (i + k) % 5 == 0
            mesh = meshes[sizes]
            expected = list(derivatives(f, x, w, t, whole))
            with cute_sharding.enabled():
                given = [distribute_tensor(full, mesh, placements) for full in (x, w)]
                tangent = distribute_tensor(t, mesh, [R] * mesh.ndim if k % 2 else placements)
                found = list(derivatives(f, *given, tangent, whole))
                for (kind, got), (_, wanted) in zip(found, expected):
                    for one, other in zip(tree_leaves(got), tree_leaves(wanted)):
                        assert isinstance(one, DTensor)
                        case = f"{kind} of {name} on {sizes} {placements}"
                        torch.testing.assert_close(
                            one.full_tensor(), other, atol=1e-5, rtol=1e-4, msg=lambda m: case + m
                        )

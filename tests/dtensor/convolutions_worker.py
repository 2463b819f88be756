"""What the processes of test_patches_of_images.py run: patches of images, eager and compiled."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cute_sharding

CASES = [
    ((4,), [Shard(3)], (1, 3, 8, 16)),
    ((4,), [Shard(2)], (1, 3, 16, 8)),
    ((2, 2), [Shard(2), Shard(3)], (1, 3, 8, 8)),
    ((2, 2), [Shard(0), Shard(3)], (2, 3, 8, 8)),
    ((2, 2), [Shard(3), Shard(3)], (2, 3, 8, 24)),  # of uneven blocks
]


def patches(numbers):
    cases = [CASES[i] for i in numbers]
    meshes = {sizes: init_device_mesh("cpu", sizes) for sizes, *_ in cases}
    apart = 4, {"stride": 4}
    overlapping = 3, {"padding": 1}  # of which torch has neighbours tell one another nothing
    for flags in ({}, {"movement": True, "redistribution": True}):
        with cute_sharding.enabled(**flags):
            for sizes, placements, shape in cases:
                mesh = meshes[sizes]
                for dynamic in (None, False, True):
                    embedded(mesh, placements, shape, apart, dynamic)
                embedded(mesh, placements, shape, overlapping, None)


def embedded(mesh, placements, shape, windows, dynamic):
    """``windows``: rows of one, options; ``dynamic``: None, where it is not compiled."""
    rows, options = windows
    torch.manual_seed(0)
    fulls = torch.randn(shape), torch.randn(6, shape[1], rows, rows), torch.randn(6)
    given = [placements, *[[Replicate()] * mesh.ndim] * 2]
    single = [full.clone().requires_grad_() for full in fulls]
    tensors = [
        distribute_tensor(full, mesh, p).requires_grad_()
        for full, p in zip(fulls, given, strict=True)
    ]

    def loss(x, w, b):
        return F.conv2d(x, w, b, **options).sin().sum()

    wanted = loss(*single)
    wanted.backward()
    if dynamic is not None:
        torch._dynamo.reset()
        loss = torch.compile(loss, backend="aot_eager", dynamic=dynamic)
    found = loss(*tensors)
    found.backward()
    case = f"{mesh} {placements} {shape} {dynamic}"
    torch.testing.assert_close(found.full_tensor(), wanted, msg=lambda m: f"{case} {m} {found}")
    for x, of in zip(tensors, single, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), of.grad, atol=1e-4, rtol=1e-4)

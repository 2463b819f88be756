"""What a program on the side runs: real processes, no word of this package in it."""

import sys

import torch
import torch.distributed as dist


def view_of_uneven_shards(rank, world, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    try:
        mesh = init_device_mesh("cpu", (world,))
        full = torch.arange(4.0 * 7 * 5).reshape(4, 7, 5)
        tensor = distribute_tensor(full, mesh, [Shard(1)]).requires_grad_()
        rows = [3, 3, 1][rank]  # 7 over 3
        assert tensor.to_local().shape == (4, rows, 5)
        viewed = tensor.view(28, 5)
        assert viewed.placements[0].dim == 0 and viewed.placements[0].split_factor == 4
        assert torch.equal(
            viewed.to_local(), full[:, 3 * rank : 3 * rank + rows].reshape(4 * rows, 5)
        )
        # And a view that torch's own rules refuse, since 7 rows over 3 do not divide.
        flat = distribute_tensor(full[0, :, :1].contiguous(), mesh, [Shard(0)]).view(7)
        assert torch.equal(flat.to_local(), full[0, 3 * rank : 3 * rank + rows, 0])
        # The gradient comes in uneven shards of the view and goes back as uneven shards of the
        # tensor.
        weight = torch.arange(4.0 * 7 * 5).reshape(28, 5) + 0.5
        viewed.backward(
            DTensor.from_local(
                weight.view(4, 7, 5)[:, 3 * rank : 3 * rank + rows].reshape(4 * rows, 5),
                mesh,
                viewed.placements,
                run_check=False,
                shape=weight.shape,
                stride=(5, 1),
            )
        )
        assert tensor.grad.placements == tensor.placements
        assert torch.equal(
            tensor.grad.to_local(), weight.view(4, 7, 5)[:, 3 * rank : 3 * rank + rows]
        )
        # And a loss through it, as a program would have it.
        tensor.grad = None
        (tensor.view(28, 5) * 2).sum().backward()
        assert torch.equal(tensor.grad.full_tensor(), torch.full((4, 7, 5), 2.0))
        assert "cute_sharding.dtensor" in sys.modules
    finally:
        dist.destroy_process_group()

"""What attention over a sharded sequence receives: this package, and PyTorch's context parallelism.

    python -m benchmarks.sequence [--ranks 8] [--shape 2 4 1024 64] [--cache 32768]

Printed is what a rank receives, in bytes, and in how many collectives: of a forward with queries,
keys and values all sharded along the sequence, of the same with its gradients, which are sharded
alike at the end, and of a step of decoding, whose one query meets keys and values that are sharded.

PyTorch's are the functions that run under ``context_parallel`` of
torch.distributed.tensor.experimental, in a process that poses as the last rank; they have no step
of decoding. Its kernel is that of CPUs, which needs no accelerator; kernels receive nothing. Its
load balance is off: it changes which rows a rank has, and not what a rank receives.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.received import COLLECTIVES, FROM_OTHERS, NOT_SENT


class Counted(TorchDispatchMode):
    """The bytes that collectives bring to this process's rank, and how many were started."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in COLLECTIVES and func._opname not in NOT_SENT:
            x, *others = args
            elements = FROM_OTHERS[func._opname](x.numel(), dist.get_rank(), *others)
            self.received += elements * x.element_size()
            self.collectives += 1
        return func(*args, **(kwargs or {}))


def counted(function: Callable[[], Any]) -> Counted:
    with Counted() as found:
        function()
    return found


def ring(mesh: DeviceMesh, shape: Sequence[int], causal: bool, gradients: bool) -> None:
    """A step of PyTorch's context parallelism."""
    batch, heads, rows, width = shape
    local = batch, heads, rows // mesh.size(), width
    q, k, v, g = (torch.randn(local) for _ in range(4))
    how: Any = {"is_causal": causal, "dropout_p": 0.0, "scale": None}
    aten = torch.ops.aten
    forward: Any = aten._scaled_dot_product_flash_attention_for_cpu
    backward: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward
    rings._cp_options.enable_load_balance = False
    group = mesh.get_group()
    y, logarithm = rings._templated_ring_attention(group, 2, forward, q, k, v, **how)
    if gradients:
        found = q, k, v, y, logarithm
        rings._templated_ring_attention_backward(group, 2, backward, g, "grad_out", *found, **how)


def sharded(mesh: DeviceMesh, shape: Sequence[int], dim: int | None) -> DTensor:
    sizes = [n // mesh.size() if d == dim else n for d, n in enumerate(shape)]
    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(torch.randn(sizes), mesh, [placement], run_check=False)


def step(mesh: DeviceMesh, shape: Sequence[int], causal: bool, gradients: bool) -> None:
    """The same with this package."""
    given = [sharded(mesh, shape, 2).requires_grad_(gradients) for _ in range(3)]
    y = F.scaled_dot_product_attention(*given, is_causal=causal)
    if gradients:
        for each in torch.autograd.grad(y, given, sharded(mesh, shape, 2)):
            each.redistribute(placements=[Shard(2)])


def decoded(mesh: DeviceMesh, shape: Sequence[int], cache: int) -> None:
    batch, heads, _, width = shape
    query = sharded(mesh, (batch, heads, 1, width), None)
    keys, values = (sharded(mesh, (batch, heads, cache, width), 2) for _ in range(2))
    F.scaled_dot_product_attention(query, keys, values)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--shape", type=int, nargs=4, default=[2, 4, 1024, 64])
    parser.add_argument("--cache", type=int, default=32768)
    options = parser.parse_args()
    ranks, shape = options.ranks, options.shape
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    import cute_sharding

    def line(name: str, theirs: Counted | None, ours: Counted) -> None:
        said = "" if theirs is None else f"{theirs.received:,} B in {theirs.collectives}"
        print(f"{name:28}{said:>24}{f'{ours.received:,} B in {ours.collectives}':>24}")

    print(f"{tuple(shape)}, {ranks} ranks{'':10}{'context_parallel':>24}{'cute_sharding':>24}")
    for causal in (False, True):
        for gradients in (False, True):
            theirs = counted(partial(ring, mesh, shape, causal, gradients))
            with cute_sharding.enabled(redistribution=True):
                ours = counted(partial(step, mesh, shape, causal, gradients))
            name = "causal" if causal else "full"
            line(f"{name}{', with gradients' if gradients else ''}", theirs, ours)
    with cute_sharding.enabled():
        ours = counted(partial(decoded, mesh, shape, options.cache))
    batch, heads, _, width = shape
    states = 4 * batch * heads * (width + 2)
    line(f"decoding, {options.cache} keys", None, ours)
    print(f"(states of one query: {states:,} B, in a ring {2 * states * (ranks - 1) // ranks:,} B)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

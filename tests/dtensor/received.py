"""What collectives bring to ranks, counted as they run in one process."""

from collections import Counter

import torch.distributed as dist
from recording_group import ring_elements
from simulation import position
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Received(TorchDispatchMode):
    """The elements that collectives bring to each rank from others, and their bytes; how often each
    collective has been started; and the ops on DTensors.
    """

    def __init__(self):
        super().__init__()
        self.by_rank, self.bytes_by_rank, self.collectives = Counter(), Counter(), Counter()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.ops[str(func).removeprefix("aten.")] += 1
            return NotImplemented
        if func.namespace in COLLECTIVES and func._opname not in NOT_SENT:
            self.collectives[func._opname] += 1
        if func._opname in FROM_OTHERS and hasattr(args[0], "_local_tensors"):
            for rank, local in args[0]._local_tensors.items():
                n = FROM_OTHERS[func._opname](local.numel(), rank, *args[1:])
                self.by_rank[rank] += n
                self.bytes_by_rank[rank] += n * local.element_size()
        return func(*args, **(kwargs or {}))


def _ranks(group):
    return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group))


def _all_to_all(_, rank, receives, sends, group):
    me = position(rank, _ranks(group))
    return sum(
        n if isinstance(n, int) else n.node._local_ints[rank]
        for k, n in enumerate(receives)
        if k != me
    )


# The libraries of torch that have collectives, and what else they have.
COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d")
NOT_SENT = ("wait_tensor", "_wrap_tensor_autograd")

# What a rank receives of others: of its own number of elements, its rank, the arguments.
FROM_OTHERS = {
    "all_gather_into_tensor": lambda n, rank, parts, group: n * (parts - 1),
    "all_to_all_single": _all_to_all,
    "all_reduce": lambda n, rank, op, group: ring_elements(len(_ranks(group)), n),
    "reduce_scatter_tensor": lambda n, rank, op, parts, group: n // parts * (parts - 1),
    "shard_dim_alltoall": lambda n, rank, *args: n - n // len(_ranks(args[-1])),
}

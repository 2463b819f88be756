"""What collectives bring to ranks, counted as they run in one process (LocalTensorMode)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Received(TorchDispatchMode):
    """The elements that collectives bring to each rank from others, and their bytes; how often each
    collective has been started; and the ops on DTensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_rank: Counter[int] = Counter()
        self.bytes_by_rank: Counter[int] = Counter()
        self.collectives: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    @property
    def most(self) -> int:
        """The bytes that the busiest rank receives."""
        return max(self.bytes_by_rank.values(), default=0)


def ring_elements(n: int, elements: int) -> int:
    """What the busiest rank receives of a reduce-scatter and an all-gather of blocks, one after the
    other around a ring, where the blocks divide; else the share of a rank on average, rounded up.
    """
    if elements % n == 0:
        return sum(elements // n for _ in range(2 * (n - 1)))
    return -(-2 * (n - 1) * elements // n)


def position(rank: int, ranks: Sequence[int]) -> int:
    """The index of ``rank`` in its group, if ``ranks`` is that of rank 0 and all ranks are numbered
    row-major: the digits of the rank that those of the group have.
    """
    strides: list[tuple[int, int]] = []
    at = list(ranks)
    while len(at) > 1:  # the innermost mode of the ranks, and the rest
        stride, size = at[1], 1
        while size < len(at) and at[size] == size * stride:
            size += 1
        strides.append((stride, size))
        at = at[::size]
    return ranks.index(sum(rank // stride % size * stride for stride, size in strides))


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group))


def _all_to_all(_: int, rank: int, receives: Any, sends: Any, group: Any) -> int:
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
FROM_OTHERS: dict[str, Callable[..., int]] = {
    "all_gather_into_tensor": lambda n, rank, parts, group: n * (parts - 1),
    "all_to_all_single": _all_to_all,
    "all_reduce": lambda n, rank, op, group: ring_elements(len(_ranks(group)), n),
    "reduce_scatter_tensor": lambda n, rank, op, parts, group: n // parts * (parts - 1),
    "shard_dim_alltoall": lambda n, rank, *args: n - n // len(_ranks(args[-1])),
}

"""A table of torch's ops that communicate: the kind of each, its tensors, and the elements that a
rank receives. The numbers follow the rules of :mod:`cute_sharding.exchange.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced import local_tensors, observing
from cute_sharding.exchange import step
from cute_sharding.exchange.step import Amount
from cute_sharding.tools.profile.values import Collective


class CollectiveCall(NamedTuple):
    """A call of an op that communicates: its arguments by name, the ranks of the group, ascending,
    and the position of this rank among them.
    """

    given: dict[str, Any]
    ranks: list[int]
    at: int

    @property
    def parts(self) -> int:
        """The number of ranks that take part."""
        return len(self.ranks)

    def number(self, n: Any) -> int:
        """A number on this rank: under LocalTensorMode, sizes differ between ranks."""
        return int(local_tensors.int_on(n, self.ranks[self.at]))

    def sizes(self, name: str) -> list[int]:
        """The elements of each tensor of an argument."""
        return [self.number(x.numel()) for x in _flat(self.given[name])]

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root of the collective."""
        return bool(self.given.get("root_rank", self.given.get("src")) == self.at)


def _flat(tensors: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, in one list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [x for some in tensors for x in _flat(some)]


class CollectiveRow(NamedTuple):
    """A collective: its kind, the argument whose first tensor gives the dtype, and the elements
    that are received and sent.
    """

    kind: str
    tensors: str
    amounts: Callable[[CollectiveCall], list[Amount]]


def _each(kind: str, name: str, amount: Callable[[CollectiveCall, int], Amount]) -> CollectiveRow:
    """A collective of which each tensor counts by itself."""
    return CollectiveRow(kind, name, lambda call: [amount(call, n) for n in call.sizes(name)])


def _all_reduce(name: str) -> CollectiveRow:
    return _each("all-reduce", name, lambda call, n: step.all_reduce(call.parts, n))


def _all_gather(name: str) -> CollectiveRow:
    return _each(
        "all-gather", name, lambda call, n: step.all_gather(call.parts, [n] * call.parts, n)
    )


def _reduce_scatter(name: str) -> CollectiveRow:
    return _each(
        "reduce-scatter",
        name,
        lambda call, n: step.reduce_scatter(call.parts, n // call.parts),
    )


def _broadcast(name: str) -> CollectiveRow:
    return _each("broadcast", name, lambda call, n: step.from_root(n, is_root=call.is_root))


def _gathered_lists(given: str, got: str) -> CollectiveRow:
    """``got`` has, for each given tensor, a list of the tensors of all ranks, which may have
    different sizes if the backend allows this.
    """

    def amounts(call: CollectiveCall) -> list[Amount]:
        own, blocks = sum(call.sizes(given)), call.sizes(got)
        least = min(blocks) if len(blocks) == call.parts else own
        return [Amount(sum(blocks) - own, (call.parts - 1) * own, sum(blocks) - least)]

    return CollectiveRow("all-gather", given, amounts)


def _all_to_all(given: str, got: str) -> CollectiveRow:
    """An all-to-all of rows. Without splits, each rank gets the same number of rows."""

    def amounts(call: CollectiveCall) -> list[Amount]:
        def elements(splits: Any, name: str) -> list[int]:
            if not splits:
                return [call.sizes(name)[0] // call.parts] * call.parts
            row = prod(map(call.number, call.given[name].shape[1:]))
            return [call.number(n) * row for n in splits]

        received = elements(call.given.get("output_split_sizes"), got)
        sent = elements(call.given.get("input_split_sizes"), given)
        return [step.all_to_all(received, sent, call.at)]

    return CollectiveRow("all-to-all", given, amounts)


def _all_to_all_lists(call: CollectiveCall) -> list[Amount]:
    got, given = call.sizes("output_tensors"), call.sizes("input_tensors")
    return [step.all_to_all(got, given, call.at)]


def _send(name: str) -> CollectiveRow:
    return _each("send", name, lambda call, n: Amount(0, n, None))


def _receive(name: str) -> CollectiveRow:
    return _each("receive", name, lambda call, n: Amount(n, 0, None))


def _batch(call: CollectiveCall) -> list[Amount]:
    """A batch of messages between ranks, in one op."""
    sizes = list(zip(call.given["op_list"], call.sizes("tensors")))
    sent = sum(n for op, n in sizes if "send" in op)
    return [Amount(sum(n for _, n in sizes) - sent, sent, None)]


_BARRIER = CollectiveRow("barrier", "tensor", lambda call: [Amount(0, 0, 0)])
# By namespace and name.
ROWS = {
    "_c10d_functional": {
        "all_reduce": _all_reduce("input"),
        "all_reduce_": _all_reduce("input"),
        "all_reduce_coalesced": _all_reduce("inputs"),
        "all_reduce_coalesced_": _all_reduce("inputs"),
        "all_gather_into_tensor": _all_gather("input"),
        "all_gather_into_tensor_out": _all_gather("input"),
        "all_gather_into_tensor_coalesced": _all_gather("inputs"),
        "reduce_scatter_tensor": _reduce_scatter("input"),
        "reduce_scatter_tensor_out": _reduce_scatter("input"),
        "reduce_scatter_tensor_coalesced": _reduce_scatter("inputs"),
        "all_to_all_single": _all_to_all("input", "input"),
        "broadcast": _broadcast("input"),
        "broadcast_": _broadcast("input"),
        "isend": _send("tensor"),
        "irecv": _receive("tensor"),
        "batch_p2p_ops": CollectiveRow("messages", "tensors", _batch),
    },
    "c10d": {
        "allreduce_": _all_reduce("tensors"),
        "allreduce_coalesced_": _all_reduce("tensors"),
        "_allgather_base_": _all_gather("input_tensor"),
        "allgather_into_tensor_coalesced_": _all_gather("inputs"),
        "allgather_": _gathered_lists("input_tensors", "output_tensors"),
        "allgather_coalesced_": _gathered_lists("input_list", "output_lists"),
        "_reduce_scatter_base_": _reduce_scatter("input_tensor"),
        "reduce_scatter_tensor_coalesced_": _reduce_scatter("inputs"),
        "reduce_scatter_": _each(
            "reduce-scatter",
            "output_tensors",
            lambda call, n: step.reduce_scatter(call.parts, n),
        ),
        "alltoall_base_": _all_to_all("input", "output"),
        "alltoall_": CollectiveRow("all-to-all", "input_tensors", _all_to_all_lists),
        "broadcast_": _broadcast("tensors"),
        "reduce_": _each(
            "reduce", "tensors", lambda call, n: step.to_root(n, is_root=call.is_root)
        ),
        "scatter_": _each(
            "scatter",
            "output_tensors",
            lambda call, n: step.scatter(call.parts, n, is_root=call.is_root),
        ),
        "gather_": _each(
            "gather",
            "input_tensors",
            lambda call, n: step.gather(call.parts, n, is_root=call.is_root),
        ),
        "send": _send("tensors"),
        "recv_": _receive("tensors"),
        "recv_any_source_": _receive("tensors"),
        "barrier": _BARRIER,
        "monitored_barrier_": _BARRIER,
    },
    "_dtensor": {"shard_dim_alltoall": _all_to_all("input", "input")},
}
# The kinds of messages from one rank to another.
MESSAGES = ("send", "receive")


@lru_cache(maxsize=1)
def ops() -> dict[Any, tuple[Any, CollectiveRow]]:
    """The ops of this torch that communicate, each with itself and its row."""
    return {
        op: (op, row)
        for namespace, by_name in ROWS.items()
        for name, row in by_name.items()
        for op in observing.overloads(namespace, name)
    }


def collective_of(
    op: Any,
    row: CollectiveRow,
    args: Any,
    kwargs: Any,
    groups: dict[Any, tuple[list[int], int]],
) -> Collective:
    """The collective that a call of an op runs. ``groups``: for each group of an earlier call, its
    ranks and the position of this rank.
    """
    given = observing.arguments_by_name(op, args, kwargs or {})
    group = observing.group_of_argument(given.get("group_name", given.get("process_group")))
    if group not in groups:
        groups[group] = dist.get_process_group_ranks(group), group.rank()
    call = CollectiveCall(given, *groups[group])
    received, sent, busiest = _together(row.amounts(call))
    peer = given.get("dst", given.get("src")) if row.kind in MESSAGES else None
    ranks = call.ranks
    if isinstance(peer, int):
        ranks = sorted({ranks[call.at], ranks[peer]})
    dtype = _flat(given[row.tensors])[0].dtype
    return Collective(
        row.kind,
        observing.name_of(op),
        tuple(ranks),
        str(dtype).removeprefix("torch."),
        dtype.itemsize,
        received,
        sent,
        busiest,
    )


def batch_of(every: Sequence[Collective]) -> Collective:
    """Several messages as one."""
    if len(every) == 1:
        return every[0]
    ranks = tuple(sorted({rank for one in every for rank in one.ranks}))
    received, sent, busiest = _together([(one.received, one.sent, one.busiest) for one in every])
    batch = every[0]._replace(op="messages", ranks=ranks)
    return batch._replace(received=received, sent=sent, busiest=busiest)


def _together(amounts: Sequence[tuple[int, int, int | None]]) -> tuple[int, int, int | None]:
    """The sum of several amounts; the busiest rank's if it is known of all."""
    received, sent, busiest = zip(*amounts)
    return sum(received), sum(sent), None if None in busiest else sum(busiest)

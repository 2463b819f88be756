"""A table of the ops that communicate. A row gives the kind of a collective, its tensors, and the
elements that a rank receives. The numbers follow the rules of
:mod:`cute_sharding.exchange.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced import local_tensors, observing
from cute_sharding.exchange import step
from cute_sharding.exchange.step import Amount


class CollectiveCall(NamedTuple):
    """A call of an op that communicates: its arguments by name, the number of ranks that take part,
    and the position of this rank among them.
    """

    given: dict[str, Any]
    parts: int
    at: int


class SentSizes(NamedTuple):
    """The shape and the dtype of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class CollectiveRow(NamedTuple):
    """A collective.

    Attributes:
        kind: the kind of the collective.
        tensors: the name of an argument. The first tensor of this argument gives the dtype.
        amounts: the elements that are received and sent, for each tensor.
    """

    kind: str
    tensors: str
    amounts: Callable[[CollectiveCall], list[Amount]]


class Sent(NamedTuple):
    """The communication of one call.

    Attributes:
        kind: the kind of the collective.
        ranks: the ranks of the group, ascending.
        tensor: one of the tensors that are sent.
        amount: the elements of all tensors together.
    """

    kind: str
    ranks: tuple[int, ...]
    tensor: SentSizes
    amount: Amount


def _flat(tensors: Any) -> list[SentSizes]:
    """The tensors of nested lists, in one list."""
    if isinstance(tensors, SentSizes):
        return [tensors]
    return [x for some in tensors for x in _flat(some)]


def _sizes(call: CollectiveCall, name: str) -> list[int]:
    return [x.numel() for x in _flat(call.given[name])]


def _all_reduce(name: str) -> CollectiveRow:
    return CollectiveRow(
        "all-reduce",
        name,
        lambda call: [step.all_reduce(call.parts, n) for n in _sizes(call, name)],
    )


def _all_gather(name: str) -> CollectiveRow:
    return CollectiveRow(
        "all-gather",
        name,
        lambda call: [step.all_gather(call.parts, [n] * call.parts, n) for n in _sizes(call, name)],
    )


def _gather_in_list(given: str, got: str) -> CollectiveRow:
    """``got`` has, for each given tensor, a list of the tensors of all ranks, or the other way
    round. The tensors of a list may have different sizes if the backend allows this.
    """

    def amounts(call: CollectiveCall) -> list[Amount]:
        own = sum(_sizes(call, given))
        whole, blocks = sum(_sizes(call, got)), _sizes(call, got)
        least = min(blocks) if len(blocks) == call.parts else own
        return [Amount(whole - own, (call.parts - 1) * own, whole - least)]

    return CollectiveRow("all-gather", given, amounts)


def _reduce_scatter(name: str) -> CollectiveRow:
    return CollectiveRow(
        "reduce-scatter",
        name,
        lambda call: [step.reduce_scatter(call.parts, n // call.parts) for n in _sizes(call, name)],
    )


def _scattered_lists(got: str) -> CollectiveRow:
    return CollectiveRow(
        "reduce-scatter",
        got,
        lambda call: [step.reduce_scatter(call.parts, n) for n in _sizes(call, got)],
    )


def _all_to_all(given: str, got: str | None, sends: str, receives: str) -> CollectiveRow:
    """An all-to-all of rows. ``sends`` and ``receives`` name the arguments with the number of rows
    for each rank. Without these arguments, all ranks have the same number.
    """

    def amounts(call: CollectiveCall) -> list[Amount]:
        x = call.given[given]
        y = x if got is None else call.given[got]

        def elements(splits: Any, tensor: SentSizes) -> list[int]:
            if not splits:
                return [tensor.numel() // call.parts] * call.parts
            row = prod(tensor.shape[1:])
            return [int(n) * row for n in splits]

        received = elements(call.given[receives], y)
        return [step.all_to_all(received, elements(call.given[sends], x), call.at)]

    return CollectiveRow("all-to-all", given, amounts)


def _all_to_all_lists(call: CollectiveCall) -> list[Amount]:
    got, given = _sizes(call, "output_tensors"), _sizes(call, "input_tensors")
    return [step.all_to_all(got, given, call.at)]


def _shard_to_shard(call: CollectiveCall) -> list[Amount]:
    (n,) = _sizes(call, "input")
    blocks = [n // call.parts] * call.parts
    return [step.all_to_all(blocks, blocks, call.at)]


def _rooted(kind: str, name: str, root: str, amount: Callable[..., Amount]) -> CollectiveRow:
    """A collective with a root, in which each rank has tensors of one size."""
    return CollectiveRow(
        kind,
        name,
        lambda call: [amount(n, is_root=call.given[root] == call.at) for n in _sizes(call, name)],
    )


def _by_block(kind: str, name: str, amount: Callable[..., Amount]) -> CollectiveRow:
    """A collective with a root, in which each other rank has a block of the root's tensor."""
    return CollectiveRow(
        kind,
        name,
        lambda call: [
            amount(call.parts, n, is_root=call.given["root_rank"] == call.at)
            for n in _sizes(call, name)
        ],
    )


def _message(kind: str, name: str) -> CollectiveRow:
    def amounts(call: CollectiveCall) -> list[Amount]:
        n = sum(_sizes(call, name))
        return [Amount(n, 0, None) if kind == "receive" else Amount(0, n, None)]

    return CollectiveRow(kind, name, amounts)


def _batch(call: CollectiveCall) -> list[Amount]:
    """A batch of messages between ranks, in one op."""
    sizes = list(zip(call.given["op_list"], _sizes(call, "tensors")))
    sent = sum(n for op, n in sizes if "send" in op)
    return [Amount(sum(n for op, n in sizes if "send" not in op), sent, None)]


_FUNCTIONAL = {
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
    "all_to_all_single": _all_to_all("input", None, "input_split_sizes", "output_split_sizes"),
    "broadcast": _rooted("broadcast", "input", "src", step.from_root),
    "broadcast_": _rooted("broadcast", "input", "src", step.from_root),
    "isend": _message("send", "tensor"),
    "irecv": _message("receive", "tensor"),
    "batch_p2p_ops": CollectiveRow("messages", "tensors", _batch),
}
_C10D = {
    "allreduce_": _all_reduce("tensors"),
    "allreduce_coalesced_": _all_reduce("tensors"),
    "_allgather_base_": _all_gather("input_tensor"),
    "allgather_into_tensor_coalesced_": _all_gather("inputs"),
    "allgather_": _gather_in_list("input_tensors", "output_tensors"),
    "allgather_coalesced_": _gather_in_list("input_list", "output_lists"),
    "_reduce_scatter_base_": _reduce_scatter("input_tensor"),
    "reduce_scatter_tensor_coalesced_": _reduce_scatter("inputs"),
    "reduce_scatter_": _scattered_lists("output_tensors"),
    "alltoall_base_": _all_to_all("input", "output", "input_split_sizes", "output_split_sizes"),
    "alltoall_": CollectiveRow("all-to-all", "input_tensors", _all_to_all_lists),
    "broadcast_": _rooted("broadcast", "tensors", "root_rank", step.from_root),
    "reduce_": _rooted("reduce", "tensors", "root_rank", step.to_root),
    "scatter_": _by_block("scatter", "output_tensors", step.scatter),
    "gather_": _by_block("gather", "input_tensors", step.gather),
    "send": _message("send", "tensors"),
    "recv_": _message("receive", "tensors"),
    "recv_any_source_": _message("receive", "tensors"),
    "barrier": CollectiveRow("barrier", "tensor", lambda call: [Amount(0, 0, 0)]),
    "monitored_barrier_": CollectiveRow("barrier", "tensor", lambda call: [Amount(0, 0, 0)]),
}
ROWS = {
    "_c10d_functional": _FUNCTIONAL,
    "c10d": _C10D,
    "_dtensor": {"shard_dim_alltoall": CollectiveRow("all-to-all", "input", _shard_to_shard)},
}
# The kinds of messages from one rank to another.
MESSAGES = ("send", "receive")


class CollectiveFacts(NamedTuple):
    """The known facts about an op that communicates.

    Attributes:
        op: the op.
        row: the row of the op.
        group_at, group_name: the argument that is the process group.
    """

    op: Any
    row: CollectiveRow
    group_at: int
    group_name: str


@lru_cache(maxsize=1)
def ops() -> dict[Any, CollectiveFacts]:
    """The ops of this torch that communicate."""
    return {
        op: CollectiveFacts(op, row, *observing.group_position(op))
        for namespace, by_name in ROWS.items()
        for name, row in by_name.items()
        for op in observing.overloads(namespace, name)
    }


class Posted(NamedTuple):
    """A call of an op that communicates, in the form in which it is recorded while the program
    waits.

    Attributes:
        of: the op.
        args, kwargs: the arguments, with the :class:`SentSizes` of each tensor.
        ranks, at: the ranks of the group, and the position of this rank among them.
    """

    of: CollectiveFacts
    args: list[Any]
    kwargs: dict[str, Any]
    ranks: list[int]
    at: int


def posted(
    of: CollectiveFacts, args: Any, kwargs: Any, places: dict[Any, tuple[list[int], int]]
) -> Posted:
    """A record of a call of the op, for later computations. The record keeps no tensor.
    ``places``: for each group of an earlier call, its ranks and the position of this rank.
    """
    at = of.group_at
    given = args[at] if at < len(args) else kwargs.get(of.group_name)
    group = observing.group_of_argument(given)
    sized = [
        SentSizes(x.shape, x.dtype) if isinstance(x, torch.Tensor) else _sized(x) for x in args
    ]
    named = kwargs and {key: _sized(value) for key, value in kwargs.items()}
    place = places.get(group)
    if place is None:
        place = places[group] = dist.get_process_group_ranks(group), group.rank()
    return Posted(of, sized, named, *place)


def _sized(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return SentSizes(value.shape, value.dtype)
    return [*map(_sized, value)] if isinstance(value, (list, tuple)) else value


def sent_by(post: Posted) -> Sent:
    """The communication of a call of the op."""
    row, ranks = post.of.row, post.ranks
    here = partial(_numbers_on, ranks[post.at])
    args, kwargs = (
        here(post.args),
        post.kwargs and dict(zip(post.kwargs, here([*post.kwargs.values()]))),
    )
    call = CollectiveCall(
        observing.arguments_by_name(post.of.op, args, kwargs), len(ranks), post.at
    )
    amounts = row.amounts(call)
    peer = call.given.get("dst", call.given.get("src")) if row.kind in MESSAGES else None
    if isinstance(peer, int):
        ranks = sorted({ranks[call.at], ranks[peer]})
    return Sent(row.kind, tuple(ranks), _flat(call.given[row.tensors])[0], together(amounts))


def _numbers_on(rank: int, value: Any) -> Any:
    """The arguments of a call on one rank: under LocalTensorMode, sizes differ between ranks."""
    if isinstance(value, SentSizes):
        return SentSizes(tuple(_numbers_on(rank, [*value.shape])), value.dtype)
    if isinstance(value, (list, tuple)):
        return [_numbers_on(rank, each) for each in value]
    return local_tensors.int_on(value, rank)


def together(amounts: Sequence[Amount]) -> Amount:
    """The sum of several amounts: received, sent and, if all are known, received by the busiest
    rank.
    """
    busiest = [amount.busiest for amount in amounts]
    return Amount(
        sum(amount.received for amount in amounts),
        sum(amount.sent for amount in amounts),
        None if None in busiest else sum(n for n in busiest if n is not None),
    )

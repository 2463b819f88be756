"""Fewer collectives in a graph that all ranks have (torch/_inductor/fx_passes/bucketing.py): an
exchange that stands there twice is made once, and small independent ones on one group go together.

What is decided follows from the graph and the network alone, so that all ranks decide alike.
Torch's own functions make the nodes of several collectives in one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced.communication import OURS, WAIT, communicates
from cute_sharding.dtensor.replaced.dispatch_modes import OF_THIS_RANK
from cute_sharding.dtensor.replaced.observing import group_of_argument
from cute_sharding.dtensor.replaced.timeline import held_bytes, ops_of
from cute_sharding.exchange.network import LINK_ITEMSIZE, Chosen, Network, messages

__all__ = ["join", "make_once"]

# By how much the joining of collectives may raise the peak of memory.
RAISED = 0.05
# A collective is tried with so many of the last sets of its kind.
OPEN = 4
# A set of collectives grows until its latency is this share of its time.
SHARE = 0.1

_c10d: Any = torch.ops._c10d_functional


# -- equal ones ------------------------------------------------------------------------------------


def make_once(graph: Any) -> int:
    """Make an exchange once that stands twice in the graph, with the same input, if the graph then
    holds no more at its peak. Returns how often one was left out.
    """
    first: dict[Any, Any] = {}
    same: dict[Any, Any] = {}  # nodes of equal values -> the first of them
    found = 0
    for node in list(graph.nodes):
        is_exchange = _is_exchange(node)
        if not is_exchange and not (_is_pure(node) and OF_THIS_RANK not in _marks(node)):
            continue
        given = torch.fx.map_arg((node.args, node.kwargs), lambda x: same.get(x, x))
        key = node.target, repr(given)
        kept = first.setdefault(key, node)
        if kept is node:
            continue
        if not is_exchange:
            same[node] = kept
        elif _fits(graph, node, kept):
            _replace(graph, node, kept)
            found += 1
    return found


def _marks(node: Any) -> Any:
    return node.meta.get("custom") or ()


def _is_exchange(node: Any) -> bool:
    if node.op != "call_function":
        return False
    ours = [getattr(torch.ops.cute_sharding, name).default for name in OURS]
    return node.target in (*ours, _c10d.all_to_all_single.default)


def _fits(graph: Any, node: Any, kept: Any) -> bool:
    """Whether the graph holds no more at its peak if ``kept`` stands for ``node``; and not both
    leave the graph. Two results in one memory are not what the compiler has told the program: the
    backward pass may write to what it was given.
    """
    ops = ops_of(graph)
    at = {op.node: i for i, op in enumerate(ops)}
    of, into = at[node], at[kept]
    if {of, into} <= {ops[needed].memory for needed in ops[-1].needs}:
        return False
    without = [
        op._replace(
            memory=into if op.memory == of else op.memory,
            held=0 if i == of else op.held,
            needs=() if i == of else tuple([into if k == of else k for k in op.needs]),
        )
        for i, op in enumerate(ops)
    ]
    return max(held_bytes(without)) <= max(held_bytes(ops))


def _replace(graph: Any, node: Any, kept: Any) -> None:
    """Have what uses a collective's results use those of an equal one."""
    for wait, of in list(_waited(node, kept)):
        wait.replace_all_uses_with(of)
        graph.erase_node(wait)
    for item in list(node.users):
        graph.erase_node(item)
    _erase(graph, node)


def _erase(graph: Any, node: Any) -> None:
    """Erase a node, and what only it used."""
    used = node.all_input_nodes
    graph.erase_node(node)
    for each in used:
        if not each.users and _is_pure(each):
            _erase(graph, each)


def _waited(node: Any, kept: Any) -> Iterator[tuple[Any, Any]]:
    """The nodes that wait for a collective's results, each with the one of an equal collective."""
    if node.target is _c10d.all_to_all_single.default:
        yield from ((user, _wait_of(kept)) for user in node.users)
        return
    of = {item.args[1]: _wait_of(item) for item in kept.users}
    for item in node.users:
        for user in item.users:
            yield user, of[item.args[1]]


def _wait_of(node: Any) -> Any:
    return next(user for user in node.users if user.target is WAIT)


# -- small ones ------------------------------------------------------------------------------------


def join(graph: Any, network: Chosen = None) -> list[tuple[list[Any], Any]]:
    """Join small all-reduces, all-gathers and reduce-scatters that do not depend on one another.
    They run where the last of them ran; or where the first ran, if what others compute from it runs
    before the last, and what the last needs can be computed earlier.

    Returns:
        for each that was made, those that it stands for (which are gone), and its node.
    """
    found = []
    for some in _sets(graph, network):
        if len(some) > 1:
            new_nodes, _ = _MERGED[some[0].target](graph, some, insert_before=some[-1].next)
            made = [node for node in new_nodes if node.target in _MADE]
            assert len(made) == 1, f"{some} became {made}"
            found.append((some, made[0]))
    return found


def _sets(graph: Any, network: Chosen) -> list[list[Any]]:
    """The small collectives, in sets that go together. The members of a set follow on one another
    in the graph, and nothing up to the last of them uses a result of theirs.
    """
    highest = (1 + RAISED) * _peak(graph)
    open_sets: dict[Any, list[list[Any]]] = {}
    found = []
    for node in [node for node in graph.nodes if node.target in _MERGED and _is_plain(node)]:
        links, size = _Links.of(node, network), _size(node)
        if size >= links.small:
            continue
        key = node.target, node.meta["val"].dtype, node.args[1:], node.meta["val"].device
        of_kind = open_sets.setdefault(key, [])
        for some in of_kind[-OPEN:]:
            fits = sum(map(_size, some)) + size <= links.most
            if fits and _can_follow(graph, some, node, highest):
                break
        else:
            some = []
            of_kind.append(some)
            found.append(some)
        some.append(node)
    return found


def _can_follow(graph: Any, some: Sequence[Any], node: Any, highest: float) -> bool:
    """Whether a collective can go with some that are before it. If results of theirs are used
    before it, it is moved to them, unless the graph then holds more than the ``highest`` bytes.
    """
    place = {each: i for i, each in enumerate(graph.nodes)}
    if not _has_room(graph, [*some, node], place, highest):
        return False
    if all(_first_use(each, place) > place[node] for each in some):
        return True
    last = some[-1]
    moved = _needed_behind(node, place[last], place)
    if not all(map(_is_pure, moved[:-1])):
        return False
    moved += node.users  # what waits, at which it has one wait with the others
    behind = [each.prev for each in moved]
    at = last
    for each in moved:
        at.append(each)
        at = each
    if _peak(graph) <= highest:
        return True
    for each, before in reversed(list(zip(moved, behind))):
        before.append(each)
    return False


def _has_room(graph: Any, some: Sequence[Any], place: dict[Any, int], highest: float) -> bool:
    """Whether there is memory for what is sent and received together, from the first of some
    collectives to the last use of a result.
    """
    uses = [place[user] for node in some for wait in node.users for user in wait.users]
    first, last = place[some[0]], max(uses, default=len(place) - 1)
    held = max(held_bytes(ops_of(graph))[first : last + 1])
    return held + 2 * sum(map(_size, some)) <= highest


def _needed_behind(node: Any, at: int, place: dict[Any, int]) -> list[Any]:
    """The node, after the nodes behind a place that it depends on."""
    found, open_nodes = {node}, [node]
    while open_nodes:
        for each in open_nodes.pop().all_input_nodes:
            if place[each] > at and each not in found:
                found.add(each)
                open_nodes.append(each)
    return sorted(found, key=place.__getitem__)


def _is_pure(node: Any) -> bool:
    """Whether a node computes the same wherever it stands, and starts and waits for nothing."""
    op = node.target
    if node.op != "call_function":
        return False
    if op is operator.getitem:
        return True
    if not isinstance(op, torch._ops.OpOverload) or op is WAIT or communicates(op):
        return False
    return not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def _peak(graph: Any) -> int:
    return max(held_bytes(ops_of(graph)), default=0)


def _is_plain(node: Any) -> bool:
    """Whether a collective's result is a tensor of numbers for sizes, which is waited for alone."""
    value, users = node.meta.get("val"), list(node.users)
    return (
        isinstance(value, torch.Tensor)
        and isinstance(node.args[-1], str)  # no symbol, as in graphs compiled on one rank
        and all(isinstance(n, int) for n in value.shape)
        and len(users) == 1
        and users[0].target is WAIT
    )


def _size(node: Any) -> int:
    """The bytes of the larger of what a collective reads and writes."""
    values = (node.meta["val"], node.args[0].meta["val"])
    return int(max(x.numel() * x.element_size() for x in values))


def _first_use(node: Any, place: dict[Any, int]) -> int:
    (wait,) = node.users
    return min([place[user] for user in wait.users], default=len(place))


class _Links:
    """The sizes of a group's network.

    Attributes:
        small: the bytes below which a collective's latency is longer than the rest of its time.
        most: the bytes of which the latency is a small share of the time.
    """

    def __init__(self, small: float, most: float) -> None:
        self.small, self.most = small, most

    @classmethod
    def of(cls, node: Any, network: Chosen) -> _Links:
        ranks = dist.get_process_group_ranks(group_of_argument(node.args[-1]))
        links = Network.of((max(ranks) - min(ranks) + 1,), network)
        link = links.slowest
        latency = messages(len(ranks), together=True) * link.alpha
        small = latency / link.beta * LINK_ITEMSIZE if link.beta else float("inf")
        return cls(small, small * (1 / SHARE - 1))


def _merged(name: str) -> Callable[..., Any]:
    def merge(graph: Any, some: Sequence[Any], **how: Any) -> Any:
        from torch._inductor.fx_passes import bucketing

        return getattr(bucketing, name)(graph, list(some), **how)

    return merge


_MERGED: dict[Any, Callable[..., Any]] = {
    _c10d.all_reduce.default: _merged("merge_all_reduce_bucket"),
    _c10d.all_gather_into_tensor.default: _merged("merge_all_gather_bucket"),
    _c10d.reduce_scatter_tensor.default: _merged("merge_reduce_scatter_bucket"),
}
_MADE = (*_MERGED, _c10d.all_gather_into_tensor_out.default)

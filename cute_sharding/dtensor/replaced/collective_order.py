"""One order of collectives on every rank of a compiled program (torch/_functorch/_aot_autograd,
torch/_functorch/partitioners.py, torch/_inductor).

The graphs of ranks differ, in local sizes and in what a rank sends and copies. A compiler sees only
one rank's when it decides what to save for the backward pass, and what runs before what. So each
collective gets a number, its place in the trace: that is the order in which the program issues it
eagerly, and it is the same on all ranks. Only this number decides the order:

- A collective runs in the forward or backward pass in which the program issued it
  (:func:`settle_passes`). torch decides by what it depends on, and by the sizes of what could be
  saved.
- Within a graph, collectives are sorted by number (:func:`arrange`); those of a checkpointed region
  run again before the first collective that needs the region, as eagerly.
- Inductor's scheduler has a kind of kernel for collectives. It chains all of them in the order of
  the graph before it does anything else, and keeps that chain. Our ops are of that kind, and the
  graph is arranged once more after the passes over it. If a program turns on passes that move
  collectives by estimated times, these do not run where ranks may differ (:func:`in_one_order`).
- Equal collectives are merged only if they are equal on all ranks (:func:`apart_on_each_rank`).

Waits have no number, and move as the compiler likes. docs/compiled.md explains the choices.
Nodes of graphs, and their metadata, may be read and moved here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

from cute_sharding.dtensor.replaced import joined
from cute_sharding.dtensor.replaced.communication import OURS, WAIT, communicates
from cute_sharding.dtensor.replaced.dispatch_modes import OF_EACH_RANK, OF_THIS_RANK
from cute_sharding.dtensor.replaced.tensor_specs import may_be_uneven

__all__ = [
    "apart_on_each_rank",
    "arrange",
    "in_one_order",
    "numbered",
    "settle_passes",
    "with_passes_settled",
]

# Keys in a node's metadata: its number, and whether the graphs of ranks may differ; and torch's own
# keys: the partitioner's choice of graph, whether to recompute, the checkpointed region.
NUMBER, AGAIN = "cute_sharding: number", "cute_sharding: number in the backward graph"
RANKS_DIFFER = "cute_sharding: ranks differ"
_PASS, _RECOMPUTE, _REGION = "partitioner_tag", "recompute", "ac_graph_id"
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


# -- numbers ---------------------------------------------------------------------------------------


def numbered(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that traces a program; if the program has DTensors, it numbers the
    collectives in the order in which they are traced.
    """

    def aot_stage1_graph_capture(aot_state: Any, orig_flat_fn: Any) -> Any:
        specs = [value._spec for value in aot_state.flat_args if isinstance(value, DTensor)]
        traced = stock(aot_state, orig_flat_fn)
        graph = traced.graph_module.graph
        nodes = [node for node in graph.nodes if _communicates(node)]
        own = [node for node in graph.nodes if _is_of_this_rank(node)]
        differ = any(map(may_be_uneven, specs)) or not all(map(_is_of_each_rank, own))
        if specs or own:
            for i, node in enumerate(nodes):
                node.meta[NUMBER] = i
                node.meta[RANKS_DIFFER] = differ
        return traced

    return aot_stage1_graph_capture


def _communicates(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and communicates(node.target)


def _is_of_this_rank(node: Any) -> bool:
    return OF_THIS_RANK in node.meta.get("custom", ())


def _is_of_each_rank(node: Any) -> bool:
    return OF_EACH_RANK in node.meta["custom"]


# -- the forward and the backward graph ------------------------------------------------------------


def with_passes_settled(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that divides the graph of a program and its gradients in two, with
    collectives in the pass where the program issues them, and in that order.
    """

    def _partition_joint_graph_into_fw_bw(fx_g: Any, *args: Any, **options: Any) -> Any:
        if not any(NUMBER in node.meta for node in fx_g.graph.nodes):
            return stock(fx_g, *args, **options)
        settle_passes(fx_g.graph)
        forward, backward, *rest = stock(fx_g, *args, **options)
        for node in backward.graph.nodes:
            if AGAIN in node.meta:
                node.meta[NUMBER] = node.meta.pop(AGAIN)
        for half in (forward, backward):
            if arrange(half.graph):
                half.recompile()
        return forward, backward, *rest

    return _partition_joint_graph_into_fw_bw


def settle_passes(joint: Any) -> None:
    """Set the pass of each numbered collective, and renumber those of the backward pass.

    A collective of a checkpointed region runs in both passes if the backward pass uses something
    that the region computes from it: eagerly the region runs again when the first of its tensors is
    needed. If the backward pass uses nothing, as of the last sum of a block, it runs once, and what
    others compute from it may be saved.
    """
    _save_what_leaves_regions(joint)
    place = {node: i for i, node in enumerate(joint.nodes)}
    needed = _first_needed(joint, place)
    backward: list[tuple[int, int, int, Any]] = []
    for node in joint.nodes:
        number = node.meta.get(NUMBER)
        if number is None:
            continue
        if _is_backward(node):
            node.meta[_PASS] = "must_be_in_backward"
            backward.append((place[node], 1, number, node))
        elif node in needed:
            backward.append((needed[node], 0, number, node))
        else:
            node.meta[_PASS] = "must_be_in_forward"
            if _is_recomputed(node):
                for each in (node, *_waits(node)):
                    each.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    for i, (*_, node) in enumerate(sorted(backward, key=lambda found: found[:3])):
        node.meta[AGAIN] = i
    _compute_in_backward(joint, {node for *_, node in backward if node in needed})


def _save_what_leaves_regions(joint: Any) -> None:
    """Mark tensors to be saved that a checkpointed region with collectives makes and others use, as
    eagerly. torch may otherwise recompute a later region's input from such a tensor, and run this
    region's collectives for that: if the input is small, as it may be on one rank alone.
    """
    with_collectives = {
        node.meta.get(_REGION)
        for node in joint.nodes
        if NUMBER in node.meta and _is_recomputed(node)
    }
    for node in joint.nodes:
        if not _is_recomputed(node) or node.meta.get(_REGION) not in with_collectives - {None}:
            continue
        if not _is_tensor(node) or not any(_is_outside(user, node) for user in node.users):
            continue
        while True:
            node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
            if not (getattr(node.target, "is_view", False) or node.target is operator.getitem):
                break
            node = node.args[0]  # torch saves a view's base in its place
            if not _is_recomputed(node):
                break


def _is_outside(user: Any, node: Any) -> bool:
    """Whether the user of a checkpointed region's node is in the forward pass, and in no region or
    in a later one.
    """
    if _is_backward(user) or not _is_tensor(user) or user.target is operator.getitem:
        return False
    region: int = user.meta.get(_REGION, node.meta[_REGION] + 1)
    return region > node.meta[_REGION]


def _first_needed(joint: Any, place: dict[Any, int]) -> dict[Any, int]:
    """For each collective of a checkpointed region that the backward pass uses through recomputed
    nodes alone: the place of the first node that uses something of its region, or, for nested
    regions, of the first collective that needs it.
    """
    used: dict[Any, int] = {}
    regions: dict[Any, int] = {}
    for node in reversed(joint.nodes):
        if _is_recomputed(node) and not _is_number(node):
            users = [user for user in node.users if not _is_number(user)]
            places = [place[user] for user in users if _is_backward(user)]
            places += [used[user] for user in users if user in used]
            if places:
                used[node] = min(places)
                region = node.meta.get(_REGION, node)
                regions[region] = min(regions.get(region, used[node]), used[node])
    needed: dict[Any, int] = {}
    first: dict[Any, int] = {}
    for node in reversed(joint.nodes):
        if node in used:
            first[node] = min([used[node], *(first[user] for user in node.users if user in first)])
            if NUMBER in node.meta:
                first[node] = min(first[node], regions[node.meta.get(_REGION, node)])
                needed[node] = first[node]
    return needed


def _compute_in_backward(joint: Any, collectives: set[Any]) -> None:
    """Have everything that the backward pass computes from these collectives of checkpointed
    regions computed there. If a result needs no gradient, such as a sign, torch may save it
    instead; it does if the result is small, which it may be on one rank alone.
    """
    behind: set[Any] = set()
    for node in joint.nodes:
        if node in collectives or not behind.isdisjoint(node.all_input_nodes):
            if _is_backward(node):
                if not _is_number(node):
                    node.meta[_PASS] = "must_be_in_backward"
                    behind.add(node)
            elif _is_recomputed(node):
                behind.add(node)


def _is_recomputed(node: Any) -> bool:
    """Whether a node is in a checkpointed region whose results are recomputed. torch does not say
    so for the parts of several results.
    """
    if node.target is operator.getitem and _RECOMPUTE not in node.meta:
        return _is_recomputed(node.args[0])
    return node.meta.get(_RECOMPUTE) in _RECOMPUTED


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_number(node: Any) -> bool:
    """Whether a node is a size, and no tensor: ranks compute sizes in different ways."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_backward(node: Any) -> bool:
    """Whether a node of the joint graph is in the backward pass. torch marks nodes that were traced
    by the end of the forward pass as forward, but it does not mark each later one.
    """
    is_forward = node.meta.get(_PASS) in ("is_forward", "must_be_in_forward")
    return node.op == "call_function" and not is_forward


def _waits(node: Any) -> Iterator[Any]:
    """The nodes that wait for a collective, also for one with several results."""
    for user in node.users:
        if user.target is WAIT:
            yield user
        elif user.target is operator.getitem:
            yield from _waits(user)


def arrange(graph: Any) -> bool:
    """Sort the collectives of a graph by number. Each moves with the nodes that it depends on; all
    others stay. Returns whether any moved.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    sequence = sorted(
        (node for node in place if NUMBER in node.meta and node.op == "call_function"),
        key=lambda node: node.meta[NUMBER],
    )
    if all(place[one] < place[next_one] for one, next_one in pairwise(sequence)):
        return False
    order: dict[Any, None] = {}
    remaining, ordered = iter(sequence), set(sequence)
    for node in place:
        while node in ordered and node not in order:
            order.update(dict.fromkeys(_with_what_it_needs(next(remaining), order, place)))
        order[node] = None
    for one, next_one in pairwise(order):
        one.append(next_one)
    for i, node in enumerate(node for node in order if node in ordered):
        node.meta[NUMBER] = i  # the same order, except where data dependencies forbid it
    return True


def _with_what_it_needs(node: Any, done: dict[Any, None], place: dict[Any, int]) -> list[Any]:
    """The node after the nodes that it depends on, without those ``done``, in the graph's order."""
    found, open_nodes = set(), [node]
    while open_nodes:
        one = open_nodes.pop()
        if one not in done and one not in found:
            found.add(one)
            open_nodes.extend(one.all_input_nodes)
    return sorted(found, key=place.__getitem__)


# -- equal collectives -----------------------------------------------------------------------------


def apart_on_each_rank(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that merges equal nodes, for all nodes except this rank's own.

    If none of these are merged, what is computed from them is the same graph on all ranks, in which
    equal nodes may be merged.
    """

    def fx_graph_cse(fx_g: Any, *args: Any, **options: Any) -> Any:
        own = [node for node in fx_g.nodes if node.op == "call_function" and _is_of_this_rank(node)]
        for i, node in enumerate(own):
            node.kwargs = {**node.kwargs, OF_THIS_RANK: i}
        marked = own
        try:
            result = stock(fx_g, *args, **options)
            marked = [*own, *result.nodes]
        finally:
            for node in marked:
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != OF_THIS_RANK}
        return result

    return fx_graph_cse


# -- Inductor --------------------------------------------------------------------------------------


def in_one_order(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's function that generates code for a graph. After the passes that a program has
    chosen, collectives are sorted by number, and the scheduler keeps the order of the graph. If
    ranks may have different sizes, passes by estimated times move no collective before another,
    whatever the program has chosen.
    """

    def fx_codegen_and_compile(gm: Any, *args: Any, **options: Any) -> Any:
        from torch._inductor import config, config_comms
        from torch._inductor.custom_graph_pass import get_custom_graph_passes

        _lower_as_collectives()
        numbered = [node for node in gm.graph.nodes if NUMBER in node.meta]
        if not numbered:
            return stock(gm, *args, **options)
        differ = any(node.meta[RANKS_DIFFER] for node in numbered)
        # Ranks that run eagerly do each collective by itself: fewer only where the program asks.
        asked = config.aten_distributed_optimizations.collective_bucketing
        chosen: dict[str, Any] = {
            "post_grad_custom_post_pass": [
                *get_custom_graph_passes(config.post_grad_custom_post_pass),
                *([have_fewer] if asked and not differ else []),
                arrange,
            ]
        }
        held: dict[str, Any] = {}
        if differ:
            chosen["aten_distributed_optimizations.enable_overlap_scheduling"] = False
            held = dict.fromkeys(filter(partial(hasattr, config_comms), _UNSAFE), False)
        with config.patch(chosen), config_comms.patch(held):  # type: ignore[attr-defined]
            return stock(gm, *args, **options)

    return fx_codegen_and_compile


def have_fewer(graph: Any) -> None:
    """Have fewer collectives in a graph that all ranks have (:mod:`.joined`): the numbers of those
    that are made follow from the numbers of those that they stand for.
    """
    joined.make_once(graph)
    numbers = {node: node.meta.get(NUMBER) for node in graph.nodes}
    for some, made in joined.join(graph):
        known = [numbers[node] for node in some if numbers[node] is not None]
        if known:
            made.meta[NUMBER], made.meta[RANKS_DIFFER] = max(known), False


_UNSAFE = (
    "reorder_iterative_unsafe_collectives_reorder",
    "sink_waits_iterative_unsafe_collectives_reorder",
)


@cache
def _lower_as_collectives() -> None:
    """Register, once, how Inductor lowers our ops that communicate: as its own collectives. Each
    op's last argument is the name of a process group, as torch's estimates of their times expect.
    """
    from torch._inductor.ir import TensorBox, _CollectiveKernel
    from torch._inductor.lowering import constrain_to_fx_strides, register_lowering
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_map

    def lowered(op: Any, *args: Any) -> Any:
        args, _ = constrain_to_fx_strides(V.graph.current_node, *args)
        return tree_map(TensorBox.create, _CollectiveKernel.create_out_of_place(op, *args))

    for name in OURS:
        op = getattr(torch.ops.cute_sharding, name).default
        register_lowering(op, type_promotion_kind=None)(partial(lowered, op))

"""One order of collectives on every rank of a compiled program (torch/_functorch/_aot_autograd,
torch/_functorch/partitioners.py, torch/_inductor).

The graphs of the ranks differ, in local sizes and in what a rank sends and copies. A compiler
decides by what it sees of one rank: what is saved for the backward pass, what runs before what. So
each collective has a number, its place in the trace: the order in which the program issues it
eagerly, and the same on all ranks. Nothing else is asked about order:

- Whether a collective runs in the forward or in the backward pass is where the program has issued
  it (:func:`settle_passes`). torch decides by what it depends on, and by the sizes of what could be
  saved.
- Within a graph collectives stand by number (:func:`arrange`); what is recomputed stands before
  the first collective of the backward pass that its region is needed for, as eagerly.
- Inductor's scheduler has a kind of kernel for collectives, chains all of them in one order before
  it does anything else, and keeps that chain in all of its passes. Our ops are of that kind
  (:func:`as_collectives`), and the order of the chain is by number (:func:`chained_by_number`).
- Equal collectives are made one only where they are equal on all ranks
  (:func:`apart_on_each_rank`).

Waits have no number, and move as the compiler likes. docs/compiled-order.md has what was weighed.
Nodes of graphs, and their metadata, may be read and moved here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy

from cute_sharding.dtensor.torch_private.collective_ops import communicates
from cute_sharding.dtensor.torch_private.dispatch_modes import OF_THIS_RANK
from cute_sharding.dtensor.torch_private.tensor_specs import may_be_uneven

__all__ = [
    "apart_on_each_rank",
    "arrange",
    "as_collectives",
    "chained_by_number",
    "numbered",
    "settle_passes",
    "unless_ranks_differ",
    "with_passes_settled",
]

# In the metadata of a node: its number, and whether the graphs of ranks may differ; and torch's: in
# which graph the partitioner is to put it, what it may compute again, in which checkpointed region.
NUMBER, RANKS_DIFFER = "cute_sharding: number", "cute_sharding: ranks differ"
_PASS, _RECOMPUTE, _REGION = "partitioner_tag", "recompute", "ac_graph_id"
_FORWARD, _BACKWARD = "must_be_in_forward", "must_be_in_backward"
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_WAIT = torch.ops._c10d_functional.wait_tensor.default


# -- numbers ---------------------------------------------------------------------------------------


def numbered(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that traces a program, which numbers the collectives of one with DTensors
    in the order in which they are traced.
    """

    def aot_stage1_graph_capture(aot_state: Any, *args: Any) -> Any:
        specs = [value._spec for value in aot_state.flat_args if isinstance(value, DTensor)]
        traced = stock(aot_state, *args)
        nodes = [node for node in traced.graph_module.graph.nodes if _communicates(node)]
        differ = any(map(_is_of_this_rank, nodes)) or any(map(may_be_uneven, specs))
        if specs or differ:
            for i, node in enumerate(nodes):
                node.meta[NUMBER] = i
                node.meta[RANKS_DIFFER] = differ
        return traced

    return aot_stage1_graph_capture


def _communicates(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and communicates(node.target)


def _is_of_this_rank(node: Any) -> bool:
    return OF_THIS_RANK in node.meta.get("custom", ())


# -- the forward and the backward graph ------------------------------------------------------------


def with_passes_settled(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that cuts the graph of a program and its gradients in two, with collectives
    in the pass where the program issues them, and in that order.
    """

    def _partition_joint_graph_into_fw_bw(fx_g: Any, *args: Any, **options: Any) -> Any:
        settle_passes(fx_g.graph)
        forward, backward, *rest = stock(fx_g, *args, **options)
        for half in (forward, backward):
            if arrange(half.graph):
                half.recompile()
        return forward, backward, *rest

    return _partition_joint_graph_into_fw_bw


def settle_passes(joint: Any) -> None:
    """Say of each collective with a number in which pass it is to run.

    One of a checkpointed region runs in both, where the backward pass uses what the region makes
    of it. Where it does not, as of the last sum of a block, it runs once, and what others make of
    it may be saved.
    """
    feeds = _recomputed_for_backward(joint)
    for node in joint.nodes:
        if NUMBER not in node.meta:
            continue
        if node.meta.get(_PASS) == "is_backward":
            node.meta[_PASS] = _BACKWARD
        elif node.meta.get(_RECOMPUTE) not in _AGAIN:
            node.meta[_PASS] = _FORWARD
        elif node not in feeds:
            node.meta[_PASS] = _FORWARD
            for each in (node, *_waits(node)):
                each.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE


def _recomputed_for_backward(joint: Any) -> set[Any]:
    """The nodes of checkpointed regions that the backward pass uses something of, by way of what is
    computed again alone.
    """
    found: set[Any] = set()
    for node in reversed(joint.nodes):
        if node.meta.get(_RECOMPUTE) in _AGAIN and any(
            user in found or user.meta.get(_PASS) in ("is_backward", _BACKWARD)
            for user in node.users
        ):
            found.add(node)
    return found


def _waits(node: Any) -> Iterator[Any]:
    """The nodes that wait for a collective, also for one of several results."""
    for user in node.users:
        if user.target is _WAIT:
            yield user
        elif getattr(user.target, "__name__", "") == "getitem":
            yield from _waits(user)


def arrange(graph: Any) -> bool:
    """Have the collectives of a graph stand by number, and what is recomputed before what it is
    recomputed for. Each brings what it depends on; all else stays. Returns whether any moved.
    """
    sequence = _sequence(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    moved = False
    done = 0
    for node in sequence:
        here = place[node]
        moved = moved or here < done
        done = max(done, here)
    if not moved:
        return False
    emitted: set[Any] = set()
    waiting = iter(sequence)
    order: list[Any] = []

    def emit(node: Any) -> None:
        behind = [node]
        needed: set[Any] = set()
        while behind:
            one = behind.pop()
            if one not in emitted and one not in needed:
                needed.add(one)
                behind.extend(one.all_input_nodes)
        for one in sorted(needed, key=place.__getitem__):
            emitted.add(one)
            order.append(one)

    in_sequence = set(sequence)
    for node in list(graph.nodes):
        while node in in_sequence and node not in emitted:
            emit(next(waiting))
        if node not in emitted:
            emitted.add(node)
            order.append(node)
    for before, node in zip(order, order[1:]):
        before.append(node)
    graph.lint()
    return True


def _sequence(graph: Any) -> list[Any]:
    """The collectives with numbers, in the order in which they are to stand."""
    first: dict[Any, float] = {}  # of each node, the first collective of the backward pass behind
    nodes = []
    for node in reversed(graph.nodes):
        first[node] = min(
            (
                user.meta[NUMBER] if _is_backward(user) else first[user]
                for user in node.users
                if user in first
            ),
            default=inf,
        )
        if NUMBER in node.meta and node.op == "call_function":
            nodes.append(node)
    regions: dict[Any, float] = {}
    for node in nodes:
        region = node.meta.get(_REGION, node)
        regions[region] = min(regions.get(region, inf), first[node])

    def key(node: Any) -> tuple[float, int, int]:
        number: int = node.meta[NUMBER]
        if node.meta.get(_RECOMPUTE) in _AGAIN:
            return regions[node.meta.get(_REGION, node)], 0, number
        return number, 1, number

    return sorted(nodes, key=key)


def _is_backward(node: Any) -> bool:
    return NUMBER in node.meta and node.meta.get(_PASS) == _BACKWARD


def apart_on_each_rank(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that makes equal nodes one, for all nodes but those that are of this rank.

    Where none of these are made one, what is computed of them is the same graph on all ranks, and
    of that equal nodes may be.
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


def as_collectives(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """How Inductor is to lower these ops: as its own collectives. The last argument of each is the
    name of a process group, as torch's estimates of their time expect.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import constrain_to_fx_strides
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_map

    def lowering(op: Any) -> Callable[..., Any]:
        def lowered(*args: Any) -> Any:
            args, _ = constrain_to_fx_strides(V.graph.current_node, *args)
            results = ir._CollectiveKernel.create_out_of_place(op, *args)
            return tree_map(ir.TensorBox.create, results)

        return lowered

    return {op: lowering(op) for op in ops}


def chained_by_number(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that chains the scheduler's collectives in the order of the graph, for which
    that order is by number. A collective without one, that a pass has made of others, stays behind
    the one before it.
    """

    def decide_global_ordering_of_comms(nodes: Sequence[Any], *args: Any) -> Any:
        from torch._inductor.utils import contains_collective

        places = [i for i, node in enumerate(nodes) if contains_collective(node)]
        numbers: list[float] = []
        for i in places:
            number = _number_of_kernel(nodes[i].node)
            numbers.append((numbers or [-1])[-1] if number is None else number)
        by_number = sorted(range(len(places)), key=numbers.__getitem__)
        chained = list(nodes)
        for place, k in zip(places, by_number):
            chained[place] = nodes[places[k]]
        stock(chained, *args)
        return nodes

    return decide_global_ordering_of_comms


def _number_of_kernel(kernel: Any) -> int | None:
    """Of what it was made of, the last: among it may be what its arguments were made of."""
    found = [node.meta[NUMBER] for node in kernel.get_origins() if NUMBER in node.meta]
    return max(found, default=None)


def unless_ranks_differ(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function that moves collectives by how long it takes them to be for what runs beside
    them: not where ranks may compute other sizes than one another. Else the order is then its own.
    """

    def schedule_overlap_bucketing_from_inductor_configs(gm: Any, *args: Any) -> Any:
        nodes = [node for node in gm.graph.nodes if NUMBER in node.meta]
        if any(node.meta[RANKS_DIFFER] for node in nodes):
            return gm
        for node in nodes:
            del node.meta[NUMBER]
        return stock(gm, *args)

    return schedule_overlap_bucketing_from_inductor_configs

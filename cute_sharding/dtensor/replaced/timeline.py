"""What the nodes of a graph compute, read and hold (torch/fx, torch/utils/flop_counter.py), as
plain values; and the bytes that a graph holds at each point.

Graphs are read here, and none is changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cute_sharding.dtensor.replaced.communication import WAIT, communicates
from cute_sharding.dtensor.replaced.symints import numbers_at_hand

__all__ = ["Kind", "TimedOp", "compiled_anew", "held_bytes", "ops_of"]

T = TypeVar("T")
# What a node is: "input", "view" (takes no time), "compute", "collective", "wait" or "output".
Kind = str


class TimedOp(NamedTuple):
    """A node of a graph.

    Attributes:
        name: the node's.
        kind: as above.
        node: the node itself.
        needs: the positions of the nodes that it uses.
        memory: the position of the node whose memory its result is in: its own, if it makes some.
        held: the bytes that it makes.
        flops: the floating point operations of products, convolutions and attention.
        itemsize: the bytes of an element of its result.
        traffic: the bytes that it reads and writes, if what is fused with it stays on the chip.
    """

    name: str
    kind: Kind
    node: Any
    needs: tuple[int, ...]
    memory: int
    held: int
    flops: float = 0.0
    itemsize: int = 4
    traffic: int = 0


def ops_of(graph: Any) -> tuple[TimedOp, ...]:
    """The nodes of a graph, in its order."""
    at = {node: i for i, node in enumerate(graph.nodes)}
    found: list[TimedOp] = []
    for i, node in enumerate(graph.nodes):
        kind = _kind(node)
        needs = tuple([at[each] for each in node.all_input_nodes])
        memory = i
        if kind in ("view", "wait") and needs:
            memory = found[needs[0]].memory
        held = _bytes(node) if memory == i and kind != "output" else 0
        op = TimedOp(node.name, kind, node, needs, memory, held, itemsize=_itemsize(node))
        if kind == "compute":
            op = op._replace(flops=_flops(node), traffic=_traffic(node))
        found.append(op)
    return tuple(found)


def _kind(node: Any) -> Kind:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if node.op == "output":
        return "output"
    if node.target is WAIT:
        return "wait"
    if node.target is operator.getitem:
        return "view"
    if not isinstance(node.target, OpOverload):
        return "view" if not _tensors(node) else "compute"  # sizes
    if communicates(node.target):
        return "collective"
    return "view" if _is_alias(node.target) else "compute"


def _is_alias(op: OpOverload) -> bool:
    """Whether the op's result is in the memory of its first argument, and nothing is written."""
    aliases = [value.alias_info for value in op._schema.returns]
    return bool(aliases) and all(of is not None and not of.is_write for of in aliases)


def _tensors(node: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]


def _number(n: Any) -> int:
    if isinstance(n, int):
        return n
    known = numbers_at_hand((n,))
    return 0 if known is None else int(known[0])


def _bytes(node: Any) -> int:
    return sum(_number(x.numel()) * x.element_size() for x in _tensors(node))


def _itemsize(node: Any) -> int:
    return max([x.element_size() for x in _tensors(node)], default=4)


def _flops(node: Any) -> float:
    counted = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if counted is None:
        return 0.0

    def value(x: Any) -> Any:
        return x.meta.get("val") if isinstance(x, torch.fx.Node) else x

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    return float(counted(*args, **kwargs, out_val=node.meta.get("val")))


def _traffic(node: Any) -> int:
    """Pointwise ops are fused with what reads them, if all that does is pointwise or a reduction:
    their results are neither written nor read.
    """
    reads = sum(_bytes(each) for each in node.all_input_nodes if not _is_fused(each))
    return reads + (0 if _is_fused(node) else _bytes(node))


def _is_fused(node: Any) -> bool:
    if not _has_tag(node, torch.Tag.pointwise):
        return False
    return all(
        _has_tag(user, torch.Tag.pointwise) or _has_tag(user, torch.Tag.reduction)
        for user in node.users
    )


def _has_tag(node: Any, tag: Any) -> bool:
    return isinstance(node.target, OpOverload) and tag in node.target.tags


# -- memory ----------------------------------------------------------------------------------------


def held_bytes(ops: Sequence[TimedOp]) -> list[int]:
    """The bytes that a graph holds while each of its ops runs. Weights and other inputs that
    outlive the graph are not counted. What a collective reads is held until it has been waited for.
    """
    change = [0] * (len(ops) + 1)
    for i, (first, last) in _lives(ops).items():
        change[first] += ops[i].held
        change[last + 1] -= ops[i].held
    return [*accumulate(change[:-1])]


def _lives(ops: Sequence[TimedOp]) -> dict[int, tuple[int, int]]:
    """For each op that makes memory, the first and the last op that hold it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, op in enumerate(ops):
        if op.kind == "input":
            if _outlives(op):
                continue
            first[i] = last[i] = 0
        elif op.held:
            first[i] = last[i] = i
        for needed in _held_by(ops, op):
            if needed in first:
                last[needed] = max(last[needed], i)
    return {i: (first[i], last[i]) for i in first}


def _held_by(ops: Sequence[TimedOp], op: TimedOp) -> Iterator[int]:
    for needed in op.needs:
        yield ops[needed].memory
    if op.kind == "wait":
        collective = ops[op.memory]
        for needed in collective.needs:
            yield ops[needed].memory


def _outlives(op: TimedOp) -> bool:
    """Whether an input is there after the graph: weights, and what the program holds. Saved tensors
    and gradients are freed after their last use.
    """
    return op.name.startswith(("primals", "arg"))


# -- graphs that are compiled ----------------------------------------------------------------------


@contextmanager
def compiled_anew(look: Callable[[Any], T]) -> Iterator[list[tuple[T, Any]]]:
    """A context in which Inductor compiles anew what runs; and a list of the graphs that it
    compiles: what ``look`` says of the graph before its passes, and the graph, as the passes leave
    it when the program has been compiled.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    found: list[tuple[T, Any]] = []
    before: list[T] = []

    def first(graph: Any) -> None:
        before[:] = [look(graph)]

    def last(graph: Any) -> None:
        found.append((before.pop() if before else look(graph), graph))

    passes = {
        "post_grad_custom_pre_pass": [
            first,
            *get_custom_graph_passes(config.post_grad_custom_pre_pass),
        ],
        "post_grad_custom_post_pass": [
            *get_custom_graph_passes(config.post_grad_custom_post_pass),
            last,
        ],
    }
    torch.compiler.reset()
    with config.patch({**passes, "force_disable_caches": True}):
        yield found

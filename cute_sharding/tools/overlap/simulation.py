"""A run of a graph, simulated: one op computes after the other, and beside that one collective
communicates after the other. Computation takes as long as its operations or its bytes on a device;
a collective what the network model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cute_sharding._words import seconds_text
from cute_sharding.dtensor.replaced import collective_order, communication, observing
from cute_sharding.dtensor.replaced.timeline import TimedOp, held_bytes, ops_of
from cute_sharding.dtensor.run import in_graphs
from cute_sharding.dtensor.run.groups import ranks_beside
from cute_sharding.exchange.network import Chosen
from cute_sharding.tools.overlap.device import Device
from cute_sharding.tools.overlap.values import Computation, Exposed, Timeline
from cute_sharding.tools.profile.causes import modelled
from cute_sharding.tools.profile.collectives import collective_of
from cute_sharding.tools.profile.collectives import ops as known_collectives
from cute_sharding.tools.profile.values import Collective

# Seconds below which an estimate says nothing.
LEAST = 1e-8


def timeline(name: str, graph: Any, device: Device, network: Chosen) -> Timeline:
    """The timeline of a graph of torch.fx, in its order."""
    ops = ops_of(graph)
    run = _Run(ops, device, network)
    for i, op in enumerate(ops):
        run.meet(i, op)
    return Timeline(
        name,
        tuple(run.computations),
        tuple([run.exposed(i) for i in run.started]),
        run.now,
        max(held_bytes(ops), default=0),
        _is_alike(ops),
    )


def _is_alike(ops: Sequence[TimedOp]) -> bool:
    numbered = [op.node.meta for op in ops if collective_order.NUMBER in op.node.meta]
    return bool(numbered) and not any(meta[collective_order.RANKS_DIFFER] for meta in numbered)


class _Started(NamedTuple):
    """A collective: when the program starts it, when it begins and ends on the network, behind
    which other one it waits, and what it is.
    """

    issued: float
    begun: float
    ended: float
    behind: str
    what: Collective


class _Run:
    """A run of a graph up to some node.

    Attributes:
        now: the time at which what computes has done so far.
        started: by their positions, the collectives.
        waited: by the positions of collectives, (when the program waits, when it goes on).
    """

    def __init__(self, ops: Sequence[TimedOp], device: Device, network: Chosen) -> None:
        self._ops, self._device, self._network = ops, device, network
        self._groups: dict[Any, tuple[list[int], int]] = {}
        self.now = self._free = 0.0
        self._last = ""
        self.computations: list[Computation] = []
        self.started: dict[int, _Started] = {}
        self.waited: dict[int, tuple[float, float]] = {}
        self._times: list[float] = []  # of what computes in front of each node

    def meet(self, i: int, op: TimedOp) -> None:
        """Run the next node."""
        self._times.append(self.now - sum(after - at for at, after in self.waited.values()))
        if op.kind == "compute":
            seconds = self._device.seconds(op)
            if seconds:
                self.computations.append(Computation(op.name, self.now, self.now + seconds))
            self.now += seconds
        elif op.kind == "collective":
            self._start(i, op)
        elif op.kind == "wait" and op.memory in self.started and op.memory not in self.waited:
            arrived = max(self.now, self.started[op.memory].ended)
            self.waited[op.memory] = self.now, arrived
            self.now = arrived

    def _start(self, i: int, op: TimedOp) -> None:
        what = collective_at(op, self._groups)
        seconds = modelled(what, in_graphs.known_meshes(), self._network)
        begun = max(self.now, self._free)
        behind = self._last if self._free > self.now else ""
        self.started[i] = _Started(self.now, begun, begun + seconds, behind, what)
        self._free, self._last = begun + seconds, op.name

    # -- what limits one ---------------------------------------------------------------------------

    def exposed(self, i: int) -> Exposed:
        """A collective, after the run."""
        op, started = self._ops[i], self.started[i]
        at, after = self.waited.get(i, (started.ended, started.ended))
        line = observing.line_of_node(op.node)
        return Exposed(
            op.name,
            started.what.op,
            len(started.what.ranks),
            started.what.busiest_bytes or started.what.received_bytes,
            started.begun,
            started.ended,
            after - at,
            self._limit(i, after - at) if after > at else "",
            f"{line[0].rpartition('/')[2]}:{line[1]}" if line else "",
        )

    def _limit(self, i: int, exposed: float) -> str:
        """Why the program waits for a collective."""
        started = self.started[i]
        wait = next(k for k, op in enumerate(self._ops) if op.kind == "wait" and op.memory == i)
        later = self._between(wait, self._first_use(i, wait))
        earlier = self._between(self._ready(i), i)
        if later > LEAST:
            return f"waited for {seconds_text(later)} of computation before its first use"
        if earlier > LEAST:
            return f"started {seconds_text(earlier)} of computation after its input is there"
        if started.behind:
            return f"behind {started.behind}"
        meanwhile = self._between(i, wait)
        if meanwhile > LEAST:
            return f"only {seconds_text(meanwhile)} of computation meanwhile"
        return "nothing to compute meanwhile"

    def _between(self, first: int, last: int) -> float:
        return self._times[last] - self._times[first]

    def _first_use(self, i: int, wait: int) -> int:
        """The position of the first node that reads what has arrived."""
        uses = [
            k
            for k, op in enumerate(self._ops)
            if k > wait
            and op.kind not in ("view", "wait")
            and any(self._ops[needed].memory == i for needed in op.needs)
        ]
        return min(uses, default=len(self._ops) - 1)

    def _ready(self, i: int) -> int:
        """The position behind the last node that makes what a collective sends."""
        ready, open_nodes = 0, list(self._ops[i].needs)
        while open_nodes:
            k = open_nodes.pop()
            if self._ops[k].kind == "view":
                open_nodes.extend(self._ops[k].needs)
            elif self._ops[k].kind != "input":
                ready = max(ready, k + 1)
        return min(ready, i)


# -- collectives -----------------------------------------------------------------------------------


def collective_at(op: TimedOp, groups: dict[Any, tuple[list[int], int]]) -> Collective:
    """The collective of a node."""
    target = op.node.target

    def value(x: Any) -> Any:
        return x.meta.get("val") if isinstance(x, torch.fx.Node) else x

    args, kwargs = torch.fx.map_arg((op.node.args, op.node.kwargs), value)
    if target in known_collectives():
        _, row = known_collectives()[target]
        return collective_of(target, row, args, kwargs, groups)
    return _ours(target, args)


def _ours(target: Any, args: Any) -> Collective:
    """An exchange of this package."""
    operands, _, numbers, how, _ = args
    mesh, dims, elements = in_graphs.received_in_graph(operands, numbers, how)
    rank = communication.this_rank()
    ranks = ranks_beside(mesh, rank, dims) if dims else (rank,)
    dtype = operands[0].dtype
    name = str(dtype).removeprefix("torch.")
    itemsize = dtype.itemsize
    what = Collective(
        "all-to-all", observing.name_of(target), ranks, name, itemsize, elements, elements, elements
    )
    return what if dist.is_initialized() else what._replace(ranks=(rank,))

"""Compiles drawn programs by Inductor as one rank of some and prints, as JSON, the collectives in
the order in which Inductor's scheduler leaves them, graph by graph, the nodes of graphs that the
package says are the same on all ranks, and the collectives of the same program run eagerly:
``python orders_of_ranks.py RANK WORLD``, a line for each line ``SEED DYNAMIC OPTIONS`` that it
reads: which program, whether for any sizes, and options of torch._inductor.config as JSON. No
kernel is made: what runs is the graph that Inductor would have made them of.

For test_compiled_order.py.
"""

import copy
import json
import sys
from functools import cache, partial

import ordered_programs
import torch
import torch._inductor.config
import torch.distributed as dist
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import contains_collective
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cute_sharding
from cute_sharding.dtensor.replaced import collective_order
from cute_sharding.dtensor.replaced.communication import communicates


class Scheduled(Exception):
    """The scheduler has done what it does."""


orders, nodes = [], []


def note_order(scheduler, *args):
    kernels = [s.node for node in scheduler.nodes for s in node.get_nodes()]
    ours = [kernel for kernel in kernels if getattr(kernel, "op_overload", None) is not None]
    started = [kernel for kernel in ours if communicates(kernel.op_overload)]
    assert all(
        contains_collective(s)
        for node in scheduler.nodes
        for s in node.get_nodes()
        if s.node in started
    )
    orders.append([[k.op_overload._opname.rstrip("_"), str(k.constant_args[-1])] for k in started])
    raise Scheduled


def nodes_of(graph):
    """The nodes of a graph with their shapes; None if it has no collectives, or the package says
    that ranks' graphs may differ.
    """
    numbered = [node for node in graph.graph.nodes if collective_order.NUMBER in node.meta]
    if not numbered or any(node.meta[collective_order.RANKS_DIFFER] for node in numbered):
        return None
    values = [(str(node.target), node.meta.get("val")) for node in graph.graph.nodes]
    return [
        [name, [str(x.shape) for x in tree_leaves(value) if isinstance(x, torch.Tensor)]]
        for name, value in values
    ]


def schedule(graph, inputs, **options):
    """Inductor's compiler of one graph, up to where it makes code."""
    nodes.append(nodes_of(graph))
    runs = copy.deepcopy(graph)
    try:
        compile_fx_inner(graph, inputs, **options)
    except Exception as error:
        while error is not None and not isinstance(error, Scheduled):
            error = error.__cause__ or getattr(error, "inner_exception", None) or error.__context__
        if error is None:
            raise
    runs.recompile()
    return make_boxed_func(runs.forward)


class Recorder(TorchDispatchMode):
    """The collectives that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if communicates(func):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@cache
def mesh_of(sizes):
    mesh = DeviceMesh("cpu", torch.arange(torch.Size(sizes).numel()).reshape(sizes))
    cute_sharding.prepare_groups(mesh)
    return mesh


def run(program, args):
    results = [result for result in program(*args) if result.requires_grad]
    if results:
        ones = [torch.ones_like(result.detach()) for result in results]
        torch.autograd.backward(results, ones)


def attempt(seed, rank, world, dynamic):
    torch._dynamo.reset()
    orders.clear()
    nodes.clear()
    said, sizes, made = ordered_programs.draw(seed, world)
    found = {"program": said}
    try:
        recorder = Recorder()
        with recorder:
            run(*made(mesh_of(sizes), rank))
        found["eager"] = recorder.names
        program, args = made(mesh_of(sizes), rank)
        backend = partial(compile_fx, inner_compile=schedule)
        run(torch.compile(program, backend=backend, dynamic=dynamic), args)
        found["graphs"] = list(orders)
        has_other_work = args[-1] is not None  # on one rank alone
        found["nodes"] = [None if has_other_work else of for of in nodes]
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def main():
    rank, world = map(int, sys.argv[1:])
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    Scheduler.codegen = note_order
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.save_args = False
    cute_sharding.enable(views=True, redistribution=True, movement=True)
    for line in sys.stdin:
        seed, dynamic, options = line.split(maxsplit=2)
        with torch._inductor.config.patch(json.loads(options)):
            found = attempt(int(seed), rank, world, bool(int(dynamic)))
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

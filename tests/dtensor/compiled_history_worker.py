"""Compiles drawn programs as one rank of four, under a setting, and prints what each does as JSON,
by how it was run: its graphs, with the collectives in them, and the placements of what it gives.
For test_no_history.py: ``python compiled_history_worker.py RANK SETTINGS FIRST LAST``.

"fresh": in a process of its own, which has run no op; "after others": the last first, each behind
an eager program; "emptied": with all caches emptied before each decision.
"""

import json
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from hashlib import sha1

import no_history_worker
import orders_of_ranks
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from compiled_strangers import called, distributed, draw, program_of, told, whole
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch._inductor.scheduler import Scheduler
from torch.fx.node import map_arg
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

import cute_sharding
from cute_sharding.dtensor.replaced import op_schemas


def read(graph):
    """What a graph computes, node by node, as text: groups by their ranks."""
    found, names = [], {}
    for node in graph.graph.nodes:
        names[node] = f"%{len(names)}"
        args = tree_map(ranks_of_group, map_arg((node.args, node.kwargs), names.__getitem__))
        value = node.meta.get("val")
        kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        called = node.target if node.op == "call_function" else ""
        found.append(f"{names[node]} {node.op} {called} {args} {kind}")
    return found


def ranks_of_group(arg):
    if not isinstance(arg, str):
        return arg
    try:
        group = dist.distributed_c10d._resolve_process_group(arg)
    except Exception:  # no group's name
        return arg
    return str(dist.get_process_group_ranks(group))


def digest(lines):
    """In short; with the collectives in full."""
    sent = [line for line in lines if "c10d" in line or "cute_sharding.exchange" in line]
    return sha1("\n".join(lines).encode(), usedforsecurity=False).hexdigest()[:12], sent


def events_of(seed):
    """What compiling it comes to: each graph, and what it gives."""
    mesh, shape, placements, for_any_sizes, by_inductor, steps = draw(seed, [(4,), (2, 2)])
    events = [" ".join(step[0] for step in steps)]
    x = distributed(whole(shape), mesh, placements).requires_grad_()

    def keep(graph, _):
        events.append(digest(read(graph)))
        return graph

    if by_inductor:
        orders_of_ranks.orders = events
        backend = partial(compile_fx, inner_compile=orders_of_ranks.schedule)
    else:
        partition = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    program = program_of(seed, mesh, shape, steps)
    try:
        found = called(torch.compile(program, backend=backend, dynamic=for_any_sizes), x)
        events.extend(map(told, found))
    except Exception as error:
        events.append(f"raises {type(error).__name__}")
    return tree_map(ranks_of_group, events)


def run(seed, settings):
    with cute_sharding.enabled(**settings):
        return events_of(seed)


@contextmanager
def emptying():
    """With all that is kept emptied before each decision."""
    propagator = op_schemas.propagator()
    stock = propagator.propagate_op_sharding_non_cached

    def propagate(schema):
        no_history_worker.empty()
        return stock(schema)

    propagator.propagate_op_sharding_non_cached = propagate
    op_schemas.clear_propagation_caches()
    try:
        yield
    finally:
        propagator.propagate_op_sharding_non_cached = stock
        op_schemas.clear_propagation_caches()


def run_emptied(seed, settings):
    with cute_sharding.enabled(**settings), emptying():
        return events_of(seed)


def run_behind(seed, settings):
    """Behind an eager program."""
    no_history_worker.run(seed, settings)
    return run(seed, settings)


def main():
    rank, settings, first, last = int(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True
    Scheduler.codegen = orders_of_ranks.note_order
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    seeds = range(first, last)
    found = {
        "fresh": {seed: no_history_worker.alone(run, seed, settings) for seed in seeds},
        "after others": {seed: run_behind(seed, settings) for seed in reversed(seeds)},
        "emptied": {seed: run_emptied(seed, settings) for seed in seeds},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""In a compiled program the collectives are issued in the order of the eager program, on every
rank, forward and backward, whatever a compiler sees of one rank.
"""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import compiled_order_worker
import pytest
import torch
import torch.nn.functional as F
from gloo import spawn
from orders_of_ranks import Recorder
from processes import search_path
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.utils.checkpoint import checkpoint

import cute_sharding
from cute_sharding.dtensor.replaced import collective_order
from cute_sharding.dtensor.replaced.collective_order import NUMBER, arrange
from cute_sharding.dtensor.replaced.communication import communicates

HERE = Path(__file__).parents[1]
PATIENCE = 400  # seconds
R = Replicate()

# By name, what moves collectives in Inductor, where a program turns it on.
PASSES = {
    "as it is": {},
    "compute beside": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["reorder_compute_for_overlap"],
    },
    "raised and sunk": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
    },
    "within memory": {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
        ],
    },
    "not by memory": {"reorder_for_peak_memory": False},
    "by time": {"aten_distributed_optimizations.enable_overlap_scheduling": True},
    "joined": {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"},
}


# -- drawn programs, as each rank compiles them ----------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    path = search_path(HERE, HERE.parent, HERE.parent.parent)
    started = [
        subprocess.Popen(
            [sys.executable, HERE / "orders_of_ranks.py", str(rank), "3"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    yield started
    for rank in started:
        rank.kill()
        rank.communicate()


def of_each_rank(ranks, seed, dynamic, options):
    """What each rank found of a program."""
    for rank in ranks:
        print(seed, int(dynamic), json.dumps(options), file=rank.stdin, flush=True)
    late = threading.Timer(PATIENCE, lambda: [rank.kill() for rank in ranks])
    late.start()
    try:
        return [json.loads(rank.stdout.readline()) for rank in ranks]
    finally:
        late.cancel()


def is_within(some, names):
    """Whether these names come in that order among the others; an exchange of ours stands for some
    collectives of the eager program.
    """
    remaining = iter(names)
    return all(
        next(remaining, None) is not None if name == "exchange" else name in remaining
        for name in some
    )


@pytest.mark.costly
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "any sizes"])
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.one_in(60)
def test_ranks_issue_the_same_collectives_in_the_order_of_the_program(ranks, seed, dynamic):
    assert_in_order(of_each_rank(ranks, seed, dynamic, {}), dynamic)


@pytest.mark.costly
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("seed", range(60, 66))
@pytest.mark.one_in(42)
def test_no_pass_of_inductors_moves_one_before_another(ranks, seed, passes):
    # Joined collectives run where the last of them does: alike on all ranks, in another order.
    dynamic = seed % 2 == 0
    found = of_each_rank(ranks, seed, dynamic, PASSES[passes])
    assert_in_order(found, dynamic, as_eagerly=passes != "joined")


def assert_in_order(found, dynamic, *, as_eagerly=True):
    said = found[0]["program"]
    errors = [rank.get("error") for rank in found]
    if all(errors):
        return  # as eagerly: means of no elements
    assert not any(errors), (said, errors)
    graphs = [rank["graphs"] for rank in found]
    assert all(of_rank == graphs[0] for of_rank in graphs), (said, graphs)
    assert all(rank["eager"] == found[0]["eager"] for rank in found), said
    assert all(rank["nodes"] == found[0]["nodes"] for rank in found), said
    names = [name for graph in graphs[0] for name, _ in graph]
    if (
        as_eagerly and not dynamic
    ):  # for any sizes some are in one op of ours; equal ones are made one
        assert is_within(names, found[0]["eager"]), (said, names, found[0]["eager"])


# -- on processes that compare each collective -----------------------------------------------------


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.parametrize("dynamic", ["dynamic", "static", "automatic"])
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.one_in(72)
def test_processes_that_compare_collectives(seed, dynamic, tmp_path):
    spawn(compiled_order_worker.start, 3, 3, str(tmp_path / "rendezvous"), [seed], dynamic)


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.parametrize("case", range(3))
@pytest.mark.one_in(3)
def test_programs_that_waited_for_one_another(case, tmp_path):
    spawn(compiled_order_worker.start, 3, 3, str(tmp_path / "rendezvous"), [-1 - case], "dynamic")


# -- graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_arranged_graphs_are_by_number_and_compute_the_same(seed):
    rng = random.Random(seed)
    graph = Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(3)]
    for _ in range(20):
        nodes.append(graph.call_function(torch.add, tuple(rng.choices(nodes, k=2))))
    graph.output(tuple(nodes))
    # Numbers in some order that data admit: as an eager program may have issued them.
    free, order = list(nodes), []
    while free:
        ready = [node for node in free if not set(node.all_input_nodes) & set(free)]
        order.append(free.pop(free.index(rng.choice(ready))))
    numbered = [node for node in order if node.op == "call_function"][::2]
    for i, node in enumerate(numbered):
        node.meta[NUMBER] = i
    module = GraphModule(torch.nn.Module(), graph)
    x = [torch.tensor(float(i)) for i in range(3)]
    wanted, kept = module(*x), [n.name for n in graph.nodes]
    by_number = sorted(numbered, key=kept_place(kept)) == numbered
    assert arrange(graph) != by_number
    graph.lint()
    module.recompile()
    assert torch.equal(torch.stack(module(*x)), torch.stack(wanted))
    found = [node for node in graph.nodes if NUMBER in node.meta]
    assert found == numbered and sorted(kept) == sorted(n.name for n in graph.nodes)
    assert not arrange(graph)


def kept_place(names):
    return lambda node: names.index(node.name)


def test_what_is_in_order_stays_as_it_is():
    module = symbolic_trace(lambda x: (x.sin(), x.cos(), x.tan()))
    before = [node.name for node in module.graph.nodes]
    for i, node in enumerate(module.graph.find_nodes(op="call_method", target="sin")):
        node.meta[NUMBER] = i
    assert not arrange(module.graph)
    assert [node.name for node in module.graph.nodes] == before


# -- one rank --------------------------------------------------------------------------------------


def mesh():
    return DeviceMesh("cpu", torch.arange(4))


def sharded(shape, placements, gradient=False):
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 10
    x = distribute_tensor(full, mesh(), placements, src_data_rank=None)
    return x.requires_grad_(gradient)


def two_graphs(program, *args):
    """The forward and the backward graph's collectives, by name, with what each is given."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = []

    def keep(graph, _):
        graphs.append([n.target._opname for n in graph.graph.nodes if is_collective(n)])
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    with cute_sharding.enabled(views=True, redistribution=True, movement=True):
        result = torch.compile(program, backend=backend, dynamic=False)(*args)
        torch.autograd.backward(result, torch.ones_like(result.detach()))
    return graphs


def is_collective(node):
    return isinstance(node.target, torch._ops.OpOverload) and communicates(node.target)


def test_what_the_backward_pass_gathers_alone_is_gathered_there():
    """torch gathers a weight for the gradient in the forward graph, and keeps it: nothing that the
    gather needs is of the backward pass.
    """

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(w)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (w,) = ctx.saved_tensors
            return grad * w.redistribute(placements=[R]).sum(), None

    x, w = sharded((8, 8), [Shard(0)], True), sharded((8, 4), [Shard(1)])
    forward, backward = two_graphs(lambda x, w: Product.apply(x, w), x, w)
    assert forward == [] and backward == ["all_gather_into_tensor"]


def test_equal_exchanges_are_not_made_one():
    """This process has no rows, so that both are of nothing; what others send differs."""
    last = DeviceMesh("cpu", torch.tensor([1, 2, 3, 0]))
    x = distribute_tensor(torch.ones(3, 3), last, [Shard(0)], src_data_rank=None).requires_grad_()
    forward, backward = two_graphs(lambda x: x.roll(1, 0) * 2 + x.roll(2, 0) * 3, x)
    assert forward == backward == ["exchange", "exchange"]


def test_a_checkpointed_region_runs_its_collectives_again_and_its_last_sum_once():
    def block(x, w):
        return (x.redistribute(placements=[R]).sin() @ w).redistribute(placements=[R])

    def program(x, w):
        return checkpoint(block, x, w, use_reentrant=False) * 2

    x, w = sharded((8, 8), [Shard(0)], True), sharded((8, 4), [Shard(0)], True)
    forward, backward = two_graphs(program, x, w)
    assert forward == ["all_gather_into_tensor", "all_reduce"]
    assert backward.count("all_reduce") == 0 and backward[0] == "all_gather_into_tensor"


def test_checkpointed_blocks_run_again_one_by_one():
    """Each when its own gradient is computed, and not before: else all of their results are there
    at once. Also by way of an op between two of them that torch could compute again.
    """

    def block(x, w):
        whole = w.redistribute(placements=[R])
        h = (x @ whole).relu()
        return (h - h.sum(0).redistribute(placements=[R])).sin() @ whole

    def program(x, *weights):
        for i, w in enumerate(weights):
            x = checkpoint(block, x.cos() if i == 2 else x, w, use_reentrant=False)
        return x

    args = [sharded((8, 8), [Shard(0)], True) for _ in range(4)]
    recorder = Recorder()
    with recorder, cute_sharding.enabled(views=True, redistribution=True, movement=True):
        result = program(*args)
        result.backward(torch.ones_like(result.detach()))
    forward, backward = two_graphs(program, *args)
    again = recorder.names[6:]
    assert forward == recorder.names[:6] == ["all_gather_into_tensor", "all_reduce"] * 3
    assert backward == again and again[:2] == again[4:6] == again[8:10] == forward[:2]


def scheduled(program, args, dynamic, **options):
    """The kernels of Inductor's scheduler that communicate, in the order of its code; and all that
    it takes for collectives.
    """
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.utils import contains_collective

    found = []

    def noted(scheduler, *args):
        kernels = [s for node in scheduler.nodes for s in node.get_nodes()]
        found.extend(
            (s.node.op_overload._opname.rstrip("_"), contains_collective(s))
            for s in kernels
            if getattr(s.node, "op_overload", None) is not None and communicates(s.node.op_overload)
        )
        return codegen(scheduler, *args)

    codegen = Scheduler.codegen
    torch._dynamo.reset()
    with (
        pytest.MonkeyPatch.context() as patch,
        torch._inductor.config.patch(force_disable_caches=True, **options),
        cute_sharding.enabled(views=True, redistribution=True, movement=True),
    ):
        patch.setattr(Scheduler, "codegen", noted)
        torch.compile(program, dynamic=dynamic)(*args)
    return found


def test_kernels_of_ours_are_collectives():
    def program(x):
        return x.redistribute(placements=[Shard(1)]), x.flip(0)

    found = scheduled(program, [sharded((6, 5), [Shard(0)])], True)
    assert found == [("exchange", True)] * 2


def test_the_chain_is_in_the_order_of_the_program():
    """Also where a pass over the graph has moved them."""
    order = []

    def program(x):
        return x.redistribute(placements=[R]), x.redistribute(placements=[Shard(1)])

    def turned(graph):
        first, second = filter(is_collective, graph.nodes)
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in collective_order._with_what_it_needs(second, {}, place):
            if node.op == "call_function":
                first.prepend(node)
        order.extend(node.target._opname for node in filter(is_collective, graph.nodes))

    args = [sharded((8, 8), [Shard(0)])]
    found = scheduled(program, args, False, post_grad_custom_post_pass=turned)
    assert order == ["all_to_all_single", "all_gather_into_tensor"]
    assert [name for name, _ in found] == order[::-1]


@pytest.mark.parametrize(
    "program, rows, alike",
    [
        (lambda x: x.redistribute(placements=[R]) * 2, 6, False),
        (lambda x: x.redistribute(placements=[R]) * 2, 8, True),
        (
            lambda x: x.redistribute(placements=[R]).sin().redistribute(placements=[Shard(0)]),
            8,
            True,
        ),
        (lambda x: x.redistribute(placements=[Shard(1)]) * 2, 8, True),
        (lambda x: x[1:] * x.sum().redistribute(placements=[R]), 8, False),
        (lambda x: x.roll(1, 0) * x.sum().redistribute(placements=[R]), 8, True),
        (lambda x: x.roll(1, 0) * x.sum().redistribute(placements=[R]), 7, False),
        (lambda x: torch.cat([x, x.flip(0)]), 8, True),
        (lambda x: x.softmax(0) * 2, 8, True),
        (lambda x: x.softmax(0) * 2, 7, False),
        (lambda x: F.conv1d(x.t().unsqueeze(0), x.new_ones(8, 8, 3), padding=1), 8, True),
        (lambda x: F.conv1d(x.t().unsqueeze(0), x.new_ones(8, 8, 3), padding=1), 10, False),
    ],
)
def test_ranks_that_differ_are_not_scheduled_by_time(program, rows, alike, monkeypatch):
    from torch._inductor.fx_passes import overlap_scheduling

    calls = []
    monkeypatch.setattr(
        overlap_scheduling,
        "schedule_overlap_bucketing",
        lambda graph, **options: calls.append(1) or graph,  # torch's asks for a GPU
    )
    options = {"aten_distributed_optimizations.enable_overlap_scheduling": True}
    scheduled(program, [sharded((rows, 8), [Shard(0)])], False, **options)
    assert calls == [1] * alike


def test_strided_shards_are_gathered_by_the_collective_that_compilers_know():
    def gathered(x):
        return x.redistribute(placements=[R]) * 2

    args = [sharded((16, 5), [_StridedShard(0, split_factor=2)])]
    assert scheduled(gathered, args, False) == [("all_gather_into_tensor", True)]

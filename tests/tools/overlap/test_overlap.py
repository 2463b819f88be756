"""A graph is simulated as it is: what computes, what communicates beside it, and what waits."""

import json
import re

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import cute_sharding
from cute_sharding.dtensor.replaced.communication import WAIT
from cute_sharding.tools.drawing.palette import of_device
from cute_sharding.tools.files import SUFFIXES
from cute_sharding.tools.overlap.device import DEVICES, Device

N = 1 << 10
SLOW = Device("slow", ((4, 2.0 * N**3),), 1e30)  # a product of two matrices takes a second
SECOND = f"flat:0,{1 / N**2}"  # and so do N * N elements


def graph_of(program, *shapes):
    given = [torch.empty(shape) for shape in shapes]
    group = DeviceMesh("cpu", torch.arange(4)).get_group()

    def traced(*given):
        return program(lambda x: funcol.all_gather_single(x, 0, group), *given)

    return make_fx(traced, tracing_mode="fake")(*given)


def simulated(graph):
    return cute_sharding.overlap(graph, device=SLOW, network=SECOND).graphs[0].after


def move_behind(graph, name, target):
    """Move what waits, or another node, behind the last node of a target."""
    nodes = [node for node in graph.graph.nodes if target in str(node.target)]
    (moved,) = [node for node in graph.graph.nodes if str(node.target) == str(name)]
    nodes[-1].append(moved)
    graph.graph.lint()


def test_what_is_waited_for_at_once_is_exposed():
    graph = graph_of(lambda gathered, x, w: (gathered(x), w @ w), (N, N), (N, N))
    found = simulated(graph)
    (one,) = found.collectives
    assert (one.op, one.ranks, one.received) == ("all-gather", 4, 3 * N * N * 4)
    assert one.seconds == one.exposed == found.exposed == pytest.approx(3)
    assert found.seconds == pytest.approx(4) and found.computation == pytest.approx(1)


def test_what_computes_meanwhile_hides_it():
    graph = graph_of(lambda gathered, x, w: (gathered(x), w @ w @ w), (N, N), (N, N))
    move_behind(graph, WAIT, "aten.mm")
    found = simulated(graph)
    assert found.exposed == pytest.approx(1) and found.seconds == pytest.approx(3)
    assert found.collectives[0].limit == "only 2 s of computation meanwhile"


def test_why_it_is_exposed():
    def program(gathered, x, w):
        y = gathered(x)
        z = w @ w
        return y.sum() + z.sum()

    def limits(graph):
        return [one.limit for one in simulated(graph).collectives]

    assert limits(graph_of(program, (N, N), (N, N))) == [
        "waited for 1 s of computation before its first use"
    ]
    late = graph_of(lambda gathered, x, w: (w @ w, gathered(x).sum()), (N, N), (N, N))
    assert limits(late) == ["started 1 s of computation after its input is there"]
    nothing = graph_of(lambda gathered, x: gathered(x).sum(), (N, N))
    assert limits(nothing) == ["nothing to compute meanwhile"]


def test_collectives_go_one_after_the_other():
    graph = graph_of(
        lambda gathered, x, w: (gathered(x).sum(), gathered(x * 2).sum()), (N, N), (N, N)
    )
    first, second = [n for n in graph.graph.nodes if n.target is WAIT]
    starts = [n for n in graph.graph.nodes if "all_gather" in str(n.target)]
    second_start = starts[1]
    for node in (second_start.args[0], second_start):
        first.prepend(node)
    found = simulated(graph)
    one, other = found.collectives
    assert other.start == one.end and found.seconds == pytest.approx(6)
    assert other.limit == f"behind {one.name}"


def test_what_is_held():
    """What a collective reads is held until it is waited for; a view holds nothing more."""
    size = N * N * 4

    def program(gathered, x):
        y = x * 2
        z = gathered(y)
        return z.view(-1).sum()

    graph = graph_of(program, (N, N))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            node.name = "primals_1"  # a weight, which outlives the graph
    assert simulated(graph).peak == size + 4 * size


def test_of_a_compiled_program():
    mesh = DeviceMesh("cpu", torch.arange(4))
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)], src_data_rank=None)
    x.requires_grad_()

    def step():
        compiled(x).sum().to_local().backward()

    with cute_sharding.enabled(redistribution=True, movement=True):
        compiled = torch.compile(
            lambda x: x.redistribute(placements=[Replicate()]).sin().roll(1, 0)
        )
        found = cute_sharding.overlap(step, network="nvlink")
    forward, backward = found.graphs
    assert [one.op for one in forward.after.collectives] == ["all-gather"]
    assert [one.op for one in backward.after.collectives] == []
    assert forward.after.alike and forward.before.collectives == forward.after.collectives
    assert "test_overlap.py:" in str(found) and "all-gather" in str(found)
    assert found == found and hash(found)


def test_of_an_exchange_of_ours():
    mesh = DeviceMesh("cpu", torch.arange(4))
    x = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)], src_data_rank=None)
    with cute_sharding.enabled(redistribution=True, movement=True):
        compiled = torch.compile(lambda x: x.roll(1, 0) * 2)
        (one,) = cute_sharding.overlap(compiled, x).collectives
    assert (one.op, one.ranks, one.received) == ("all-to-all", 4, 6 * 4)


def test_it_is_saved(tmp_path):
    found = cute_sharding.overlap(graph_of(lambda gathered, x: gathered(x).sum(), (N, N)))
    for suffix in SUFFIXES:
        assert found.save(tmp_path / f"found{suffix}").exists()
    events = json.loads((tmp_path / "found.json").read_text())["traceEvents"]
    assert {event.get("tid") for event in events if event["ph"] == "X"} == {0, 1}
    page = (tmp_path / "found.html").read_text()
    for chart in page.split("<figure")[1:]:  # before and after the passes
        exposed = f'height="14" fill="{of_device(2)}"'
        assert chart.count(exposed) == 1 and 'aria-label="communication"' in chart
    assert page.count("<figure") == 2 and re.search(r"all-gather", page)
    with pytest.raises(ValueError, match="give a file name for the overlap"):
        found.save(tmp_path / "found.png")


def test_what_is_not_known():
    with pytest.raises(ValueError, match="unknown device 'h1': use a100, h100, h200"):
        cute_sharding.overlap(graph_of(lambda _, x: x.sin(), (2,)), device="h1")
    with pytest.raises(ValueError, match="Inductor compiled no graph"):
        cute_sharding.overlap(torch.sin, torch.ones(2))
    assert [*DEVICES] == ["a100", "h100", "h200"]

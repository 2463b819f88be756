"""Graphs with fewer collectives compute the same, and hold little more."""

import gloo
import pytest
import torch
import torch.distributed._functional_collectives as funcol
from joined_programs import PROGRAMS, compare, weights_and_input
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

import cute_sharding
from cute_sharding.dtensor.replaced import joined
from cute_sharding.dtensor.replaced.communication import communicates
from cute_sharding.dtensor.replaced.timeline import held_bytes, ops_of


def graph_of(program, *given):
    group = DeviceMesh("cpu", torch.arange(4)).get_group()

    def summed(x):
        return funcol.all_reduce(x, "sum", group)

    def gathered(x):
        return funcol.all_gather_single(x, 0, group)

    return make_fx(lambda *given: program(summed, gathered, *given), tracing_mode="fake")(*given)


def collectives(graph):
    nodes = [n for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [n.target._opname for n in nodes if communicates(n.target)]


def joined_graph(program, *given, network=None):
    """The graph after its collectives have been joined; its results are as before."""
    graph = graph_of(program, *given)
    wanted = Interpreter(graph).run(*given)
    peak = max(held_bytes(ops_of(graph.graph)))
    joined.join(graph.graph, network)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(*given), wanted)
    assert max(held_bytes(ops_of(graph.graph))) <= 1.05 * peak
    return graph


BIG = torch.ones(1 << 8, 1 << 8)


def test_independent_ones_go_together():
    """The fake group leaves its buffers as they are: what is summed is what one rank has."""
    x = torch.arange(8.0)

    def program(summed, gathered, x, big):
        big = (big @ big).relu() @ big
        return summed(x), summed(x * 2), summed(x[:3].sin()), big

    graph = joined_graph(program, x, BIG)
    assert collectives(graph) == ["all_reduce"]


def test_what_depends_on_another_stays_behind_it():
    def program(summed, gathered, x, big):
        big = (big @ big).relu() @ big
        y = summed(x)
        return y, summed(y * 2), big

    assert collectives(joined_graph(program, torch.arange(8.0), BIG)) == ["all_reduce"] * 2


def test_what_is_needed_later_is_computed_earlier():
    """Two chains of two: the first ones go together, and so do the second ones."""

    def program(summed, gathered, x, big):
        big = (big @ big).relu() @ big
        one = summed(summed(x) * 2)
        other = summed(summed(x.sin()) * 3)
        return one, other, big

    assert collectives(joined_graph(program, torch.arange(8.0), BIG)) == ["all_reduce"] * 2


def test_large_ones_stay_alone():
    def program(summed, gathered, x, big):
        return summed(x), summed(x * 2), (big @ big).relu() @ big

    graph = joined_graph(program, torch.ones(64), BIG, network="flat:1e-9,1e-9")
    assert collectives(graph) == ["all_reduce"] * 2
    graph = joined_graph(program, torch.ones(64), BIG, network="flat:1e-6,1e-9")
    assert collectives(graph) == ["all_reduce"]


def test_no_more_than_fits():
    def program(summed, gathered, x, y):
        return summed(x), summed(y)

    graph = joined_graph(program, torch.ones(1 << 10), torch.ones(1 << 10))
    assert collectives(graph) == ["all_reduce"] * 2


def test_other_kinds_groups_and_dtypes_stay_apart():
    def program(summed, gathered, x, n, big):
        big = (big @ big).relu() @ big
        return summed(x), gathered(x), summed(n), big

    graph = joined_graph(program, torch.ones(8), torch.ones(8, dtype=torch.int64), BIG)
    assert collectives(graph) == ["all_reduce", "all_gather_into_tensor", "all_reduce"]


# -- exchanges that stand twice --------------------------------------------------------------------


@pytest.fixture(autouse=True)
def bucketing():
    with config.patch("aten_distributed_optimizations.collective_bucketing", True):
        yield


def exchanged(program):
    """The exchanges that Inductor's graph of a program has in the end."""
    mesh = DeviceMesh("cpu", torch.arange(4))
    x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)], src_data_rank=None)
    with cute_sharding.enabled(redistribution=True, movement=True):
        return cute_sharding.overlap(torch.compile(program), x).graphs[0]


def test_an_exchange_that_stands_twice_is_made_once():
    found = exchanged(lambda x: (x.roll(1, 0) * 2, x.roll(1, 0) * 3, x.roll(2, 0)))
    assert len(found.before.collectives) == 3 and len(found.after.collectives) == 2
    found = exchanged(
        lambda x: [x.redistribute(placements=[Shard(1)]).sin() * k for k in range(1, 4)]
    )
    assert len(found.after.collectives) == 1


def test_not_if_nobody_asks():
    with config.patch({"aten_distributed_optimizations.collective_bucketing": None}):
        graph = exchanged(lambda x: (x.roll(1, 0) * 2, x.roll(1, 0) * 3))
    assert len(graph.after.collectives) == len(graph.before.collectives) == 2


def test_not_if_ranks_may_differ():
    mesh = DeviceMesh("cpu", torch.arange(4))
    x = distribute_tensor(torch.ones(7, 8), mesh, [Shard(0)], src_data_rank=None)
    with cute_sharding.enabled(redistribution=True, movement=True):
        program = torch.compile(lambda x: (x.roll(1, 0) * 2, x.roll(1, 0) * 3))
        (graph,) = cute_sharding.overlap(program, x).graphs
    assert len(graph.after.collectives) == 2 and not graph.after.alike


def test_not_if_it_would_hold_more():
    """The result would be held over a peak."""

    def program(x):
        first = x.roll(1, 0).sum()
        h = x.repeat(4, 8)
        h = (h @ h.t()).relu() @ h
        return first, h.sum(), x.roll(1, 0)

    found = exchanged(program)
    assert [one.op for one in found.after.collectives].count("all-to-all") == 2


# -- on processes ----------------------------------------------------------------------------------


@pytest.mark.processes
def test_values_on_processes(tmp_path):
    """Which compare their collectives."""
    gloo.run(4, tmp_path, *[(compare, name) for name in PROGRAMS], compares=True)


def test_small_gathers_of_weights_are_joined():
    mesh = DeviceMesh("cpu", torch.arange(4))
    program, args = weights_and_input(mesh)
    with cute_sharding.enabled(redistribution=True, movement=True):
        (graph,) = cute_sharding.overlap(torch.compile(program), *args).graphs
    assert len(graph.before.collectives) > len(graph.after.collectives)
    assert graph.after.peak <= 1.05 * graph.before.peak

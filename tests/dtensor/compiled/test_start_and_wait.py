"""In a graph, an exchange of ours has started when its op returns, and is complete when its result
has been waited for: on a group whose results come late.
"""

import time

import pytest
import torch
from late_group import SECONDS, late_meshes, ones
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import Interpreter

import cute_sharding
from cute_sharding.dtensor.replaced.communication import WAIT

R = Replicate()


@pytest.fixture(scope="module")
def meshes():
    return late_meshes()


class Watching(Interpreter):
    """Runs a graph, and notes whether the results of each exchange of ours are complete when its op
    returns, and when all have been waited for.
    """

    def __init__(self, module):
        super().__init__(module)
        self.before, self.after = [], []

    def run_node(self, node):
        result = super().run_node(node)
        if node.target is torch.ops.cute_sharding.exchange.default:
            self.before.append(are_ones(result))
        if node.target is WAIT:
            self.after.append(are_ones([result]))
        return result


def are_ones(results):
    return all(bool((x == 1).all()) for x in results)


def watched(program, *args, dynamic=False):
    watching = []

    def compiler(module, _):
        watching.append(Watching(module))
        return make_boxed_func(watching[-1].run)

    torch._dynamo.reset()
    with cute_sharding.enabled(views=True, redistribution=True, movement=True):
        results = torch.compile(
            program, backend=aot_autograd(fw_compiler=compiler), dynamic=dynamic
        )(*args)
    return watching[0], results


PROGRAMS = {
    "gathered": lambda x: x.redistribute(placements=[R] * x.device_mesh.ndim),
    "columns": lambda x: x.redistribute(placements=[Shard(1)] * x.device_mesh.ndim),
    "strided": lambda x: x.redistribute(
        placements=[_StridedShard(0, split_factor=2)] + [R] * (x.device_mesh.ndim - 1)
    ),
    "rolled": lambda x: x.roll(1, 0),
    "turned": lambda x: x.flip(0),
    "sliced": lambda x: x[2:] * 1,
    "joined": lambda x: torch.cat([x, x[1:]]),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "any sizes"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("placement", [Shard(0), _StridedShard(0, split_factor=2)], ids=str)
def test_results_are_complete_when_they_are_waited_for(meshes, dims, placement, name, dynamic):
    x = ones(meshes[dims - 1], [placement, *[Shard(1)] * (dims - 1)], rows=7)
    watching, result = watched(PROGRAMS[name], x, dynamic=dynamic)
    assert all(watching.after), watching.after
    local = result._local_tensor
    assert bool((getattr(local, "elem", local) == 1).all())


@pytest.mark.parametrize("name", ["sliced", "columns", "rolled", "turned"])
def test_the_op_returns_before_its_results_have_come(meshes, name):
    watching, _ = watched(PROGRAMS[name], ones(meshes[0], [Shard(0)], rows=7))
    assert watching.before == [False] and watching.after == [True]


def test_each_result_of_an_op_is_waited_for(meshes):
    """Also if there are more results than operands, and where Inductor makes the code."""

    def program(x):
        return [part * 1 for part in x.split([3, 2, 2])]

    x = ones(meshes[0], [Shard(0)], rows=7)
    watching, results = watched(program, x)
    assert watching.before == [False] and watching.after == [True] * 3
    with cute_sharding.enabled(views=True, redistribution=True, movement=True):
        torch._dynamo.reset()
        results += torch.compile(program, dynamic=False)(x)
    assert all(bool((x._local_tensor == 1).all()) for x in results)


def test_exchanges_that_have_started_come_together(meshes):
    x = ones(meshes[0], [Shard(0)], rows=7)
    found = []

    def keep(module, _):
        found.append(next(n for n in module.graph.nodes if "exchange" in str(n.target)))
        return module

    with cute_sharding.enabled(redistribution=True):
        torch._dynamo.reset()
        torch.compile(PROGRAMS["columns"], backend=aot_autograd(fw_compiler=keep), dynamic=False)(x)
    _, *rest = found[0].args
    started = time.monotonic()
    results = [torch.ops.cute_sharding.exchange([x._local_tensor], *rest)[0] for _ in range(8)]
    assert time.monotonic() - started < 4 * SECONDS
    x._local_tensor.fill_(5)  # what was sent has been read, also what this rank keeps
    for result in results:
        assert bool((torch.ops._c10d_functional.wait_tensor(result) == 1).all())

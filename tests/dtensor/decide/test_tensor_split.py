"""tensor_split and what torch makes of it: parts as on one device, in one exchange for all."""

import random

import pytest
import torch
from drawing import draw_placements
from movement_programs import MESHES
from op_programs import S, assert_close, values
from simulation import distribute, most_received, plain, ranks_of, watched_wire
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import cute_sharding
from cute_sharding.dtensor.run.ops import StaleView

SPLITS = {
    "sections": lambda x: x.tensor_split(3),
    "more sections than rows": lambda x: x.tensor_split(11),
    "indices": lambda x: torch.tensor_split(x, (1, 5, 9)),
    "indices that go back": lambda x: x.tensor_split((4, 2, 4, -1, 40)),
    "indices in a tensor": lambda x: x.tensor_split(torch.tensor([2, 7])),
    "vsplit": lambda x: torch.vsplit(x, (4, 5, 7)),
    "the last dim": lambda x: x.T.tensor_split(4, -1),
}


@pytest.mark.one_in(40)
@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize("name", SPLITS)
def test_parts_are_those_of_one_device(name, world):
    function, full, rng = SPLITS[name], values(10, 3), random.Random(f"{name} {world}")
    with plain():
        of_one = full.clone().requires_grad_()
        wanted = function(of_one)
        sum((part * part).sum() * k for k, part in enumerate(wanted)).backward()
    with ranks_of((world,)), cute_sharding.enabled(movement=True):
        for _ in range(3):
            mesh = rng.choice(MESHES[world])
            placements = draw_placements(rng, mesh, (10, 3))
            x = distribute(full, mesh, placements, requires_grad=True)
            with CommDebugMode() as communicated:
                parts = function(x)
            assert communicated.get_total_counts() <= 1, (mesh, placements)
            for part, want in zip(parts, wanted, strict=True):
                assert_close(part.detach(), want.detach(), (mesh, placements))
            sum((part * part).sum() * k for k, part in enumerate(parts)).backward()
            assert_close(x.grad, of_one.grad, (mesh, placements, "gradient"))


@pytest.mark.parametrize("placements", [[Shard(0)], [S(0)], [Partial()], [Replicate()]])
@pytest.mark.parametrize("name", SPLITS)
def test_parts_are_what_slices_are(name, placements, monkeypatch):
    """As to placements, and as to what is received for all of them."""
    full, dim = values(10, 3), int(name == "the last dim")
    with plain():
        bounds = [(part.storage_offset() // 3, part.shape[dim]) for part in SPLITS[name](full)]
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        x = distribute(full, (4,), placements)
        with watched_wire(monkeypatch) as of_slices:
            slices = [x[first : first + count] for first, count in bounds]
        with watched_wire(monkeypatch) as of_parts:
            parts = SPLITS[name](x)
        assert [part.placements for part in parts] == [
            tuple(Shard(1) if dim and isinstance(p, Shard) else p for p in part.placements)
            if dim
            else part.placements
            for part in slices
        ]
        assert most_received(of_parts) == most_received(of_slices)
        assert len(of_parts) == min(len(of_slices), 1)


def test_a_write_to_a_part_reaches_the_tensor():
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        full = values(10, 3)
        x = distribute(full, (4,), [Shard(0)])
        kept = x.tensor_split(3)
        x.tensor_split(3)[1].zero_()
        with plain():
            wanted = full.clone()
            wanted[4:7] = 0
        assert_close(x, wanted, "the tensor")
        first, second, last = kept
        for part, want in zip((first, last), (wanted[:4], wanted[7:])):
            assert_close(part, want, "parts that were taken before")
        with pytest.raises(StaleView):
            second.clone()


@pytest.mark.parametrize("movement", [False, True])
def test_where_autograd_is_left_out(movement):
    """In inference mode torch does not take the op apart before a class of tensors meets it."""
    with ranks_of((4,)), cute_sharding.enabled(movement=movement):
        x = distribute(values(10, 3), (4,), [Shard(0)])
        with torch.inference_mode(), CommDebugMode() as communicated:
            parts = x.tensor_split(3)
        assert communicated.get_total_counts() == 1
        assert all(part.is_inference() for part in parts)
        for part, want in zip(parts, values(10, 3).tensor_split(3)):
            assert_close(part, want, "inference")


class Seen(TorchDispatchMode):
    """Notes the ops that come by."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append((func, [kind.__name__ for kind in types]))
        return func(*args, **(kwargs or {}))


def test_other_tensors_and_modes_meet_what_they_meet_on_stock():
    x = torch.arange(10.0)

    def met(inference):
        with torch.inference_mode(inference), Seen() as seen:
            parts = x.tensor_split(3)
        return seen.ops, [part.tolist() for part in parts]

    for inference in (False, True):
        stock = met(inference)
        with cute_sharding.enabled(movement=True):
            assert met(inference) == stock


def test_arguments_that_torch_refuses_are_refused():
    refused = [
        (lambda x: x.tensor_split(0), "must be larger than 0"),
        (lambda x: x.tensor_split(2, 2), "out of range"),
        (lambda x: x[0, 0].tensor_split(2), "at least a 1-dimensional"),
    ]
    with ranks_of((4,)), cute_sharding.enabled(movement=True):
        x = distribute(values(10, 3), (4,), [Shard(0)])
        for split, why in refused:
            with pytest.raises((RuntimeError, IndexError), match=why):
                split(x)
        assert len(x.tensor_split(3)) == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """The graph has the one exchange; for any sizes, one for each part."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def program(x):
        first, second, third = x.tensor_split(3)
        return first * 2, second * 3, third * 4

    torch._dynamo.reset()
    full = values(12, 3)
    mesh = init_device_mesh("cpu", (4,))
    with cute_sharding.enabled(movement=True):
        x = DTensor.from_local(torch.ones(3, 3), mesh, [Shard(0)])
        expected = program(x)
        compiled = torch.compile(
            program, backend=aot_autograd(fw_compiler=keep), dynamic=dynamic, fullgraph=True
        )
        found = compiled(x)
    assert full.shape == x.shape
    assert [part.placements for part in found] == [part.placements for part in expected]
    assert [part.to_local().shape for part in found] == [part.to_local().shape for part in expected]
    exchanges = ["all_to_all" in str(node.target) for node in graphs[0].graph.nodes]
    moves = ["cute_sharding.exchange" in str(node.target) for node in graphs[0].graph.nodes]
    assert (sum(exchanges), sum(moves)) == ((0, 3) if dynamic else (1, 0))

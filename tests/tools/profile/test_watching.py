"""Who watches is told of everything once, in its own thread, and nothing is left behind."""

from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding
from cute_sharding.dtensor.replaced import observing, patches
from cute_sharding.tools.profile.recorder import Recorder


@pytest.fixture
def x():
    mesh = init_device_mesh("cpu", (4,))
    return DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)]).requires_grad_()


def replaced():
    """What of torch is replaced while somebody watches."""
    op = torch.ops._c10d_functional.all_reduce
    group = dist.ProcessGroup
    kernels = sum("c10d" in key for key in patches.KERNELS.found())
    rule, context = patches.CLASS_RULES.found(), torch.autograd.function.BackwardCFunction.__init__
    return rule, context, op._op, op.default._op, group.allreduce, group.barrier, kernels


class Ops(Recorder):
    """Every op that is seen, with its line, and whether it computes a gradient."""

    def __init__(self):
        self.ops = []
        super().__init__()

    @property
    def _last(self):
        return None

    @_last.setter
    def _last(self, met):
        if met is not None:
            line, op, *_, number = met
            line = self._lines.of_node(number) if line is None else line
            self.ops.append((str(op), line, number is not None))


def test_ops_are_seen_as_dtensor_answers_them(x):
    with Ops() as recorder:
        y = x * 2
        with torch.inference_mode():
            x + 1
        y.sum().full_tensor().backward()
    names = [name for name, _, _ in recorder.ops]
    assert names[:3] == ["aten.mul.Tensor", "aten.add.Tensor", "aten.sum.default"]
    lines = [{line for _, line, back in recorder.ops if back == which} for which in (False, True)]
    assert lines[1] and lines[1] <= lines[0]  # a gradient has the line of its forward op


def of_all_kinds():
    x, four = torch.ones(4), [torch.empty(4) for _ in range(4)]
    dist.all_reduce(x)
    dist.all_gather(four, x)
    dist.broadcast(x, 0)
    dist.all_to_all_single(torch.empty(8), torch.ones(8))
    dist.barrier()


ALL_KINDS = ["all-reduce", "all-gather", "broadcast", "all-to-all", "barrier"]


def test_collectives_of_all_kinds_are_seen_once(x):
    with Recorder() as recorder:
        of_all_kinds()
        x.redistribute(placements=[Replicate()])
    assert [one.op for one in recorder.collectives] == [*ALL_KINDS, "all-gather"]
    assert recorder.collectives[-1].name == "_c10d_functional.all_gather_into_tensor"


def test_collectives_of_inference_are_seen():
    with torch.inference_mode(), Recorder() as recorder:
        of_all_kinds()
    assert [one.op for one in recorder.collectives] == ALL_KINDS


def test_gradients_of_functions_have_their_own_lines(x):
    """Also where ops on plain tensors, which nobody sees, come between."""
    with Recorder() as recorder:
        w = torch.ones(2, 6, requires_grad=True)
        y = DTensor.from_local(w, x.device_mesh, [Replicate()], run_check=False)  # its line
        gathered = y.redistribute(placements=[Shard(0)])  # and a gradient that is gathered
        local = gathered.to_local()
        (local * 2).exp().sum().backward()
    (gradient,) = [one for one in recorder.collectives if one.backward]
    with open(__file__) as file:
        assert "a gradient that is gathered" in file.readlines()[gradient.place.line - 1]


def test_nothing_is_left_behind_and_what_is_nested_sees_the_same(x):
    before = replaced()
    with pytest.raises(ZeroDivisionError), Recorder() as outer:
        assert all(now is not was for now, was in zip(replaced(), before))
        with Recorder() as inner:
            x.redistribute(placements=[Replicate()])
        x.redistribute(placements=[Replicate()])
        _ = 1 / 0
    assert len(outer.collectives) == 2 and len(inner.collectives) == 1
    assert replaced() == before
    assert not observing._everyone and not observing._watchers()
    x.redistribute(placements=[Replicate()])
    assert len(outer.collectives) == 2


def test_a_thread_has_its_own(x):
    found = {}

    def other(name, watches):
        if not watches:
            x.redistribute(placements=[Replicate()])
            return
        with Recorder() as recorder:
            x.detach()[1:5]
        found[name] = recorder.collectives

    with Recorder() as mine:
        for name, watches in (("silent", False), ("watched", True)):
            thread = Thread(target=other, args=(name, watches))
            thread.start()
            thread.join(60)
    assert mine.collectives == [] and [one.op for one in found["watched"]] == ["all-gather"]
    assert {one.place.function.rpartition(".")[2] for one in found["watched"]} == {"other"}


def test_what_is_compiled_is_recorded_as_it_runs_and_not_as_it_is_traced(x):
    def program(x):
        return (x * 2)[1:5]

    compiled = torch.compile(program, backend="aot_eager")
    with cute_sharding.profile() as p:
        compiled(x.detach())
    assert [one.op for one in p.collectives] == ["all-gather"]
    assert not [line for line in p.lines if line.cause.kind == "op"]

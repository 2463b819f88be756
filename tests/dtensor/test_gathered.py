"""What ops gather of a view that is free: once for all of them and their gradients, as torch's view
would have; and again where it was written to since.
"""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from simulation import assert_holds, distribute, number, plain, ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from cute_sharding.dtensor.memory.copies import LIVE
from cute_sharding.dtensor.memory.gathered import gathered_of
from cute_sharding.dtensor.torch_private import streams

SHAPE, MESH = (4, 3, 8), (4,)


def source(requires_grad=False):
    """What views to (4, 24) with blocks of two of every eight columns."""
    return distribute(number(SHAPE).sin(), MESH, [Shard(2)], requires_grad)


def gathers(program, *args):
    with CommDebugMode() as counting:
        result = program(*args)
    return result, counting.get_total_counts()


def norm(v):
    return F.layer_norm(v, (24,))


def of_rows(v):
    return v.sort(-1)[0] + v.cumsum(-1) * v.softmax(-1)


def scores(v):
    return F.log_softmax(v, -1) - v.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("program", [norm, of_rows, scores])
@pytest.mark.parametrize("redistribution", [False, True])
def test_a_view_is_gathered_once(program, redistribution):
    with plain():
        x = number(SHAPE).sin().requires_grad_()
        program(x.view(4, 24)).square().sum().backward()
    with ranks_of(MESH), cute_sharding.enabled(redistribution=redistribution):
        ours = source(requires_grad=True)
        loss, sent = gathers(lambda: program(ours.view(4, 24)).square().sum())
        assert sent == 1, "one gather, whatever reads it"
        _, sent = gathers(loss.backward)
        assert sent == 0, "what was gathered for the op is what its gradient needs"
        got = ours.grad.full_tensor()
        for part in got._local_tensors.values():
            torch.testing.assert_close(part, x.grad)


@pytest.mark.parametrize("program", [of_rows, scores])
def test_views_that_lead_back_to_plain_shards_are_gathered_once(program):
    with plain():
        x = number(SHAPE).sin().requires_grad_()
        program(x).square().sum().backward()
    with ranks_of(MESH), cute_sharding.enabled():
        ours = source(requires_grad=True)
        back = ours.view(4, 24).view(SHAPE)
        assert back.placements == (Shard(2),)
        loss, sent = gathers(lambda: program(back).square().sum())
        assert sent == 1, "torch's first view would have gathered"
        _, sent = gathers(loss.backward)
        assert sent == 0
        for part in ours.grad.full_tensor()._local_tensors.values():
            torch.testing.assert_close(part, x.grad)
        with torch.no_grad():
            back.mul_(2.0)
            with plain():
                wanted = program(number(SHAPE).sin() * 2.0)
            again, sent = gathers(lambda: program(back))
            assert sent == 1, "written to, and gathered anew"
            for part in again.full_tensor()._local_tensors.values():
                torch.testing.assert_close(part, wanted)


# What makes what was gathered another tensor than the view is, and whether the view's own memory is
# what was written to.
WRITES = {
    "in place": lambda x, v: v.mul_(2.0),
    "what it views": lambda x, v: x.add_(1.0),
    "a detached alias": lambda x, v: x.detach().add_(1.0),
    "data": lambda x, v: x.data.add_(1.0),
    "a view of it": lambda x, v: v.view(SHAPE).mul_(3.0),
    "one column": lambda x, v: v[:, 3].zero_(),
    "out": lambda x, v: torch.mul(v, 2.0, out=v),
    "a list": lambda x, v: torch._foreach_mul_([v], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_was_written_is_gathered_anew(name):
    def run(x):
        v = x.view(4, 24)
        before = v.cumsum(-1)
        WRITES[name](x, v)
        return before, v.cumsum(-1)

    with plain():
        expected = run(number(SHAPE))
        assert not torch.equal(*expected)
    with ranks_of(MESH), cute_sharding.enabled():
        results, sent = gathers(run, distribute(number(SHAPE), MESH, [Shard(2)]))
        assert sent >= 2
        for result, full in zip(results, expected):
            assert_holds(result.redistribute(placements=[Replicate()]), full)


def test_writes_to_other_memory_change_nothing():
    with ranks_of(MESH), cute_sharding.enabled():
        x, other = source(), source()
        v = x.view(4, 24)
        v.cumsum(-1)
        other.add_(1.0)
        assert gathers(v.cumsum, -1)[1] == 0


def test_other_placements_are_gathered_by_themselves():
    """On a mesh of two dims an op that needs less than the whole."""
    with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True):
        x = distribute(number(SHAPE), (2, 2), [Shard(0), Shard(2)])
        v = x.view(4, 24)
        first, second = v.cumsum(-1), v.cumsum(0)
        with plain():
            full = number(SHAPE).view(4, 24)
            expected = full.cumsum(-1), full.cumsum(0)
        for result, wanted in zip((first, second), expected):
            assert_holds(result.redistribute(placements=[Replicate()] * 2), wanted)


def test_it_goes_with_the_view():
    """What was gathered is gone when the view is, also without the garbage collector."""
    gc.disable()
    try:
        with ranks_of(MESH), cute_sharding.enabled():
            x, before = source(), len(LIVE)
            v = x.view(4, 24)
            v.cumsum(-1)
            (gathered,) = gathered_of(v._local_tensor)
            memory = weakref.ref(gathered)
            del gathered
            assert memory() is not None and len(LIVE) == before + 1
            v = None
            assert memory() is None and len(LIVE) == before, (
                "the view is gone, and what was gathered of it"
            )
            w = x.view(4, 24)
            assert gathers(w.cumsum, -1)[1] == 1
    finally:
        gc.enable()


def test_it_is_neither_saved_nor_copied_with_the_view():
    def saved(tensor):
        file = io.BytesIO()
        torch.save(tensor, file)
        return file.getvalue()

    mesh = DeviceMesh("cpu", torch.arange(4))
    with cute_sharding.enabled():
        x = DTensor.from_local(torch.rand(4, 3, 2), mesh, [Shard(2)], run_check=False)
        v = x.view(4, 24)
        before = saved(v._local_tensor)
        v.cumsum(-1)
        assert gathered_of(v._local_tensor)
        assert saved(v._local_tensor) == before
        assert not gathered_of(copy.deepcopy(v)._local_tensor)


def test_placements_of_the_program_itself_are_gathered_each_time():
    """A parameter lives long; torch gathers it at each use, and so is it here."""
    with ranks_of(MESH), cute_sharding.enabled():
        x = source().view(4, 24).detach()
        own = distribute(number((4, 24)), MESH, x.placements)
        assert gathers(own.cumsum, -1)[1] == 1
        assert gathers(own.cumsum, -1)[1] == 1
        assert not gathered_of(own._local_tensor)


def halves(v):
    return v[:, :12], v[:, 12:]


def sums_between(v):
    first = v[:, 2:9]
    v.cumsum(-1)
    return first, v[:, 9:20]


VIEWS_OF_WHOLE = {
    "slices": halves,
    "parts": lambda v: (*v.split(12, 1), v[:, 6:18]),
    "items": lambda v: (v.select(1, 3), *v.unbind(1)[:2]),
    "vsplit": lambda v: v.view(2, 2, 24).transpose(0, 2).vsplit(2),
    "an op between": sums_between,
}


@pytest.mark.parametrize("name", VIEWS_OF_WHOLE)
def test_views_of_it_are_gathered_once_for_all(name):
    """As views of a replica, which torch's view would have made."""
    views = VIEWS_OF_WHOLE[name]
    with plain():
        full = number(SHAPE)
        expected = views(full.view(4, 24))
        expected[0].mul_(2.0)
        expected[1].add_(3.0)
    with ranks_of(MESH), cute_sharding.enabled():
        x = distribute(number(SHAPE), MESH, [Shard(2)])
        v = x.view(4, 24)
        given, sent = gathers(views, v)
        assert sent == 1
        given[0].mul_(2.0)
        given[1].add_(3.0)
        for view, wanted in zip((*given, v, x), (*expected, full.view(4, 24), full)):
            assert_holds(view.redistribute(placements=[Replicate()] * len(MESH)), wanted)


def test_what_is_written_to_a_view_is_in_the_others():
    def program(x):
        v = x.view(4, 24)
        left, right, middle = *halves(v), v[:, 6:18]
        left.mul_(2.0)
        middle.add_(1.0)
        again = v[:, 6:18] * 1.0
        v.sub_(3.0)
        return left, right, middle, again, v[:, 6:18], v * 1.0, x * 1.0

    with plain():
        expected = program(number(SHAPE).sin())
    for redistribution in (False, True):
        with ranks_of(MESH), cute_sharding.enabled(redistribution=redistribution):
            for part, wanted in zip(program(source().detach()), expected, strict=True):
                assert_holds(part, wanted)


def test_views_of_what_was_gathered_have_gradients():
    def program(x):
        left, right = halves(x.view(4, 24))
        return (left.sin() * right.square()).sum()

    with plain():
        x = number(SHAPE).sin().requires_grad_()
        program(x).backward()
    with ranks_of(MESH), cute_sharding.enabled():
        ours = source(requires_grad=True)
        loss, sent = gathers(program, ours)
        assert sent == 1
        loss.backward()
        assert_holds(ours.grad, x.grad)


def test_with_views_of_it_it_goes_when_these_have():
    """What was gathered has a way back to where it was gathered of, but not to the tensor that it
    is kept with, or neither would ever go.
    """
    mesh, before = DeviceMesh("cpu", torch.arange(4)), len(LIVE)
    gc.disable()
    try:
        with cute_sharding.enabled():
            x = DTensor.from_local(torch.zeros(4, 3, 2), mesh, [Shard(2)], run_check=False)
            v = x.view(4, 24)
            first, second = v[:, :5], v[:, 5:]
            (gathered,) = gathered_of(v._local_tensor)
            kept = weakref.ref(gathered)
            del gathered, v, second
            assert kept() is not None, "torch keeps a tensor for as long as there are views of it"
            del first
            assert kept() is None and len(LIVE) == before
    finally:
        gc.enable()


def test_writes_to_a_local_tensor_are_counted_in_the_way_back():
    mesh = DeviceMesh("cpu", torch.arange(4))
    with cute_sharding.enabled():
        x = DTensor.from_local(torch.zeros(4, 3, 2), mesh, [Shard(2)], run_check=False)
        v = x.view(4, 24)
        part = v[:, :5]
        part.add_(1.0)  # of four devices the first has the columns 0 and 1 of every eight
        assert x.to_local().tolist() == [[[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]] * 4
        v.to_local().add_(1.0)
        assert gathers(lambda: v[:, 5:])[1] == 1
        with pytest.raises(RuntimeError, match="Take the view again, after that write"):
            part.add_(1.0)


def test_what_is_written_to_a_view_of_it_is_not_kept():
    with ranks_of(MESH), cute_sharding.enabled(implicit_redistribution=True):
        x = distribute(number(SHAPE), MESH, [Shard(2)])
        v = x.view(4, 24)
        v.cumsum(-1)
        part = v[:, 5:7]
        part.zero_()
        with plain():
            full = number(SHAPE).view(4, 24).clone()
            full[:, 5:7] = 0
        assert_holds(v.cumsum(-1).redistribute(placements=[Replicate()]), full.cumsum(-1))
        assert_holds(x.redistribute(placements=[Replicate()]), full.view(SHAPE))


class Stream:
    """A stand-in for one of an accelerator's."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)

    def __enter__(self):
        streams.current.now.append(self)

    def __exit__(self, *_):
        streams.current.now.pop()


def on_streams(monkeypatch, first):
    """Streams for the CPU. (now: which of them ops are put on.)"""

    def current(device):
        return current.now[-1]

    current.now = [first]
    monkeypatch.setattr(streams, "current", current)
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: recorded.append(stream))
    return recorded


def test_another_stream_waits_for_what_was_gathered(monkeypatch):
    """A program has no reason to: it knows of no gather."""
    first, second = Stream(), Stream()
    recorded = on_streams(monkeypatch, first)
    mesh = DeviceMesh("cpu", torch.arange(4))
    with cute_sharding.enabled():
        v = DTensor.from_local(torch.zeros(4, 3, 2), mesh, [Shard(2)], run_check=False).view(4, 24)
        assert gathers(lambda: v.cumsum(-1))[1] == 1
        assert gathers(lambda: v.cumsum(-1))[1] == 0 and not second.waited_for
        with second:
            assert gathers(lambda: v.cumsum(-1))[1] == 0, "ranks need not meet again"
            assert second.waited_for == [first], "where it was gathered"
            assert recorded == [second], "its memory is not given away while that one reads it"
        assert not first.waited_for


def test_a_captured_graph_keeps_nothing(monkeypatch):
    """What is computed there is there when the graph is replayed."""
    mesh = DeviceMesh("cpu", torch.arange(4))
    with cute_sharding.enabled():
        v = DTensor.from_local(torch.zeros(4, 3, 2), mesh, [Shard(2)], run_check=False).view(4, 24)
        v.cumsum(-1)
        with monkeypatch.context() as patched:
            patched.setattr(streams, "is_capturing", lambda device: True)
            assert [gathers(lambda: v.cumsum(-1))[1] for _ in range(2)] == [1, 1]
        assert gathers(lambda: v.cumsum(-1))[1] == 0

"""Copies of a value that a plan keeps are not read after something has written to the value: on
processes with plain local tensors, whose versions do not count writes.
"""

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from cute_sharding import planned
from cute_sharding.tools.steps.__main__ import planned_step


@pytest.fixture(autouse=True)
def everything():
    with cute_sharding.enabled(redistribution=True, movement=True):
        yield


def placed(mesh, placements):
    local = torch.rand(2, 8) if placements == [Shard(0)] else torch.rand(8, 8)
    return DTensor.from_local(local, mesh, placements, run_check=False)


def written_by(write):
    """A step whose two losses read a weight that ``write`` has written to between them."""

    def step(mesh):
        w, x = placed(mesh, [Shard(0)]), placed(mesh, [Replicate()])

        def run():
            found = (x @ w).amax(1), (x @ w.exp()).amax(1)
            write(w)
            return *found, (x @ w).amax(1)

        return run

    return step


def by_data(w):
    w.data.mul_(2)


def by_lists(w):
    torch._foreach_mul_([w], 2.0)


def by_views(w):
    w[1:3].mul_(2)


def by_local_tensors(w):
    w.to_local().mul_(2)


def by_collectives(w):
    dist.all_reduce(w.to_local())


def by_out(w):
    torch.split_with_sizes_copy(torch.ones(2, 8), [2], out=[w.to_local()])


def by_another_thread(w):
    """Whose ops no mode of this thread sees, and whose writes to lists no tensor counts."""
    thread = threading.Thread(target=by_lists, args=(w,))
    thread.start()
    thread.join()


def double(w):
    w.mul_(2)


def by_compiled_code(w):
    torch.compile(double, backend="aot_eager")(w)


def by_compiled_code_elsewhere(w):
    """On another DTensor in the same memory, which counts versions of its own."""
    other = DTensor.from_local(w.to_local(), w.device_mesh, w.placements, run_check=False)
    torch.compile(double, backend="aot_eager")(other)


def by_nothing(w):
    pass


WRITES = (
    by_data,
    by_lists,
    by_views,
    by_local_tensors,
    by_collectives,
    by_out,
    by_another_thread,
    by_compiled_code,
    by_compiled_code_elsewhere,
)


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,))


def gathered(step, mesh, plan):
    """The collectives of the second of two steps."""
    run = step(mesh)
    with CommDebugMode() as seen, planned(plan):
        run()
        before = seen.get_total_counts()
        run()
    return seen.get_total_counts() - before


def test_a_copy_is_read_when_its_source_is_gone(mesh):
    """As of an activation that autograd keeps, as another tensor, for the gradient."""

    def step(mesh):
        x, w = placed(mesh, [Shard(0)]), placed(mesh, [Replicate()]).requires_grad_()

        def run():
            ((x @ w).relu() @ w).amax(1).sum().backward()
            w.grad = None

        return run

    plan = planned_step(step, mesh, device="cpu")
    activation = next(op.results[0] for op in plan.ops if op.op == "aten.relu.default")

    def whole(op, keeps):
        """It reads the activation as a replica."""
        at = [k for k, argument in enumerate(op.arguments) if argument == f"%{activation}"]
        if not at or op.op not in ("aten.mm.default", "aten.threshold_backward.default"):
            return op
        reads = tuple(["[R]" if k in at else None for k in range(2)])
        return replace(op, reads=reads, keeps=(keeps,) * 2)

    def sent(keeps):
        ops = tuple([whole(op, keeps) for op in plan.ops])
        assert sum(op.reads.count("[R]") for op in ops) == 2
        return gathered(step, mesh, replace(plan, ops=ops))

    assert sent(keeps=True) == sent(keeps=False) - 1


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_is_gathered_again(mesh, write):
    plan = planned_step(written_by(by_nothing), mesh, device="cpu")
    assert any(any(op.keeps) for op in plan.ops)
    without = gathered(written_by(by_nothing), mesh, plan)
    assert gathered(written_by(write), mesh, plan) > without


def test_what_a_rank_may_write_to_alone_is_not_kept(mesh):
    """All ranks gather it again, whichever has written to its local tensor."""
    plan = planned_step(written_by(by_local_tensors), mesh, device="cpu")
    kept = [(op, i) for op in plan.ops for i, keeps in enumerate(op.keeps) if keeps]
    weights = [f"%{plan.numbers[k]}" for k, given in enumerate(plan.given) if given[2] == "[S(0)]"]
    assert not [op for op, i in kept if op.arguments[i] in weights]


def test_a_conjugate_is_no_copy_of_the_tensor_in_its_memory(mesh):
    """Its elements are conjugated by what reads them."""

    def step(mesh):
        w, x = (placed(mesh, [p]).to(torch.complex64) for p in (Shard(0), Replicate()))

        def run():
            return (x @ w).abs().amax(1), (x @ w.conj()).abs().amax(1)

        return run

    plan = planned_step(step, mesh, device="cpu")
    first, second = [op.arguments[1] for op in plan.ops if op.op == "aten.mm.default"]
    assert first != second
    assert gathered(step, mesh, plan) == plan.totals["planned"].collectives

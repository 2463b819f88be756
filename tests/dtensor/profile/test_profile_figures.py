"""What a profile says that rules receive is what they receive: those that were in force, and the
others, by which each op of a drawn program runs again on tensors that lie as its own did.
"""

import pytest
import stranger_programs
import torch
from profile_programs import run_as_far_as_it_goes
from simulation import distribute, number, ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import cute_sharding
from cute_sharding.dtensor.profile import Profiler, report
from cute_sharding.dtensor.profile.causes import of_call

ON = {"redistribution": True, "movement": True}


@pytest.fixture(scope="module")
def meshes():
    def mesh(*sizes):
        ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
        return DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")[: len(sizes)])

    return {sizes: mesh(*sizes) for sizes in stranger_programs.MESHES}


def switch(is_on):
    if is_on:
        cute_sharding.enable(**ON)
    else:
        cute_sharding.disable()


def argument(value):
    """As it was, of zeros."""
    if isinstance(value, tuple):
        return [argument(each) for each in value]
    if not isinstance(value, DTensorSpec):
        return value
    shape, _ = compute_local_shape_and_global_offset(value.shape, value.mesh, value.placements)
    local = torch.zeros(shape, dtype=value.tensor_meta.dtype)
    return DTensor(local, value, requires_grad=False)


def received_again(call):
    """Bytes, by the rules that are in force; None where they refuse the op."""
    with torch.no_grad(), Profiler() as profiler:
        try:
            call.op(*map(argument, call.args), **{name: argument(x) for name, x in call.kwargs})
        except (RuntimeError, IndexError, NotImplementedError):
            return None
    return sum(line.received for line in report(profiler).lines)


def check(seeds, meshes):
    """How many figures were compared: of the rules in force, and of the others."""
    lines = calls = 0
    for seed in seeds:
        is_on = bool(seed % 2)
        switch(is_on)
        with Profiler() as profiler:
            run_as_far_as_it_goes(seed, meshes)
        for line in report(profiler).lines:
            said = line.of(line.cause.package if is_on else line.cause.torch)
            if said is not None:
                assert said == line.received, (seed, line.cause)
                lines += 1
        switch(not is_on)
        for call in profiler.calls:
            cause = of_call(call, (), (), None)
            said = (cause.torch if is_on else cause.package).received
            found = None if said is None else received_again(call)
            if found is not None:
                assert found == said, (seed, cause)
                calls += 1
    return lines, calls


def test_figures_are_what_the_rules_receive(meshes):
    lines, calls = check(range(16), meshes)
    assert lines > 16 and calls > 100


@pytest.mark.costly
def test_two_hundred_programs_have_right_figures(meshes):
    # One writes to rows of a copy, which go back where they came from: no op of the program.
    lines, calls = check([seed for seed in range(16, 216) if seed != 185], meshes)
    assert lines > 200 and calls > 2000


# -- what the program asks for ---------------------------------------------------------------------


def sums(mesh, *placements):
    return DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)


def by_line(is_on, run):
    switch(is_on)
    with cute_sharding.profile() as p:
        run()
    (line,) = [line for line in p.lines if line.events]
    return line


def test_the_weight_of_a_loss_is_counted(meshes):
    """It is added up beside the loss."""
    mesh = meshes[2, 2]
    scores = DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(0), Shard(0)])
    classes = DTensor.from_local(torch.arange(4), mesh, [Shard(0), Replicate()])
    line = by_line(True, lambda: torch.nn.functional.nll_loss(scores, classes))
    assert line.of(line.cause.package) == line.received == 16


def test_what_goes_by_rules_of_this_package_is_known(meshes):
    """Also of ops that torch has functions of its own for, and that write to statistics."""
    mesh = meshes[2, 2]
    images = DTensor.from_local(torch.ones(2, 4, 4, 4), mesh, [Shard(0), Shard(3)])
    weight = DTensor.from_local(torch.ones(4, 2, 3, 3), mesh, [Replicate(), Shard(1)])
    functions = torch.nn.functional
    for run in (
        lambda: functions.batch_norm(images, None, None, training=True),
        lambda: functions.conv2d(images, weight),
    ):
        line = by_line(True, run)
        assert line.of(line.cause.package) == line.received > 0
    with cute_sharding.profile() as p:
        functions.conv2d(images.requires_grad_(), weight.requires_grad_()).sum().backward()
    sent = [line for line in p.lines if line.events]
    assert all(line.of(line.cause.package) == line.received for line in sent) and len(sent) > 1


def test_a_redistribution_of_several_collectives_is_asked_for_once(meshes):
    mesh = meshes[2, 2]
    x = sums(mesh, Shard(0), Shard(0))
    line = by_line(False, lambda: [x.full_tensor() for _ in range(3)])
    assert line.calls == 3 and line.kinds == {"all-gather": 6}
    assert line.of(line.cause.torch) == line.received == 3 * 3 * 4 * 4 * 4
    assert line.of(line.cause.package) == by_line(True, lambda: [x.full_tensor()] * 3).received * 3


def test_a_gradient_that_goes_the_way_back_is_no_op(meshes):
    mesh = meshes[4,]

    def run():
        local = torch.ones(2, 4, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        x.to_local(grad_placements=[Partial()]).sum().backward()

    for is_on in (False, True):
        line = by_line(is_on, run)
        cause = line.cause
        assert (cause.kind, cause.op, cause.backward) == ("asked", "from_local", True)
        assert line.of(line.cause.torch) == line.of(line.cause.package) == line.received > 0


def test_reductions_of_other_placements_are_counted(meshes):
    """Those of norms, which the placement itself runs."""
    mesh = meshes[2, 2]
    norms = torch.linalg.vector_norm(sums(mesh, Shard(0), Shard(0)), dim=0)
    for is_on in (False, True):
        line = by_line(is_on, lambda: norms.redistribute(placements=[Replicate()] * 2))
        assert line.kinds == {"all-reduce": 2} and line.received == 2 * 4 * 4
        assert line.of(line.cause.torch) == line.of(line.cause.package) == line.received
    counted = cute_sharding.stats()["redistribute"]
    assert counted["collectives"] == 2 and counted["received_elements"] == 2 * 4


def test_an_op_that_torch_has_a_function_for_is_not_known(meshes):
    x = sums(meshes[4,], Shard(0))
    for is_on in (False, True):
        cause = by_line(is_on, lambda: x.argmax(0)).cause
        assert cause.torch.received is None and cause.package.received is None


def test_all_ranks_in_one_process():
    """Their messages differ in size: those of the first rank are counted."""
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True, movement=True):
        x = distribute(number((8, 6)), (4,), [Shard(0)])
        with cute_sharding.profile() as p:
            x[1:5]
    (row,) = p.to_dict()["lines"]
    assert row["collectives"] == {"all-to-all": 1} and row["received_bytes"] == 24, row

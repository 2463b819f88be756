"""Each collective that runs is recorded, once, with what this rank receives and the line it is
for.
"""

from weakref import WeakKeyDictionary

import pytest
import stranger_programs
import torch
from profile_programs import run_as_far_as_it_goes
from profile_worker import by_kind
from recording_group import Recording, recording_mesh
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import cute_sharding
from cute_sharding.dtensor.run import groups as groups_of_ranks
from cute_sharding.tools.profile.recorder import Recorder


@pytest.fixture(scope="module")
def meshes():
    """Meshes whose groups count what they are handed, and hand it to nobody; without the groups
    that other tests have prepared for the same ranks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_of_ranks, "_groups", WeakKeyDictionary())
        yield {sizes: recording_mesh(*sizes) for sizes in stranger_programs.MESHES}


def run(seed, meshes):
    """What was recorded of a drawn program."""
    Recording.events.clear()
    with CommDebugMode() as counted, Recorder() as recorder:
        run_as_far_as_it_goes(seed, meshes)
    return recorder.collectives, by_kind(counted)


def check(seeds, meshes):
    sent = 0
    for seed in seeds:
        if seed % 2:
            cute_sharding.enable(redistribution=True, movement=True)
        else:
            cute_sharding.disable()
        collectives, counted = run(seed, meshes)
        found = [(one.op, one.received_bytes) for one in collectives]
        assert found == Recording.events, seed
        kinds = {}
        for op, _ in found:
            kinds[op] = kinds.get(op, 0) + 1
        assert kinds == dict(counted), seed
        sent += len(found)
    return sent


def test_drawn_programs_agree_with_the_backend_and_with_comm_debug_mode(meshes):
    assert check(range(12), meshes) > 12


@pytest.mark.costly
def test_two_hundred_drawn_programs_agree(meshes):
    assert check(range(12, 212), meshes) > 300


# -- lines -----------------------------------------------------------------------------------------


def gathered(x, w):
    y = x.redistribute(placements=[Replicate()])  # line: gathered
    z = torch.relu(y) @ w  # line: product
    return z.softmax(0)[:, :3]  # line: sliced


def line_of(mark):
    with open(__file__) as file:
        return next(
            i for i, text in enumerate(file, 1) if text.rstrip().endswith(f"# line: {mark}")
        )


@pytest.fixture
def operands():
    mesh = DeviceMesh("cpu", torch.arange(4))
    x = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)]).requires_grad_()
    w = DTensor.from_local(torch.ones(6, 2), mesh, [Shard(1)]).requires_grad_()
    return x, w


def by_line(recorder):
    return [(one.op, one.place.line, one.backward) for one in recorder.collectives]


def test_gradients_stand_under_the_line_of_their_forward_op(operands):
    with Recorder() as recorder:
        out = gathered(*operands)
        out.to_local().sum().backward()
    first, sliced = line_of("gathered"), line_of("sliced")
    found = by_line(recorder)
    assert ("all-gather", first, False) in found
    assert ("all-gather", sliced, False) in found
    assert ("all-reduce", line_of("product"), True) in found  # what relu's gradient is made of
    assert {line for _, line, _ in found} == {first, line_of("product"), sliced}
    assert {one.place.function for one in recorder.collectives} == {"gathered"}
    assert {one.place.file for one in recorder.collectives} == {__file__}


def test_a_backward_of_a_forward_that_was_not_seen_is_under_the_line_that_starts_it(operands):
    out = gathered(*operands)
    with Recorder() as recorder:
        out.to_local().sum().backward()  # line: backward
    assert {(line, backward) for _, line, backward in by_line(recorder)} == {
        (line_of("backward"), True)
    }


def test_what_a_checkpoint_runs_again_is_of_the_line_that_runs_again(operands):
    with Recorder() as recorder:
        out = checkpoint(gathered, *operands, use_reentrant=False)
        out.to_local().sum().backward()
    again = [one for one in recorder.collectives if one.recomputed]
    assert [one.op for one in again] == ["all-gather"] * len(again) and again
    assert {one.place.line for one in again} <= {line_of("gathered"), line_of("sliced")}


def test_two_recorders_at_once_see_the_same(operands):
    with Recorder() as outer, Recorder() as inner:
        gathered(*operands)
    one, other = [
        [each._replace(start=0.0, measured=0.0) for each in recorder.collectives]
        for recorder in (outer, inner)
    ]
    assert one == other != []


def test_nothing_is_left_behind(operands):
    from cute_sharding.dtensor.replaced import observing

    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), recorder:
        1 / 0
    assert not observing._everyone and not observing._watchers()
    gathered(*operands)
    assert recorder.collectives == []


def test_a_compiled_program_is_under_the_lines_of_its_graph(operands):
    compiled = torch.compile(gathered, backend="aot_eager")
    with cute_sharding.enabled(redistribution=True, movement=True):
        compiled(*operands)
        with Recorder() as recorder:
            compiled(*operands).to_local().sum().backward()
    lines = {line for _, line, _ in by_line(recorder)}
    assert {line_of("gathered"), line_of("sliced")} <= lines
    assert lines <= {*range(line_of("gathered"), line_of("sliced") + 1)}
    assert ("all-reduce", line_of("product"), True) in by_line(recorder)


def sliced_by_rows(x):
    return x[1:5] * 2  # line: dynamic


def test_what_the_op_of_graphs_exchanges_is_seen():
    """Of sizes that are symbols one op of this package plans and sends in each call."""
    mesh = DeviceMesh("cpu", torch.arange(4))
    compiled = torch.compile(sliced_by_rows, backend="aot_eager", dynamic=True)
    seen = []
    with cute_sharding.enabled(redistribution=True, movement=True):
        for rows in (2, 3):
            x = DTensor.from_local(torch.ones(rows, 6), mesh, [Shard(0)])
            for run in (sliced_by_rows, compiled):
                run(x)  # compiles, which is not recorded
                with Recorder() as recorder:
                    run(x)
                found = recorder.collectives
                seen.append([(x.op, x.received, x.busiest, x.place.line) for x in found])
    assert seen[0] and seen[1::2] == seen[::2], seen


def test_functions_of_torch_func_are_no_compilers():
    """Also of tensors without elements, which a compiler has too."""
    mesh = recording_mesh(4)
    cute_sharding.enable(redistribution=True)

    def loss(x):
        return (x @ x.t()).square().sum()

    with FakeTensorMode():
        local = torch.empty(2, 4)
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    with Recorder() as recorder:
        torch.func.grad(loss)(x)
    assert recorder.collectives

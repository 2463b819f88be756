"""Where a program may not communicate: the first collective raises, or warns."""

import warnings
from importlib.metadata import entry_points

import profiled
import pytest
import torch
from profiled import ON, program, tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding
from cute_sharding.tools.profile.recorder import Recorder
from cute_sharding.tools.profile.refusing import CommunicationError

pytest_plugins = "pytester"


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def test_the_first_collective_raises_before_it_is_sent(mesh):
    x = tensor(mesh, (8, 6), 0)
    with (
        Recorder() as recorder,
        pytest.raises(CommunicationError) as raised,
        cute_sharding.no_communication(),
    ):
        x * 2
        program(x)
    assert recorder.collectives == []
    assert "profiled.py" in str(raised.value) and "in program" in str(raised.value)


def test_what_the_program_asks_for_may_pass(mesh):
    x = tensor(mesh, (8, 6), 0)
    with (
        pytest.raises(CommunicationError, match=r"slice at .* all-gather among 4 ranks"),
        cute_sharding.no_communication(allow_explicit=True),
    ):
        program(x)


def test_a_gradient_raises_with_the_line_of_its_forward_op(mesh):
    w = DTensor.from_local(torch.ones(8, 6), mesh, [Replicate()]).requires_grad_()
    with (
        pytest.raises(CommunicationError, match="redistribute, for a gradient of") as raised,
        cute_sharding.no_communication(),
    ):
        rows = w.redistribute(placements=[Shard(0)])  # a slice, and its gradient a gather
        rows.to_local().sum().backward()
    line = int(str(raised.value).partition("test_refusing.py:")[2].partition(" ")[0])
    with open(__file__) as file:
        assert "a slice, and its gradient a gather" in file.readlines()[line - 1]


def test_a_warning_instead(mesh):
    x = tensor(mesh, (8, 6), 0)
    with (
        warnings.catch_warnings(record=True) as caught,
        cute_sharding.no_communication(action="warn"),
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            program(x)
    said = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert len(said) == 2 and said[1].endswith(
        "slice redistributes a tensor of (8, 6) from [S(0)] to [R], by PyTorch's rule. What to do: "
        "redistribute the operand before the block, or move the line out of the block."
    )
    assert caught[0].filename == profiled.__file__


def test_a_warning_for_each_op_of_a_line_and_each_gradient(mesh):
    x = tensor(mesh, (8, 8), 0).requires_grad_()

    def step():
        y, z = x[1:5] + x[2:6], x.roll(1, 0)  # exchanges all, forward and backward
        (y.to_local().sum() + z.to_local().sum()).backward()

    with cute_sharding.enabled(**ON), cute_sharding.profile() as p:
        step()
    with (
        cute_sharding.enabled(**ON),
        warnings.catch_warnings(record=True) as caught,
        cute_sharding.no_communication(action="warn"),
    ):
        warnings.simplefilter("always")
        step()
        step()
    rows = [line.cause for line in p.lines]
    listed = {cause.op + (", for a gradient of" if cause.backward else " at") for cause in rows}
    said = [str(each.message).partition(" /")[0] for each in caught]
    assert len(rows) > len(listed) == 4
    assert sorted(said) == sorted(listed)


def test_another_action():
    with (
        pytest.raises(ValueError, match="action='ignore' is not one of 'raise', 'warn'"),
        cute_sharding.no_communication(action="ignore"),
    ):
        pass


def test_the_fixture(pytester):
    pytester.makepyfile(
        """
        import torch
        import torch.distributed as dist

        def test_free(no_communication):
            torch.ones(2) * 2

        def test_sends(no_communication):
            dist.all_reduce(torch.ones(2))
        """
    )
    is_installed = any(found.name == "cute_sharding" for found in entry_points(group="pytest11"))
    plugin = [] if is_installed else ["-p", "cute_sharding._pytest"]
    result = pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*CommunicationError: all_reduce at*"])

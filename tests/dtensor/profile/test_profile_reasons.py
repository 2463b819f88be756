"""What a profile says of sums that have to be finished, of gradients that autograd adds up, of
libraries that communicate, and of what PyTorch refuses.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cute_sharding
from cute_sharding.profiling import Other
from cute_sharding.showing.table import text


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def made(mesh, shape, placement):
    """A tensor of that global shape; what its elements are does not matter."""
    local = list(shape)
    if isinstance(placement, Shard):
        local[placement.dim] //= 4
    return DTensor.from_local(torch.ones(local), mesh, [placement], run_check=False)


def causes(run):
    with cute_sharding.profile() as p:
        run()
    return [line.cause for line in p.lines if line.events]


def test_a_partial_that_goes_into_a_shard_is_said_to_receive_the_least(mesh):
    x, y = made(mesh, (8, 4), Partial()), made(mesh, (8, 4), Shard(0))
    (cause,) = causes(lambda: x * y)
    assert [moved.change for moved in cause.moved] == ["P(sum) -> S(0)"]
    assert cause.todo == (
        "this communication is needed: a Partial has to be reduced once, and a reduction to a "
        "Shard receives the least",
    )


def test_the_other_operand_is_named_and_reduced_where_that_helps(mesh):
    """A product that gathers its weight, as the other operand is no finished sum."""
    x, w = made(mesh, (8, 4), Partial()), made(mesh, (4, 8), Shard(1))
    (cause,) = causes(lambda: x @ w)
    assert [moved.change for moved in cause.moved] == ["S(1) -> R"]
    assert "from [S(1)] to [R], while the other operand is (8, 4) [P(sum)], by " in cause.why
    said = "if operand 0, which is a Partial, is first reduced to [R], once for all ops that use it"
    assert said in cause.todo[0]
    assert causes(lambda: made(mesh, (8, 4), Replicate()) @ w) == []


def test_gradients_that_are_added_up_are_said_to_be(mesh):
    x = made(mesh, (8, 4), Replicate()).requires_grad_()

    def run():
        rows = x * made(mesh, (8, 4), Shard(0))
        columns = x * made(mesh, (8, 4), Shard(1))
        (rows.sum() + columns.sum()).full_tensor().backward()

    found = [cause for cause in causes(run) if cause.backward]
    assert {cause.op for cause in found} <= {"add", "add_"} and found
    assert all(cause.todo[0].startswith("autograd adds the gradients") for cause in found)


def test_what_fsdp_sends_is_under_its_name(mesh):
    model = torch.nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh)
    found = causes(lambda: model(torch.ones(2, 8)).sum().backward())
    assert {(cause.op, cause.kind) for cause in found} == {("FSDP", "direct")}
    assert all(cause.why.startswith("FSDP gathers parameters") for cause in found)


def test_what_pytorch_refuses_or_is_not_known_is_said_in_its_column(mesh):
    x = made(mesh, (16,), Shard(0))
    on = cute_sharding.enabled(redistribution=True, movement=True)
    with on, cute_sharding.profile() as p:
        x.roll(1, 0)

    def table(torchs):
        (line,) = [line for line in p.lines if line.events]
        lines = (line._replace(cause=line.cause._replace(torch=torchs)),)
        return text(p.report._replace(lines=lines), 100, 20).partition("Why")[0]

    assert " raises\n" in table(Other(None, None, "no rule for that"))
    unknown = table(Other(None))
    assert " ?\n" in unknown and "?: unknown" in unknown
    known = table(Other(48))
    assert " 48 B\n" in known and "unknown" not in known


def test_a_convolution_sends_nothing_where_images_are_cut_by_number(mesh):
    kernels = made(mesh, (16, 16, 3), Shard(0))
    x = made(mesh, (4, 16, 8), Shard(2))
    with cute_sharding.enabled(redistribution=True, movement=True):
        (cause,) = causes(lambda: torch.nn.functional.conv1d(x, kernels, padding=1))
        assert "convolution sends nothing if operand 0 is [R]" in " ".join(cause.todo)
        whole = x.redistribute(placements=[Replicate()])
        assert causes(lambda: torch.nn.functional.conv1d(whole, kernels, padding=1)) == []


def test_a_function_that_several_lines_call_says_which(mesh):
    def last(x):
        return x[:, -2:]

    x = made(mesh, (4, 8), Shard(1))
    with cute_sharding.profile() as p:
        last(x)
        for _ in range(2):
            last(x * 2)
    (line,) = p.lines
    (first, one), (then, two) = sorted(line.callers.items())
    assert (one, two) == (1, 2) and then.line == first.line + 2
    said = f"Called from {then} (2 collectives), {first} (1 collective)."
    assert said in " ".join(p.table(100).split())
    assert p.to_dict()["lines"][0]["events"][0]["caller"] == first._asdict()
    assert said.partition("from ")[0] in p.html()
    with cute_sharding.profile() as p:
        last(x)
    assert "Called from" not in p.table(100)


def test_kinds_of_collectives_are_not_cut(mesh):
    """In the narrowest table."""
    x = made(mesh, (64, 64), Shard(1)).requires_grad_()

    def run():
        y = (x @ x).redistribute(placements=[Shard(0)])
        y.cumsum(0).sum().full_tensor().backward()

    with cute_sharding.profile() as p:
        run()
    shown = p.table(72).partition("received: bytes")[0]
    wide = p.table(200).partition("received: bytes")[0]
    for kind in ("all-gather", "all-to-all", "all-reduce", "reduce-scatter"):
        assert shown.count(kind) == wide.count(kind)
    assert max(map(len, shown.splitlines())) <= 80

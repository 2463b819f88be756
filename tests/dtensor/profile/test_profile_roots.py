"""What a profile says of where a sharding or a Partial came from, and that bytes fall if the
program does as it is told.
"""

import pytest
import torch
import torch.nn.functional as F
from profiled import ON
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cute_sharding
from cute_sharding.dtensor.profile.roots import as_code


@pytest.fixture
def mesh():
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def made(mesh, shape, placement, *, is_weight=False):
    local = list(shape)
    if isinstance(placement, Shard):
        local[placement.dim] //= 4
    tensor = DTensor.from_local(torch.ones(local), mesh, [placement], run_check=False)
    return tensor.requires_grad_(is_weight)


def profiled(run, **flags):
    with cute_sharding.enabled(**(flags or ON)), cute_sharding.profile() as p:
        run()
    return p


def received(p):
    return sum(line.received for line in p.lines)


def joined(text):
    return " ".join(text.split())


def hints(p):
    return [todo for line in p.lines if line.events for todo in line.cause.todo]


# -- a replicated tensor that a smaller operand shards ---------------------------------------------


def modulation(mesh, change):
    """A large x that is scaled and shifted by what a sharded layer says, and two linears."""
    weights = [
        made(mesh, shape, Shard(0), is_weight=True) for shape in ((64, 32), (96, 32), (48, 32))
    ]

    def run():
        x, c = (made(mesh, shape, Replicate()) for shape in ((4, 20, 32), (4, 32)))
        both = change(F.linear(c, weights[0]))
        shift, scale = both.chunk(2, -1)
        x = x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        y = F.linear(x, weights[1]), F.linear(x, weights[2])
        (y[0].sum() + y[1].sum()).full_tensor().backward()

    return run


def test_the_line_that_shards_is_named_and_bytes_fall_if_it_is_changed(mesh):
    before = profiled(modulation(mesh, lambda both: both))
    linears = [
        line.cause
        for line in before.lines
        if line.cause.op == "mm" and not line.cause.backward and line.events
    ]
    assert len(linears) == 2
    (root,) = {cause.root for cause in linears}
    for cause in linears:
        text = cause.todo[0]
        assert text.startswith("the tensor may have become [S(2)] in test_profile_roots.py:")
        assert "mul combines a (4, 20, 32) [R] with a (4, 1, 32) [S(2)]" in text
        assert "a redistribution of the smaller to [R] receives 384 B; the smaller may" in text
        assert "come from mm in" in text
        assert "its result, (4, 64) [S(1)], to [R] receives 768 B" in text
    assert root.op == "mm" and root.place.line == linears[0].place.line - 3
    assert before.to_dict()["lines"][0]["root"] is None or root.text
    said = joined(before.table(100))
    assert f"on 1 line may follow from one op. {root.text}." in said
    after = profiled(modulation(mesh, lambda both: both.redistribute(placements=[Replicate()])))
    assert received(after) < received(before) / 2
    assert all(line.cause.root is None for line in after.lines)


@pytest.mark.parametrize("shape", [(4, 20, 32), (4, 1, 32)], ids=["as large", "smaller"])
def test_only_a_smaller_operand_is_one_to_redistribute(mesh, shape):
    def run():
        x = made(mesh, (4, 20, 32), Replicate()) * made(mesh, shape, Shard(2))
        F.linear(x, made(mesh, (96, 32), Shard(0)))

    said = any("the tensor may have become" in todo for todo in hints(profiled(run)))
    assert said == (shape[1] == 1)


def test_a_column_parallel_layer_is_no_root(mesh):
    """Its weight is smaller and sharded, but x stays whole."""

    def run():
        x = made(mesh, (80, 32), Replicate())
        F.linear(F.linear(x, made(mesh, (32, 32), Shard(0))), made(mesh, (96, 32), Shard(0)))

    p = profiled(run)
    assert received(p) > 0
    assert all(line.cause.root is None for line in p.lines)


def test_no_communication_names_the_line_that_shards(mesh):
    with (
        cute_sharding.enabled(**ON),
        pytest.raises(RuntimeError, match=r"may have become \[S\(2\)\] in test_profile_roots.py"),
        cute_sharding.no_communication(),
    ):
        x = made(mesh, (4, 20, 32), Replicate()) * made(mesh, (4, 1, 32), Shard(2))
        F.linear(x, made(mesh, (96, 32), Shard(0)))


def test_a_remedy_of_several_rows_is_said_once(mesh):
    said = joined(profiled(modulation(mesh, lambda both: both)).table(100))
    assert said.count("combines a (4, 20, 32) [R] with a (4, 1, 32) [S(2)]") == 1
    assert said.count(": the tensor may have become [S(2)] in test_profile_roots.py:") == 1


# -- a Partial -------------------------------------------------------------------------------------


def test_a_partial_that_several_ops_reduce_is_to_be_reduced_once(mesh):
    def run(change):
        x = made(mesh, (20, 32), Shard(1))
        y = change(F.linear(x, made(mesh, (48, 32), Shard(1))))
        return F.layer_norm(y, [48]), F.gelu(y)

    before = profiled(lambda: run(lambda y: y))
    (said,) = set(hints(before))
    assert said.startswith("this Partial may come from mm in test_profile_roots.py:")
    assert said.endswith(
        "and 2 ops reduce it, or a tensor that is computed from it: redistribute the result of mm "
        "once, before these ops"
    )
    after = profiled(lambda: run(lambda y: y.redistribute(placements=[Replicate()])))
    assert received(after) == 2 * 20 * 48 * 4 * 3 // 4 and received(before) > received(after)


def test_a_gradient_is_reduced_while_it_is_small_and_bytes_fall(mesh):
    w = made(mesh, (64, 32), Replicate(), is_weight=True)
    down = made(mesh, (64, 8), Shard(1))

    def step(change):
        y = change(F.linear(made(mesh, (4, 32), Replicate()), w))
        (y @ down).sum().full_tensor().backward()
        with torch.no_grad():
            w.add_(w.grad)
        w.grad = None

    def hooked(y):
        y.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))
        return y

    before = profiled(lambda: step(lambda y: y))
    (cause,) = [line.cause for line in before.lines if line.cause.op == "add_" and line.events]
    at = f"test_profile_roots.py:{step.__code__.co_firstlineno + 1}"
    assert cause.todo == (
        f"mm in the backward pass of {at} makes this Partial of a smaller one, (64, 4) [P(sum)]: "
        "a call of register_hook(lambda grad: grad.redistribute(placements=[Replicate()])) on the "
        f"result of mm in {at} reduces the smaller one, which receives 1,536 B",
    )
    after = profiled(lambda: step(hooked))
    assert received(before) - received(after) == 2 * (64 * 32 - 64 * 4) * 4 * 3 // 4


def test_a_gradient_that_has_to_be_reduced_is_needed(mesh):
    """That of a replicated weight, of inputs sharded by number, and one the program reduces."""
    w = made(mesh, (48, 32), Replicate(), is_weight=True)

    def step():
        F.linear(made(mesh, (80, 32), Shard(0)), w).sum().full_tensor().backward()
        with torch.no_grad():
            w.add_(w.grad)

    (cause,) = [each.cause for each in profiled(step).lines if each.cause.op == "add_"]
    (todo,) = cause.todo
    assert todo.startswith("this Partial may come from mm in the backward pass of test_profile_")
    assert todo.endswith("with the placements there, it has to be reduced once for each step")

    def asked():
        x = made(mesh, (80, 32), Replicate(), is_weight=True)
        y = x.redistribute(placements=[Replicate()]) @ made(mesh, (32, 48), Shard(1))
        y.sum().full_tensor().backward()

    (cause,) = [
        line.cause
        for line in profiled(asked).lines
        if line.cause.op == "redistribute" and line.events
    ]
    assert cause.todo == (
        "this communication is needed: the gradient is a Partial, and redistribute() reduces it "
        "once",
    )


def test_an_operand_that_stays_is_named_if_no_other_helps(mesh):
    """Bias and weight follow the features of x: each alone is no way."""

    def run(placement):
        x = made(mesh, (64, 32), placement)
        return F.linear(x, made(mesh, (48, 32), Shard(0)), made(mesh, (48,), Shard(0)))

    p = profiled(lambda: run(Shard(1)))
    (said,) = hints(p)
    assert said == (
        "addmm sends nothing if operand 1 is [R]; a redistribution to these placements receives "
        "6,144 B (no less than now)"
    )
    assert received(profiled(lambda: run(Replicate()))) == 0


def test_placements_are_written_as_a_program_writes_them():
    assert as_code([Shard(1), Replicate()]) == "[Shard(1), Replicate()]"


def test_the_command_for_totals_has_the_mesh_of_the_program():
    mesh = init_device_mesh("cpu", (2, 4))
    x = DTensor.from_local(torch.ones(2, 6), mesh, [Replicate(), Shard(0)])
    with cute_sharding.profile() as p:
        x[1:5]
    assert "estimate FILE.py:FUNCTION --mesh 2,4 (see" in joined(p.table(100))

"""Views and redistributions under torch.compile: static and dynamic sizes, what is assumed of them,
and what leaves a program.
"""

import logging

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from compiling import MESH, assert_same, compiled, flatten, fresh_compiler, sharded  # noqa: F401
from simulation import mesh_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from benchmarks.compiled import PATTERNS, make, measure
from cute_sharding.dtensor.replaced import communication

# -- dynamic sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_models_run_as_eagerly_in_few_graphs(name, gradients):
    pattern = PATTERNS[name]
    found = measure(pattern, gradients=gradients)
    assert found.error is None
    assert found.graphs <= (1 + pattern.split_factors if pattern.split_factors else 2)


@pytest.mark.parametrize(
    "name", ["flatten", "split to heads", "patchify, rows sharded", "2-d mesh flatten"]
)
@pytest.mark.costly
def test_patterns_under_inductor(name):
    found = measure(PATTERNS[name], "inductor", gradients=True)
    assert found.error is None


@pytest.mark.parametrize(
    ("name", "guards"),
    [
        ("flatten", ()),
        ("flatten, unflatten", ()),
        ("flatten, uneven sequences", ()),
        ("reshape(-1, d)", ("b % 4 == 0",)),
        ("patchify, images sharded", ("w % 4 == 0", "h % 4 == 0")),
    ],
)
def test_what_is_assumed_is_the_weakest_fact_and_is_logged(name, guards):
    assert measure(PATTERNS[name]).guards == guards


def test_a_split_factor_costs_a_graph_only_where_it_leaves_the_program():
    """Inside, it stays a symbol; the sequence stays dynamic in both."""
    shapes = tuple((b, s, 16) for b in (2, 3, 5) for s in (12, 20, 28))
    assert measure(PATTERNS["flatten"]._replace(shapes=shapes)).graphs == 3
    assert measure(PATTERNS["flatten, unflatten"]._replace(shapes=shapes)).graphs == 1


def test_sequences_that_divide_and_others_have_one_graph():
    """Local sizes that an op is told are worked out without asking whether global ones divide."""
    shapes = tuple((2, s, 16) for s in (12, 13, 14, 16))
    assert measure(PATTERNS["flatten, unflatten"]._replace(shapes=shapes)).graphs == 1


def test_global_sizes_that_a_graph_takes_for_constants_are_guarded():
    """The local tensors of (16, 2) and (16, 4) have the same shape on the first of four devices."""
    program = compiled(lambda x: x.view(x.shape[0] * x.shape[1]) * 2)
    for shape in ((16, 2), (16, 4), (16, 3)):
        assert program(sharded(shape, [Shard(1)])).shape == (shape[0] * shape[1],)
    program = compiled(lambda x: x * 2, dynamic=False)
    for rows in (8, 7):
        assert program(sharded((rows, 3), [Shard(0)])).shape == (rows, 3)


@pytest.mark.parametrize("in_cpp", [True, False])
@pytest.mark.costly
def test_constant_global_sizes_are_guarded_in_either_language_and_nothing_else_is(in_cpp):
    """Also a program that only ever sees local tensors of one shape; but not for the sizes of what
    they are views of.
    """
    count = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(enable_cpp_symbolic_shape_guards=in_cpp):
        program = compiled(lambda x: x * 2, dynamic=False, backend=count)
        for rows in (8, 7, 8, 7):
            assert program(sharded((rows, 3), [Shard(0)])).shape == (rows, 3)
        assert count.frame_count == 2
        count.clear()
        program = compiled(lambda x: (x * x).to_local(), None, count)
        for shape in ((4, 4), (6, 8), (10, 10)):
            given = DTensor.from_local(
                torch.randn(shape, requires_grad=True), mesh_of(MESH), [Shard(0)], run_check=False
            )
            for dim in (0, 1):
                torch._dynamo.mark_dynamic(given, dim)
            program(given).sum().backward()
        assert count.frame_count == 1


def split(x):
    """Three columns are no rows of (2, 3)."""
    return x.unflatten(2, (2, 3)) * 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_views_that_are_not_free_go_where_they_go_eagerly(dynamic):
    program = compiled(split, dynamic)
    for batch in (4, 8):
        x = sharded((batch, 8, 6), [Shard(2)])
        eager, result = split(x), program(x)
        assert result.placements == eager.placements == (Shard(0),)
        assert result.to_local().shape == eager.to_local().shape == (batch // 4, 8, 2, 3)


# -- sizes without a value -------------------------------------------------------------------------


def unbacked(shape, placements, dim):
    x = sharded(shape, placements)
    torch._dynamo.decorators.mark_unbacked(x, dim)
    return x


@pytest.mark.parametrize(
    ("program", "placements", "dim"),
    [
        (lambda x: x.permute(1, 0, 2), [Shard(0)], 0),
        (flatten, [Shard(0)], 1),
        (flatten, [Replicate()], 0),
        (lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1), [Shard(0)], 0),
        (lambda x: x.repeat(2, 1, 1), [Shard(1)], 0),
    ],
)
def test_views_of_unbacked_sizes_that_can_be_proved_are_free(program, placements, dim):
    x = unbacked((8, 8, 16), placements, dim)
    assert_same(
        compiled(lambda x: program(x) * 2, None)(x), program(sharded((8, 8, 16), placements)) * 2
    )


def test_views_of_unbacked_sizes_keep_what_does_not_block_them():
    """Which placements are the cheapest is not known; to replicate all is dearer."""
    x = sharded((8, 6, 6), [Shard(0), Shard(2)], (2, 4))
    torch._dynamo.decorators.mark_unbacked(x, 0)
    assert compiled(split, None)(x).placements == (Shard(0), Replicate())


def test_products_of_unbacked_sizes():
    a, b = (sharded((8, 8), [Replicate()]) for _ in range(2))
    for x in (a, b):
        for dim in (0, 1):
            torch._dynamo.decorators.mark_unbacked(x, dim)
    assert_same(compiled(torch.mm, None)(a, b), torch.mm(a, b))


def test_an_unbacked_size_that_decides_can_be_checked():
    def checked(x):
        torch._check(x.shape[0] % 4 == 0)
        return flatten(x) * 2

    assert_same(
        compiled(checked, None)(unbacked((8, 8, 16), [Shard(0)], 0)),
        flatten(sharded((8, 8, 16), [Shard(0)])) * 2,
    )


# -- static sizes ----------------------------------------------------------------------------------


def collectives_of(code):
    return sum(
        code.count(f"torch.ops._c10d_functional.{name}.default(")
        for name in (
            "all_to_all_single",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_reduce",
            "all_reduce_",
        )
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_static_patterns_under_inductor_equal_eager_bit_for_bit(name):
    from torch._inductor.utils import run_and_get_code

    pattern = PATTERNS[name]

    def program(x):
        return pattern.run(x) * 2

    for shape in pattern.shapes[:2]:
        torch._dynamo.reset()
        with CommDebugMode() as eager:
            expected = program(make(shape, pattern))
        actual, codes = run_and_get_code(compiled(program, False, "inductor"), make(shape, pattern))
        assert_same(actual, expected)
        assert sum(map(collectives_of, codes)) == eager.get_total_counts() == 0


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_compiled_redistribution_issues_the_collectives_of_an_eager_one(dynamic):
    from torch._inductor.utils import run_and_get_code

    def program(x):
        return x.redistribute(placements=[Shard(1)]) * 2

    with cute_sharding.enabled(redistribution=True):
        with CommDebugMode() as eager:
            expected = program(sharded((8, 12, 5), [Shard(0)]))
        actual, codes = run_and_get_code(
            compiled(program, dynamic, "inductor"), sharded((8, 12, 5), [Shard(0)])
        )
    assert (actual.placements, actual.to_local().shape) == (
        expected.placements,
        expected.to_local().shape,
    )
    opaque = sum(
        "ops.cute_sharding.exchange" in code for code in codes
    )  # of sizes that are symbols: one op that issues it when it runs
    assert (sum(map(collectives_of, codes)), opaque) == (
        (0, 1) if dynamic else (1, 0)
    ) and eager.get_total_counts() == 1


@pytest.mark.costly
def test_backward_graphs_have_the_sizes_of_what_they_move():
    """Of symbols that a backward graph is not handed Inductor's code says that they are not
    defined.
    """

    def program(x):
        y = (x[:, 1:] * x[:, :-1]).redistribute(placements=[Shard(2)])
        return torch.cat([y, y * 2], 2).sin()

    with (
        cute_sharding.enabled(movement=True, redistribution=True),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        step = compiled(program, True, "inductor")
        for n in (42, 50):
            x = sharded((2, n, 40), [Shard(1)], grad=True)
            (found,) = torch.autograd.grad(step(x).sum(), x)
            assert found.shape == x.shape and found.placements == x.placements


@pytest.mark.costly
def test_a_gather_of_symbolic_sizes_that_divide_is_seen_by_the_compiler():
    from torch._inductor.utils import run_and_get_code

    with cute_sharding.enabled(redistribution=True):
        for before, after in (
            ([Shard(0)], [Replicate()]),
            ([Partial()], [Shard(0)]),
            ([Partial()], [Replicate()]),
        ):
            torch._dynamo.reset()
            _, codes = run_and_get_code(
                compiled(
                    lambda x, after=after: (x * 2).redistribute(placements=after) + 1,
                    True,
                    "inductor",
                ),
                sharded((8, 12, 5), before),
            )
            assert sum(map(collectives_of, codes)) == 1, (before, after)


def test_a_wait_is_scheduled_after_compute_that_needs_nothing_of_it():
    from torch._inductor.utils import run_and_get_code

    def program(x, a):
        moved = x.redistribute(placements=[Shard(1)])
        return torch.mm(a, a), moved.to_local() * 2

    def order(overlap):
        torch._dynamo.reset()
        with (
            torch._inductor.config.patch(
                reorder_for_compute_comm_overlap=overlap,
                reorder_for_compute_comm_overlap_passes=["sink_waits"],
            ),
            cute_sharding.enabled(redistribution=True),
        ):
            _, (code,) = run_and_get_code(
                compiled(program, False, "inductor"),
                sharded((64, 64), [Shard(0)]),
                torch.ones(64, 64),
            )
        return [
            code.index(call)
            for call in (
                "_c10d_functional.all_to_all_single.default(",
                "extern_kernels.mm(",
                "wait_tensor.default(",
            )
        ]

    calls = order(True)
    assert calls == sorted(calls)
    start, multiply, wait = order(False)
    assert start < wait < multiply


# -- what goes in and out --------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_with_views_is_exported(strict):
    class Module(torch.nn.Module):
        def forward(self, x):
            return flatten(x).sin().view(x.shape)

    x = sharded((2, 8, 16), [Shard(1)])
    program = torch.export.export(Module(), (x,), strict=strict)
    assert_same(program.module()(x), Module()(x))


# -- switching -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False])
def test_switching_between_calls_is_seen_by_compiled_programs(dynamic):
    """Torch refuses this view, of rows that do not divide; as a reshape of a whole tensor it is
    free in both.
    """
    cute_sharding.disable()

    def program(x):
        return x.view(21) * 2

    def given():
        return DTensor.from_local(
            torch.arange(6.0).reshape(2, 3),
            mesh_of(MESH),
            [Shard(0)],
            run_check=False,
            shape=torch.Size((7, 3)),
            stride=(3, 1),
        )

    run = compiled(program, dynamic)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run(given())
        with cute_sharding.enabled():
            assert run(given()).placements == (Shard(0),)


def test_a_mesh_of_a_process_group_that_is_gone_has_the_group_of_its_name():
    """torch caches specs, and their meshes with them; a later process group has other groups of the
    same names.
    """
    living = mesh_of(MESH).get_group(0)

    class Gone(torch.distributed.ProcessGroup):
        group_name = living.group_name

    class Mesh:
        def get_group(self, dim=0):
            return gone

    gone = Gone(0, 4)
    assert (
        communication.group_of_dim(Mesh(), 0) is communication.group_of_flattened(Mesh()) is living
    )
    Gone.group_name = "no group has this name"
    assert communication.group_of_flattened(Mesh()) is None
    with pytest.raises(RuntimeError, match="was destroyed"):
        communication.group_of_dim(Mesh(), 0)


def test_guards_are_logged_by_name(caplog):
    with caplog.at_level(logging.DEBUG, "cute_sharding"):
        compiled(lambda x: flatten(x) * 2)(sharded((8, 6, 10), [Shard(0)]))
    assert any("guard: " in line and "% 4 == 0 (now " in line for line in caplog.messages)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("dynamic", [True, False])
def test_an_exchange_with_more_results_than_operands(dynamic):
    """For Inductor, a wait for a collective's n-th result reads its n-th operand."""

    def program(x):
        return [part * 2 for part in x.split(3)]

    with cute_sharding.enabled(movement=True):
        found = compiled(program, dynamic, "inductor")(sharded((8, 7), [Shard(0)]))
        expected = program(sharded((8, 7), [Shard(0)]))
    assert [x.shape for x in found] == [x.shape for x in expected]
    if not dynamic:  # of any sizes, results keep the operand's placements
        assert [x.placements for x in found] == [x.placements for x in expected]

"""Where torch compiles a program of DTensor ops, whichever they are, it is compiled with our flags
too: without an error, in no more graphs, to the same values.
"""

import warnings
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from programs import PROGRAMS
from simulation import mesh_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_leaves

import cute_sharding

FLAGS = {
    "views": {},
    "redistribution": {"redistribution": True, "views": False},
    "both": {"redistribution": True},
}
MODES = {"static": False, "automatic": None, "dynamic": True, "marked": None, "unbacked": None}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing from an earlier test or an earlier run."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


class Outcome(NamedTuple):
    graphs: int
    error: str | None = None
    wrong: str | None = None  # what differs from eager, under the same flags


def marked(inputs, mode):
    for tensor in tree_leaves(inputs) if mode in ("marked", "unbacked") else ():
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[0] > 1:
            (
                torch._dynamo.mark_dynamic
                if mode == "marked"
                else torch._dynamo.decorators.mark_unbacked
            )(tensor, 0)
    return inputs


def called(run, inputs, gradients):
    """All that comes of a call: outputs, inputs as they are then, and their gradients."""
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    with nullcontext() if gradients else torch.no_grad():
        outputs = tree_leaves(run(*inputs))
    results = [*outputs, *(x.detach() for x in tensors)]
    roots = [y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]
    leaves = [x for x in tensors if x.requires_grad]
    if gradients and roots and leaves:
        results += torch.autograd.grad(
            roots, leaves, [torch.ones_like(y) for y in roots], allow_unused=True
        )
    return results


def difference(actual, expected, *, values):
    """In words; None where there is none. On the fake process group values are what one device
    would have, unless something is communicated.
    """
    if isinstance(expected, DTensor):
        if not isinstance(actual, DTensor):
            return f"{type(actual)} for a DTensor"
        if (actual.shape, actual.placements) != (expected.shape, expected.placements):
            return f"{actual.shape} {actual.placements} for {expected.shape} {expected.placements}"
        actual, expected = actual.to_local(), expected.to_local()
    if not isinstance(expected, torch.Tensor):
        return None if actual == expected else f"{actual} for {expected}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"a local {actual.shape} {actual.dtype} for {expected.shape} {expected.dtype}"
    return (
        "values" if values and not torch.allclose(actual, expected, rtol=1e-4, atol=1e-5) else None
    )


def outcome(program, mode, backend="aot_eager"):
    getattr(program.run, "prepare", lambda: None)()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    gradients = (
        program.gradients and mode != "unbacked"
    )  # torch compares sizes of gradients to numbers
    compiled = torch.compile(program.run, backend=counter, fullgraph=True, dynamic=MODES[mode])
    for sizes in program.sizes:
        with CommDebugMode() as communicated:
            try:
                expected = called(program.run, program.inputs(*sizes), gradients)
            except Exception as error:  # what eager refuses is no matter of compilation
                return Outcome(counter.frame_count, f"eager: {type(error).__name__} {error}")
        try:
            actual = called(compiled, marked(program.inputs(*sizes), mode), gradients)
        except Exception as error:
            return Outcome(counter.frame_count, f"{sizes}: {type(error).__name__} {error}")
        found = [
            difference(a, e, values=not communicated.get_total_counts())
            for a, e in zip(actual, expected, strict=True)
        ]
        if any(found):
            return Outcome(counter.frame_count, wrong=f"{sizes}: {found}")
    return Outcome(counter.frame_count)


def worse(stock, ours):
    """What ours has that torch has not; None where it is no worse."""
    if ours.wrong and not stock.wrong:
        return ours.wrong
    if stock.error:
        return None
    if ours.error:
        return ours.error
    return (
        f"{ours.graphs} graphs for {stock.graphs}"
        if ours.graphs > stock.graphs and not stock.wrong
        else None
    )


def compare(name, mode, flags, backend="aot_eager"):
    program, found = PROGRAMS[name], {}
    stock = outcome(program, mode, backend)
    for flag in flags:
        with cute_sharding.enabled(**FLAGS[flag]):
            found[flag] = worse(stock, outcome(program, mode, backend))
    return {flag: what for flag, what in found.items() if what}


# Each program in one of the ways to compile it, the next one in the next: all of them in all ways
# take minutes, and find what one finds.
CASES = [
    (name, list(MODES)[(i + 2) % len(MODES)], list(FLAGS)[i % len(FLAGS)])
    for i, name in enumerate(PROGRAMS)
]


@pytest.mark.parametrize(("name", "mode", "flag"), CASES, ids=[" - ".join(case) for case in CASES])
@pytest.mark.one_in(64)
@pytest.mark.costly
def test_a_program_compiles_no_worse_than_on_torchs_own_rules(name, mode, flag):
    assert compare(name, mode, [flag]) == {}


# What once was worse.
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (
            "rows by number",
            "dynamic",
        ),  # an op with a list of tensors, met while another is decomposed
        ("gathered, uneven", "dynamic"),  # sizes that do not divide
        ("mm, replicas", "unbacked"),  # strategies of unbacked sizes, compared
        ("mm, two mesh dims", "unbacked"),
        (
            "local tensors of inputs that are views",
            "marked",
        ),  # sizes of what a local tensor is a view of
    ],
)
def test_no_flag_makes_these_worse(name, mode):
    assert compare(name, mode, FLAGS) == {}


@pytest.mark.parametrize(
    "name", ["add a pending sum", "linear", "layer norm", "mutation of an input"]
)
def test_programs_under_inductor(name):
    assert compare(name, "automatic", ["both"], "inductor") == {}


def test_offsets_in_a_buffer_are_no_matter_of_guards():
    for mode in ("automatic", "dynamic"):
        with cute_sharding.enabled(redistribution=True):
            assert outcome(PROGRAMS["slices of one buffer"], mode) == Outcome(1)


def test_a_graph_break_keeps_a_placement_alive():
    """What leaves the first graph is no tensor alone."""

    @torch.compile(backend="eager")
    def program(x):
        y, placements = x * 2, [Replicate()]
        torch._dynamo.graph_break()
        return y.redistribute(placements=placements)

    with cute_sharding.enabled():
        x = distribute_tensor(torch.ones(8, 4), mesh_of((4,)), [Shard(0)])
        assert program(x).placements == (Replicate(),)


def decayed(parameter):
    parameter.mul_(0.5)


def decayed_by_gradient(parameter):
    parameter.sub_(parameter.grad.view(-1, parameter.shape[1]), alpha=0.5)


def views_of_gradient(parameter):
    return parameter.grad.view(-1, 8, parameter.grad.shape[1]) * 2


def compiled_steps(program, dynamic, sizes, without_gradient=()):
    """How often a step is compiled for parameters of these sizes, and what they are after it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    count = CompileCounterWithBackend("aot_eager")
    step, results = torch.no_grad()(torch.compile(program, backend=count, dynamic=dynamic)), []
    for at, rows in enumerate(sizes):
        made = [
            distribute_tensor(torch.randn(rows, 8), mesh_of((4,)), [Shard(0)]) for _ in range(2)
        ]
        parameter = torch.nn.Parameter(made[0])
        if at not in without_gradient:
            # A view, as FSDP leaves it: torch gives the sizes of others no symbols.
            local = made[1].to_local()
            parameter.grad = DTensor.from_local(local, made[1].device_mesh, [Shard(0)])
        results.append((step(parameter), parameter.data, made[1]))
    return count.frame_count, results


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("program", [decayed, decayed_by_gradient])
def test_gradients_of_parameters_are_no_worse_for_being_unread(program, dynamic):
    """torch gives their sizes symbols, and asks no input for them."""
    for sizes in ((64, 64), (64, 32, 96)):
        stock, expected = compiled_steps(program, dynamic, sizes)
        with cute_sharding.enabled():
            graphs, results = compiled_steps(program, dynamic, sizes)
        assert graphs == stock
        for (_, actual, _), (_, wanted, _) in zip(results, expected, strict=True):
            assert torch.equal(actual.to_local(), wanted.to_local())
    with cute_sharding.enabled():
        if program is decayed:
            assert compiled_steps(program, dynamic, (64, 64), without_gradient={1})[0] == 1


def test_sizes_of_a_gradient_that_is_viewed_may_change():
    """torch raises where the first guard on one of them is made."""
    with cute_sharding.enabled():
        _, results = compiled_steps(views_of_gradient, None, (64, 32, 96))
    for view, _, gradient in results:
        assert view.placements == (Shard(0),)
        assert torch.equal(view.to_local(), gradient.to_local().view(-1, 8, 8) * 2)


def test_a_column_of_a_few_rows_compiles_where_torch_does():
    """A rank has one row or none, so that rows are a constant; the column's stride is none."""
    with cute_sharding.enabled():
        for program in (lambda x: x.flatten() + 1, lambda x: x.sum(0)):
            torch._dynamo.reset()
            compiled = torch.compile(program, backend="aot_eager", dynamic=True, fullgraph=True)
            for rows, columns in ((7, 8), (9, 8)):
                full = torch.randn(rows, columns)
                column = distribute_tensor(full, mesh_of((4,)), [Shard(0)])[:, 1]
                expected, actual = program(column), compiled(column)
                assert actual.placements == expected.placements
                assert torch.equal(actual.to_local(), expected.to_local())


def graphs_for(rows, placements, mesh):
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend=count, dynamic=True)
    for n in rows:
        x = distribute_tensor(torch.randn(n, 8), mesh, placements, src_data_rank=None)
        assert torch.equal(compiled(x).to_local(), (x.to_local() * 2).sin() + 1)
    return count.frame_count


@pytest.mark.parametrize("flags", [{}, {"redistribution": True}, {"movement": True}], ids=str)
@pytest.mark.parametrize(
    ("rows", "placements", "sizes"),
    [
        ((7, 9, 13, 11, 10), [Shard(0)], (4,)),
        ((2, 3, 4, 5, 6), [Shard(0)], (4,)),
        ((16, 9, 8, 12), [Shard(0), Shard(0)], (2, 2)),
    ],
    ids=str,
)
@pytest.mark.costly
def test_few_rows_of_some_ranks_cost_no_graphs(rows, placements, sizes, flags):
    """One row or none on some of the four: as many graphs as torch makes on the same device, or on
    the fullest one, where that goes from one row to two.
    """
    stock, ours = [], []
    for device in range(4):
        order = torch.arange(4).roll(device)  # this process stands where `device` would
        mesh = DeviceMesh("cpu", order.reshape(sizes))
        stock.append(graphs_for(rows, placements, mesh))
        with cute_sharding.enabled(**flags):
            ours.append(graphs_for(rows, placements, mesh))
    fullest = 1 if min(rows) <= 4 < max(rows) else 0
    assert all(n <= of_torch + fullest for n, of_torch in zip(ours, stock)), (ours, stock)

"""What the processes of test_processes.py run of movement ops, as in processes_worker.py."""

import random
import runpy
from pathlib import Path

import movement_programs
import pytest
import torch
import torch.distributed as dist
from drawing import draw_placements
from processes_worker import assert_holds, distribute, mesh_of_ranks
from simulation import number
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from writing_programs import drawn_program, program_to_compile

import cute_sharding
from cute_sharding.dtensor.run.ops import StaleView


def movements(ranks, count):
    """Drawn programs of movement ops, forward and backward."""
    mesh = mesh_of_ranks(ranks)
    sizes = tuple(mesh.shape)
    rng = random.Random(f"movements {ranks}")
    names = [*movement_programs.PROGRAMS]
    with cute_sharding.enabled(movement=True):
        for k in range(count):
            name = names[k % len(names)]
            drawn, shape, program = movement_programs.draw(rng, name)
            placements = draw_placements(rng, sizes, shape)
            case = (name, drawn, shape, placements, ranks)
            single = number(shape).requires_grad_()
            expected = movement_programs.listed(program(single))
            gradients = [number(tuple(part.shape)) + 0.5 for part in expected]
            (wanted,) = torch.autograd.grad(expected, single, gradients)
            tensor = distribute(number(shape), mesh, placements)
            results = movement_programs.listed(program(tensor))
            for result, part in zip(results, expected, strict=True):
                assert_holds(result, part.detach(), case)
            given = [distribute(g, mesh, r.placements).detach() for g, r in zip(gradients, results)]
            (found,) = torch.autograd.grad(results, tensor, given)
            assert_holds(found, wanted, (case, "gradient"))
        moved = [of["exchanged"] for of in cute_sharding.stats().values()]
    assert sum(moved) > count // 8


def writes_and_reads(ranks, count):
    """Slices of slices, with writes and reads between: all ranks exchange in step, also where some
    hold a slice for longer than others.
    """
    mesh = mesh_of_ranks(ranks)
    sizes = tuple(mesh.shape)
    rng = random.Random(f"writes and reads {ranks}")
    kept = []
    with cute_sharding.enabled(redistribution=True, movement=True):
        for seed in range(count):
            shape = tuple(rng.choice([1, 3, 4, 7, 8]) for _ in range(rng.choice([1, 2, 2])))
            placements = draw_placements(rng, sizes, shape)
            single, stale = number(shape), []
            x = distribute(number(shape), mesh, placements).detach()
            results = drawn_program(random.Random(seed), x, StaleView, stale)
            expected = drawn_program(random.Random(seed), single, raised=stale)
            for k, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                try:
                    read = result.clone()
                except StaleView:
                    continue
                if read.ndim or mesh.get_coordinate() is not None:  # a rank outside has a number
                    assert_holds(read, wanted, (seed, k, shape, placements, ranks))
            if dist.get_rank() % 2 and shape[0] > 1:
                kept += [x[1:]]
            else:
                x[1:]
            x.add_(1), single.add_(1)
            assert_holds(x + 0, single, "what one rank keeps, nobody waits for")


def movement_models():
    """A training step of each of the models in examples/."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "movement_models.py"))
    mesh = mesh_of_ranks([*range(dist.get_world_size())])
    with cute_sharding.enabled(movement=True, redistribution=True):
        for model in example["models"]():
            said = example["run"](model, mesh)
            assert said.startswith("as on one device"), (model.name, said)
        counted = cute_sharding.stats()
    assert counted["roll.default"]["exchanged"] and counted["unfold.default"]["exchanged"]


def compiled_movements():
    """Movement ops in graphs, forward and backward."""
    mesh = mesh_of_ranks([*range(dist.get_world_size())])
    programs = {
        "next tokens": (lambda x: (x[:, 1:] * 2).sin(), (4, 17, 3), Shard(1)),
        "roll": (lambda x: x.roll(3, 1) * x, (4, 17, 3), Shard(1)),
        "gate": (lambda x: torch.mul(*x.chunk(2, -1)), (4, 16), Shard(1)),
        "windows": (
            lambda x: torch.nn.functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
            (2, 16, 3),
            Shard(1),
        ),
        "flip": (lambda x: x.flip(1) * x, (2, 15), Shard(1)),
        "last": (lambda x: x[:, -1] * 2, (4, 16, 8), Shard(1)),
        "tril": (lambda x: x.tril() + 1, (16, 16), Shard(0)),
    }
    with cute_sharding.enabled(movement=True):
        for name, (program, shape, placement) in programs.items():
            torch._dynamo.reset()
            single = (number(shape) / 10).requires_grad_()
            expected = program(single)
            gradient = number(tuple(expected.shape)) + 0.5
            (wanted,) = torch.autograd.grad(expected, single, gradient)
            compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=False)
            tensor = distribute(number(shape) / 10, mesh, [placement])
            result = compiled(tensor)
            assert_holds(result, expected.detach(), name)
            given = distribute(gradient, mesh, result.placements).detach()
            (found,) = torch.autograd.grad(result, tensor, given)
            assert_holds(found, wanted, (name, "gradient"))


def slices_of_any_size():
    """One graph for all lengths of a sequence, and the same exchange as where it runs eagerly."""
    mesh = mesh_of_ranks([*range(dist.get_world_size())])
    torch._dynamo.reset()

    def program(x):
        return (x[:, 1:] * x[:, :-1]).sin()

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
    with cute_sharding.enabled(movement=True):
        for length in (17, 24, 31, 18):
            single = (number((2, length, 3)) / 10).requires_grad_()
            expected = program(single)
            gradient = number(tuple(expected.shape)) + 0.5
            (wanted,) = torch.autograd.grad(expected, single, gradient)
            tensor = distribute(number((2, length, 3)) / 10, mesh, [Shard(1)])
            result = compiled(tensor)
            assert list(result.placements) == [Shard(1)]
            assert_holds(result, expected.detach(), length)
            given = distribute(gradient, mesh, result.placements).detach()
            (found,) = torch.autograd.grad(result, tensor, given)
            assert Replicate() not in found.placements
            whole = torch.allclose(found.full_tensor(), wanted, rtol=1e-5, atol=1e-4)
            assert whole, (length, "gradient")
    assert cute_sharding.stats()["slice.Tensor"]["exchanged"] > 0
    assert not cute_sharding.stats()["slice.Tensor"]["signature"]


_PAD = torch.nn.functional.pad
# (program, how its operand is cut, the op that is then exchanged)
OF_ANY_SIZE = {
    "roll": (lambda x: x.roll(3, 1) * x, Shard(1), "roll.default"),
    "flip": (lambda x: x.flip(1) * x, Shard(1), "flip.default"),
    "cat": (lambda x: torch.cat([x, x * 2], 1).sin(), Shard(1), "cat.default"),
    "causal windows": (
        lambda x: _PAD(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
        Shard(1),
        "unfold.default",
    ),
    "reflected": (lambda x: _PAD(x, (2, 1), mode="reflect").sin(), Shard(2), None),
    "last": (lambda x: x[:, -1] * 2, Shard(1), "select.int"),
    "halves": (lambda x: torch.mul(*x.split(x.shape[1] // 2, 1)[:2]), Shard(1), "split.Tensor"),
    "tril": (lambda x: x.tril(1) + 1, Shard(1), None),
    "fused": (lambda x: torch.mul(*x.chunk(2, -1)), _StridedShard(2, split_factor=2), None),
}


def movements_of_any_size(names):
    """The other ops likewise: one graph for all lengths, forward and backward."""
    mesh = mesh_of_ranks([*range(dist.get_world_size())])
    for name in names:
        program, placement, op = OF_ANY_SIZE[name]
        with cute_sharding.enabled(movement=True):
            cute_sharding.stats(reset=True)
            torch._dynamo.reset()
            graphs = []
            # The size of a fused dim is a number, as where it comes of a weight. First there is a
            # graph of numbers, and then one for all lengths.
            automatic = name == "fused"
            compiled = torch.compile(
                program,
                backend=counting("aot_eager", graphs),
                fullgraph=True,
                dynamic=None if automatic else True,
            )
            for length in (42, 50, 62, 44):
                _check_of_any_size(mesh, program, compiled, length, placement, name)
            assert len(graphs) == 1 + automatic, (name, len(graphs))
            counted = cute_sharding.stats()
        if op is not None:
            assert counted[op]["exchanged"] and not counted[op]["signature"], (op, counted)
        if automatic:
            assert counted["split.Tensor"]["free"] > 1 and not counted["split.Tensor"]["gate"]


def _check_of_any_size(mesh, program, compiled, length, placement, name):
    full = number((2, length, 16)) / 10
    single = full.clone().requires_grad_()
    expected = program(single)
    gradient = number(tuple(expected.shape)) + 0.5
    (wanted,) = torch.autograd.grad(expected, single, gradient)
    tensor = distribute(full, mesh, [placement])
    result = compiled(tensor)
    assert_holds(result, expected.detach(), (name, length))
    given = distribute(gradient, mesh, result.placements).detach()
    (found,) = torch.autograd.grad(result, tensor, given)
    whole = torch.allclose(found.full_tensor(), wanted, rtol=1e-5, atol=1e-4)
    assert whole, (name, length, "gradient")


def counting(backend, graphs):
    """The backend, of which each graph that it is given is noted."""
    from torch._dynamo.backends.registry import lookup_backend

    def compiler(graph, inputs):
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    return compiler


def write_to_halves(x):
    h = x * 2
    a, b = h[:3], h[3:]  # of a split, autograd takes no writes
    a.mul_(3)
    b.add_(a.sum())
    return h, a * 1


def write_to_slices_of_one(x):
    h = x * 2
    y = h[1:]
    y.mul_(3)
    z = h[2:]
    z.add_(y[1:])
    return h * 1, z * 1


def write_items(x):
    h = x * 2
    h[1:] = h[:-1].clone()
    h[2] = 7
    h[1::2].mul_(3)
    return h


# What is compiled, of a tensor that it slices: what it writes to the slice is in the tensor.
WRITTEN_INSIDE = {
    "slices of one": write_to_slices_of_one,
    "items": write_items,
    "a slice of the input": lambda x: (x[1:].add_(1), x * 1)[1],
    "the input": lambda x: (x.add_(1), x[1:])[1] * 1,
}

# What is compiled, of a tensor and a slice of it that was taken before.
WRITTEN_INPUTS = {
    "the slice": lambda x, y, run: run(lambda y: y.add_(1) * 2)(y),
    "the tensor": lambda x, y, run: run(lambda x: x.add_(1) * 2)(x),
    "a slice of the slice": lambda x, y, run: run(lambda y: y[1:].add_(1) * 2)(y),
    "one after the other": lambda x, y, run: (
        run(lambda y: y.add_(1) * 2)(y) + run(lambda x: x.mul_(2) * 3)(x)[1:]
    ),
}


def compiler(dynamic, backend="aot_eager"):
    torch._dynamo.reset()
    return lambda f: torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)


def compiled_writes(dynamic, backend, names):
    """What a compiled program writes to a slice that is a copy, or to what one is a copy of."""
    mesh = mesh_of_ranks([*range(dist.get_world_size())])
    gradients = [False] if dynamic else [False, True]
    with cute_sharding.enabled(movement=True, redistribution=True):
        for name, program in WRITTEN_INSIDE.items():
            if name not in names:
                continue
            for has_gradient in gradients if "input" not in name else [False]:
                single = number((8, 3)).requires_grad_(has_gradient)
                x = distribute(number((8, 3)), mesh, [Shard(0)]).detach()
                x.requires_grad_(has_gradient)
                expected = movement_programs.listed(program(single))
                results = movement_programs.listed(compiler(dynamic, backend)(program)(x))
                for result, wanted in zip(results, expected, strict=True):
                    assert_holds(result.detach() * 1, wanted.detach(), (name, dynamic))
                if has_gradient:
                    (wanted,) = torch.autograd.grad(sum(t.square().sum() for t in expected), single)
                    (found,) = torch.autograd.grad(sum(t.square().sum() for t in results), x)
                    assert_holds(found, wanted, (name, "gradient"))
                else:
                    assert_holds(x * 1, single, name)
        for name, program in WRITTEN_INPUTS.items():
            if name not in names:
                continue
            single, x = number((8, 3)), distribute(number((8, 3)), mesh, [Shard(0)]).detach()
            expected = [program(single, single[1:], lambda f: f), single]
            results = [program(x, y := x[1:], compiler(dynamic, backend)), x, y]
            for result, wanted in zip(results[:2], expected):
                assert_holds(result * 1, wanted, (name, dynamic))
            if name in ("the tensor", "one after the other"):
                with pytest.raises(StaleView):
                    y * 1
            else:
                assert_holds(y * 1, single[1:], (name, dynamic))
        if not dynamic:  # of sizes that are symbols, nobody knows which rows are apart
            single, x = number((8, 3)), distribute(number((8, 3)), mesh, [Shard(0)]).detach()
            expected, found = (
                write_to_halves(single),
                compiler(dynamic, backend)(write_to_halves)(x),
            )
            for result, wanted in zip(found, expected, strict=True):
                assert_holds(result * 1, wanted, "halves")
            x = distribute(number((8, 3)), mesh, [Shard(0)]).detach()
            with pytest.raises(RuntimeError, match="aliased inputs that are mutated"):
                compiler(dynamic, backend)(lambda x, y: (y.add_(1), x + 0)[1])(x, x[1:])


# Views of the input and of a result, of which rows have moved to other devices in some.
VIEWS_RETURNED = {
    "slice": lambda x: x[1:3],
    "row": lambda x: x[-1],
    "diagonal": lambda x: x.diagonal(1),
    "slice of the transposed": lambda x: x.t().narrow(1, 1, 2),
    "slice of the flattened": lambda x: x.flatten()[2:-3],
    "two": lambda x: (x[::2], x[2]),
    "part": lambda x: x.split(2)[1],
    "rows": lambda x: x.unbind(),
    "of a result": lambda x: (y := x * 2, y[1:4]),
    "diagonal of a result": lambda x: (y := x + 1, y.diagonal()),
}


def views_returned(movement, dynamic):
    """A view that a compiled program returns is that which an eager one returns: by values,
    placements, strides, the values of gradients, and what is written to it, or to what it views.
    """
    mesh = mesh_of_ranks([*range(dist.get_world_size())])
    with cute_sharding.enabled(movement=movement):
        for name, program in VIEWS_RETURNED.items():
            for cut in (0, 1):
                expected, found = (
                    _views_and_writes(run(program), distribute(number((7, 4)), mesh, [Shard(cut)]))
                    for run in (lambda program: program, compiler(dynamic))
                )
                for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                    case = (name, cut, i)
                    assert (a.shape, a.placements) == (b.shape, b.placements), case
                    strides = zip(a.shape, a.stride(), b.stride())
                    assert all(m == k for n, m, k in strides if n > 1), case
                    assert torch.equal(a.full_tensor(), b.full_tensor()), case


def _views_and_writes(program, leaf):
    """What it gives, and its gradient; and then what all are, after writes to one and another."""
    results = movement_programs.listed(program(leaf))
    loss = sum(t.square().sum() * (k + 1) for k, t in enumerate(results))
    (gradient,) = torch.autograd.grad(loss, leaf)
    gradient = gradient.redistribute(placements=leaf.placements)
    found = [*(t.detach().clone() for t in results), gradient]
    with torch.no_grad():
        results[-1].detach().mul_(3)
        leaf.add_(1)
        results[-1].detach().add_(leaf.sum())
    return [*found, *(t.detach() * 1 for t in (leaf, *results))]


# By torch alone as well: gradients of a split of which some parts are not used.
REFUSED = ("got mixed torch.Tensor and DTensor",)


def drawn_compiled_writes(count, gradients):
    """All ranks compile alike, and what is written is as on one device; or all of them raise."""
    mesh = mesh_of_ranks([*range(dist.get_world_size())])
    right = 0
    with cute_sharding.enabled(redistribution=True, movement=True):
        for seed in range(count):
            rng = random.Random(f"compiled writes {seed}")
            full = number((rng.choice([5, 6, 7, 8, 9, 12]), 3))
            program = program_to_compile(rng, full, gradients)
            single = full.clone().requires_grad_(gradients)
            x = distribute(full, mesh, [Shard(0)]).detach().requires_grad_(gradients)
            expected = program(single)
            torch._dynamo.reset()
            try:
                results = torch.compile(program, backend="aot_eager", dynamic=False)(x)
                raised = ""
            except Exception as error:
                raised = str(error)
            of_all = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, bool(raised))
            assert len(set(of_all)) == 1, (seed, of_all, raised)
            if raised:
                assert any(text in raised for text in REFUSED), (seed, raised)
                continue
            right += 1
            for k, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                assert_holds(result.detach(), wanted.detach(), (seed, k))
            if gradients:
                (wanted,) = torch.autograd.grad(
                    sum(t.sum() * (k + 1) for k, t in enumerate(expected) if t.requires_grad),
                    single,
                )
                (found,) = torch.autograd.grad(
                    sum(t.sum() * (k + 1) for k, t in enumerate(results) if t.requires_grad), x
                )
                assert_holds(found, wanted, (seed, "gradient"))
            else:
                assert_holds(x * 1, single, (seed, "input"))
    assert right > count // 2

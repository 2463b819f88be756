"""Generators as relations, beside what their code makes of whole tensors; those that compute."""

import pytest
import torch
import torch.nn.functional as F
from drawn_moves import carried_out, drawn_program, numbered

from cute_sharding.dtensor.refit.trace import trace
from cute_sharding.relations import NotOnlyMoved


def relation_of(generator, **shapes):
    return trace(generator, {name: (shape, torch.int64) for name, shape in shapes.items()})


def assert_is_what_it_makes(generator, **shapes):
    found = relation_of(generator, **shapes)
    given = numbered(shapes.values())
    wanted = generator(dict(zip(shapes, given)))
    assert found.names == tuple(wanted)
    for result, want in zip(carried_out(found.relation, given), wanted.values(), strict=True):
        assert torch.equal(result, want)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("first", range(0, 500, 100))
def test_drawn_programs(first):
    for seed in range(first, first + 100):
        program = drawn_program(seed)

        def generator(w, program=program):
            return dict(zip("abcdefghijklmnop", program([*w.values()])))

        names = [f"w{k}" for k in range(len(program.shapes))]
        assert_is_what_it_makes(generator, **dict(zip(names, program.shapes)))


# What programs write, of a tensor of (4, 6).
MOVES = {
    "stack": lambda x: torch.stack([x, x.flip(0)], 1),
    "stack, last": lambda x: torch.stack([x, x], -1),
    "chunk": lambda x: x.chunk(3, 1)[1],
    "split": lambda x: x.split([1, 3])[1],
    "tensor_split": lambda x: x.tensor_split(3)[2],
    "unbind": lambda x: x.unbind(1)[2],
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "tile": lambda x: x.tile(2, 1),
    "expand": lambda x: x[:, None].expand(4, 3, 6).reshape(12, 6),
    "rearranged": lambda x: x.unflatten(0, (2, 2)).movedim(0, 1).flatten(0, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1).contiguous(),
    "mT": lambda x: x.mT.clone(),
    "hstack": lambda x: torch.hstack([x, x]),
    "vstack": lambda x: torch.vstack([x[1:], x[:1]]),
    "concat": lambda x: torch.concat([x, x.new_zeros(1, 6)]),
    "block_diag": lambda x: torch.block_diag(x, x),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "index": lambda x: x[torch.tensor([2, 0, -1])],
    "list of rows": lambda x: x[[0, 2]],
    "range of columns": lambda x: x[:, range(5, 0, -2)],
    "index, columns": lambda x: x[:, torch.tensor([0, 2, 4, 1, 3, 5])],
    "index, of two dims": lambda x: x[torch.tensor([[2, 0], [1, 3]])],
    "index_select": lambda x: x.index_select(1, torch.tensor([5, 3, 1])),
    "roll": lambda x: x.roll((1, 2), (0, 1)),
    "roll, flat": lambda x: x.roll(7),
    "flip": lambda x: x.flip(0, 1),
    "rot90": lambda x: torch.rot90(x),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=-5),
    "pad, circular": lambda x: F.pad(x[None].expand(2, 4, 6), (1, 1), mode="replicate"),
    "tril": lambda x: x.tril(1),
    "unfold": lambda x: x.unfold(1, 3, 1),
    "diagonal": lambda x: x.diagonal(1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
    "slices": lambda x: x[None, ..., 1:5:2],
    "int": lambda x: x[..., -1],
    "detach": lambda x: x.detach().data,
    "parameter": lambda x: (
        torch.nn.Parameter(x.float(), requires_grad=False).long() if not x.is_meta else x
    ),
    "squeeze": lambda x: x[:1].squeeze(0),
    "broadcast": lambda x: torch.broadcast_to(x[0], (3, 6)),
    "no elements": lambda x: torch.cat([torch.empty(0, 6).long(), x, x.new_empty(0, 6)]),
    "cat, to nothing": lambda x: torch.cat([torch.empty(0).long(), x, x.new_empty(0), x], 1),
    "constants": lambda x: torch.cat([x, torch.full((2, 6), 7), torch.ones_like(x)]),
    "cpu": lambda x: x.cpu().to("cpu", torch.int64).mT,
    "written to": lambda x: written(x),
    "written to, row by row": lambda x: rows_of(x),
    "written to, then over": lambda x: over(x),
    "scatter": lambda x: torch.slice_scatter(torch.zeros(6, 6).long(), x, 0, 1, 5),
    "scatter, a row": lambda x: torch.select_scatter(x, x[0], 0, 2),
    "scatter, a diagonal": lambda x: torch.diagonal_scatter(x, x[0, 1:5]),
    "copied": lambda x: torch.ops.aten.copy(torch.empty(4, 6).long(), x[:1]),
    "foreach": lambda x: foreach(x),
    "bytes": lambda x: x.view(torch.uint8).view(torch.int64),
    "bucket of bytes": lambda x: bucket(x),
    "rows put": lambda x: put(x),
    "rows put, of two dims": lambda x: put_pairs(x),
    "rows copied": lambda x: x.index_copy(1, torch.tensor([4, 0]), x[:, :2]),
    "rows put, one value": lambda x: put_value(x),
    "out": lambda x: torch.cat([x, x], out=torch.empty(0, dtype=torch.int64)),
    "constants, computed": lambda x: torch.cat([x, x.new_zeros(1, 6).add_(2) + 1]),
    "in place, of views": lambda x: x.clone().t_().unsqueeze_(0),
}


def written(x):
    made = torch.empty(10, 6, dtype=torch.int64)
    made[:4], made[4], made[5:].T[:, :4] = x, 7, x.mT
    made.narrow(0, 9, 1).zero_()
    return made


def rows_of(x):
    made = x.new_zeros(6, 5)
    for i, row in enumerate(x.unbind(0)):
        made[:, i].copy_(row)
    return made


def over(x):
    made = torch.zeros(4, 6, dtype=torch.int64)
    made[::2], made[:, 1:5:3], made[1:3, 2:4] = x[:2], x[:, :2], x[2:, ::3]
    made[0, 0] = -1
    return torch.cat([made, made.flip(0)])


def foreach(x):
    parts = [*torch.empty(3, 4, 6, dtype=torch.int64).unbind(0)]
    torch._foreach_copy_(parts, [x, x.flip(0), x.flip(1)])
    return torch.stack(parts)


def put(x):
    made = torch.zeros(6, 6, dtype=torch.int64)
    made[torch.tensor([5, 0, -3, 2])] = x
    made[:, torch.tensor([1])] = x[:1, :1]
    return made


def put_pairs(x):
    made = x.new_zeros(6, 6)
    made[torch.tensor([[5, 0], [3, 2]])] = x.view(2, 2, 6)
    made[torch.tensor([[1], [4]])] = x[0]
    return made


def put_value(x):
    made = x.clone()
    made[torch.tensor([1, 3])] = 7
    return made


def bucket(x):
    parts = [x[:3], x[3:]]
    memory = torch.empty(x.nbytes + 8, dtype=torch.uint8)
    at = 8
    for part in parts:
        memory[at : at + part.nbytes].copy_(part.contiguous().view(torch.uint8).flatten())
        at += part.nbytes
    one = memory[8 : 8 + parts[0].nbytes].view(torch.int64).view(3, 6)
    return torch.cat([one.mT, memory[-parts[1].nbytes :].view(torch.int64).view(6, 1)], 1)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", MOVES)
def test_what_programs_write(name):
    assert_is_what_it_makes(lambda w: {"y": MOVES[name](w["x"])}, x=(4, 6))


@pytest.mark.one_in(1)
def test_a_source_as_it_is_and_a_constant():
    def generator(w):
        return {"x": w["x"], "p": w["x"].view(6, 4), "z": torch.zeros(3).long()}

    assert_is_what_it_makes(generator, x=(4, 6))


@pytest.mark.one_in(1)
def test_a_parameter_is_what_it_is_made_of():
    made = relation_of(lambda w: {"x": torch.nn.Parameter(w["x"], False)}, x=(4, 6))
    assert made.relation.sources == (0,) and len(made.relation.pieces) == 1


def test_casts():
    found = trace(
        lambda w: {"x": torch.cat([w["a"], w["a"]]).to(torch.bfloat16), "y": w["a"].double()},
        {"a": ((2, 3), torch.float32)},
    )
    assert found.dtypes == (torch.bfloat16, torch.float64)
    found = trace(
        lambda w: {"x": torch.cat([w["a"], w["b"]])},  # to the wider one
        {"a": ((2, 3), torch.float32), "b": ((2, 3), torch.bfloat16)},
    )
    assert found.dtypes == (torch.float32,)
    found = trace(
        lambda w: {"x": F.pad(w["a"], (0, 1), value=0.1).to(torch.bfloat16)},
        {"a": ((2,), torch.float32)},
    )
    assert found.relation.constants == (torch.tensor(0.1).bfloat16().item(),)
    found = trace(lambda w: {"x": w["a"].float().bfloat16()}, {"a": ((2,), torch.bfloat16)})
    assert found.dtypes == (torch.bfloat16,)  # nothing is lost on the way
    found = trace(lambda w: {"x": w["a"].float().half()}, {"a": ((2,), torch.bfloat16)})
    assert found.dtypes == (torch.float16,)


COMPUTED = {
    "mul": (lambda x: x * 2, "aten.mul.Tensor computes"),
    "softmax": (lambda x: x.softmax(0), "aten._softmax.default computes"),
    "then moved": (lambda x: torch.cat([x, x + 1])[1:].reshape(-1), "aten.add.Tensor computes"),
    "mm": (lambda x: x @ x.mT, "aten.mm.default computes"),
    "cast twice": (lambda x: x.half().float(), "'x' is cast twice"),
    "bits": (lambda x: x.view(torch.int32), "the bits of 'x' are read as torch.int32"),
    "in place": (lambda x: x.clone().mul_(2), "aten.mul.Tensor computes"),
    "in place, a part": (
        lambda x: F.pad(x, (1, 1))[:, 1:].add_(x[0, 0]),
        "aten.add.Tensor computes",
    ),
    "noise": (lambda x: torch.cat([x, torch.empty(1, 6).normal_()]), "draws random numbers"),
    "sum of windows": (lambda x: F.fold(x[None, :, :3], (2, 4), 2), "adds up"),
    "own values": (lambda x: torch.cat([x, torch.arange(6.0)[None]]), "which must be a source"),
    "numbers": (lambda x: torch.complex(x, x), "aten.complex.default computes"),
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_computes_is_named(name):
    code, words = COMPUTED[name]
    with pytest.raises(NotOnlyMoved) as raised:
        trace(lambda w: {"ok": w["x"], "y.weight": code(w["x"])}, {"x": ((4, 6), torch.float32)})
    text = str(raised.value)
    assert "a refit cannot make result 'y.weight' from its sources" in text and words in text
    assert "before or after the refit" in text


def test_what_computes_and_is_not_used_is_no_error():
    def generator(w):
        _ = w["x"] * 2
        return {"y": w["x"].mT}

    assert relation_of(generator, x=(4, 6)).names == ("y",)


READ = {
    "if": lambda x: x if (x > 0).all() else x.mT,
    "item": lambda x: x[: int(x[0, 0].item())],
    "tolist": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "mask": lambda x: x[x > 0],
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", READ)
def test_values_are_not_there_to_be_read(name):
    with pytest.raises(NotOnlyMoved, match=r"the generator \(.*\) reads (the )?values"):
        relation_of(lambda w: {"y": READ[name](w["x"])}, x=(4, 6))


def test_pairs_and_none():
    def pairs(w):
        for name, x in w.items():
            yield f"{name}.weight", x.mT

    assert_is_what_it_makes(lambda w: dict(pairs(w)), x=(4, 6), y=(2, 3))
    assert relation_of(pairs, x=(4, 6), y=(2, 3)).names == ("x.weight", "y.weight")
    assert relation_of(lambda w: {"x": w["x"], "bias": None}, x=(4,)).names == ("x",)


def test_what_a_generator_gives():
    with pytest.raises(TypeError, match=r"the generator \(.*\) returns a list"):
        relation_of(lambda w: [w["x"]], x=(4,))
    with pytest.raises(TypeError, match="a mapping of str to int"):
        relation_of(lambda w: {"x": 1}, x=(4,))
    with pytest.raises(KeyError, match=r"takes 'wx', .* among the 2 sources: did you mean 'x'\?"):
        relation_of(lambda w: {"x": w["wx"]}, y=(4,), x=(4,))
    with pytest.raises(ValueError, match="returns no tensor"):
        relation_of(lambda w: {}, x=(4,))
    with pytest.raises(RuntimeError, match="shape"):  # the program's own mistake, as torch has it
        relation_of(lambda w: {"x": w["x"].view(5)}, x=(4,))

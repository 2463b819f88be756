"""Slices and views of a DTensor that are copies: after a write to the DTensor, what may miss it is
not read, on any rank; and what cannot miss it is.
"""

import gc
import random
import re

import pytest
import torch
from drawing import draw_placements
from movement_programs import MESHES
from op_programs import assert_close
from simulation import assert_holds, distribute, mesh_of, number, plain, ranks_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from writing_programs import drawn_program

import cute_sharding
from cute_sharding.dtensor.run.ops import StaleView

SETTINGS = {"movement": {"movement": True}, "views": {}}


# A DTensor's local tensor, also while somebody watches who reads it.
LOCAL = DTensor.__dict__["_local_tensor"]


def local_is_at_hand():
    return DTensor.__dict__["_local_tensor"] is LOCAL


@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_drawn_programs(settings, world, some_of):
    """Slices of slices, and writes between: each statement is as on one device, or raises and does
    nothing.
    """
    read, raised = 0, 0
    for seed in some_of(range(40), 4):
        rng = random.Random(f"{settings} {world} {seed}")
        mesh = rng.choice(MESHES[world])
        shape = tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 8]) for _ in range(rng.choice([1, 2, 2, 3])))
        placements, stale = draw_placements(rng, mesh, shape), []
        with (
            ranks_of((world,)),
            cute_sharding.enabled(redistribution=True, **SETTINGS[settings]),
        ):
            x = distribute(number(shape), mesh, placements)
            results = drawn_program(random.Random(seed), x, StaleView, stale)
            with plain():
                expected = drawn_program(random.Random(seed), number(shape), raised=stale)
            for k, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                try:
                    assert_holds(result.clone(), wanted)
                    read += 1
                except StaleView:
                    raised += 1
                except Exception as error:
                    case = (seed, k, shape, mesh, placements)
                    raise AssertionError(f"{case}: {result.placements}") from error
    assert read > raised


# What is written to x, of shape (8, 3), while slices of it are kept.
WRITES = {
    "the base": lambda x, parts: x.add_(1.0),
    "another slice": lambda x, parts: x[1:7].mul_(2.0),
    "by data": lambda x, parts: x.data.add_(1.0),
    "a detached alias": lambda x, parts: x.detach().add_(1.0),
    "a list": lambda x, parts: torch._foreach_mul_([x], 2.0),
    "out": lambda x, parts: torch.mul(x.clone(), 2.0, out=x),
}


def slices(x):
    return [x[1:], x[1:][2:], x[::3], x[5], x.split(5)[1], x[2:6].view(-1)]


READS = {
    "an op": lambda part: part.clone(),
    "redistribute": lambda part: part.redistribute(placements=[Replicate()] * 2),
    "full_tensor": lambda part: part.full_tensor(),
    "to_local": lambda part: part.to_local(),
    "an operand": lambda part: torch.zeros_like(part).copy_(part),
    "a view": lambda part: part.view(-1) * 1,
    "a write": lambda part: part.add_(1.0),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", WRITES)
def test_what_misses_a_write_is_not_read(name, settings):
    with plain():
        expected = number((8, 3))
        WRITES[name](expected, slices(expected))
    with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True, **SETTINGS[settings]):
        x = distribute(number((8, 3)), (2, 2), [Shard(0), Replicate()])
        parts = slices(x)
        WRITES[name](x, parts)
        stale = [part for part in parts if storage_of(part) is not storage_of(x)]
        assert len(stale) > 2
        for part in stale:
            for read in READS.values():
                with pytest.raises(StaleView):
                    read(part)
        assert_holds(x, expected)
        for part, wanted in zip(slices(x), slices(expected), strict=True):
            assert_close(part.clone(), wanted, name)


def storage_of(x):
    return next(iter(LOCAL.__get__(x)._local_tensors.values())).untyped_storage()


def test_the_error_names_both_lines():
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        x = distribute(number((8, 3)), (2,), [Shard(0)])
        part = x[1:]  # taken
        x[2:].mul_(2.0)  # written
        with pytest.raises(StaleView) as raised:
            part + 1
    with open(__file__) as file:
        lines = [
            f"{__file__}:{n}" for n, line in enumerate(file, 1) if re.search("  # (t|w)", line)
        ]
    assert [raised.value.taken_at, raised.value.written_at] == lines
    assert raised.value.writer == "mul_.Tensor"
    assert all(line in str(raised.value) for line in lines)


# Of x, of shape (8, 6), two results without a common row: the second stays good after a write to
# the first.
APART = {
    "halves": lambda x: (x[:4], x[4:]),
    "parts that both move": lambda x: (x[1:5], x[5:]),
    "rows between": lambda x: (x[::2], x[1::2]),
    "columns": lambda x: (x[:, :2], x[:, 2:]),
    "an element and rows": lambda x: (x[3], x[4:]),
    "parts of a split": lambda x: x.split(5),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_were_not_written_to_are_read(name):
    def program(x):
        one, other = APART[name](x)
        one.mul_(2.0)
        other.add_(1.0)
        one.add_(other.sum())
        return [x, one, other]

    with plain():
        expected = program(number((8, 6)))
    for mesh, placements in (((2,), [Shard(0)]), ((2, 2), [Shard(1), Shard(0)])):
        with ranks_of(mesh), cute_sharding.enabled(movement=True):
            found = program(distribute(number((8, 6)), mesh, placements))
            for part, wanted in zip(found, expected, strict=True):
                assert_close(part.clone(), wanted, name)


def test_nothing_is_asked_where_nothing_is_kept():
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        x = distribute(number((8, 3)), (2,), [Shard(0)])
        gc.collect()  # of errors that were raised before
        x + 1
        for _ in range(3):
            x[1:].add_(1.0)
            x.mul_(2.0)
        assert local_is_at_hand()
        part = x[1:]
        x.mul_(2.0)
        assert not local_is_at_hand()
        del part
        x + 1
        assert local_is_at_hand()


def test_gradients_around_a_write():
    def program(x):
        y = x * 2
        with torch.no_grad():
            y.detach().add_(3.0)
        y[2:].mul_(5.0)
        part = y[1:]
        return (part * part).sum() + y.sum()

    with plain():
        single = number((8, 3)).requires_grad_()
        (expected,) = torch.autograd.grad(program(single), single)
    with ranks_of((2,)), cute_sharding.enabled(movement=True, redistribution=True):
        x = distribute(number((8, 3)), (2,), [Shard(0)], requires_grad=True)
        (gradient,) = torch.autograd.grad(program(x), x)
        assert_close(gradient, expected, "gradient")


def test_views_that_are_kept_through_a_switch():
    with ranks_of((2,)):
        with cute_sharding.enabled(movement=True):
            x = distribute(number((8, 3)), (2,), [Shard(0)])
            part = x[1:]
            x.mul_(2.0)
        assert local_is_at_hand()
        with cute_sharding.enabled(movement=True), pytest.raises(StaleView):
            part.clone()


def test_in_a_compiled_program():
    def program(x):
        part = x[1:]
        x.mul_(2.0)
        return part + 1

    def later(part):
        return part + 1

    with cute_sharding.enabled(movement=True):
        torch._dynamo.reset()
        x = DTensor.from_local(torch.ones(4, 3), mesh_of((2,)), [Shard(0)])
        with pytest.raises(Exception, match="is read after"):
            torch.compile(program, backend="aot_eager")(x)
        part = x[1:]
        torch.compile(lambda x: x.mul_(2.0), backend="aot_eager")(x)
        with pytest.raises(Exception, match="is read after"):
            torch.compile(later, backend="aot_eager")(part)

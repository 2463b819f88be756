"""Slices and views of a DTensor that are kept while it is written to: read later, they have what
was written, as on one device.
"""

import random

import pytest
import torch
from drawing import draw_placements
from movement_programs import MESHES
from op_programs import assert_close
from simulation import assert_holds, distribute, number, plain, ranks_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from writing_programs import drawn_program

import cute_sharding
from cute_sharding.dtensor.extras.copies import Copy

SETTINGS = {"movement": {"movement": True}, "views": {}}


def local_is_at_hand():
    return type(DTensor.__dict__["_local_tensor"]).__name__ == "member_descriptor"


@pytest.mark.parametrize("world", MESHES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_drawn_programs(settings, world, some_of):
    """Slices of slices, and writes between."""
    for seed in some_of(range(40), 4):
        rng = random.Random(f"{settings} {world} {seed}")
        mesh = rng.choice(MESHES[world])
        shape = tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 8]) for _ in range(rng.choice([1, 2, 2, 3])))
        placements = draw_placements(rng, mesh, shape)
        with plain():
            expected = drawn_program(random.Random(seed), number(shape))
        with (
            ranks_of((world,)),
            cute_sharding.enabled(
                implicit_redistribution="cheapest", redistribution=True, **SETTINGS[settings]
            ),
        ):
            results = drawn_program(
                random.Random(seed), distribute(number(shape), mesh, placements)
            )
            for k, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                try:
                    assert_holds(result.clone(), wanted)
                except Exception as error:
                    case = (seed, k, shape, mesh, placements)
                    raise AssertionError(f"{case}: {result.placements}") from error


# What is written to x, of shape (8, 3), while slices of it are kept.
WRITES = {
    "the base": lambda x, parts: x.add_(1.0),
    "another slice": lambda x, parts: x[2:7].mul_(2.0),
    "one of them": lambda x, parts: parts[0].mul_(3.0),
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
    "full_tensor": lambda part: DTensor.from_local(
        part.full_tensor(), part.device_mesh, [Replicate()] * 2, run_check=False
    ),
    "an operand": lambda part: torch.zeros_like(part) + part,
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_read_is_what_was_written(name, settings):
    for read in READS.values():
        with plain():
            single = number((8, 3))
            expected = slices(single)
            WRITES[name](single, expected)
        with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True, **SETTINGS[settings]):
            x = distribute(number((8, 3)), (2, 2), [Shard(0), Replicate()])
            parts = slices(x)
            WRITES[name](x, parts)
            if settings == "movement":
                assert not local_is_at_hand()
            for part, wanted in zip(parts, expected, strict=True):
                assert_close(read(part), wanted, name)
            assert local_is_at_hand(), "nothing is stale any more"


def test_nothing_is_asked_where_nothing_is_kept():
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        x = distribute(number((8, 3)), (2,), [Shard(0)])
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


@pytest.mark.one_in(1)
def test_a_write_costs_the_same_however_many_slices_are_kept(monkeypatch):
    """A write through a slice looks up that one, which is brought up to date and taken back, and
    not the others; each is told from what it has, so that all are as on one device.
    """
    looked_up = []
    moved = Copy.moved
    monkeypatch.setattr(Copy, "moved", lambda *which: looked_up.append(which) or moved(*which))

    def program(x, count):
        parts = [x[i : i + 5] for i in range(count)]
        x.add_(1.0)
        for part in parts:
            part.mul_(2.0)
        return [x, *parts]

    for count in (3, 12):
        with plain():
            expected = program(number((16, 3)), count)
        with ranks_of((2,)), cute_sharding.enabled(movement=True):
            looked_up.clear()
            parts = program(distribute(number((16, 3)), (2,), [Shard(0)]), count)
            assert len(looked_up) <= 4 * count
            for part, wanted in zip(parts, expected, strict=True):
                assert_close(part.clone(), wanted, f"{count} slices")


def test_a_write_to_a_part_leaves_the_other_parts_as_they_are(monkeypatch):
    """No two parts of a split have a row in common; what was written to all is brought to the one
    that is read.
    """
    brought = []
    refresh = Copy.refresh
    monkeypatch.setattr(Copy, "refresh", lambda *which: brought.append(which) or refresh(*which))

    def program(x):
        parts = x.split(3)
        parts[0].add_(1.0)
        parts[2].mul_(2.0)
        torch._foreach_add_([parts[0], parts[1]], 5.0)
        return [x, *parts]

    with plain():
        expected = program(number((8, 3)))
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        x, *parts = program(distribute(number((8, 3)), (2,), [Shard(0)]))
        brought.clear()
        for part, wanted in zip([x, *parts], expected, strict=True):
            assert_close(part.clone(), wanted, "after writes to parts")
        assert not brought
        x.mul_(3.0)
        assert_close(parts[1].clone(), expected[2] * 3, "after a write to all")
        assert [copy.number for (copy,) in brought] == [1]


def test_to_local_raises_where_it_would_have_to_receive():
    """One rank may ask alone, and would wait for the others."""
    with ranks_of((2,)), cute_sharding.enabled(movement=True):
        x = distribute(number((8, 3)), (2,), [Shard(0)])
        part = x[1:]
        x.mul_(2.0)
        for context in (torch.no_grad, torch.enable_grad):
            with context(), pytest.raises(RuntimeError, match=r"to_local\(\) cannot update"):
                part.to_local()
        repr(part)
        part + 1
        part.to_local()


def test_gradients_of_what_was_brought_up_to_date():
    def program(x):
        y = x * 2
        part = y[1:]
        with torch.no_grad():
            y.detach().add_(3.0)
        y[2:].mul_(5.0)
        return (part * part).sum() + y.sum()

    with plain():
        single = number((8, 3)).requires_grad_()
        (expected,) = torch.autograd.grad(program(single), single)
    with ranks_of((2,)), cute_sharding.enabled(movement=True, redistribution=True):
        x = distribute(number((8, 3)), (2,), [Shard(0)], requires_grad=True)
        (gradient,) = torch.autograd.grad(program(x), x)
        assert_close(gradient, expected, "gradient")


def test_copies_that_are_kept_through_a_switch():
    with ranks_of((2,)):
        with cute_sharding.enabled(movement=True):
            x = distribute(number((8, 3)), (2,), [Shard(0)])
            part = x[1:]
            x.mul_(2.0)
        assert local_is_at_hand()
        with cute_sharding.enabled(movement=True):
            with plain():
                expected = number((8, 3))[1:] * 2
            assert_close(part.clone(), expected, "read later")

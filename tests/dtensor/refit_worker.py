"""What the processes of test_refits.py run: every rank draws the same programs, meshes and
placements, and compares its own part with what the program makes of whole tensors.
"""

import os
import random
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from across_worker import Sent, as_dtensor, draw_mesh, draw_ranks, local_of
from drawing import draw_placements
from drawn_moves import drawn_program
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cute_sharding
from cute_sharding.dtensor.run.packing import OtherShape
from cute_sharding.dtensor.run.runner import Flight

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int16)


class Lies:
    """A mesh, drawn, and what a rank holds of tensors on it."""

    def __init__(self, rng, ranks, meshes):
        self.ranks, self.sizes = ranks, draw_mesh(rng, ranks)
        key = (self.sizes, *ranks)
        if key not in meshes:
            meshes[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(self.sizes))
        self.mesh = meshes[key]

    def dtensor(self, whole, placements):
        local = local_of(whole, self.sizes, self.ranks, placements, dist.get_rank())
        x = as_dtensor(local, whole.shape, self.mesh, placements, whole.dtype)
        return DTensor(x._local_tensor.detach(), x._spec, requires_grad=False)

    def assert_holds(self, result, whole, said):
        wanted = local_of(whole, self.sizes, self.ranks, result.placements, dist.get_rank())
        local = result.to_local()
        if wanted is None:
            assert local.numel() == 0, said
        else:
            assert local.dtype == wanted.dtype and torch.equal(local, wanted), said


def drawn_values(rng, shapes):
    """Whole tensors of drawn dtypes; small numbers, which all of these have."""
    found = []
    for k, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(100 + k)
        values = torch.randint(-100, 100, shape, generator=generator)
        found.append(values.to(rng.choice(DTYPES)))
    return found


def refits(first, stop, prepared=False):
    """Draws in [first, stop); ``prepared``: the ranks of both meshes get a group."""
    world, meshes, ran = dist.get_world_size(), {}, 0
    for seed in range(first, stop):
        rng = random.Random(seed)
        program = drawn_program(seed)
        one = draw_ranks(rng, world)
        other = rng.choice([draw_ranks(rng, world), one, rng.sample(one, len(one))])
        source, target = (Lies(rng, ranks, meshes) for ranks in (one, other))
        if prepared:
            cute_sharding.prepare_groups(source.mesh, target.mesh)
        given = drawn_values(rng, program.shapes)
        cast = rng.choice([None, None, torch.bfloat16, torch.float32])

        def generator(w, program=program, cast=cast):
            results = program([*w.values()])
            return {
                f"result{k}": x if k or cast is None or x.dtype == cast else x.to(cast)
                for k, x in enumerate(results)
            }

        ran += once(seed, rng, generator, given, source, target)
    assert ran > 0.7 * (stop - first), ran


def once(seed, rng, generator, given, source, target):
    names = [f"w{k}" for k in range(len(given))]
    state = {
        name: source.dtensor(whole, draw_placements(rng, source.sizes, whole.shape))
        for name, whole in zip(names, given)
    }
    places = {}

    def onto(name, tensor):
        places[name] = draw_placements(rng, target.sizes, tensor.shape)
        return target.mesh, places[name]

    said = f"seed {seed}: {source.ranks} as {source.sizes} -> {target.ranks} as {target.sizes}"
    try:
        plan = cute_sharding.plan_refit(generator, state, onto)
    except ValueError as error:
        assert "is cast twice" in str(error), said
        return False
    wanted = generator(dict(zip(names, given)))
    whole = plan
    for within in (None, 0, rng.random()):
        if within is not None:
            limit = limit_of(whole, within)
            plan = cute_sharding.plan_refit(
                generator, state, lambda name, x: (target.mesh, places[name]), memory_limit=limit
            )
            assert plan.buffer_bytes <= limit and plan.received_bytes == whole.received_bytes, said
        with Sent() as sent:
            results = plan.run(state)
        assert sum(sent.counts.values()) <= plan.collectives, (said, sent.counts)
        assert within is not None or plan.collectives <= 1, said
        assert [*results] == [*wanted], said
        for name, result in results.items():
            assert tuple(result.placements) == tuple(places[name]), said
            target.assert_holds(result, wanted[name], said)
    back_again(whole, results, dict(zip(names, given)), source, said)
    return True


def limit_of(plan, share):
    """So many bytes of buffers as the largest of its members needs, and a share of what more all
    need together.
    """
    moved = [member.item.moved(rank) for member in plan.members for rank in plan.looked_at]
    least = max(map(sum, moved), default=0)
    return least + int(share * (plan.buffer_bytes - least))


def back_again(plan, results, given, source, said):
    """The inverse, where there is one and nothing was cast."""
    if plan.unread or any(
        plan.source[name].dtype != spec.dtype
        for name in plan.source
        for spec in plan.target.values()
    ):
        return
    back = plan.inverse().run(results)
    for name, whole in given.items():
        source.assert_holds(back[name], whole, said)


# -- programs --------------------------------------------------------------------------------------


def between_two_pairs():
    """A trainer's ranks and a generator's: fused, repeated, cast, and in place again and again."""
    trainer, generator = (DeviceMesh("cpu", torch.tensor(r)) for r in ([0, 1], [2, 3]))
    q, k = torch.arange(48.0).reshape(8, 6), torch.arange(100.0, 112.0).reshape(2, 6)
    state = {"q": _on(trainer, q, [Shard(0)]), "k": _on(trainer, k, [Shard(1)])}

    def fused(w):
        k = w["k"].repeat_interleave(2, 0)
        return {"qk": torch.cat([w["q"], k]).to(torch.bfloat16), "v": w["k"].flip(0)}

    plan = cute_sharding.plan_refit(fused, state, {"*": (generator, [Shard(0)])})
    assert plan.coverage == 1.0 and plan.collectives == 1
    rank = dist.get_rank()
    whole = fused({"q": q, "k": k})
    into = plan.run(state if rank < 2 else None)
    places = {name: x.to_local().data_ptr() for name, x in into.items()}
    for factor in (1, 2, 3):
        for x in state.values():
            x._local_tensor.mul_(factor)
        whole = {name: x * factor for name, x in whole.items()}
        again = plan.run(state, into=into)
        for name, x in again.items():
            assert x is into[name] and x.to_local().data_ptr() == places[name]
            if rank > 1:
                assert torch.equal(x.to_local(), whole[name].chunk(2)[rank - 2])


def groups_made_between_runs():
    """A plan that has run from rank to rank goes in one collective of a group made later."""
    trainer, generator = (DeviceMesh("cpu", torch.tensor(r)) for r in ([0, 1], [1, 2]))
    whole, rank = torch.arange(24.0).reshape(6, 4), dist.get_rank()
    state = {"w": _on(trainer, whole, [Shard(0)])}
    plan = cute_sharding.plan_refit(
        lambda w: {"v": w["w"].mT}, state, {"v": (generator, [Shard(0)])}
    )
    for prepared in (False, True, True):
        if prepared:
            cute_sharding.prepare_groups(trainer, generator)
        local = plan.run(state)["v"].to_local()
        if rank in (1, 2):
            assert torch.equal(local, whole.mT.chunk(2)[rank - 1])


def _on(mesh, whole, placements):
    return distribute_tensor(whole, mesh, placements)


def what_does_not_fit():
    """Is said on the rank that has it, and before anything is sent."""
    line, other = DeviceMesh("cpu", torch.arange(4)), DeviceMesh("cpu", torch.tensor([1, 0, 3, 2]))
    x = _on(line, torch.arange(12.0).reshape(6, 2), [Shard(0)])
    plan = cute_sharding.plan_refit(
        lambda w: {"y": w["x"].mT}, {"x": x}, {"y": (other, [Shard(1)])}
    )
    for state, words in (
        ({}, "the state has no tensor 'x'"),
        (
            {"x": _on(line, torch.ones(6, 2), [Replicate()])},
            "but the refit was planned for",
        ),
        ({"x": _on(other, torch.ones(6, 2), [Shard(0)])}, "plan the refit again"),
        ({"x": torch.ones(6, 2)}, "give a DTensor"),
    ):
        try:
            plan.run(state)
        except (ValueError, TypeError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    wrong = DTensor(torch.ones(5, 2), x._spec, requires_grad=False)
    try:
        plan.run({"x": wrong})
    except OtherShape as error:
        assert "this rank's local tensor of 'x' has shape (5, 2)" in str(error)
    else:
        raise AssertionError("a local tensor of another shape")


def ranks_of_neither():
    """Do nothing, and have results without data."""
    one, two = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0], [1, 2]))
    x = _on(one, torch.arange(6.0), [Replicate()])
    plan = cute_sharding.plan_refit(lambda w: {"y": w["x"]}, {"x": x}, {"y": (two, [Shard(0)])})
    y = plan.run({"x": x})["y"]
    assert y.shape == (6,) and y.to_local().numel() == (3 if dist.get_rank() in (1, 2) else 0)


def of_memory_in_any_order():
    """Local tensors that are transposed, or have steps of their own where there is one row."""
    line, other = DeviceMesh("cpu", torch.arange(4)), DeviceMesh("cpu", torch.tensor([2, 3, 0, 1]))
    k = dist.get_rank()
    turned = torch.arange(48.0).reshape(6, 8).t()[2 * k : 2 * k + 2]
    narrow = torch.arange(32.0).reshape(8, 4)[2 * k : 2 * k + 2, 1:2]
    assert not turned.is_contiguous() and narrow.stride() == (4, 1)
    single = torch.arange(8.0).as_strided((2, 1), (1, 9), 2 * k)
    state = {
        name: DTensor(
            local,
            as_dtensor(local, shape, line, [Shard(0)], local.dtype)._spec,
            requires_grad=False,
        )
        for name, local, shape in (
            ("turned", turned, (8, 6)),
            ("narrow", narrow, (8, 1)),
            ("single", single, (8, 1)),
        )
    }
    plan = cute_sharding.plan_refit(
        lambda w: {"all": torch.cat([w["turned"], w["narrow"], w["single"].flip(0)], 1)},
        state,
        {"*": (other, [Shard(1)])},
    )
    whole = torch.cat(
        [
            torch.arange(48.0).reshape(6, 8).t(),
            torch.arange(32.0).reshape(8, 4)[:, 1:2],
            torch.arange(8.0).flip(0)[:, None],
        ],
        1,
    )
    wanted = whole.chunk(4, 1)[[2, 3, 0, 1].index(k)]
    result = plan.run(state)["all"]
    assert torch.equal(result.to_local(), wanted)
    memory = torch.zeros(2, 8)
    into = {"all": DTensor(memory.t(), result._spec, requires_grad=False)}
    assert plan.run(state, into=into)["all"] is into["all"] and torch.equal(memory.t(), wanted)


def dying(rank, world, rendezvous, folder):
    """A trainer's rank dies in a step, between two of several exchanges. The others get an error
    within the backend's timeout, and each of the generator's weights is as it was or wholly new, as
    that says.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=10),
    )
    trainer, generator = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3]))
    names = [f"w{k}" for k in range(8)]
    state = {n: _on(trainer, torch.ones(64, 6), [Shard(0)]) for n in names}
    plan = cute_sharding.plan_refit(
        lambda w: {f"f{k}": torch.cat([w[f"w{2 * k}"], w[f"w{2 * k + 1}"]]) for k in range(4)},
        state,
        {"*": (generator, [Shard(1)])},
        memory_limit=4000,
    )
    assert plan.collectives == 4
    into = plan.send(state) if rank < 2 else plan.receive()
    dist.barrier()
    for x in state.values():
        x._local_tensor.fill_(2)
    sent, count = Flight.__init__, []

    def dies(self, runner, number, *given):
        count.append(number)
        if rank == 1 and len(count) == 3:
            os._exit(0)
        sent(self, runner, number, *given)

    begin, failed = time.monotonic(), None
    with patch.object(Flight, "__init__", dies):
        try:
            _ = plan.send(state) if rank < 2 else plan.receive(into=into)
        except RuntimeError as error:
            failed = error
    took = time.monotonic() - begin
    if rank > 1:
        assert {*failed.moved, *failed.left} == {*into} and failed.left, failed
        for name, x in into.items():
            assert (x.to_local() == (2 if name in failed.moved else 1)).all(), (name, failed)
    Path(folder, str(rank)).write_text(f"{type(failed).__name__} {took < 20}")
    os._exit(0)  # what is left of the group cannot be taken down in order


def who_only_has_and_who_only_wants():
    """Is told where a rank does both."""
    one, two = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [1, 2]))
    x = _on(one, torch.arange(6.0), [Shard(0)])
    plan = cute_sharding.plan_refit(lambda w: {"y": w["x"]}, {"x": x}, {"y": (two, [Shard(0)])})
    rank = dist.get_rank()
    wrong = [plan.send] * (rank in (1, 2)) + [lambda state: plan.receive()] * (rank in (0, 1))
    for call in wrong:
        try:
            call({"x": x})
        except ValueError as error:
            assert f"because rank {rank} is on a " in str(error)
            assert "Call run(state) on rank" in str(error)
        else:
            raise AssertionError(call)
    if rank == 0:
        plan.send({"x": x})
    elif rank == 1:
        y = plan.run({"x": x})["y"]
    elif rank == 2:
        y = plan.receive()["y"]
    if rank in (1, 2):
        assert torch.equal(y.to_local(), torch.arange(6.0).chunk(2)[rank - 1])


PROGRAMS = (
    of_memory_in_any_order,
    between_two_pairs,
    what_does_not_fit,
    groups_made_between_runs,
    ranks_of_neither,
    who_only_has_and_who_only_wants,
)

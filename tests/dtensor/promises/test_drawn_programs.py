"""Programs drawn at random: with redistribution allowed no view is refused, and every rank's values
and gradients are those of one device.
"""

import random
from collections import Counter
from contextlib import contextmanager
from itertools import product

import pytest
from drawing import draw_program, draw_view, run
from enumeration import cuts_on, devices, signature
from simulation import (
    assert_holds,
    cuts_of,
    distribute,
    is_partial,
    most_received,
    number,
    placements_of,
    plain,
    ranks_of,
    watched_wire,
)
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from cute_sharding.dtensor.decide import redistributions
from cute_sharding.exchange import received_elements

MESHES = [(2,), (3,), (4,), (8,), (1, 2), (2, 2), (2, 3), (4, 2), (2, 2, 2)]
CASES = 60  # of each mesh


def contributions(full, mesh, placements):
    """What each rank has: all the same, but for a contribution of its own on each mesh dim with a
    pending sum.
    """
    pending = [m for m, p in enumerate(placements) if is_partial(p)]
    with plain():
        return {
            rank: full + sum(100 ** (m + 1) * device[m] for m in pending)
            for rank, device in enumerate(devices(mesh))
        }


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_program_runs_and_is_right(mesh):
    rng = random.Random(f"programs {mesh}")
    with ranks_of(mesh), cute_sharding.enabled():
        for _ in range(CASES):
            shape, target, cuts = draw_view(rng, mesh, range(49), rng.choice((None, True)))
            single = number(shape).requires_grad_()
            program = draw_program(rng, single, target)
            with plain():
                expected = run(program, single)
                gradient = number(expected.shape) + 0.5
                expected.backward(gradient)
            # Only before a single op may a sum be pending: a reshape that has to copy first may
            # finish it, as torch's own rule for copies likes.
            chance = 0.3 if len(program) == 1 else 0
            placements = [
                Partial() if cut is None and rng.random() < chance else p
                for cut, p in zip(cuts, placements_of(cuts))
            ]
            inputs = contributions(single.detach(), mesh, placements)
            try:
                tensor = distribute(inputs, mesh, placements, requires_grad=True)
                result = run(program, tensor)
                with plain():
                    outputs = {rank: run(program, full) for rank, full in inputs.items()}
                assert_holds(result, outputs)
                assert [is_partial(p) for p in result.placements] == [
                    is_partial(p) for p in placements
                ]
                # The gradient of a sum is whole on each of its contributions.
                result.backward(
                    distribute(
                        gradient,
                        mesh,
                        [Replicate() if is_partial(p) else p for p in result.placements],
                    )
                )
                assert not any(is_partial(p) for p in tensor.grad.placements)
                assert_holds(tensor.grad, single.grad)
            except Exception as error:
                raise AssertionError(f"{shape} as {placements} on {mesh}: {program}") from error
        outcomes = Counter()
        for counts in cute_sharding.stats().values():
            outcomes.update(counts)
    assert outcomes["stock"] == 0
    assert (
        outcomes["redistribution"] >= CASES // 4
        and outcomes["algebra"] >= CASES // 4
        and outcomes["tracing"] >= CASES // 8
    )


# -- what it costs ---------------------------------------------------------------------------------


@contextmanager
def watched_inputs(monkeypatch):
    """The (before, after) placements of each input that is redistributed."""
    moves, redistribute = [], redistributions.redistribute_local_tensor

    def watched(local, current, target, **options):
        moves.append((current.placements, target.placements))
        return redistribute(local, current, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(redistributions, "redistribute_local_tensor", watched)
        yield moves


def busiest(before, after):
    return max((wanted & ~had).bit_count() for had, wanted in zip(before, after, strict=True))


def cheapest(shape, target, cuts, mesh):
    """By brute force on sets: the least that the busiest device must receive to hold what some cuts
    of the view's output hold as well.
    """
    of_outputs = {
        signature(target, mesh, output) for output in product(cuts_on(target), repeat=len(mesh))
    }
    before = signature(shape, mesh, cuts)
    candidates = {
        signature(shape, mesh, source) for source in product(cuts_on(shape), repeat=len(mesh))
    }
    return min(busiest(before, after) for after in candidates & of_outputs)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_the_input_goes_where_it_is_cheapest(mesh, monkeypatch):
    rng = random.Random(f"cheapest {mesh}")
    on = cute_sharding.enabled()
    with (
        ranks_of(mesh),
        on,
        watched_inputs(monkeypatch) as moves,
        watched_wire(monkeypatch) as wire,
    ):
        for _ in range(100):
            shape, target, cuts = draw_view(rng, mesh, range(4, 21), wants_communication=True)
            distribute(number(shape), mesh, placements_of(cuts)).view(target)
            [(before, after)] = moves
            assert before == placements_of(cuts)
            least = cheapest(shape, target, cuts, mesh)
            assert received_elements(shape, cuts, cuts_of(after), mesh) == least, (
                shape,
                target,
                before,
                after,
            )
            assert most_received(wire) == least, "more is sent than planned"
            moves.clear()
            wire.clear()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_one_collective_at_most(mesh, monkeypatch):
    """None for a view that is free, nor for an input that has all it needs where it is."""
    rng = random.Random(f"collectives {mesh}")
    counts = Counter()
    with (
        ranks_of(mesh),
        cute_sharding.enabled(),
        watched_inputs(monkeypatch) as moves,
    ):
        for case in range(30):
            shape, target, cuts = draw_view(
                rng, mesh, range(1, 49), wants_communication=case % 3 > 0
            )
            tensor = distribute(number(shape), mesh, placements_of(cuts))
            with CommDebugMode() as communication:
                tensor.view(target)
            assert len(moves) == (case % 3 > 0), (shape, target, cuts)
            elements = received_elements(shape, cuts, cuts_of(moves.pop()[1]), mesh) if moves else 0
            assert communication.get_total_counts() == (elements > 0), (
                shape,
                target,
                cuts,
                communication.get_comm_counts(),
            )
            counts[elements > 0] += 1
    assert counts[True] >= 15 and counts[False] >= 10

"""Plans, run on all devices at once: reductions and moves end in the right values everywhere, and
no plan receives more than the naive one.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from on_numpy import MESHES, Sharding, drawn, lacking, run_exchange, run_reduction, shuffled

from cute_sharding.exchange.network import Link, Network
from cute_sharding.exchange.placed import Placed, holds_all
from cute_sharding.exchange.plan import collectives, received_by
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.exchange.step import AllToAll, Reduction

FLAT = Network.flat(alpha=0, beta=1)
REDUCE = {"sum": np.sum, "avg": np.mean, "max": np.max}


def without(sharding, mesh_dims):
    return sharding._replace(
        cuts=tuple(None if m in mesh_dims else cut for m, cut in enumerate(sharding.cuts))
    )


def programs(seed, count, **options):
    """(source, target, and how both lie: with what is pending and to be reduced, and with what
    stays pending).
    """
    rng = random.Random(seed)
    for _ in range(count):
        source, target = drawn(rng, **options)
        roles = [
            rng.choice(["reduce", "reduce", "move", "move", "stay"]) if n > 1 else "move"
            for n in source.mesh
        ]
        reduce, stay = (
            [m for m, role in enumerate(roles) if role == of] for of in ("reduce", "stay")
        )
        ops = rng.choice([["sum"], ["max"], ["sum", "avg"]])
        source = without(source, [*reduce, *stay])
        target, kept = without(target, stay), tuple((m, "sum") for m in stay)
        pending = (*((m, rng.choice(ops)) for m in reduce), *kept)
        yield source, target, placed(source, pending), placed(target, kept)


def placed(sharding, pending=()):
    return Placed.numbered(sharding.shape, sharding.mesh, sharding.chains, pending)


def contributions(rng, source, partial):
    """A tensor for each coordinate of the mesh dims ``partial``, by coordinates (0 on others) and
    flat index; every mean of them is exact.
    """
    sizes = [n if m in partial else 1 for m, n in enumerate(source.mesh)]
    return np.random.default_rng(rng.randrange(2**32)).integers(
        0, 100, (*sizes, int(np.prod(source.shape)))
    ).astype(float) * np.prod(source.mesh)


def read(tensors, device, indices):
    return tensors[tuple(min(c, n - 1) for c, n in zip(device, tensors.shape))][indices]


def run(steps, local, rng):
    """The local tensors after the steps; each step is found to receive what it says."""
    for step in steps:
        peers = shuffled(step, rng) if rng.random() < 0.2 else None
        if isinstance(step, AllToAll):
            local, received = run_exchange(step, local, peers)
            assert step.received_elements == max(map(sum, received.values())), step
            continue
        local, received = run_reduction(step, local, peers)
        most, parts = max(tensor.size for tensor in local.values()), step.parts
        if step.scatters:
            assert step.received_elements == max(received.values()) == (parts - 1) * most, step
        else:  # Chan et al.: a reduce-scatter and an all-gather
            assert step.received_elements == -(-2 * (parts - 1) * most // parts), step
    return local


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed, flat", [(0, True), (1, True), (2, True), (3, False), (4, False)])
def test_values_are_right_everywhere(seed, flat):
    """On networks with slow and fast links as well, where plans may have a step more."""
    rng, kinds = random.Random(100 + seed), Counter()
    meshes = MESHES if flat else [(2, 3), (4, 2), (2, 4), (2, 2, 2), (3, 2, 2)]
    for source, target, before, after in programs(seed, 300, meshes=meshes, most=600):
        network = (
            FLAT
            if flat
            else Network(
                tuple(rng.choice([Link(1e-6, 1e-11), Link(1e-5, 1e-9)]) for _ in source.mesh)
            )
        )
        steps = plan_steps(before, after, network)
        tensors = contributions(rng, source, [m for m, _ in before.pending])
        found = run(
            steps,
            {device: read(tensors, device, indices) for device, indices in source.indices.items()},
            rng,
        )
        for m, op in before.reduced_to(after).items():
            tensors = REDUCE[op](tensors, axis=m, keepdims=True)
        for device, indices in target.indices.items():
            expected = read(tensors, device, indices)
            assert found[device].shape == expected.shape and (found[device] == expected).all(), (
                before,
                after,
                steps,
            )
        kinds.update(
            type(step).__name__ + " scatter" * getattr(step, "scatters", False) for step in steps
        )
        kinds["scattered, then moved"] += (
            len(steps) == 2 and getattr(steps[0], "scatters", False) and bool(steps[1].mesh_dims)
        )
        kinds["moved twice"] += (
            sum(isinstance(step, AllToAll) and bool(step.mesh_dims) for step in steps) == 2
        )
    expected = [
        "AllToAll",
        "Reduction",
        "Reduction scatter",
        "scattered, then moved",
        *([] if flat else ["moved twice"]),
    ]
    assert min(kinds[kind] for kind in expected) > 1, kinds


def test_a_reduction_that_stays_pending_is_not_mixed():
    """Two exchanges may cut, in between, a mesh dim that neither source nor target cut, but not one
    whose devices hold different contributions.
    """
    source, target = (
        placed(Sharding((16,), (2, 4), (cut, None), (0, 1))) for cut in ((0, 1), None)
    )
    network = Network((Link(0, 1e-9), Link(0, 1e-11)))
    assert collectives(plan_steps(source, target, network)) == 2
    ends = (replace(end, pending=((1, "sum"),)) for end in (source, target))
    (step,) = plan_steps(*ends, network)
    assert step.mesh_dims == (0,)


def test_at_most_two_collectives_and_no_more_than_the_naive_plan():
    """The naive plan: all-reduce every pending mesh dim, one after another, then move."""
    fewer = 0
    for source, target, before, after in programs(10, 600, most=600):
        steps, reduced = plan_steps(before, after, FLAT), before.reduced_to(after)
        assert (
            collectives(steps)
            == sum(isinstance(step, Reduction) or bool(step.mesh_dims) for step in steps)
            <= bool(reduced) + 1
        )
        have = source.indices
        most = max(indices.size for indices in have.values())
        naive = sum(-(-2 * (g - 1) * most // g) for g in (source.mesh[m] for m in reduced)) + max(
            lacking(have, target.indices).values()
        )
        assert received_by(steps) == sum(step.received_elements for step in steps) <= naive, (
            before,
            after,
        )
        fewer += received_by(steps) < naive
    assert fewer > 100


def test_nothing_pending_is_one_exchange_or_nothing():
    for *ends, _, _ in programs(11, 100):
        source, target = map(placed, ends)
        assert plan_steps(source, target, FLAT) == (
            () if source == target else (AllToAll(source, target),)
        )


def planned(shape, mesh, source, target, *pending):
    source, target = (
        placed(Sharding(shape, mesh, cuts, tuple(range(len(mesh)))), held)
        for cuts, held in ((source, pending), (target, ()))
    )
    return plan_steps(source, target, FLAT)


R, S0, S1 = None, (0, 1), (1, 1)


def test_known_plans_of_one_collective():
    """Each of the collectives by itself, where it is enough."""
    shape, n = (16, 24), 16 * 24

    (step,) = planned(shape, (4,), [R], [R], (0, "sum"))
    assert (
        isinstance(step, Reduction)
        and not step.scatters
        and step.received_elements == 2 * n * 3 // 4
    )

    for target in (S0, S1, (1, 3)):
        (step,) = planned(shape, (4,), [R], [target], (0, "avg"))
        assert (
            isinstance(step, Reduction)
            and step.scatters
            and step.even
            and step.divisor == 4
            and step.received_elements == n // 4 * 3
        )

    # Sizes that do not divide are scattered as well, block by block.
    (step,) = planned((10,), (4,), [R], [S0], (0, "max"))
    assert step.scatters and not step.even and step.op == "max" and step.received_elements == 3 * 3

    # Two mesh dims at once: 3/4 of the tensor twice, and not 1/2 four times.
    (step,) = planned(shape, (2, 2), [R, R], [R, R], (0, "sum"), (1, "avg"))
    assert (
        step.mesh_dims == (0, 1) and step.divisor == 2 and step.received_elements == 2 * n * 3 // 4
    )

    # What the other mesh dim cuts off is not reduced.
    (step,) = planned(shape, (2, 2), [R, R], [R, S0], (0, "sum"))
    assert (
        step.mesh_dims == (0,) and not step.scatters and step.received_elements == 2 * (n // 2) // 2
    )

    # Scalars and empty tensors.
    (step,) = planned((), (4,), [R], [R], (0, "sum"))
    assert not step.scatters
    assert collectives(planned((0, 3), (4,), [R], [S0], (0, "sum"))) == 0


def test_known_plans_of_several_collectives():
    """The smaller one first."""
    # Half the tensor is scattered; then the rows, now half as many, go where they belong.
    steps = planned((16, 24), (2, 2), [R, S0], [S1, R], (0, "sum"))
    assert (
        [type(step) for step in steps] == [Reduction, AllToAll]
        and steps[0].scatters
        and received_by(steps) == 16 * 24 // 4 + 16 * 24 // 4
    )

    # Two collectives rather than one, if they move less: half the tensor scattered, then half of
    # it, of two contributions left, all-reduced.
    steps = planned((16,), (2, 2), [R, R], [(0, 4), R], (0, "sum"), (1, "sum"))
    assert steps[0].scatters and collectives(steps) == 2 and received_by(steps) == 8 + 8

    # 3/4 of what there is scattered, on mesh dim 0 as the target wants it; the rest of the target
    # gathered.
    steps = planned((16, 8), (2, 2, 2), [R, R, S1], [(0, 4), R, R], (0, "sum"), (1, "sum"))
    assert steps[0].scatters and steps[1].gathers and received_by(steps) == 64 * 3 // 4 + 64 - 16

    # Mesh dim 0 is to cut what mesh dim 2 leaves: it may as well do so before the reduction. Of
    # sizes that do not divide it had better not always.
    assert received_by(planned((24,), (2, 2, 2), [R, R, S0], [S0, S0, S0], (1, "sum"))) == 6
    assert (
        received_by(planned((6, 7), (2, 2, 2), [R, (1, 2), R], [S0, S0, (1, 4)], (0, "sum"))) == 16
    )


def test_a_reduction_keeps_to_what_each_device_has():
    """Its target lies within its source, and either none or all of its mesh dims cut that. Every
    mesh dim that is pending is reduced once.
    """
    for source, _, before, after in programs(12, 300, most=600):
        steps = plan_steps(before, after, FLAT)
        reductions = [step for step in steps if isinstance(step, Reduction)]
        for step in reductions:
            dims, cut = {*step.mesh_dims}, {*step.target.cut}
            assert dims <= cut or cut.isdisjoint(dims)
            assert holds_all(step.shape, step.mesh, step.source.chains, step.target.chains)
        assert sorted(m for step in reductions for m in step.mesh_dims) == [
            m for m in before.reduced_to(after) if 0 not in source.shape
        ]


# -- within ----------------------------------------------------------------------------------------


def holds(source, target):
    return not any(lacking(source.indices, target.indices).values())


def pairs(seed, count, **options):
    """Shardings, and as often ones with more cuts at the end, before, or in between, so that some
    lie within others.
    """
    rng = random.Random(seed)
    for _ in range(count):
        source, target = drawn(rng, **options)
        if rng.random() < 0.5:
            source = target._replace(cuts=tuple(rng.choice([cut, None]) for cut in target.cuts))
        yield source, target


def test_within_up_to_64_devices_is_exact():
    answers = Counter()
    for source, target in pairs(20, 800, most=600):
        answer = holds_all(source.shape, source.mesh, source.chains, target.chains)
        assert answer == holds(source, target), (source, target)
        answers[answer] += 1
    assert min(answers.values()) > 100


def test_within_is_never_mistaken_on_more_devices():
    """There a no may only mean that the digits do not line up. The first devices and the last may
    have what they need, and others not.
    """
    source, target = (Sharding((29,), (66,), ((0, f),), (0,)) for f in (3, 1))
    assert not holds_all((29,), (66,), source.chains, target.chains)
    said = 0
    for source, target in pairs(
        21, 150, meshes=[(66,), (5, 14), (8, 16), (3, 5, 5), (2, 2, 17)], most=600
    ):
        if holds_all(source.shape, source.mesh, source.chains, target.chains):
            said += 1
            assert holds(source, target), (source, target)
    assert said > 20

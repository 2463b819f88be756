"""The exchange, run on all devices at once: every device ends with its target, and each missing
element moved once.
"""

import random
from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from enumeration import devices
from on_numpy import (
    Sharding,
    drawn,
    group_of,
    lacking,
    number,
    part_on,
    run_exchange,
    run_gather,
    shuffled,
)

from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.step import AllToAll
from cute_sharding.sharding.digits import digits


def between(source, target):
    return AllToAll(
        *(Placed.numbered(each.shape, each.mesh, each.chains) for each in (source, target))
    )


def cases(seed, count, **options):
    """(step, what each device holds, what it needs), as flat indices: the tensor's values,
    as well.
    """
    rng = random.Random(seed)
    for _ in range(count):
        source, target = drawn(rng, **options)
        yield between(source, target), source.indices, target.indices


def dividing(seed, count, **options):
    """Those where every device holds as much as the others."""
    for step, have, want in cases(seed, count, **options):
        if all(
            digits(n, chain, step.mesh) is not None
            for placed in step.ends
            for n, chain in zip(step.shape, placed.chains)
        ):
            yield step, have, want


def plain(shape, mesh, *cuts):
    return Sharding(shape, mesh, cuts, tuple(range(len(mesh))))


def total(received):
    return {device: sum(counts) for device, counts in received.items()}


def assert_same(after, want, step):
    for device in want:
        assert after[device].shape == want[device].shape, (step, device)
        assert (after[device] == want[device]).all(), (step, device)


def owners(have):
    """For every element, the devices that hold it."""
    result = defaultdict(set)
    for device, indices in have.items():
        for element in indices.flat:
            result[element].add(device)
    return result


# -- what arrives ----------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
def test_everyone_ends_with_the_target_and_receives_what_it_lacks(seed):
    for step, have, want in cases(seed, 250):
        after, received = run_exchange(step, have)
        assert_same(after, want, step)
        assert total(received) == lacking(have, want), step
        assert step.received_elements == max(total(received).values())


def test_among_peers_in_another_order(share):
    """As on a process group that numbers its ranks otherwise than the mesh."""
    rng = random.Random(10)
    for step, have, want in cases(11, share(200, 4)):
        after, received = run_exchange(step, have, shuffled(step, rng))
        assert_same(after, want, step)
        assert total(received) == lacking(have, want), step


def test_in_rounds(share):
    """A share of every message in each: of a tensor of one dim, as many elements from each peer, or
    one more.
    """
    rng = random.Random(13)
    for step, have, want in cases(14, share(250, 4)):
        step = replace(step, rounds=rng.randint(2, 6))
        after, received = run_exchange(
            step, have, shuffled(step, rng) if rng.random() < 0.2 else None
        )
        assert_same(after, want, step)
        assert total(received) == lacking(have, want), step
        if len(step.shape) == 1:
            assert all(
                max(counts) - min(counts) < len(group_of(step, device))
                for device, counts in received.items()
            ), (step, received)


def test_on_meshes_too_large_to_be_counted_out(share):
    """Above 64 devices the exchange goes by digits where it can, and otherwise takes mesh dims in
    that it might do without.
    """
    for step, have, want in cases(12, share(40, 4), meshes=[(66,), (5, 14), (3, 5, 5)], most=300):
        after, received = run_exchange(step, have)
        assert_same(after, want, step)
        assert total(received) == lacking(have, want), step


def test_empty_and_single_elements():
    """Sizes 0 and 1 in every place, on every small mesh."""
    for shape in ((0,), (1,), (0, 3), (5, 1)):
        for mesh in ((2,), (1, 2), (2, 2)):
            cuts = [None, *((d, f) for d in range(len(shape)) for f in (1, 2))]
            for source, target in product(product(cuts, repeat=len(mesh)), repeat=2):
                before, to = plain(shape, mesh, *source), plain(shape, mesh, *target)
                after, received = run_exchange(between(before, to), before.indices)
                assert_same(after, to.indices, (before, to))
                assert total(received) == lacking(before.indices, to.indices)


# -- among whom ------------------------------------------------------------------------------------


def test_no_mesh_dims_exactly_if_nothing_has_to_move(share):
    still = 0
    for step, have, want in cases(20, share(1500, 3), most=400):
        assert (step.mesh_dims == ()) == (not any(lacking(have, want).values())), step
        still += step.mesh_dims == () and step.source != step.target
    assert still > share(100, 3)


def received_from(step, device):
    """Every pair of the device and one that sends it something."""
    group = group_of(step, device)
    return [(device, peer) for peer, n in zip(group, part_on(step, device, group).receives) if n]


def test_mesh_dims_on_which_nothing_moves_take_no_part(share):
    """Where sizes divide: an element has to move on a mesh dim on which none that holds it has the
    coordinate of who needs it.

    Beyond those there are only the mesh dims of the spread, on which something may.
    """
    seen = 0
    for step, have, want in dividing(21, share(1200, 3), most=400):
        holding, needed = owners(have), set()
        for device, indices in want.items():
            for element in indices.flat:
                needed |= {
                    m
                    for m in range(len(step.mesh))
                    if all(owner[m] != device[m] for owner in holding[element])
                }
        assert {*step.mesh_dims} - {*step.exchange.spread} == needed, step
        met = [pair for device in have for pair in received_from(step, device)]
        moved = {m for device, peer in met for m in range(len(step.mesh)) if peer[m] != device[m]}
        assert needed <= moved <= {*step.mesh_dims}, step
        seen += bool(step.mesh_dims) and len(step.mesh_dims) < sum(n > 1 for n in step.mesh)
    assert seen > share(20, 3)


def sent(step, have):
    """How many elements each device sends to others."""
    parts = {device: part_on(step, device, group_of(step, device)) for device in have}
    return {
        device: sum(n for peer, n in zip(group_of(step, device), part.sends) if peer != device)
        for device, part in parts.items()
    }


def test_replicas_send_alike(share):
    """Devices that hold the same are asked for as much, if some dim of every message divides, as
    here.
    """
    seen = 0
    for step, have, _ in dividing(
        22,
        share(700, 4),
        meshes=[(2, 2), (4, 2), (2, 4), (2, 2, 2)],
        sizes=(64, 128, 3),
        most=128 * 64,
    ):
        alike = defaultdict(set)
        for device, n in sent(step, have).items():
            alike[have[device].tobytes()].add(n)
        assert all(len(counts) == 1 for counts in alike.values()), (step, alike.values())
        seen += bool(step.exchange.spread)
    assert seen > share(20, 4)


def test_what_replicas_send_differs_by_an_element_at_most():
    """Sizes dividing or not. And no rank is sent to by more of them than that takes."""
    rng = random.Random(23)
    seen = 0
    while seen < 100:
        n, mesh = rng.randint(5, 60), rng.choice([(2, 3), (3, 2), (4, 2)])
        source, target = (
            plain((n,), mesh, (0, rng.randint(1, 5)), None),
            plain((n,), mesh, rng.choice([None, (0, 1)]), (0, rng.randint(1, 5))),
        )
        step = between(source, target)
        if not step.exchange.spread:
            continue
        seen += 1
        parts = {device: part_on(step, device, group_of(step, device)) for device in devices(mesh)}
        for a in range(mesh[0]):
            outside = [
                [n for peer, n in zip(group_of(step, (a, b)), parts[a, b].sends) if peer[0] != a]
                for b in range(mesh[1])
            ]
            shares = [sum(some) for some in outside]
            assert max(shares) - min(shares) <= 1, (step, outside)
            asked = sum(any(column) for column in zip(*outside))
            assert sum(n > 0 for some in outside for n in some) < asked + mesh[1], (step, outside)


def test_replicas_are_asked_only_where_it_is_uneven_otherwise():
    """A mesh dim that cuts what the source leaves whole takes no part: every device can ask the
    replica of its own coordinate.
    """
    rows, columns, whole = (0, 1), (1, 1), None
    for source, target, dims, spread in [
        ((rows, whole), (whole, columns), (0,), ()),
        ((rows, whole), (columns, whole), (0,), ()),
        ((rows, whole), (columns, columns), (0,), ()),
        ((rows, whole), (whole, rows), (0, 1), (1,)),
        ((whole, rows), (rows, whole), (0, 1), (0,)),
        ((rows, whole), (rows, rows), (), ()),
    ]:
        step = between(plain((16, 16), (2, 4), *source), plain((16, 16), (2, 4), *target))
        assert (step.mesh_dims, step.exchange.spread) == (dims, spread), (source, target)


# -- as an all-gather ------------------------------------------------------------------------------


def test_an_all_gather_is_recognized_and_right(share):
    """Where sizes divide: exactly if each device's target is what its group has, in equal shares,
    and without an element twice.
    """
    found = 0
    for step, have, want in dividing(30, share(2500, 3), most=800):
        gathers = bool(step.mesh_dims)
        for device in have:
            shares = [have[peer].reshape(-1) for peer in group_of(step, device)]
            together = np.sort(np.concatenate(shares))
            gathers &= len({*map(len, shares)}) == 1 and np.array_equal(
                together, np.sort(want[device].reshape(-1))
            )
        assert step.gathers == gathers, step
        if gathers:
            found += 1
            assert_same(run_gather(step, have), want, step)
    assert found > share(100, 3)


def test_an_all_gather_of_sizes_that_do_not_all_divide_is_right(share):
    """It may be one if what does not divide stays as it is."""
    found = uneven = 0
    for step, have, want in cases(31, share(4000, 4), meshes=[(2, 2), (2, 3), (3, 2, 2)], most=400):
        if step.gathers:
            found += 1
            uneven += len({indices.size for indices in have.values()}) > 1
            assert_same(run_gather(step, have), want, step)
    assert found > share(100, 4) and uneven > share(10, 4)


# -- copies ----------------------------------------------------------------------------------------


def parts_of(source, target):
    step = between(source, target)
    return [part_on(step, device, group_of(step, device)) for device in devices(source.mesh)]


def test_what_lies_as_it_travels_is_not_copied():
    """From columns to rows: the rows for each device are a block of the source. From rows to
    columns: what each device sends is one of the target.
    """
    rows, columns = plain((8, 12), (4,), (0, 1)), plain((8, 12), (4,), (1, 1))
    for part in parts_of(columns, rows):
        assert part.packs[0] is None and len(part.unpacks[0]) == 1 and not part.kept()
    for part in parts_of(rows, columns):
        assert len(part.packs[0]) == 1 and part.unpacks[0] is None and not part.kept()
    for part in parts_of(rows, plain((8, 12), (4,), None)):
        assert part.unpacks[0] is None
    for part in parts_of(
        plain((4, 8, 12), (4,), (1, 1)), plain((4, 8, 12), (4,), (2, 1))
    ):  # neither: what stays is copied once
        assert part.packs[0] is not None and part.unpacks[0] is not None and len(part.kept()) == 1


@pytest.mark.parametrize("side", [4, 8, 16])
def test_copies_do_not_grow_with_the_devices(side):
    """Of a gather over two mesh dims whose blocks do not divide, where whole and short ones take
    turns.
    """
    rows = side * side + 3
    step = between(
        plain((rows, rows), (side, side), (0, 1), (1, 1)),
        plain((rows, rows), (side, side), None, None),
    )
    for device in ((0, 0), (side // 2, side // 2), (side - 1, side - 1)):
        part = part_on(step, device, group_of(step, device))
        assert len(part.unpacks[0]) <= 8 and len(part.packs[0]) <= 1 and len(part.kept()) <= 1


def test_no_buffer_without_need(share):
    """None only if the buffer, own part included, would be the tensor as it lies; and then always,
    if that is worth it: if the own part, which has to travel along, is the lesser, and no more is
    sent than there is. (Messages of several boxes go box by box, and may be copied though right.)
    """
    free = 0
    for step, have, want in cases(40, share(800, 4), most=400):
        if step.exchange.spread:
            continue  # which share each replica gives, only the step knows

        def message(sender, receiver):
            missing = (
                want[receiver]
                if sender == receiver
                else np.setdiff1d(want[receiver], have[receiver])
            )
            return np.intersect1d(have[sender], missing)

        def boxes(sender, receiver):
            rank = number(step, receiver)
            found = [step.flow.kept_by(rank)] if sender == receiver else step.flow.sent_to(rank)
            from_it = [m for m in found if m is not None and m.peer == number(step, sender)]
            return sum(len(message.copies) for message in from_it)

        for device in have:
            group = group_of(step, device)
            part = part_on(step, device, group)
            out, into = [(device, peer) for peer in group], [(peer, device) for peer in group]
            sent, taken = (
                np.concatenate([message(*ends) for ends in messages]) for messages in (out, into)
            )
            worth_it = (
                2 * message(device, device).size < len(sent) == len(taken) <= have[device].size
            )
            for copies, buffer, tensor, messages in (
                (part.packs[0], sent, have[device], out),
                (part.unpacks[0], taken, want[device], into),
            ):
                lies = np.array_equal(buffer, tensor.reshape(-1))
                assert (copies is None) <= lies, (step, device)
                if lies and worth_it and all(boxes(*ends) <= 1 for ends in messages):
                    assert copies is None, (step, device)
                    free += 1
    assert free > share(20, 4)

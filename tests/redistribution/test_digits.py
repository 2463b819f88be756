"""Digits of the row number: where they are given, they say of all devices what counting says of each. None claims nothing."""

import random
from itertools import product

from enumeration import chunk, rows_after

from cute_sharding.redistribution.digits import common, digits

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 2, 2), (4, 2, 3)]


def drawn(rng, n, mesh):
    """Some of the mesh dims, in some order, with split factors that divide more often than not."""
    mesh_dims = rng.sample(range(len(mesh)), rng.randint(0, len(mesh)))
    return tuple((m, rng.choice([1, 1, 2, 3, 4, 6, 8, 12, rng.randint(1, n + 2)])) for m in mesh_dims)


def rows_held(n, chain, mesh):
    """Of every device, the rows in their local order."""
    return {device: rows_after(n, tuple((f, mesh[m], device[m]) for m, f in chain)) for device in product(*map(range, mesh))}


def number(row, modes):
    """The number that the digits of a row make, outermost first."""
    result = 0
    for count, stride in modes:
        result = result * count + row // stride % count
    return result


def test_digits_are_the_owner_and_the_place_of_every_row():
    rng = random.Random(0)
    answered = 0
    for _ in range(2000):
        n, mesh = rng.choice((1, 2, 6, 12, 16, 24, 30, 36, 48, 60, 72)), rng.choice(MESHES)
        chain = drawn(rng, n, mesh)
        found = digits(n, chain, mesh)
        if found is None:
            continue
        answered += bool(chain)
        assert found.devices.keys() == {m for m, _ in chain}
        for device, rows in rows_held(n, chain, mesh).items():
            expected = [row for row in range(n) if all(number(row, modes) == device[m] for m, modes in found.devices.items())]
            assert list(rows) == expected, (n, chain, mesh)
            assert [number(row, found.local) for row in rows] == list(range(len(rows)))
    assert answered > 400


def test_one_cut_has_digits_exactly_if_its_blocks_are_of_one_size():
    for n, parts in product(range(25), (2, 3, 4, 5)):
        for split_factor in range(1, n + 3):
            sizes = {len(block) for piece in chunk(range(n), split_factor) if piece for block in chunk(piece, parts)}
            assert (digits(n, ((0, split_factor),), (parts,)) is not None) == (len(sizes) == 1), (n, split_factor, parts)


def test_powers_of_two_always_have_digits_to_compare():
    rng = random.Random(1)
    given = 0
    for _ in range(500):
        n, mesh = 2 ** rng.randint(0, 10), rng.choice([(2,), (4,), (2, 8), (4, 2, 2)])
        found = []
        for _ in range(2):
            chain, rows, divides = [], n, True
            for m in rng.sample(range(len(mesh)), rng.randint(0, len(mesh))):
                chain.append((m, 2 ** rng.randint(0, 3)))
                divides &= rows % (chain[-1][1] * mesh[m]) == 0
                rows //= mesh[m]
            found.append(digits(n, tuple(chain), mesh))
            assert found[-1] is not None or not divides, (n, chain, mesh)
        if None not in found:
            assert common(n, *found) is not None
            given += 1
    assert given > 200


def test_the_closed_form_is_the_count_of_the_busiest_device():
    """`common`: the fewest rows that a device keeps, and how many it needs, from the digits alone."""
    rng = random.Random(2)
    answers = []
    for _ in range(5000):
        n, mesh = rng.choice((2, 6, 8, 12, 16, 24, 30, 36, 48, 60, 72)), rng.choice(MESHES)
        one, other = drawn(rng, n, mesh), drawn(rng, n, mesh)
        found = digits(n, one, mesh), digits(n, other, mesh)
        answer = None if None in found else common(n, *found)
        if answer is None:
            continue
        before, after = rows_held(n, one, mesh), rows_held(n, other, mesh)
        assert {len(rows) for rows in after.values()} == {answer[1]}, (n, one, other, mesh)
        assert min(len({*before[device]} & {*after[device]}) for device in after) == answer[0], (n, one, other, mesh)
        answers.append(answer)
    # Of all kinds, and not by luck: nothing kept, some of it, all of it.
    assert min(sum(kept == 0 for kept, _ in answers), sum(0 < kept < need for kept, need in answers), sum(kept == need for kept, need in answers)) > 30

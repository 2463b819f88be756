"""Digits of the row number: where they are given, they say of all devices what counting says of
each. None claims nothing.
"""

import random
from collections import Counter
from itertools import permutations, product

from enumeration import chunk, rows_after

from cute_sharding.sharding.digits import common, digits

MESHES = [(2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 4), (2, 2, 2), (4, 2, 3)]


def drawn(rng, n, mesh):
    """Some of the mesh dims, in some order, with split factors that divide more often than not."""
    mesh_dims = rng.sample(range(len(mesh)), rng.randint(0, len(mesh)))
    return tuple(
        (m, rng.choice([1, 1, 2, 3, 4, 6, 8, 12, rng.randint(1, n + 2)])) for m in mesh_dims
    )


def rows_held(n, chain, mesh):
    """Of every device, the rows in their local order."""
    return {
        device: rows_after(n, tuple((f, mesh[m], device[m]) for m, f in chain))
        for device in product(*map(range, mesh))
    }


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
            expected = [
                row
                for row in range(n)
                if all(number(row, modes) == device[m] for m, modes in found.devices.items())
            ]
            assert list(rows) == expected, (n, chain, mesh)
            assert [number(row, found.local) for row in rows] == list(range(len(rows)))
    assert answered > 200


def test_one_cut_has_digits_exactly_if_its_blocks_are_of_one_size():
    for n, parts in product(range(25), (2, 3, 4, 5)):
        for split_factor in range(1, n + 3):
            sizes = {
                len(block)
                for piece in chunk(range(n), split_factor)
                if piece
                for block in chunk(piece, parts)
            }
            assert (digits(n, ((0, split_factor),), (parts,)) is not None) == (len(sizes) == 1), (
                n,
                split_factor,
                parts,
            )


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


def assert_counted(n, one, other, mesh):
    """Where there is a closed form, it is the count of every device; the form, or None."""
    found = digits(n, one, mesh), digits(n, other, mesh)
    answer = None if None in found else common(n, *found)
    if answer is not None:
        before, after = rows_held(n, one, mesh), rows_held(n, other, mesh)
        assert {len(rows) for rows in after.values()} == {answer[1]}, (n, one, other, mesh)
        assert min(len({*before[device]} & {*after[device]}) for device in after) == answer[0], (
            n,
            one,
            other,
            mesh,
        )
    return answer


def test_the_closed_form_is_the_count_of_the_busiest_device():
    """`common`: the fewest rows that a device keeps, and how many it needs, from the
    digits alone.
    """
    rng = random.Random(2)
    answers = []
    for _ in range(5000):
        n, mesh = rng.choice((2, 6, 8, 12, 16, 24, 30, 36, 48, 60, 72)), rng.choice(MESHES)
        answer = assert_counted(n, drawn(rng, n, mesh), drawn(rng, n, mesh), mesh)
        answers += [answer] if answer is not None else []
    # Of all kinds: nothing kept, some of it, all of it.
    kinds = Counter(
        "none" if kept == 0 else "all" if kept == need else "some" for kept, need in answers
    )
    assert min(kinds[kind] for kind in ("none", "some", "all")) > 30


def test_the_closed_form_of_every_pair_on_one_mesh():
    """16 rows on 2 x 4 devices: coordinates of two digits of the row number, apart or side by side,
    and shared in part.
    """
    orders = [order for size in range(3) for order in permutations(range(2), size)]
    chains = [
        tuple(zip(order, factors))
        for order in orders
        for factors in product((1, 2, 4, 8), repeat=len(order))
    ]
    assert (
        sum(
            assert_counted(16, one, other, (2, 4)) is not None for one in chains for other in chains
        )
        > 400
    )

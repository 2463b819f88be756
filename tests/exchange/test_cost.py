"""What going from one sharding to another costs, against counting on every device."""

import random
from itertools import product
from math import prod

import pytest
from enumeration import devices, held
from on_numpy import MESHES, drawn, lacking

from cute_sharding.exchange.placed import local_elements, most_local, received, received_elements
from cute_sharding.sharding.digits import common, digits


def cases(seed, count, **options):
    rng = random.Random(seed)
    for _ in range(count):
        yield drawn(rng, **options)


def of(source, target):
    return received(source.shape, source.chains, target.chains, source.mesh)


def busiest(source, target):
    return max(lacking(source.indices, target.indices).values())


@pytest.mark.parametrize(
    "meshes, count",
    [
        (MESHES, 600),
        ([(64,), (61,), (8, 8), (4, 4, 4), (3, 21), (2, 2, 2, 2, 2, 2), (1, 5, 7)], 120),
    ],
)
def test_received_elements_up_to_64_devices(meshes, count):
    nothing = 0
    for source, target in cases(0, count, meshes=meshes, most=600):
        wanted = busiest(source, target)
        assert of(source, target) == wanted, (source, target)
        if source.order == target.order == tuple(range(len(source.mesh))):
            assert received_elements(source.shape, source.cuts, target.cuts, source.mesh) == wanted
        nothing += wanted == 0
    assert 0 < nothing < 0.6 * count


def test_received_elements_of_more_devices():
    """Where the digits line up, exact; elsewhere what some device does receive: never more than the
    busiest.
    """
    rng, exact = random.Random(1), 0
    for _ in range(200):
        mesh = rng.choice([(66,), (5, 14), (8, 16), (3, 5, 5), (2, 64)])
        source, target = drawn(
            rng, meshes=[mesh], sizes=(prod(mesh), 2 * prod(mesh), 4, 7), most=600
        )
        found = [
            (digits(n, a, mesh), digits(n, b, mesh))
            for n, a, b in zip(source.shape, source.chains, target.chains)
        ]
        wanted = busiest(source, target)
        if all(
            one and other and common(n, one, other) for n, (one, other) in zip(source.shape, found)
        ):
            exact += wanted > 0
            assert of(source, target) == wanted, (source, target)
        else:
            assert of(source, target) <= wanted, (source, target)
    assert exact > 20


def test_known_costs():
    """All-gather: all but one's own. Scatter of a replicated tensor: nothing. All-to-all: all but
    one's own of a p-th.
    """
    assert received_elements((64, 32), ((0, 1),), (None,), (8,)) == 64 * 32 * 7 // 8
    assert received_elements((64, 32), (None,), ((1, 1),), (8,)) == 0
    assert received_elements((64, 32), ((0, 1),), ((1, 1),), (8,)) == 64 * 32 // 8 * 7 // 8
    assert (
        received_elements((2**40, 2**30), ((0, 1), (0, 1)), ((0, 1), (1, 1)), (2**10, 2**10))
        == 2**50 - 2**40
    )
    assert received_elements((), (None,), (None,), (8,)) == 0
    assert received_elements((0, 5), ((1, 1),), (None,), (2,)) == 0


def test_local_elements():
    """Device 0 need not hold the most. Of 9 rows the halves have 5 and 4; split factor 4 deals the
    5 as 2, 2, 1, of which the first of two devices gets 3, and the 4 as single rows, of which it
    gets them all.
    """
    for n, mesh in product(range(13), [(2, 2), (2, 3), (3, 2)]):
        for factors in product(range(1, n + 1), repeat=2):
            cuts = tuple((0, f) for f in factors)
            assert local_elements((n,), cuts, mesh) == max(
                held((n,), mesh, cuts, device).size for device in devices(mesh)
            ), (n, mesh, cuts)
    for source, _ in cases(2, 400, most=600):
        assert most_local(source.shape, source.chains, source.mesh) == max(
            indices.size for indices in source.indices.values()
        ), source

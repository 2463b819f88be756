"""The search for placements that make a view free: its answers are free, and none is cheaper."""

import random
from itertools import product

from enumeration import factorizations, signature

from cute_sharding.exchange import received_elements
from cute_sharding.propagation.views import carry, cheapest, unblocked
from cute_sharding.relations.table import BY_OP


def drawn(rng, meshes, sizes=(12, 18, 24, 30, 36, 48)):
    """Views that are not free, with all the cuts that the input could have."""
    n = rng.choice(sizes)
    shapes = [s for rank in range(1, 4) for s in factorizations(n, rank)]
    while True:
        shape, target, mesh = rng.choice(shapes), rng.choice(shapes), rng.choice(meshes)
        options = [None] + [(d, f) for d in range(len(shape)) for f in range(1, shape[d] + 1)]
        cuts = tuple(rng.choice(options) for _ in mesh)
        view = BY_OP["Tensor.view"].view(shape, target)
        if carry(view, cuts, mesh).blocked is not None:
            return view, cuts, mesh, options


def busiest(before, after):
    return max((wanted & ~held).bit_count() for held, wanted in zip(before, after, strict=True))


def test_answers_are_free_and_none_is_cheaper():
    rng = random.Random(0)
    checked = 0
    while checked < 250:
        view, cuts, mesh, options = drawn(rng, [(2,), (3,), (4,), (2, 2)])
        if len(options) ** len(mesh) > 700:
            continue
        checked += 1
        before = signature(view.input_shape, mesh, cuts)
        best = cheapest(view, cuts, mesh)
        assert carry(view, best.source, mesh).cuts == best.output
        assert busiest(before, signature(view.input_shape, mesh, best.source)) == best.received
        least = min(
            busiest(before, signature(view.input_shape, mesh, source))
            for source in product(options, repeat=len(mesh))
            if carry(view, source, mesh).blocked is None
        )
        assert best.received == least, (view.input_shape, view.output_shape, mesh, cuts, best)


def test_received_elements_by_enumeration():
    rng = random.Random(1)
    for _ in range(300):
        view, source, mesh, options = drawn(rng, [(2,), (5,), (2, 3), (2, 2, 2)])
        target = tuple(rng.choice(options) for _ in mesh)
        wanted = busiest(
            signature(view.input_shape, mesh, source), signature(view.input_shape, mesh, target)
        )
        assert received_elements(view.input_shape, source, target, mesh) == wanted


def test_what_must_stay_stays():
    view = BY_OP["Tensor.view"].view((8, 48), (8, 2, 24))
    # Mesh dim 0 carries a pending reduction: it may not start to shard. Dim 0 is not to be sharded.
    for fixed, unsharded in product(([], [0]), ([], [0])):
        cuts: tuple = (None, (1, 1))
        source = cheapest(view, cuts, (2, 4), fixed=fixed, unsharded=unsharded).source
        assert source[0] is None or not fixed
        assert all(cut is None or cut[0] not in unsharded for cut in source)


def test_never_dearer_than_replicating_what_is_in_the_way():
    """Also where the search has no budget for as many changes."""
    shape, mesh = (7, 11, 13, 5), (2,) * 6
    view = BY_OP["Tensor.view"].view(shape, (7 * 11, 13 * 5))
    cuts = ((0, 1), (2, 1), (0, 1), (2, 1), (0, 1), (3, 1))
    kept, _ = unblocked(view, cuts, mesh)
    assert sum(a != b for a, b in zip(kept, cuts)) > 2
    found = cheapest(view, cuts, mesh)
    assert carry(view, found.source, mesh).cuts == found.output
    assert found.received <= received_elements(shape, cuts, kept, mesh)


def test_search_is_bounded():
    """Six dims on six mesh dims: still an answer that beats replicating what is in the way, within
    the budget of steps.
    """
    shape = (48,) * 6
    view = BY_OP["Tensor.view"].view(shape, (*shape[:-1], 2, 24))
    cuts = ((5, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1))
    mesh = (4, 2, 2, 2, 2, 2)
    assert carry(view, cuts, mesh).blocked is not None
    best = cheapest(view, cuts, mesh)
    assert carry(view, best.source, mesh).blocked is None
    assert best.received < received_elements(shape, cuts, (None, *cuts[1:]), mesh)

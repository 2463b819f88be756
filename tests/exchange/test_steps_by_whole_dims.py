"""Steps of strided shards, as collectives of whole dims of the same tensor with more dims: what
each device then holds is counted element by element.
"""

import random
from itertools import product
from math import prod

import numpy as np
import pytest
from enumeration import dealt
from on_numpy import packed

from cute_sharding.exchange import Placed
from cute_sharding.exchange.step import AllToAll, Reduction, with_a_dim_for_each_cut


def elements(placed, device):
    """The elements that a device holds, one by one, in its local order."""
    rows = []
    for n, chain in zip(placed.shape, placed.chains):
        some = list(range(n))
        for m, factor in chain:
            some = dealt(some, factor, placed.mesh.sizes[m], device[m])
        rows.append(some)
    return np.arange(prod(placed.shape)).reshape(placed.shape)[np.ix_(*rows)]


def drawn_ends(draw):
    mesh = draw.choice([(2, 2), (2, 4), (4, 2), (3, 2), (2, 2, 2), (1, 4)])
    shape = tuple([draw.choice([1, 4, 8, 12, 16, 24, 48]) for _ in range(draw.choice([1, 2]))])

    def cuts():
        chains = [()] * len(shape)
        for m in draw.sample(range(len(mesh)), draw.randint(0, len(mesh))):
            d = draw.randrange(len(shape))
            chains[d] += ((m, draw.choice([1, 1, 2, 4])),)
        return tuple(chains)

    whole = Placed.numbered(shape, mesh, ((),) * len(shape))
    return whole.cut_as(cuts()), whole.cut_as(cuts())


def test_the_view_is_of_the_same_elements_in_the_same_order():
    draw, viewed = random.Random(0), 0
    for _ in range(2_000):
        ends = drawn_ends(draw)
        more = with_a_dim_for_each_cut(*ends)
        if more is None:
            continue
        viewed += len(more[0].shape) > len(ends[0].shape)
        for one, other in zip(ends, more):
            assert all(factor == 1 for chain in other.chains for _, factor in chain)
            for device in product(*map(range, one.mesh.sizes)):
                assert [*elements(one, device).flat] == [*elements(other, device).flat]
    assert viewed > 200


@pytest.mark.parametrize("pieces", [2, 3])
def test_gathers_and_scatters_of_strided_shards_are_native(pieces):
    """A flattened (batch, sequence), of which one mesh dim has the batch and one the sequence."""
    rows = Placed.numbered((48 * pieces, 5), (2, 4), (((0, 1), (1, 2 * pieces)), ()))
    outer = rows.cut_as((((0, 1),), ()))
    gather = AllToAll(rows, outer)
    assert gather.along is None
    found = gather.by_whole_dims.along
    assert found is not None and found.even and found.scattered is None
    assert found.mesh_dims == (1,)
    scatter = Reduction(outer, rows, mesh_dims=(1,))
    found = scatter.by_whole_dims.along
    assert found is not None and found.even and found.gathered is None


def test_what_has_no_such_view_stays_itself():
    rows = Placed.numbered((10,), (2, 2), (((0, 1), (1, 2)),))  # blocks of 3 and 2
    uneven = AllToAll(rows, rows.cut_as((((0, 1),),)))
    assert uneven.by_whole_dims is uneven
    plain = AllToAll(rows.cut_as((((0, 1),),)), rows.cut_as(((),)))
    assert plain.along is not None and plain.by_whole_dims is plain
    crossed = Placed.numbered((12,), (2, 3), (((0, 1),),))
    across = AllToAll(crossed, crossed.cut_as((((1, 1),),)))
    assert across.by_whole_dims is across


def blocks_of(how, local, parts):
    """What a rank of a graph gives each rank of its group."""
    shape = [*local.shape]
    shape[how.scattered : how.scattered + 1] = [parts, shape[how.scattered] // parts]
    return np.moveaxis(local.reshape(shape), how.scattered, 0).reshape(parts, -1)


def test_messages_are_the_blocks_that_graphs_trade():
    """Ranks that run compiled meet ranks that run eagerly, which pack the step as it is."""
    draw, traded, strided = random.Random(1), 0, 0
    for _ in range(8_000):
        source, target = drawn_ends(draw)
        step = AllToAll(source, target)
        natively = step.by_whole_dims
        how = natively.along
        if how is None or how.dim_of_blocks is not None or not how.even:
            continue
        traded, strided = traded + 1, strided + (natively is not step)
        for rank in step.source.mesh.ranks:
            peers = step.group(rank)
            assert peers == natively.group(rank)
            local = elements(source, step.place(rank)).astype(float)
            blocks = blocks_of(how, local.reshape(natively.shapes_on(rank)[0]), len(peers))
            order = [coordinate(step.place(peer), how.mesh_dims, step.mesh) for peer in peers]
            part = step.transfer(rank, peers)
            sent = np.split(packed(part, local), np.cumsum(part.sends)[:-1])
            for peer, place, message in zip(peers, order, sent):
                assert peer == rank or [*message] == [*blocks[place]], (source, target)
    assert traded > 100 and strided > 30


def coordinate(device, dims, sizes):
    found = 0
    for m in dims:
        found = found * sizes[m] + device[m]
    return found

"""Concatenations of pieces give what strided copies write, whatever memory the operands lie in."""

from itertools import permutations, product
from math import prod

import numpy as np
import pytest

from cute_sharding.exchange.exchange import Exchange, identity
from cute_sharding.exchange.flow import Copy
from cute_sharding.exchange.part import MOST, in_order, join_copies
from cute_sharding.exchange.placed import Placed
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding import Replicate, Shard, Sharding


def strided(memory, sizes, strides, first):
    at = first + sum(
        (np.arange(n).reshape(-1, *[1] * (len(sizes) - i - 1)) * step)
        for i, (n, step) in enumerate(zip(sizes, strides))
    )
    return memory[at]


def concatenation(found, memories, shape):
    pieces = [strided(memories[p.of], p.sizes, p.strides, p.first) for p in found.pieces]
    whole = np.concatenate(pieces, found.dim)
    assert found.shape in (None, shape) and (found.shape is not None or whole.shape == shape)
    return whole.reshape(shape)


def written(copies, tensors, shape):
    made = np.full(shape, -1)
    for of, copy in copies:
        for at in product(*map(range, copy.sizes)):
            x, y = (
                tuple(
                    start + sum(i * step[d] for i, step in zip(at, steps))
                    for d, start in enumerate(begin)
                )
                for begin, steps in ((copy.x, copy.dx), (copy.y, copy.dy))
            )
            made[y] = tensors[of][x]
    return made


def layouts(shape, order):
    """A tensor of those sizes whose dims lie in that order in memory, that, and its strides."""
    lies = np.arange(prod(shape)).reshape([shape[d] for d in order])
    tensor = lies.transpose([order.index(d) for d in range(len(shape))])
    return tensor, lies.reshape(-1), tuple(n // tensor.itemsize for n in tensor.strides)


MOVES = [
    BY_OP["Tensor.__getitem__"].move((16, 6, 4), 0, 1, None),
    BY_OP["Tensor.__getitem__"].move((16, 6, 4), 1, 1, 5),
    BY_OP["torch.split"].move((16, 6, 4), 6, 0),
    BY_OP["torch.split"].move((4, 3, 12), 4, 2),
    BY_OP["torch.roll"].move((16, 6, 4), 3, 0),
    identity((16, 6, 4)),
]


@pytest.mark.parametrize("move", MOVES, ids=range(len(MOVES)))
@pytest.mark.parametrize("cuts", [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(2), Shard(2))])
def test_pieces_are_what_copies_write(move, cuts):
    before, after = cuts
    source = Placed.of(Sharding(move.inputs[0], (3,), (before,)))
    targets = tuple([Placed.of(Sharding(shape, (3,), (after,))) for shape in move.outputs])
    exchange, looked_at = Exchange(move, (source,), targets), 0
    for rank, order in product(range(3), permutations(range(3))):
        part = exchange.part(rank, range(3))
        tensor, memory, strides = layouts(part.source_shape(), order)
        received = -2 - np.arange(sum(part.receives))
        tensors = {0: tensor, None: received}
        every = [*zip(part.made, part.target_shapes), (part.sent, (sum(part.sends),))]
        for found, (copies, shape) in zip(part.joined(strides), every, strict=True):
            assert found is None or copies is not None
            if found is not None:
                made = concatenation(found, {0: memory, None: received}, shape)
                assert (made == written(copies, tensors, shape)).all()
                looked_at += 1
    assert looked_at


def test_what_is_no_concatenation():
    row, turned = (
        Copy((4,), (0,), ((1,),), (0,), ((1,),)),
        Copy((4,), (3,), ((-1,),), (0,), ((1,),)),
    )
    assert in_order([(0, row)], (4,)) == ((0, row),)
    assert in_order([(0, row)], (5,)) is None  # a gap behind it
    assert in_order([(0, row), (1, row)], (8,)) is None  # twice to one place
    assert join_copies(((0, turned),), [(1,)], (4,)) is None  # torch has no strides below 0
    many = [(0, Copy((), (k,), (), (k,), ())) for k in range(MOST + 1)]
    assert in_order(many[:MOST], (MOST,)) is not None and in_order(many, (MOST + 1,)) is None


def test_slices_of_a_cut_dim_are_two_pieces():
    """What a device keeps, and what it receives: no copy of either, and one concatenation."""
    move = BY_OP["Tensor.__getitem__"].move((16, 8), 0, 1, None)
    source, target = (Placed.of(Sharding((n, 8), (4,), (Shard(0),))) for n in (16, 15))
    part = Exchange(move, (source,), (target,)).part(1, range(4))
    made, sent = part.joined((8, 1))
    assert [piece.of for piece in made.pieces] == [0, None] and made.shape is None
    assert [(piece.sizes, piece.first) for piece in sent.pieces] == [((8,), 0)]


def test_parts_of_a_replica_are_views_of_it():
    move = identity((8, 4))
    source, target = (Placed.of(Sharding((8, 4), (2,), (p,))) for p in (Replicate(), Shard(0)))
    (made, _) = Exchange(move, (source,), (target,)).part(1).joined((4, 1))
    assert made.pieces[0].first == 16 and len(made.pieces) == 1

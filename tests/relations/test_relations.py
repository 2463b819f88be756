"""Relations beside enumeration: of drawn programs, what torch makes of index arrays."""

import random
from math import prod

import pytest
import torch
from drawn_moves import (
    carried_out,
    counted_out,
    drawn_program,
    drawn_step,
    numbered,
    relation_of_step,
)

from benchmarks.views import MODEL_VIEWS
from cute_sharding.relations import (
    ReadTwice,
    Relation,
    compose,
    filled,
    inverse,
    piece,
)
from cute_sharding.relations.table import relation_of


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, 1500, 100))
def test_drawn_programs(first):
    for seed in range(first, first + 100):
        program = drawn_program(seed)
        relation = program.relation()
        given = numbered(program.shapes)
        wanted = program(given)
        assert relation.is_total, seed
        for found, want in zip(carried_out(relation, given), wanted, strict=True):
            assert torch.equal(found, want), (seed, program)


def drawn_chain(rng, count):
    """Relations of one operand and one result each, one behind the other."""
    shape = tuple(rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.choice([1, 2, 3])))
    found = []
    while len(found) < count:
        step = drawn_step(rng, [shape])
        if step is None:
            return found
        relation = relation_of_step(step, [shape])
        if len(relation.inputs) > 1:  # of one tensor several times
            pieces = [each._replace(source=min(each.source, 0)) for each in relation.pieces]
            relation = Relation(relation.inputs[:1], relation.outputs, tuple(pieces))
        relation = relation.of(step.result)
        found.append(relation)
        (shape,) = relation.outputs
        if not shape:
            return found
    return found


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_composition_is_associative(first):
    for seed in range(first, first + 100):
        chain = drawn_chain(random.Random(seed), 3)
        if len(chain) == 3:
            a, b, c = chain
            one, other = compose(compose(a, b), c), compose(a, compose(b, c))
            assert counted_out(one) == counted_out(other), seed
            assert (one.inputs, one.outputs) == (other.inputs, other.outputs)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_inverses(first):
    had = 0
    for seed in range(first, first + 100):
        for relation in drawn_chain(random.Random(seed), 3):
            said = counted_out(relation)
            read = [place for place in said.values() if place[0] is not None]
            if len({*read}) < len(read):
                with pytest.raises(ReadTwice, match="is in several places of the results"):
                    inverse(relation)
            else:
                had += 1
                back = inverse(relation)
                turned = {place: at for at, place in said.items() if place[0] is not None}
                assert counted_out(back) == turned
                moved = [each for each in relation.pieces if each.source >= 0]
                assert counted_out(inverse(back)) == counted_out(
                    Relation(relation.inputs, relation.outputs, tuple(moved))
                )
            some = counted_out(inverse(relation, any_copy=True))
            assert {*some} == {*read} and all(said[at] == place for place, at in some.items())
    assert had > 50


def test_the_inverse_of_a_movement_is_its_gradient():
    x = torch.randn(6, 5, requires_grad=True)
    y = torch.nn.functional.pad(x[1:5:2].flip(1), (1, 0))
    relation = relation_of("Tensor.__getitem__", (6, 5), 0, 1, 5, 2)
    relation = relation.then(relation_of("torch.flip", (2, 5), (1,)))
    relation = relation.then(relation_of("torch.nn.functional.pad", (2, 5), (1, 0)))
    assert relation.outputs == (tuple(y.shape),)
    given = torch.arange(1, y.numel() + 1).reshape(y.shape)
    y.backward(given.float())
    back = filled(inverse(relation), 0)
    assert torch.equal(carried_out(back, [given])[0], x.grad.long())


# -- sizes of models -------------------------------------------------------------------------------


@pytest.mark.parametrize("what, shape, target", [case[:3] for case in MODEL_VIEWS])
def test_a_view_is_one_piece(what, shape, target):
    relation = relation_of("Tensor.view", shape, target)
    assert relation.pieces == (piece(0, 0, 0, 0, [(prod(shape), 1, 1)]),)
    back = relation.then(relation_of("Tensor.view", target, shape))
    assert back == Relation.same(shape)


@pytest.mark.parametrize("case", MODEL_VIEWS, ids=lambda case: case[0])
def test_views_of_models_after_a_permutation(case):
    """Of fewer rows, element by element."""
    shape, target = small(case[1], case[2])
    order = tuple(reversed(range(len(target))))
    relation = relation_of("Tensor.view", shape, target).then(
        relation_of("torch.permute", target, order)
    )
    (given,) = numbered([shape])
    assert torch.equal(carried_out(relation, [given])[0], given.view(target).permute(order))
    assert len(relation.pieces) == 1


def small(shape, target):
    """The same view of a tensor of fewer elements, by halving dims that both shapes have."""
    shape, target = list(shape), list(target)
    while prod(shape) > 3000:
        pairs = [
            (i, j, k)
            for k in (2, 3, 5, 7, 167)
            for i, n in enumerate(shape)
            for j, m in enumerate(target)
            if n % k == m % k == 0
        ]
        i, j, k = max(pairs, key=lambda pair: shape[pair[0]])
        shape[i] //= k
        target[j] //= k
    return tuple(shape), tuple(target)


def test_cost_grows_with_modes_and_not_with_elements():
    big = (4096, 4096)
    turned = relation_of("torch.permute", big, (1, 0))
    heads = turned.then(relation_of("Tensor.view", big, (32, 128, 4096)))
    assert len(heads.pieces) == 1
    some = heads.then(relation_of("Tensor.__getitem__", (32, 128, 4096), 2, 5, 4000, 3))
    some = some.then(relation_of("torch.permute", (32, 128, 1332), (2, 0, 1)))
    assert len(some.pieces) == 1
    assert turned.then(turned) == Relation.same(big)


def test_what_is_cut_out_of_a_flat_view_stays_one_piece():
    """In the rows of (3, 5) it is three boxes: an end, a whole row, a start."""
    relation = relation_of("Tensor.view", (3, 5), (15,))
    relation = relation.then(relation_of("Tensor.__getitem__", (15,), 0, 2, 11))
    relation = relation.then(relation_of("Tensor.view", (9,), (3, 3)))
    assert relation.pieces == (piece(0, 0, 2, 0, [(9, 1, 1)]),)


def test_a_cat_of_what_was_split_is_what_it_was():
    split = relation_of("torch.split", (8, 6), 2, 0)
    assert compose(split, relation_of("torch.cat", [(2, 6)] * 4, 0)) == Relation.same((8, 6))
    columns = compose(
        relation_of("torch.split", (8, 6), 2, 1), relation_of("torch.cat", [(8, 2)] * 3, 1)
    )
    assert counted_out(columns) == counted_out(Relation.same((8, 6)))
    assert len(columns.pieces) == 1


def test_constants_are_kept_and_each_is_there_once():
    pad = relation_of("torch.nn.functional.pad", (3,), (1, 0), 7.0)
    twice = pad.then(relation_of("torch.nn.functional.pad", (4,), (0, 2), 7.0))
    other = twice.then(relation_of("torch.nn.functional.pad", (6,), (0, 1), 7))
    assert other.constants == (7.0, 7) and len({*map(type, other.constants)}) == 2
    assert carried_out(other, [torch.arange(3)])[0].tolist() == [7, 0, 1, 2, 7, 7, 7]


def test_relations_of_other_shapes():
    with pytest.raises(ValueError, match="cannot compose the relations"):
        compose(Relation.same((4,)), Relation.same((5,)))

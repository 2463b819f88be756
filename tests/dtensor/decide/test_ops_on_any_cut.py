"""Small programs of ops beside views on drawn cuts, forward and backward, as on one device: by
signatures, and by the gate alone.
"""

import random
from itertools import product

import pytest
import torch
from drawing import draw_placements
from op_programs import (
    DRAWS,
    GATED,
    MESHES,
    PROGRAMS,
    assert_close,
    compare,
    compare_on_torchs,
    index,
    values,
)
from simulation import assert_holds, distribute, plain, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding


def on_any_cut(name, mesh):
    """(program, values, placements) of which one at least is strided."""
    function, *shapes = PROGRAMS[name]
    fulls = [shape if isinstance(shape, torch.Tensor) else values(*shape) for shape in shapes]
    rng = random.Random(f"{name} {mesh}")
    done = 0
    while done < DRAWS:
        placements = [draw_placements(rng, mesh, tuple(full.shape)) for full in fulls]
        if name in GATED:  # of plain shards torch makes what it likes
            placements = [
                [Replicate() if type(p) is Shard else p for p in some] for some in placements
            ]
        if any(isinstance(p, _StridedShard) for some in placements for p in some):
            done += 1
            yield function, fulls, placements


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_any_cut(name, mesh):
    with ranks_of(mesh):
        for function, fulls, placements in on_any_cut(name, mesh):
            compare(function, fulls, mesh, placements, f"{name} on {mesh}: {placements}")


# Without its signature torch derives the rule of attention by trying all placements.
LONG = [name for name in PROGRAMS if name.startswith("attention")]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.costly) if name in LONG else name for name in PROGRAMS],
)
def test_on_any_cut_without_signatures(name, mesh):
    """The gate stands before all that torch is not known to get right. What torch has no rule for,
    or refuses where strided shards are replicated, raises.
    """
    with ranks_of(mesh):
        for function, fulls, placements in on_any_cut(name, mesh):
            case = f"{name} on {mesh}: {placements}"
            try:
                compare(function, fulls, mesh, placements, case, ops=False)
            except RuntimeError:
                plainer = [
                    [Replicate() if isinstance(p, _StridedShard) else p for p in some]
                    for some in placements
                ]
                with pytest.raises(RuntimeError):
                    compare_on_torchs(function, fulls, mesh, plainer, case)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "loss" in name or "bce" in name])
@pytest.mark.parametrize("ops", [True, False])
def test_losses_on_blocks_of_different_sizes(name, ops):
    function, *shapes = PROGRAMS[name]
    fulls = [shape if isinstance(shape, torch.Tensor) else values(*shape) for shape in shapes]
    placements = [[Shard(fulls[0].ndim - 1)], [Replicate()]]
    with ranks_of((2,)):
        compare(function, fulls, (2,), placements, name, ops=ops)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "one image" in name])
def test_rows_of_one_image_are_no_channels(name, dim):
    """Torch takes the second dim for channels whether or not there is one for several images."""
    function, shape = PROGRAMS[name]
    with ranks_of((2,)):
        compare(function, [values(*shape)], (2,), [[Shard(dim)]], name)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
def test_what_is_the_greatest_of_uneven_blocks_stays_pending(mesh):
    """Nothing is received for it; and among others is what is among any device's."""
    x, others = values(7, 5), torch.arange(3, 85, 2)
    cut = [Shard(0)] + [Replicate()] * (len(mesh) - 1)
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        for op in (torch.amax, torch.amin):
            given = distribute(x, mesh, cut).requires_grad_()
            result = op(given, 0)
            assert result.placements[0].is_partial()
            assert_close(result, op(x, 0), op.__name__)
            (gradient,) = torch.autograd.grad(result.sum(), given)
            with plain():
                leaf = x.clone().requires_grad_()
                (wanted,) = torch.autograd.grad(op(leaf, 0).sum(), leaf)
            assert_close(gradient, wanted, op.__name__)
        # Fewer results than elements to be gathered: to reduce them is cheaper.
        numbers, whole = torch.arange(6).reshape(2, 3), [Replicate()] * len(mesh)
        for invert in (False, True):
            found = torch.isin(
                distribute(numbers, mesh, whole).detach(),
                distribute(others, mesh, cut).detach(),
                invert=invert,
            )
            assert found.placements[0].is_partial() != invert
            assert_close(found, torch.isin(numbers, others, invert=invert), f"isin {invert}")
            assert_close(~found, ~torch.isin(numbers, others, invert=invert), "not")


# (the op along a dim, the shape that it is given): of each torch's own rule compares the dim with
# those that are cut, which are counted from the front.
ALONG = {
    "cumsum": (lambda x, d: x.cumsum(d), (4, 8)),
    # torch's gradient of cumprod mixes DTensors with plain tensors, and raises.
    "cumprod": (lambda x, d: x.detach().cumprod(d) + x, (4, 8)),
    "logcumsumexp": (lambda x, d: x.logcumsumexp(d), (4, 8)),
    "cumulative_trapezoid": (lambda x, d: torch.cumulative_trapezoid(x, dim=d), (4, 8)),
    "slice": (lambda x, d: x.narrow(d, 1, 2), (4, 8)),
    "select": (lambda x, d: x.select(d, 1), (4, 8)),
    "argmax": (lambda x, d: x.argmax(d) + x.sum(d), (4, 8)),
    "argmin": (lambda x, d: x.argmin(d, keepdim=True) + x.sum(d, keepdim=True), (8, 4)),
    "slice's gradient": (
        lambda x, d: torch.ops.aten.slice_backward(x, [6, 4] if d == -2 else [4, 6], d, 1, 5, 1),
        (4, 4),
    ),
    "select's gradient": (
        lambda x, d: torch.ops.aten.select_backward(x, [3, 4, 8] if d == -3 else [4, 8, 3], d, 1),
        (4, 8),
    ),
}


@pytest.mark.parametrize("movement", [False, True])
@pytest.mark.parametrize("name", ALONG)
def test_dims_that_are_counted_from_the_end(name, movement):
    function, shape = ALONG[name]
    full = values(*shape)
    for d in (-1, -3 if name == "select's gradient" else -2):
        for cut in (Shard(0), Shard(1), _StridedShard(1, split_factor=2)):
            with plain():
                given = full.clone().requires_grad_()
                expected = function(given, d)
                expected.square().sum().backward()
            with ranks_of((2,)), cute_sharding.enabled(movement=movement):
                x = distribute(full, (2,), [cut], True)
                result = function(x, d)
                assert_close(result, expected.detach(), f"{d} {cut}")
                result.square().sum().backward()
                assert_close(x.grad, given.grad, f"gradient {d} {cut}")


def lower(*shape):
    with plain():
        return values(*shape).tril() + 3 * torch.eye(shape[-1])


def pivots(matrices):
    with plain():
        return torch.arange(1, matrices.shape[-1] + 1, dtype=torch.int32).expand(
            matrices.shape[:-1]
        )


SOLVES = {
    "solve": lambda a, at, b: torch.linalg.solve(a, b),
    "lu_solve": torch.linalg.lu_solve,
    "ldl_solve": lambda a, at, b: torch.linalg.ldl_solve(a.detach(), at, b.detach()),
    "solve_triangular": lambda a, at, b: torch.linalg.solve_triangular(a, b, upper=False),
    "cholesky_solve": lambda a, at, b: torch.cholesky_solve(b, a),
}


@pytest.mark.parametrize("name", SOLVES)
@pytest.mark.parametrize("few", [(2, 2), (2, 2, 2), (1, 2, 2), (2, 2, 2, 2)], ids=str)
def test_equations_that_are_solved_for_several_matrices_alike(name, few):
    """Batch dims are counted from the end: of (2, 2, 2, 2) the dim 0 is none of (2, 2, 2). And with
    as many on both sides one side may be cut, and the other not.
    """
    many = (2, 2, 2, 2)
    ways = [(many, few), (few, many)]
    if name == "ldl_solve":  # on one device torch reads past the matrices where these are few
        ways.pop()
    for of, by in ways:
        fulls = [lower(*of), pivots(lower(*of)), lower(*by)]
        with ranks_of((2,)):
            for first, last in product((Shard(0), Replicate()), repeat=2):
                placements = [[first], [Replicate()], [last]]
                compare(SOLVES[name], fulls, (2,), placements, f"{of} {by} {first} {last}")


@pytest.mark.parametrize("n", [2, 5])
def test_triangles_and_sides_are_cut_alike(n):
    """torch would cut the triangles in the batch dim, and not the sides."""
    fulls = [lower(n, 2, 2), pivots(lower(n, 2, 2)), lower(n, 2, 2)]
    cuts = [[Replicate(), Shard(0), Shard(1)], [Replicate()] * 3, [Shard(2), Shard(2), Shard(1)]]
    with ranks_of((2, 1, 2)):
        compare(SOLVES["solve_triangular"], fulls, (2, 1, 2), cuts, f"{n} of each")


@pytest.mark.parametrize("dim", [-3, -7, 2])
@pytest.mark.parametrize("cut", [Shard(0), Shard(1), _StridedShard(1, split_factor=2)])
def test_searches_along_a_dim_that_there_is_not(cut, dim):
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(4, 6), (2,), [cut])
        for search in (torch.argmax, torch.argmin):
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                search(x, dim)


@pytest.mark.parametrize("dim", [0, -2, None])
@pytest.mark.parametrize("cut", [Shard(0), Replicate()])
@pytest.mark.parametrize("search", [torch.argmax, torch.argmin])
def test_searches_of_nothing(search, cut, dim):
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(torch.zeros(0, 3), (2,), [cut])
        with pytest.raises((IndexError, RuntimeError), match=r"non-zero size|reduction dim"):
            search(x, dim)
        assert search(x, 1).shape == (0,)


@pytest.mark.parametrize("term", [(), (1,)], ids=str)
@pytest.mark.parametrize("cuts", [(0, None), (1, 0), (1, None), (None, 0)], ids=str)
def test_a_term_that_is_one_value_for_all_rows(term, cuts):
    """Of plain shards; the last device has no rows of the product."""
    fulls = [values(*term), values(5, 10), values(10)]
    placements = [[Replicate() if d is None else Shard(d)] for d in (None, *cuts)]
    with ranks_of((4,)):
        compare(torch.addmv, fulls, (4,), placements, f"{term} {cuts}")


@pytest.mark.parametrize(
    ("product", "shapes", "said"),
    [
        (torch.addmm, [(10,), (6, 8), (8,)], "must be 2D"),
        (torch.addmm, [(7,), (6, 8), (8, 10)], "of length 7|existing size .7."),
        (torch.addmm, [(2, 6, 10), (6, 8), (8, 10)], "number of sizes"),
        (torch.addmv, [(), (6, 8), (8, 2)], "matrix @ vector expected"),
    ],
)
def test_products_that_do_not_fit(product, shapes, said):
    """The error is torch's."""
    with ranks_of((2,)), cute_sharding.enabled():
        cuts = [Replicate(), _StridedShard(0, split_factor=3), Replicate()]
        given = [distribute(values(*s), (2,), [cut]) for s, cut in zip(shapes, cuts)]
        with pytest.raises(RuntimeError, match=said):
            product(*given)


@pytest.mark.parametrize("term", [(10,), (1, 10), ()], ids=str)
def test_a_term_of_integers_is_not_pending(term):
    """Its parts on three devices would be no integers."""
    shapes = [term, (6, 9), (9, 10)]
    cuts = [Replicate(), _StridedShard(1, split_factor=3), _StridedShard(0, split_factor=3)]
    with plain():
        fulls = [index(*shape, below=7) for shape in shapes]
        expected = torch.addmm(*fulls)
    with ranks_of((3,)), cute_sharding.enabled():
        given = [distribute(full, (3,), [cut]) for full, cut in zip(fulls, cuts)]
        assert_holds(torch.addmm(*given).redistribute(placements=[Replicate()]), expected)

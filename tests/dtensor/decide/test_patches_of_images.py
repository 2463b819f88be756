"""Convolutions whose windows lie side by side: of images that are cut into blocks of whole windows
nothing is gathered, forward and backward; others are as they were.
"""

import random
from itertools import product

import convolutions_worker
import pytest
import torch.nn.functional as F
from gloo import run
from op_programs import S, compare, values
from simulation import distribute, ranks_of
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding

R = Replicate()
FLAGS = [{}, {"movement": True, "redistribution": True}]
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

# the image, the kernel, and the placements that leave whole windows on each device
TILED = {
    (2,): [
        ((2, 3, 16), 4, [Shard(2)]),
        ((1, 3, 8, 8), 4, [Shard(3)]),
        ((1, 3, 8, 8), 4, [Shard(2)]),
        ((1, 2, 4, 4, 8), 2, [Shard(4)]),
        ((1, 2, 4, 4, 8), 2, [Shard(2)]),
        ((1, 2, 4, 16), 2, [S(3)]),
    ],
    (3,): [((2, 3, 24), 4, [Shard(2)]), ((1, 3, 4, 12), 2, [Shard(3)])],
    (4,): [((2, 3, 16), 4, [Shard(2)]), ((1, 3, 8, 16), 4, [Shard(3)])],
    (2, 2): [
        ((1, 3, 8, 8), 4, [Shard(2), Shard(3)]),
        ((1, 3, 4, 16), 4, [Shard(3), Shard(3)]),
        ((4, 3, 4, 16), 4, [Shard(0), Shard(3)]),
        ((1, 3, 4, 16), 4, [Shard(3), R]),
        ((2, 3, 16), 2, [S(2), Shard(0)]),
    ],
}
CASES = [(mesh, *case) for mesh, cases in TILED.items() for case in cases]


def kernel(shape, size):
    return values(4, shape[1], *[size] * (len(shape) - 2))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("mesh", "shape", "size", "placements"), CASES, ids=str)
def test_values_and_gradients(mesh, shape, size, placements, with_bias, flags):
    convolution = CONVOLUTIONS[len(shape) - 2]
    operands = [values(*shape), kernel(shape, size), values(4)][: 2 + with_bias]
    with ranks_of(mesh):
        compare(
            lambda x, w, b=None: convolution(x, w, b, stride=size),
            operands,
            mesh,
            [placements, *[[R] * len(mesh)] * (len(operands) - 1)],
            "patches",
            **flags,
        )


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("mesh", "shape", "size", "placements"), CASES, ids=str)
def test_nothing_is_received(mesh, shape, size, placements):
    """Also on the way back: what is pending of the weights is left so."""
    convolution = CONVOLUTIONS[len(shape) - 2]
    with ranks_of(mesh), cute_sharding.enabled():
        x = distribute(values(*shape), mesh, placements, requires_grad=True)
        w, b = (
            distribute(full, mesh, [R] * len(mesh), requires_grad=True)
            for full in (kernel(shape, size), values(4))
        )
        with CommDebugMode() as sent:
            result = convolution(x, w, b, stride=size)
            gradient = distribute(values(*result.shape), mesh, placements)
            result.backward(gradient)
        assert not sent.get_total_counts()
        assert [*result.placements] == [*x.grad.placements] == placements
        cut = [p != R for p in placements]
        assert [p.is_partial() for p in w.grad.placements] == cut
        assert [p.is_partial() for p in b.grad.placements] == cut


OTHERS = {
    "uneven": ((2, 3, 12), 4, {}),
    "rows that are left over": ((2, 3, 18), 4, {}),
    "of the same width": ((2, 3, 16), 3, {"stride": 1, "padding": 1}),
    "padded": ((2, 3, 16), 4, {"padding": 2}),
    "dilated": ((2, 3, 16), 2, {"dilation": 2}),
    "steps within a window": ((2, 3, 16), 4, {"stride": 2}),
    "steps beyond one": ((2, 3, 16), 2, {"stride": 4}),
    "in groups": ((2, 4, 16), 4, {"groups": 2}),
    "windows of one row": ((2, 3, 7), 1, {}),
    "few windows": ((2, 3, 4), 4, {}),
    "of one row, dilated": ((2, 3, 7), 1, {"dilation": 3}),
}


@pytest.mark.one_in(20)
@pytest.mark.parametrize("mesh", TILED, ids=str)
@pytest.mark.parametrize("case", OTHERS)
def test_others_are_right_as_well(case, mesh):
    shape, size, options = OTHERS[case]
    options = {"stride": size, **options}
    weight = values(4, shape[1] // options.get("groups", 1), size)
    rng = random.Random(f"{case} {mesh}")
    for cut in product((R, Shard(0), Shard(2), S(2)), repeat=len(mesh)):
        others = [[rng.choice([R, Shard(0), Shard(1)]) for _ in mesh], [R] * len(mesh)]
        with ranks_of(mesh):
            compare(
                lambda x, w, b: F.conv1d(x, w, b, **options),
                [values(*shape), weight, values(4)],
                mesh,
                [cut, *others],
                f"{case} {cut} {others}",
            )


@pytest.mark.parametrize("mesh", TILED, ids=str)
@pytest.mark.parametrize("spatial", TRANSPOSED)
def test_transposed(spatial, mesh):
    """A place makes a window: the result is cut as the image is, also where that is uneven in
    places, which is made whole.
    """
    shape = (2, 3, *[2] * (spatial - 1), 12)
    for cut in product((R, Shard(0), Shard(spatial + 1), S(spatial + 1)), repeat=len(mesh)):
        with ranks_of(mesh):
            compare(
                lambda x, w, b: TRANSPOSED[spatial](x, w, b, stride=2),
                [values(*shape), values(3, 4, *[2] * spatial), values(4)],
                mesh,
                [cut, [R] * len(mesh), [R] * len(mesh)],
                f"transposed {cut}",
            )
    with ranks_of((2,)), cute_sharding.enabled():
        x = distribute(values(*shape), (2,), [Shard(spatial + 1)])
        w = distribute(values(3, 4, *[2] * spatial), (2,), [R])
        with CommDebugMode() as sent:
            assert TRANSPOSED[spatial](x, w, stride=2).placements == x.placements
        assert not sent.get_total_counts()


@pytest.mark.costly
def test_processes(some_of, tmp_path):
    """Also compiled: of symbols blocks may not be of whole windows in another call."""
    cases = some_of(range(len(convolutions_worker.CASES)), 5)
    run(4, tmp_path, (convolutions_worker.patches, cases))

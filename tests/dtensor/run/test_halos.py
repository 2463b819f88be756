"""Ops on windows over sharded dims: values and gradients beside one device, on drawn sizes, windows
and placements, and what they receive.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from compiling import compiled, fresh_compiler, sharded  # noqa: F401
from functorch.compile import make_boxed_func
from op_programs import assert_close
from simulation import distribute, plain, ranks_of
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from benchmarks.received import Received
from cute_sharding.dtensor.run.halos import HALOS
from cute_sharding.relations import parse
from cute_sharding.relations.table import SIGNATURES

MESHES = [(4,), (2, 3), (2, 2, 2), (8,)]


def sizes(rng, n):
    """The sizes of images of n dims: some of fewer rows than devices."""
    return [rng.choice([1, 3, 5, 8, 12, 17, 24] if n == 1 else [2, 5, 8, 11]) for _ in range(n)]


def several(rng, n, options):
    """A number for all dims, or one for each."""
    found = [rng.choice(options) for _ in range(n)]
    return found[0] if rng.random() < 0.4 else found


def maximum(rng):
    n = rng.choice([1, 2, 2, 3])
    kernel = several(rng, n, [1, 2, 3, 4])
    least = kernel if isinstance(kernel, int) else min(kernel)
    args = (
        kernel,
        several(rng, n, [1, 2, 3, 5]),
        rng.choice([0, least // 2]),
        several(rng, n, [1, 1, 2]),
        rng.random() < 0.3,
    )
    pool = [F.max_pool1d, F.max_pool2d, F.max_pool3d][n - 1]

    def function(x):
        y, indices = pool(x, *args, return_indices=True)
        return y, indices.to(y.dtype)

    return [images(rng, n)], function, ("maximum", n, *args)


def average(rng):
    n = rng.choice([1, 2, 2, 3])
    kernel = several(rng, n, [1, 2, 3, 4])
    least = kernel if isinstance(kernel, int) else min(kernel)
    options = {
        "stride": several(rng, n, [1, 2, 3, 5]),
        "padding": rng.choice([0, least // 2]),
        "ceil_mode": rng.random() < 0.3,
        "count_include_pad": rng.random() < 0.5,
    }
    if n > 1 and rng.random() < 0.2:
        options["divisor_override"] = 3
    pool = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][n - 1]
    return [images(rng, n)], lambda x: pool(x, kernel, **options), ("average", n, kernel, options)


def adaptive(rng):
    n = rng.choice([1, 2, 3])
    kind = rng.choice(["avg", "max"])
    pool = getattr(F, f"adaptive_{kind}_pool{n}d")
    windows = several(rng, n, [1, 2, 4, 6])
    shape = images(rng, n)
    if rng.random() < 0.8:
        counts = [windows] * n if isinstance(windows, int) else windows
        shape = [*shape[:-n], *(count * rng.choice([1, 2, 3]) for count in counts)]
    return [shape], lambda x: pool(x, windows), ("adaptive", kind, n, windows)


def convolution(rng):
    n, transposed = rng.choice([1, 1, 2, 2, 3]), rng.random() < 0.4
    groups = rng.choice([1, 1, 1, 2])
    channels, made = groups * rng.choice([1, 2]), groups * rng.choice([1, 3])
    kernel = [rng.choice([1, 2, 3, 4]) for _ in range(n)]
    options = {
        "stride": several(rng, n, [1, 1, 2, 3]),
        "padding": several(rng, n, [0, 1, 2, 6]),
        "dilation": several(rng, n, [1, 1, 2]),
        "groups": groups,
    }
    name = f"conv{'_transpose' if transposed else ''}{n}d"
    if transposed:
        options["output_padding"] = several(rng, n, [0, 1])
    weight = [channels, made // groups] if transposed else [made, channels // groups]
    shapes = [[rng.choice([1, 2, 3]), channels, *sizes(rng, n)], [*weight, *kernel]]
    if rng.random() < 0.6:
        shapes.append([made])
    convolve = getattr(F, name)
    return shapes, lambda *given: convolve(*given, **options), (name, n, kernel, options)


def interpolation(rng):
    n = rng.choice([1, 2, 2, 3])
    modes = ["nearest", "nearest-exact", ["linear", "bilinear", "trilinear"][n - 1]]
    mode = rng.choice([*modes, *["bicubic"] * (n == 2)])
    shape, options = [2, 3, *sizes(rng, n)], {"mode": mode}
    if rng.random() < 0.5:
        options["size"] = sizes(rng, n)
    else:
        factors = [rng.choice([0.5, 2, 3, 1.7, 1]) for _ in range(n)]
        options["scale_factor"] = factors
    if "linear" in mode or "cubic" in mode:
        options["align_corners"] = rng.random() < 0.5
    return [shape], lambda x: F.interpolate(x, **options), ("interpolation", n, options)


def images(rng, n):
    leading = [rng.choice([2, 3, 4])] * rng.choice([1, 2, 2])
    return [*leading, *sizes(rng, n)]


OPS = {
    "maximum": maximum,
    "average": average,
    "adaptive": adaptive,
    "convolution": convolution,
    "interpolation": interpolation,
}


def drawn(rng, mesh, ndim, n):
    """Placements that shard one of the last ``n`` dims on some mesh dim."""
    kinds = [Shard(d) for d in range(ndim)] + [Shard(d) for d in range(ndim - n, ndim)] * 2
    kinds += [
        Replicate(),
        _StridedShard(ndim - 1, split_factor=2),
        _StridedShard(ndim - n, split_factor=2),
    ]
    while True:
        found = [rng.choice(kinds) for _ in mesh]
        if any(not p.is_replicate() and p.dim >= ndim - n for p in found):
            return found


def with_gradients(function, *tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = function(*leaves)
    y, *others = found if isinstance(found, tuple) else (found,)
    ((y * y).sum() + y.sum()).backward()
    return [y.detach(), *others, *[x.grad for x in leaves if x.grad is not None]]


def case(name, seed):
    """Drawn tensors, and what one device makes of them; an op that is not defined on such sizes is
    drawn again.
    """
    rng = random.Random(f"{name} {seed}")
    while True:
        shapes, function, about = OPS[name](rng)
        try:
            with plain():
                torch.manual_seed(seed)
                tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
                wanted = with_gradients(function, *tensors)
        except RuntimeError:
            continue
        n = next(k for k in about if isinstance(k, int))
        mesh = rng.choice(MESHES)
        placements = [drawn(rng, mesh, len(shapes[0]), n)]
        placements += [[Replicate()] * len(mesh) for _ in shapes[1:]]
        return (about, shapes, mesh, placements), function, tensors, wanted


def check(name, seed):
    about, function, tensors, wanted = case(name, seed)
    _, _, mesh, placements = about
    with ranks_of(mesh), cute_sharding.enabled():
        given = [distribute(x, mesh, some) for x, some in zip(tensors, placements)]
        found = with_gradients(function, *given)
        assert len(found) == len(wanted), about
        for one, other in zip(found, wanted):
            assert_close(one, other, about)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("name", list(OPS))
def test_values_and_gradients_are_those_of_one_device(name, seed):
    """Even and uneven shards, strided ones, several on one dim, on several dims of the images,
    devices without rows or without windows, padding, and windows wider than a device's rows.
    """
    check(name, seed)


@pytest.mark.parametrize("name", list(OPS))
def test_in_inference_mode(name):
    """A DTensor then meets composite ops, such as ``conv2d``, whose parts torch tries on a mesh of
    one device, and then runs the whole.
    """
    for seed in range(12):
        (about, _, mesh, placements), function, tensors, wanted = case(name, seed)
        with ranks_of(mesh), cute_sharding.enabled(), torch.inference_mode():
            found = function(*(distribute(x, mesh, p) for x, p in zip(tensors, placements)))
            for one, other in zip(found if isinstance(found, tuple) else [found], wanted):
                assert_close(one, other, about)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_nearest_rows_are_those_that_one_device_takes(mode):
    """PyTorch finds them in floating point, to whose last bit that depends on the scale."""
    rng = random.Random(mode)
    for _ in range(20):
        x, dtype = (
            torch.randn(1, 1, rng.randint(1, 300)),
            rng.choice([torch.float32, torch.bfloat16]),
        )
        scale = rng.choice([rng.uniform(0.2, 5), 1.1, 2 / 3, 1 / 3, 3, 7, 2.5])
        options = rng.choice([{"size": rng.randint(1, 400)}, {"scale_factor": scale}])
        with plain():
            x = x.to(dtype)
            if int(x.shape[2] * scale) == 0:
                continue
            wanted = F.interpolate(x, mode=mode, **options)
        with ranks_of((4,)), cute_sharding.enabled():
            found = F.interpolate(distribute(x, (4,), [Shard(2)]), mode=mode, **options)
            assert_close(found, wanted, (options, x.shape, dtype))


def test_a_maximum_of_nothing_is_in_the_first_row_that_is_no_padding():
    """Windows of minus infinity and of NaN, and integers, of which the least is the padding."""
    low, lost = -torch.inf, torch.nan
    for dilation in (1, 2):
        x = torch.full((2, 3, 17, 9), low)
        x[0, 0, 8, 3], x[1, 1, 2, 2] = lost, 3
        for full in (x, torch.randint(-9, -2, (2, 3, 17, 9))):
            for dim in (2, 3):
                with plain():
                    wanted = F.max_pool2d(full, 3, 2, 1, dilation, return_indices=True)
                with ranks_of((4,)), cute_sharding.enabled():
                    given = distribute(full, (4,), [Shard(dim)])
                    found = F.max_pool2d(given, 3, 2, 1, dilation, return_indices=True)
                    for one, other in zip(found, wanted, strict=True):
                        assert_close(
                            one.nan_to_num(7) if one.is_floating_point() else one,
                            other.nan_to_num(7) if one.is_floating_point() else other,
                            (dilation, dim),
                        )


def test_what_is_pending_stays_pending_beside_a_halo():
    mesh, full = (2, 2), torch.randn(2, 3, 17, 9, dtype=torch.float64)
    with ranks_of(mesh), cute_sharding.enabled():
        x = distribute(full, mesh, [Shard(2), Partial()])
        y = F.avg_pool2d(x, 3, 1, 1)
        assert y.placements == (Shard(2), Partial())
        with plain():
            wanted = F.avg_pool2d(2 * full, 3, 1, 1)  # on each of two devices
        assert_close(y, wanted, "average")


LINE = 4 * 2 * 4  # the bytes of a row of two images of four channels, of one element
RECEIVED = [
    # op, size, sharded dim, what the busiest of eight ranks receives of its neighbours
    (lambda x, w: F.conv1d(x, w), (2, 4, 512), 2, 2 * LINE),
    (lambda x, w: F.conv1d(x, w, padding=1), (2, 4, 512), 2, 2 * LINE),
    (lambda x, w: F.conv1d(x, w, padding=2, dilation=2), (2, 4, 512), 2, 4 * LINE),
    (lambda x, w: F.conv1d(x, w, padding=1, stride=2), (2, 4, 512), 2, LINE),
    (lambda x, w: F.max_pool2d(x, 2), (2, 4, 64, 64), 2, 0),
    (lambda x, w: F.max_pool2d(x, 3, 2, 1), (2, 4, 64, 64), 2, 64 * LINE),
    (lambda x, w: F.avg_pool2d(x, 3, 1, 1), (2, 4, 64, 64), 3, 2 * 64 * LINE),
    (lambda x, w: F.adaptive_avg_pool2d(x, 8), (2, 4, 64, 64), 2, 0),
    (lambda x, w: F.interpolate(x, scale_factor=2), (2, 4, 64, 64), 2, 0),
    (
        lambda x, w: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (2, 4, 64, 64),
        2,
        2 * 64 * LINE,
    ),
    (
        lambda x, w: F.interpolate(x, scale_factor=2, mode="bicubic"),
        (2, 4, 64, 64),
        2,
        4 * 64 * LINE,
    ),
]


@pytest.mark.parametrize("function, shape, dim, most", RECEIVED)
def test_only_halos_are_received(function, shape, dim, most):
    """And as much in the gradient: of a convolution once more, for the weight's."""
    mesh = (8,)
    x, w = torch.randn(shape), torch.randn(4, 4, 3)
    with ranks_of(mesh), cute_sharding.enabled():
        x = distribute(x, mesh, [Shard(dim)]).detach().requires_grad_()
        w = distribute(w, mesh, [Replicate()]).detach().requires_grad_()
        with Received() as counted:
            y = function(x, w)
        with Received() as in_gradient:
            torch.autograd.grad(y, (x, w), torch.ones_like(y), allow_unused=True)
    assert y.placements == (Shard(dim),)
    assert max(counted.bytes_by_rank.values(), default=0) == most
    assert max(in_gradient.bytes_by_rank.values(), default=0) <= 2 * most
    assert {*counted.collectives} <= {"all_to_all_single"}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_graph_has_an_op_for_each_halo(dynamic):
    """One for the rows of each op; of sizes that are symbols the dims stay whole."""
    nodes = []

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    program = compiled(
        lambda x: F.max_pool2d(F.avg_pool2d(x, 3, 1, 1), 3, 2, 1),
        dynamic,
        aot_autograd(fw_compiler=backend),
    )
    x = sharded((2, 4, 64, 16), [Shard(2)])
    y = program(x)
    if not dynamic:
        assert y.placements == (Shard(2),)
        assert nodes.count("cute_sharding.exchange.default") == 2


@pytest.mark.parametrize("name", ["maximum", "adaptive", "patches", "interpolated"])
def test_windows_side_by_side_where_the_number_of_images_is_a_symbol(name):
    """Patches stay sharded. Others are whole: what they say of rows would have to be put right."""
    weight = sharded((4, 4, 2, 2), [Replicate()])
    program = {
        "maximum": lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, 4),
        "patches": lambda x: F.conv2d(x, weight, stride=2),
        "interpolated": lambda x: F.interpolate(x, scale_factor=1, mode="nearest"),
    }[name]
    traced = compiled(program, None)
    for images in (5, 6, 7):
        x = sharded((images, 4, 8, 8), [Shard(2)])
        torch._dynamo.mark_dynamic(x, 0)
        y = traced(x)
        assert y.shape == program(x).shape
        assert y.placements == (Shard(2),) or name != "patches"
        if y.placements == (Shard(2),):
            assert y._local_tensor.shape == program(x)._local_tensor.shape


def test_the_table_says_which_rows_are_read():
    """As text, which is read as it is printed."""
    pool = SIGNATURES["max_pool2d_with_indices.default"]
    convolution = SIGNATURES["convolution.default"]
    nearest = SIGNATURES["upsample_bilinear2d.default"]
    image, weight = (2, 4, 64, 64), (8, 4, 3, 3)
    windows = [1, 1], [1, 0], [1, 2], False, [0, 0], 1
    for text, pattern, ndims in (
        (
            "d0 d1 y0*2-1:3 y1*2-1:3 -> d0 d1 y0 y1, d0 d1 y0 y1",
            pool.pattern(image, [3, 3], [2, 2], [1, 1]),
            (4,),
        ),
        (
            "n c y0*1-1:3 y1*1:5, o c [k0] [k1], +o -> n o y0 y1",
            convolution.pattern(image, weight, (8,), *windows),
            (4, 4, 1),
        ),
        (
            "d0 d1 y0*1/2-1/4:2 y1*1/2-1/4:2 -> d0 d1 y0 y1",
            nearest.pattern(image, [128, 128], False),
            (4,),
        ),
    ):
        assert pattern == text
        assert str(parse(pattern, ndims)) == text


def test_each_op_on_windows_is_in_the_table():
    assert {row.windows.name for row in SIGNATURES.values() if row.windows.name} == set(HALOS)

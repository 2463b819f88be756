"""Reductions that stay pending beside strided shards: a reduction of results is the result of what
is reduced. Each device has contributions of its own, and the values are those of one device.
"""

from functools import reduce
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from op_programs import assert_close
from simulation import distribute, mesh_of, plain, ranks_of
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from benchmarks.received import Received
from cute_sharding.dtensor.replaced.op_schemas import overload
from cute_sharding.relations.signature import COPIED, FILLED, Linear
from cute_sharding.relations.table import SIGNATURES
from cute_sharding.relations.table.along import ADDITIONS, COMMUTING, INCREASING, pointwise
from cute_sharding.relations.table.products import ROWS as PRODUCTS
from cute_sharding.sharding.rows import rows

MESH, SHAPE = (2, 2), (6, 4, 4)
COMBINED = {
    "sum": torch.add,
    "avg": lambda a, b: ((a + b) / 2).to(a.dtype),
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
BITS = ("band", "bor", "bxor")
SUMS = ("sum", "avg")
# (op, the reductions that it keeps), of an operand whose dim 1 is cut: torch keeps them, too.
ONE = {
    "flip.default": (lambda x: x.flip(0), COPIED),
    "roll.default": (lambda x: x.roll(1, 0), COPIED),
    "t.default": (lambda x: x[0].t(), COPIED),
    "transpose_copy.int": (lambda x: torch.transpose_copy(x, 0, 1), COPIED),
    "permute_copy.default": (lambda x: torch.permute_copy(x, (2, 0, 1)), COPIED),
    "alias_copy.default": (torch.alias_copy, COPIED),
    "unsqueeze_copy.default": (lambda x: torch.unsqueeze_copy(x, 1), COPIED),
    "unbind.int": (lambda x: torch.cat(x.unbind(0), 1), COPIED),
    "select.int": (lambda x: x[1], COPIED),
    "split.Tensor": (lambda x: torch.stack(x.split(3, 0)), COPIED),
    "split_with_sizes.default": (lambda x: torch.cat(x.split([2, 4], 0)), COPIED),
    "unfold_copy.default": (lambda x: torch.unfold_copy(x, 0, 2, 1), COPIED),
    "slice.Tensor": (lambda x: x[1:5:2], COPIED),
    "view_as_complex_copy.default": (
        lambda x: torch.view_as_real(torch.view_as_complex_copy(x[:, :, :2])),
        SUMS,
    ),
    "sum.dim_IntList": (lambda x: x.sum(0), SUMS),
    "mean.dim": (lambda x: x.mean(0), SUMS),
    # Where torch finishes them first, or where something is gathered.
    "flip of what is cut": (lambda x: x.flip(1), ()),
    "sum, rounded": (lambda x: x.sum(0, dtype=torch.int64), ()),
    "cumsum": (lambda x: x.cumsum(0, dtype=torch.int64), ()),
    "sum of fewer digits": (lambda x: x.sum(0, dtype=torch.float32), ()),
    "tril": (lambda x: x.tril(), ()),
    "diagonal": (lambda x: x.diagonal(1, 0, 2), ()),
    "trace": (lambda x: x[0].trace(), ()),
    "amax": (lambda x: x.amax(0), ()),
    "prod": (lambda x: x[1:3].prod(0, dtype=torch.int64), ()),
    "any": (lambda x: x.any(0), ()),
    "norm of a part": (lambda x: torch.linalg.vector_norm(x.tril(), float("inf"), 0), ()),
    "slice_backward.default": (
        lambda x: torch.ops.aten.slice_backward(x, [9, 4, 4], 0, 2, 8, 1),
        COPIED,
    ),
    "select_backward.default": (
        lambda x: torch.ops.aten.select_backward(x, [2, *x.shape], 0, 1),
        COPIED,
    ),
    "constant_pad_nd.default": (lambda x: F.pad(x, (1, 2)), COPIED),
    "padded with ones": (lambda x: F.pad(x, (1, 2), value=1.0), FILLED),
    "unfold.default": (lambda x: x.unfold(0, 2, 1), COPIED),
    "cumsum.default": (lambda x: x.cumsum(0), SUMS),
    "trace.default": (lambda x: x[0].trace(), ()),  # a number: it is finished with the op
    "_fft_c2c.default": (lambda x: torch.fft.fft(torch.complex(x, x), dim=0), ()),
    "_fft_r2c.default": (lambda x: torch.fft.rfft(x, dim=0), SUMS),
    "_softmax_backward_data.default": (
        lambda x: torch.ops.aten._softmax_backward_data(x, rows_like(x), 0, x.dtype),
        SUMS,
    ),
    "grid_sampler_2d.default": (
        lambda x: F.grid_sample(*at_points(x, 2)),
        SUMS,
    ),
    "grid_sampler_3d.default": (
        lambda x: F.grid_sample(*at_points(x, 3)),
        SUMS,
    ),
    "index_select.default": (lambda x: x.index_select(0, index_like(x)), SUMS),
    "index.Tensor": (lambda x: x[index_like(x)], SUMS),
    **{
        f"{name}.default": (program, SUMS)
        for name, program in {
            "avg_pool2d": lambda x: F.avg_pool2d(x.transpose(0, 1), 2),
            "avg_pool3d": lambda x: F.avg_pool3d(x.transpose(0, 1).unsqueeze(1), (1, 2, 2)),
            "_adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.transpose(0, 1), (2, 3)),
            "_adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(
                x.transpose(0, 1).unsqueeze(1), (1, 2, 3)
            ),
            "_upsample_nearest_exact1d": lambda x: F.interpolate(
                x.permute(1, 2, 0), 9, mode="nearest-exact"
            ),
            "_upsample_nearest_exact2d": lambda x: F.interpolate(
                x.transpose(0, 1).unsqueeze(0), (9, 5), mode="nearest-exact"
            ),
            "_upsample_nearest_exact3d": lambda x: F.interpolate(
                x.transpose(0, 1).unsqueeze(0).unsqueeze(2), (1, 9, 5), mode="nearest-exact"
            ),
            "upsample_trilinear3d": lambda x: F.interpolate(
                x.transpose(0, 1).unsqueeze(0).unsqueeze(2), (1, 9, 5), mode="trilinear"
            ),
            **{
                f"{name}2d{aa}": lambda x, mode=mode, aa=bool(aa): F.interpolate(
                    x.transpose(0, 1).unsqueeze(0), (9, 5), mode=mode, antialias=aa
                )
                for name, mode in (("bilinear", "bilinear"), ("bicubic", "bicubic"))
                for name, aa in ((f"upsample_{name}", ""), (f"_upsample_{name}", "_aa"))
            },
            "upsample_nearest1d": lambda x: F.interpolate(x.permute(1, 2, 0), 9),
            "upsample_linear1d": lambda x: F.interpolate(x.permute(1, 2, 0), 9, mode="linear"),
            "upsample_nearest2d": lambda x: F.interpolate(x.transpose(0, 1).unsqueeze(0), (9, 5)),
            "upsample_nearest3d": lambda x: F.interpolate(
                x.transpose(0, 1).unsqueeze(0).unsqueeze(2), (1, 9, 5)
            ),
        }.items()
    },
}
TWO = {
    "cat.default": lambda x, y: torch.cat([x, y, x]),
    "stack.default": lambda x, y: torch.stack([x, y], 1),
}
OF_FLOATS = (
    *("mean.dim", "norm of a part", "view_as_complex_copy.default", "padded with ones"),
    *(
        name
        for name in ONE
        if name.startswith(
            ("_fft", "_softmax", "avg", "_adaptive", "upsample", "_upsample", "grid")
        )
    ),
)


def rows_like(x):
    """Numbers of the sizes of ``x``, cut as it is, and finished."""
    with plain():
        full = numbers(5, torch.float64).softmax(0)
    if not isinstance(x, DTensor):
        return full
    return distribute(full, MESH, [Replicate(), *x.placements[1:]])


def at_points(x, dims):
    """``x`` as an image whose channels are its cut dim, and points in it."""
    with plain():
        points = torch.tensor([-0.5, 0.25, 0.75]).double()[:dims].expand(1, *[2] * dims, dims)
    image = x.transpose(0, 1).unsqueeze(0)
    if isinstance(x, DTensor):
        points = distribute(points, MESH, [Replicate()] * 2)
    return image if dims == 2 else image.unsqueeze(2), points


def index_like(x):
    with plain():
        index = torch.tensor([3, 0, 3])
    return distribute(index, MESH, [Replicate()] * 2) if isinstance(x, DTensor) else index


def numbers(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-4, 5, SHAPE, generator=generator)
    return drawn > 2 if dtype is torch.bool else drawn.to(dtype)


def contributed(kind, seed, cut, dtype):
    """(a DTensor of ``[Partial(kind), cut]``, its value): other numbers on each device."""
    with plain():
        parts = [numbers(10 * seed + k, dtype) for k in range(MESH[0])]
        full = reduce(COMBINED[kind], parts)
        locals_ = {}
        for rank, (i, j) in enumerate(product(*map(range, MESH))):
            held = rows(SHAPE[cut.dim], [(cut.split_factor, MESH[1], j)])
            pieces = [parts[i].narrow(cut.dim, a, b - a) for a, b in held]
            locals_[rank] = torch.cat(pieces, cut.dim)
    tensor = DTensor.from_local(
        LocalTensor(locals_),
        mesh_of(MESH),
        [Partial(kind), cut],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    return tensor, full


def dtype_of(kind):
    return torch.int64 if kind in BITS else torch.float64


def found(program, kind, operands, dtype=None):
    """The placements of the program's result, which is right."""
    with ranks_of(MESH), cute_sharding.enabled():
        given = [
            contributed(kind, seed, _StridedShard(1, split_factor=2), dtype or dtype_of(kind))
            for seed in range(operands)
        ]
        result = program(*[tensor for tensor, _ in given])
        with plain():
            expected = program(*[full for _, full in given])
        assert_close(result, expected, kind)
    return result.placements


@pytest.mark.parametrize(
    ("op", "kind"),
    [(op, kind) for op in ONE for kind in COPIED if kind not in BITS or op not in OF_FLOATS],
)
def test_of_one_operand(op, kind):
    program, keeps = ONE[op]
    placements = found(program, kind, 1)
    assert (placements[0] == Partial(kind)) == (kind in keeps), placements


@pytest.mark.parametrize("kind", COPIED)
@pytest.mark.parametrize("op", TWO)
def test_of_operands_together(op, kind):
    assert found(TWO[op], kind, 2)[0] == Partial(kind)


@pytest.mark.parametrize("op", TWO)
def test_what_is_pending_of_one_of_them_is_finished(op):
    with ranks_of(MESH), cute_sharding.enabled():
        x, full = contributed("max", 0, _StridedShard(1, split_factor=2), torch.float64)
        with plain():
            other = numbers(7, torch.float64)
        y = distribute(other, MESH, [Replicate(), _StridedShard(1, split_factor=2)])
        for given, wanted in (((x, y), (full, other)), ((y, x), (other, full))):
            result = TWO[op](*given)
            assert isinstance(result.placements[0], Shard)  # of a free dim: less is received
            with plain():
                expected = TWO[op](*wanted)
            assert_close(result, expected, op)


@pytest.mark.parametrize("op", TWO)
def test_of_several_dtypes_it_is_finished(op):
    """A sum of integers that are parts of numbers is not that of the numbers."""
    cut = _StridedShard(1, split_factor=2)
    with ranks_of(MESH), cute_sharding.enabled():
        x, full = contributed("avg", 0, cut, torch.int64)
        y, other = contributed("avg", 1, cut, torch.float64)
        result = TWO[op](x, y)
        with plain():
            expected = TWO[op](full, other)
        assert isinstance(result.placements[0], Shard)  # of a free dim: less is received
        assert_close(result, expected, op)


def test_what_is_gathered_is_reduced_before():
    """Else more is reduced afterwards."""
    with ranks_of(MESH), cute_sharding.enabled():
        x, full = contributed("max", 0, _StridedShard(0, split_factor=2), torch.float64)
        with Received() as received:
            result = x.flip(0)
        with plain():
            expected = full.flip(0)
        assert result.placements[0] == Replicate()
        assert_close(result, expected, "flip")
        # What is reduced is half of it, and so is what is gathered.
        assert max(received.by_rank.values()) <= full.numel()


@pytest.mark.parametrize("kind", ["sum", "avg", "product", "max", "min"])
@pytest.mark.parametrize("name", COMMUTING)
def test_of_pointwise_ops(name, kind):
    """With a tensor that is finished beside it, or a number."""
    op, row = overload(name), COMMUTING[name]
    linear = row.linear if isinstance(row.linear, Linear) else Linear(row.linear)
    tensors = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)
    needed = [a for a in op._schema.arguments if not a.has_default_value() and not a.kwarg_only]
    options = {"decimals": 1} if name == "round.decimals" else {}
    cut = _StridedShard(1, split_factor=2)
    for at in range(tensors):
        with ranks_of(MESH), cute_sharding.enabled():
            x, full = contributed(kind, 0, cut, torch.float64)
            with plain():
                other = numbers(3, torch.float64) + 7
            y = distribute(other, MESH, [Replicate(), cut]) if tensors == 2 else 2.0
            beside = [other if tensors == 2 else 2.0] * (len(needed) - 1)
            given, wanted = [y] * len(beside), beside
            result = op(*given[:at], x, *given[at:], **options)
            with plain():
                expected = op(*wanted[:at], full, *wanted[at:], **options)
            assert_close(result, expected, (name, kind, at))
        is_kept = at in linear.operands and kind in linear.kept
        assert (result.placements[0] == Partial(kind)) == is_kept, (at, result.placements)


@pytest.mark.parametrize("name", INCREASING)
def test_increasing_functions_keep_what_is_no_number(name):
    """A maximum of contributions of which one is NaN is NaN, and what is made of it too."""
    given = torch.tensor([float("nan"), -float("inf"), -2.5, 0.0, 3.5, float("inf")])
    made = overload(name)(given, **({"decimals": 1} if name == "round.decimals" else {}))
    assert made[0].isnan() and bool((made[1:].diff().nan_to_num() >= 0).all())


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("name", [name for name, tensors in ADDITIONS if tensors == 1])
def test_a_number_is_added_in_place_to_each_part(name, kind):
    """An average, the greatest and the least are not finished for that: nothing is received."""
    op, cut = overload(name), _StridedShard(1, split_factor=2)
    with ranks_of(MESH), cute_sharding.enabled(), Received() as received:
        x, full = contributed(kind, 0, cut, torch.float64)
        received.by_rank.clear()
        result = op(x, 3, alpha=2) if name.endswith("Tensor") else op(x, 3)
        assert result is x and result.placements[0] == Partial(kind)
        assert (not any(received.by_rank.values())) == (kind in ("avg", "max", "min"))
        with plain():
            expected = full + (1 if name.startswith("add") else -1) * (
                6 if name.endswith("Tensor") else 3
            )
        assert_close(result, expected, (name, kind))


@pytest.mark.parametrize("kind", ["sum", "avg", "max"])
@pytest.mark.parametrize("name", [name for name, tensors in ADDITIONS if tensors == 2])
def test_of_additions(name, kind):
    op, cut = overload(name), _StridedShard(1, split_factor=2)
    with ranks_of(MESH), cute_sharding.enabled():
        x, full = contributed(kind, 0, cut, torch.float64)
        y, other = contributed(kind, 1, cut, torch.float64)
        z = distribute(other, MESH, [Replicate(), cut])
        for given in ((x, y), (x, z), (z, x), (x, 1.0)):
            with plain():
                of = {id(x): full, id(y): other, id(z): other}
                expected = op(*[of.get(id(a), a) for a in given])
            result = op(*given)
            assert_close(result, expected, (name, kind))
            assert isinstance(result.placements[0], Partial) == (
                kind != "max" and isinstance(given[1], DTensor)
            )


def test_every_row_that_keeps_something_pending_is_here():
    """But for those of products and of pointwise ops, which have tests of their own; of numbers,
    which are finished; and of what is pending and complex.
    """
    here = {*ONE, *TWO, "sum.default", "mean.default", "view_as_real_copy.default"}
    for row in SIGNATURES.values():
        is_pointwise = row.rule is pointwise or "backward" in row.signed[0]
        if row.linear and not is_pointwise and row not in PRODUCTS:
            assert here & {*row.signed}, row.signed

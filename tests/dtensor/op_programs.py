"""Small programs of ops beside views, and how what comes of them is compared with one device."""

from functools import partial

import torch
import torch.nn.functional as F
from simulation import assert_close, distribute, plain
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding


def S(dim, split_factor=2):
    return _StridedShard(dim, split_factor=split_factor)


def values(*shape):
    """Small numbers, no two of which are equal."""
    with plain():
        n = torch.Size(shape).numel()
        return (
            (torch.arange(float(n)) * 7919 % 101 + torch.arange(float(n)) / 1000) / 50 - 1
        ).reshape(shape)


def index(*shape, below):
    with plain():
        return (torch.arange(torch.Size(shape).numel()) * 5 % below).reshape(shape)


# (what is computed, its tensors; those of integers are indices)
def solved_with(**sides):
    """Equations with lower triangles, of ones in their diagonals."""
    return partial(torch.linalg.solve_triangular, upper=False, unitriangular=True, **sides)


def far_from_singular(x):
    eye = 3 * torch.eye(x.shape[-1])
    if isinstance(x, DTensor):
        replicated = [Replicate()] * x.device_mesh.ndim
        eye = DTensor.from_local(eye, x.device_mesh, replicated, run_check=False)
    return x + eye


def resized(size, *modes, **options):
    """The sum of what they make of an image."""
    return lambda x: sum(F.interpolate(x, size, mode=mode, **options) for mode in modes)


def added_in_lists(x, y):
    torch._foreach_add_([result := x.detach() * 1], [y.detach()])
    return result


PROGRAMS = {
    "mm": (torch.mm, (6, 8), (8, 10)),
    "bmm": (torch.bmm, (4, 6, 5), (4, 5, 3)),
    "mv": (torch.mv, (6, 8), (8,)),
    "dot": (torch.dot, (9,), (9,)),
    "addmm": (torch.addmm, (10,), (6, 8), (8, 10)),
    "addmm, a matrix": (torch.addmm, (6, 10), (6, 8), (8, 10)),
    "addmv": (torch.addmv, (6,), (6, 8), (8,)),
    "addmv, a term for all rows": (torch.addmv, (1,), (6, 2), (2,)),
    "addmv, a scalar": (torch.addmv, (), (5, 10), (10,)),
    "addmm, a scalar": (torch.addmm, (), (6, 8), (8, 10)),
    "addmm, a row": (torch.addmm, (1, 10), (6, 8), (8, 10)),
    "addmm, a column": (torch.addmm, (6, 1), (6, 8), (8, 10)),
    "baddbmm, rows of each": (torch.baddbmm, (4, 1, 3), (4, 6, 5), (4, 5, 3)),
    "baddbmm, columns": (torch.baddbmm, (6, 1), (4, 6, 5), (4, 5, 3)),
    "addbmm": (torch.addbmm, (5,), (4, 6, 3), (4, 3, 5)),
    "baddbmm": (torch.baddbmm, (4, 6, 3), (4, 6, 5), (4, 5, 3)),
    "triangles": (solved_with(), (4, 3, 3), (4, 3, 6)),
    "triangles at the right": (solved_with(left=False), (4, 3, 3), (4, 6, 3)),
    "triangles, broadcast": (solved_with(), (4, 3, 3), (2, 1, 3, 5)),
    "one triangle": (solved_with(), (3, 3), (4, 3, 5)),
    "bilinear": (F.bilinear, (4, 6), (4, 5), (3, 6, 5), (3,)),
    "linear": (F.linear, (3, 4, 8), (10, 8), (10,)),
    "matmul": (torch.matmul, (2, 3, 4, 5), (5, 6)),
    "softmax": (lambda x: x.softmax(1), (4, 6, 5)),
    "log_softmax": (lambda x: x.log_softmax(-1), (4, 6)),
    "cumsum": (lambda x: x.cumsum(0), (6, 5)),
    "sort": (lambda x: x.sort(1).values, (4, 6)),
    "topk": (lambda x: x.topk(3, dim=0).values, (6, 5)),
    "max along a dim": (lambda x: x.max(1).values, (4, 6)),
    "kthvalue": (lambda x: x.kthvalue(2, dim=1).values, (4, 6)),
    "flip": (lambda x: x.flip(1), (4, 6)),
    "roll": (lambda x: x.roll(2, 0), (4, 6)),
    "t": (lambda x: x.t() @ x, (4, 6)),
    "t_copy": (lambda x: torch.t_copy(x), (4, 6)),
    "transpose_copy": (lambda x: torch.transpose_copy(x, 0, -1), (4, 6, 5)),
    "permute_copy": (lambda x: torch.permute_copy(x, (2, 0, -2)), (4, 6, 5)),
    "view_as_real_copy": (
        lambda x, y: torch.view_as_real_copy(torch.complex(x, y)),
        (4, 6),
        (4, 6),
    ),
    "view_as_complex_copy": (
        lambda x: torch.view_as_complex_copy(x.detach()).abs(),
        (4, 6, 2),
    ),
    "unsqueeze_copy": (lambda x: torch.unsqueeze_copy(x, -2), (4, 6)),
    "diagonal": (lambda x: x.diagonal(), (3, 4, 6)),
    "tril": (lambda x: x.tril(), (3, 4, 6)),
    "sum": (lambda x: x.sum(), (4, 6)),
    "sum along a dim": (lambda x: x.sum(1), (4, 6, 3)),
    "sum, kept": (lambda x: x.sum((0, 2), keepdim=True), (4, 6, 3)),
    "mean": (lambda x: x.mean(), (4, 6)),
    "mean along a dim": (lambda x: x.mean(0), (5, 6)),
    "amax": (lambda x: x.amax((0, 1)), (4, 6, 3)),
    "amin, kept": (lambda x: x.amin(1, keepdim=True), (4, 6)),
    "max": (lambda x: x.max(), (4, 6)),
    "logsumexp, kept": (lambda x: x.logsumexp(0, keepdim=True) + x * 0, (3, 4, 6)),
    "logsumexp": (lambda x: x.logsumexp(1), (4, 6)),
    "var": (lambda x: x.var(1), (4, 6)),
    "std": (lambda x: x.std(), (4, 6)),
    "prod": (lambda x: x.detach().prod(1), (4, 5)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (5, 4, 3), (4,), (4,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (4, 3, 6), (6,), (6,)),
    "layer_norm, bare": (lambda x: F.layer_norm(x, (3, 6)), (4, 3, 6)),
    "gather": (lambda x, i: x.gather(1, i), (4, 6), index(4, 3, below=6)),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), (4, 6), index(4, 3, below=6), (4, 3)),
    "gather of one row": (lambda x, i: x.gather(1, i), (4, 6), index(1, 3, below=6)),
    "scatter to one row": (
        lambda x, i: x.detach().scatter(1, i, 5.0),
        (4, 6),
        index(1, 3, below=6),
    ),
    "index_select": (lambda x, i: x.index_select(1, i), (4, 6), index(5, below=6)),
    "isin": (
        lambda x, among: torch.isin(x, among) * 2.0 + torch.isin(x, 3),
        index(4, 6, below=9),
        index(5, below=9),
    ),
    "embedding": (lambda i, w: F.embedding(i, w), index(4, 6, below=9), (9, 6)),
    **{
        f"bags, {mode}": (
            lambda w, i, o, mode=mode: F.embedding_bag(i, w, o, mode=mode),
            *((9, 6), index(10, below=9), torch.tensor([0, 3, 3, 7])),
        )
        for mode in ("sum", "mean", "max")
    },
    "bags, weighted": (
        lambda w, i, o, by: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=by),
        *((9, 6), index(10, below=9), torch.tensor([0, 3, 3, 7]), (10,)),
    ),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), (6, 5, 4), (6, 1, 1)),
    "weight norm of the last dim": (
        lambda v, g: torch._weight_norm(v, g, 2),
        *((6, 5, 4), (1, 1, 4)),
    ),
    "pdist": (F.pdist, (6, 5)),
    "margins": (F.multi_margin_loss, (6, 5), index(6, below=5)),
    "margins, a sum with weights": (
        lambda x, at, by: F.multi_margin_loss(x, at, weight=by.detach(), reduction="sum"),
        *((6, 5), index(6, below=5), (5,)),
    ),
    "margins of each row": (
        lambda x, at: F.multi_margin_loss(x, at, reduction="none"),
        *((6, 5), index(6, below=5)),
    ),
    "cat": (lambda x, y: torch.cat([x, y], 1), (4, 6), (4, 3)),
    "block_diag": (torch.block_diag, (4, 6), (5, 3)),
    "block_diag of a scalar": (lambda x: torch.block_diag(x.sum()), (4, 6)),
    "stack": (lambda x, y: torch.stack([x, y], 1), (4, 6), (4, 6)),
    "split": (
        lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.split(4, 1))], 0),
        (4, 12),
    ),
    "chunk": (lambda x: sum(part * i for i, part in enumerate(x.chunk(3, 0))), (6, 4)),
    "unbind": (lambda x: sum(part * i for i, part in enumerate(x.unbind(0))), (3, 8)),
    "select": (lambda x: x[:, 2], (4, 6, 3)),
    "slice": (lambda x: x[1:3], (6, 8)),
    "slice with steps": (lambda x: x[:, ::2], (4, 6)),
    "a whole slice": (lambda x: x[:, :], (4, 6)),
    "mse_loss": (F.mse_loss, (2, 9), (2, 9)),
    "mse_loss, sum": (lambda x, y: F.mse_loss(x, y, reduction="sum"), (2, 9), (2, 9)),
    "mse_loss, none": (lambda x, y: F.mse_loss(x, y, reduction="none"), (2, 9), (2, 9)),
    "smooth_l1_loss": (F.smooth_l1_loss, (2, 9), (2, 9)),
    "huber_loss": (F.huber_loss, (2, 9), (2, 9)),
    "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y.detach()), (2, 9), (2, 9)),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (2, 9), (2, 9)),
    "bce with logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        (2, 9),
        (2, 9),
    ),
    "l1_loss": (F.l1_loss, (2, 9), (2, 9)),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), (6, 5), index(6, below=5)),
    "cross_entropy, weighted": (
        lambda x, i, w: F.cross_entropy(x, i, w.detach().exp()) + w.sum(),
        (6, 5),
        index(6, below=5),
        (5,),
    ),
    "cross_entropy, all": (
        lambda x, i: F.cross_entropy(x, i, reduction="none"),
        (6, 5),
        index(6, below=5),
    ),
    "cross_entropy, summed": (
        lambda x, i: F.cross_entropy(x, i, reduction="sum"),
        (6, 5, 4),
        index(6, 4, below=5),
    ),
    "fft": (lambda x: torch.view_as_real(torch.fft.fft2(x)).sum(-1), (4, 6, 5)),
    "rfft": (lambda x: torch.fft.rfft(x, dim=1).abs(), (4, 6, 5)),
    "irfft": (lambda x: torch.fft.irfft(torch.complex(x, x), dim=1), (4, 6, 5)),
    "interpolated lines": (resized(7, "nearest", "nearest-exact", "linear"), (4, 3, 5)),
    "interpolated images": (
        resized((5, 7), "nearest", "nearest-exact", "bilinear", "bicubic"),
        (4, 3, 6, 5),
    ),
    "interpolated without aliasing": (
        resized((4, 3), "bilinear", "bicubic", antialias=True),
        (3, 4, 6, 5),
    ),
    "interpolated in space": (
        resized((3, 4, 5), "nearest", "nearest-exact", "trilinear"),
        (2, 3, 4, 3, 2),
    ),
    "sampled at a grid": (
        lambda x, at: F.grid_sample(x, at, align_corners=True),
        (4, 3, 5, 6),
        (4, 3, 2, 2),
    ),
    "sampled at a grid in space": (
        lambda x, at: F.grid_sample(x, at, align_corners=False),
        (2, 4, 3, 4, 2),
        (2, 2, 3, 2, 3),
    ),
    "average pool": (lambda x: F.avg_pool2d(x, 2), (4, 3, 6, 5)),
    "average pool in one dim": (lambda x: F.avg_pool1d(x, 2), (3, 4, 6)),
    "average pool in space": (lambda x: F.avg_pool3d(x, 2), (2, 3, 4, 4, 5)),
    "average pool to a size": (lambda x: F.adaptive_avg_pool3d(x, 2), (2, 3, 4, 4, 5)),
    "average pool of one image": (lambda x: F.adaptive_avg_pool2d(x, (5, 4)), (4, 6, 5)),
    "unpooling of one image": (
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        (4, 6, 4),
    ),
    "unpooling of one image in space": (
        lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2),
        (4, 4, 6, 4),
    ),
    "max pool": (lambda x: F.max_pool2d(x, 2), (4, 3, 6, 5)),
    "max pool in space": (lambda x: F.max_pool3d(x, 2), (2, 3, 4, 4, 5)),
    "max pool to a size": (lambda x: F.adaptive_max_pool2d(x, 3), (4, 3, 6, 5)),
    "reflection": (lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), (4, 3, 6, 5)),
    "replication": (lambda x: F.pad(x, (1, 2), mode="replicate"), (4, 3, 6)),
    "addr": (torch.addr, (6, 5), (6,), (5,)),
    "addr, a term for each column": (torch.addr, (5,), (2,), (5,)),
    "addr, a number": (torch.addr, (), (6,), (5,)),
    "trace": (lambda x: x.detach().trace(), (5, 4)),
    "glu": (lambda x: F.glu(x, 1), (5, 6, 3)),
    "channels change places": (lambda x: F.channel_shuffle(x.detach(), 2), (3, 6, 2, 2)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (5, 8, 3, 2)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (3, 5, 4, 6)),
    "count_nonzero": (lambda x: torch.count_nonzero(x.detach() > 0, 1), (5, 6)),
    "count_nonzero of all": (lambda x: torch.count_nonzero(x.detach() > 0), (5, 6)),
    "std_mean": (lambda x: sum(torch.std_mean(x, 1)), (5, 6)),
    "std_mean, kept": (lambda x: sum(torch.std_mean(x, (0, 2), keepdim=True)), (5, 6, 3)),
    "index_add": (lambda x, i, s: x.index_add(1, i, s), (4, 6), index(3, below=6), (4, 3)),
    "turned": (lambda x: torch.rot90(x, 1, (0, 2)), (4, 6, 5)),
    "turned back": (lambda x: torch.rot90(x, -1, (1, 2)), (4, 6, 5)),
    "narrow_copy": (lambda x: torch.narrow_copy(x, 1, 2, 3), (4, 6, 5)),
    "mish": (F.mish, (5, 6)),
    "padded with a constant": (lambda x: F.pad(x, (1, 2, 0, 0, -1, 0), value=2.0), (4, 6, 5)),
    "elu": (lambda x: F.elu(x, 1.5), (5, 6)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), (5, 6)),
    "softplus": (lambda x: F.softplus(x, 2.0), (5, 6)),
    "hardswish": (F.hardswish, (5, 6)),
    "floor_divide": (lambda x, y: torch.floor_divide(x.detach(), y.detach()), (5, 6), (6,)),
    "masked_fill": (lambda x, y: x.masked_fill(y > 0, y.sum() * 0 + 2), (5, 6), (5, 6)),
    "complex": (lambda x, y: torch.view_as_real(torch.complex(x, y)).sum(-1), (5, 6), (5, 6)),
    # convolutions and attention
    "conv2d": (lambda x, w: F.conv2d(x, w), (4, 2, 5, 5), (3, 2, 2, 2)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b), (2, 4, 6), (6, 4, 3), (6,)),
    "argmax": (lambda x: x.argmax(1), (4, 6)),
    "argmin of all": (lambda x: x.argmin(), (4, 6)),
    "argmax, kept": (lambda x: x.argmax(-1, keepdim=True), (4, 3, 6)),
    "extremes": (lambda x: sum(torch.aminmax(x, dim=1)), (4, 6)),
    "extremes of all": (lambda x: sum(torch.aminmax(x)), (4, 6)),
    "distances": (F.pairwise_distance, (5, 6), (5, 6)),
    "distances of all": (torch.cdist, (3, 5, 4), (3, 6, 4)),
    "distances of all, of another order": (partial(torch.cdist, p=1.0), (2, 5, 4), (2, 6, 4)),
    "each row no longer than": (lambda x: torch.renorm(x, 2, 1, 0.5), (4, 6, 3)),
    "taken": (lambda x, i: torch.take(x.detach(), i), (4, 6), index(3, 5, below=24)),
    "indexed": (lambda x, i: x[:, i], (4, 6, 3), index(5, below=6)),
    "indexed by two": (lambda x, i, j: x[i, :, j], (4, 6, 3), index(5, below=4), index(5, below=3)),
    "indexed by two beside each other": (
        lambda x, i, j: x[:, i, j],
        (4, 6, 3),
        index(2, 5, below=6),
        index(2, 5, below=3),
    ),
    "indexed by two that are broadcast": (
        lambda x, i, j: x[i, j],
        (4, 6, 3),
        index(2, 1, below=4),
        index(5, below=6),
    ),
    "put at indices": (
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        (4, 6),
        index(5, below=4),
        (5, 6),
    ),
    "solve": (lambda x, y: torch.linalg.solve(far_from_singular(x), y), (4, 3, 3), (4, 3, 5)),
    "solve from the right": (
        lambda x, y: torch.linalg.solve(far_from_singular(x), y, left=False),
        (4, 3, 3),
        (4, 5, 3),
    ),
    "solve of a vector": (
        lambda x, y: torch.linalg.solve(far_from_singular(x), y),
        (4, 3, 3),
        (4, 3),
    ),
    "solve with factors": (
        lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(far_from_singular(x)), y),
        (4, 3, 3),
        (4, 3, 5),
    ),
    "solve with roots": (
        lambda x, y: torch.cholesky_solve(y, far_from_singular(x).tril()),
        (4, 3, 3),
        (4, 3, 5),
    ),
    "norms": (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 3.0, [1]), (4, 6, 3)),
    "var_mean": (lambda x: sum(torch.var_mean(x, 1)), (5, 6)),
    "cross": (lambda x, y: torch.linalg.cross(x, y, dim=1), (4, 3, 5), (4, 3, 5)),
    "index_fill": (lambda x, i: x.index_fill(1, i, 2.0), (4, 6, 3), index(3, below=6)),
    "index_fill of one": (lambda x: x.index_fill(0, torch.tensor(2), 2.0), (4, 6)),
    "bucketize": (lambda x, at: torch.bucketize(x, at.sort().values), (4, 6), (5,)),
    "bucketize a number": (lambda at: torch.bucketize(0.25, at.sort().values), (5,)),
    "logsigmoid": (F.logsigmoid, (5, 6)),
    "diag_embed": (lambda x: torch.diag_embed(x, 1, 0, 2), (3, 4, 5)),
    "diagonal_copy": (lambda x: torch.diagonal_copy(x, 1, 0, 2), (3, 4, 5)),
    "unbind_copy": (lambda x: sum(x * i for i, x in enumerate(torch.unbind_copy(x, 1))), (4, 3, 5)),
    "select_copy": (lambda x: torch.select_copy(x, 1, 2), (4, 6, 5)),
    "slice_copy": (lambda x: torch.slice_copy(x, 1, 1, 6, 2), (4, 6, 5)),
    "split_copy": (lambda x: torch.sub(*torch.split_copy(x, 3, 1)), (4, 6, 5)),
    "unfold_copy": (lambda x: torch.unfold_copy(x.detach(), 1, 3, 2), (4, 7, 5)),
    "unsafe_chunk": (lambda x: torch.sub(*torch.unsafe_chunk(x, 2, 1)), (4, 6, 3)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (2, 4, 6, 8),
        (2, 4, 6, 8),
        (2, 4, 6, 8),
    ),
    "attention with a mask": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        (2, 4, 6, 8),
        (2, 4, 5, 8),
        (2, 4, 5, 8),
        (2, 1, 6, 5),
    ),
    "attention with a mask for all": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        (2, 4, 6, 8),
        (2, 4, 5, 8),
        (2, 4, 5, 8),
        (6, 5),
    ),
    "inverse": (lambda x: torch.linalg.inv(far_from_singular(x)), (3, 4, 4)),
    "determinants": (
        lambda x: torch.linalg.det(x) + sum(torch.linalg.slogdet(far_from_singular(x))),
        (6, 3, 3),
    ),
    "factors": (
        lambda x: sum(torch.linalg.qr(far_from_singular(x))) + torch.linalg.lu(x.detach())[2],
        (4, 3, 3),
    ),
    "eigenvalues": (
        lambda x: torch.linalg.eigvalsh(x + x.mT) * torch.linalg.svdvals(far_from_singular(x)),
        (4, 3, 3),
    ),
    "viewed as integers": (lambda x: x.detach().view(torch.int32), (4, 6)),
    "all along a dim": (lambda x: (x.detach() > 0).all(1) * 1.0, (4, 6)),
    "repeated by counts": (
        lambda x, counts: x.detach().repeat_interleave(counts, 0),
        *((4, 6), index(4, below=3)),
    ),
    "embedding with max_norm": (
        lambda i, w: F.embedding(i, w.detach() * 1, max_norm=0.7),
        *(index(4, 6, below=9), (9, 6)),
    ),
    "added in lists": (added_in_lists, (4, 6), (4, 6)),
    # torch's own rules
    "pointwise": (lambda x, y: (x * y + x).exp().clamp(0, 2), (4, 6), (4, 6)),
    "where": (lambda x, y: torch.where(x > 0, x, y), (4, 6), (4, 6)),
    "norm": (lambda x: torch.linalg.vector_norm(x), (4, 6)),
}
GATED = ("conv2d", "conv1d")
MESHES = [(3,), (4,), (2, 2)]
DRAWS = 1


def uneven(shape, placements, mesh):
    return any(
        isinstance(p, (Shard, _StridedShard)) and shape[p.dim] % n for p, n in zip(placements, mesh)
    )


def compare(function, fulls, mesh, placements, case, **settings):
    """The program and its gradients, under these settings, with one device."""
    with cute_sharding.enabled(**settings):
        compare_on_torchs(function, fulls, mesh, placements, case)


def compare_on_torchs(function, fulls, mesh, placements, case):
    """As :func:`compare`, under whatever is switched on."""
    with plain():
        singles = [full.clone().requires_grad_(full.is_floating_point()) for full in fulls]
        expected = function(*singles)
        gradient = values(*expected.shape) + 0.5
        leaves = [x for x in singles if x.requires_grad]
        wanted = (
            torch.autograd.grad(expected, leaves, gradient, allow_unused=True)
            if expected.requires_grad
            else ()
        )
    tensors = [
        distribute(full, mesh, p, requires_grad=full.is_floating_point())
        for full, p in zip(fulls, placements)
    ]
    result = function(*tensors)
    leaves = [x for x in tensors if x.requires_grad]
    given = [Replicate() if isinstance(p, Partial) else p for p in result.placements]
    grads = (
        torch.autograd.grad(result, leaves, distribute(gradient, mesh, given), allow_unused=True)
        if wanted
        else ()
    )
    assert_close(result.detach(), expected.detach(), case)
    for x, y in zip(grads, wanted, strict=True):
        assert (x is None) == (y is None), case
        if x is not None:
            assert_close(x, y, f"{case}, gradient")

"""Losses, norms, pools, reductions and other ops on tensors of few rows: of no row, one, or fewer
than devices.
"""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from op_programs import index, values
from simulation import plain

REDUCTIONS = ("none", "mean", "sum")


def signs(*shape):
    with plain():
        return index(*shape, below=2).float() * 2 - 1


def between(*shape):
    """Numbers between 0 and 1."""
    with plain():
        return values(*shape).sigmoid()


def pairs(n):
    return values(n, 5), values(n, 5) * 0.5


# (name, the loss, its operands of n rows)
_LOSSES = (
    ("l1", F.l1_loss, pairs),
    ("mse", F.mse_loss, pairs),
    ("smooth_l1", F.smooth_l1_loss, pairs),
    ("huber", F.huber_loss, pairs),
    ("soft_margin", F.soft_margin_loss, lambda n: (values(n, 5), signs(n, 5))),
    ("bce", F.binary_cross_entropy, lambda n: (between(n, 5), between(n, 5))),
    (
        "bce, weighted",
        lambda x, y, w, **how: F.binary_cross_entropy(x, y, w.detach(), **how),
        lambda n: (between(n, 5), between(n, 5), between(n, 5)),
    ),
    (
        "bce with logits",
        F.binary_cross_entropy_with_logits,
        lambda n: (values(n, 5), between(n, 5)),
    ),
    ("kl_div", F.kl_div, lambda n: (values(n, 5), between(n, 5))),
    ("poisson_nll", F.poisson_nll_loss, lambda n: (values(n, 5), between(n, 5))),
    ("hinge_embedding", F.hinge_embedding_loss, lambda n: (values(n, 5), signs(n, 5))),
    (
        "margin_ranking",
        F.margin_ranking_loss,
        lambda n: (values(n, 5), values(n, 5) * 0.5, signs(n, 5)),
    ),
    ("multi_margin", F.multi_margin_loss, lambda n: (values(n, 5), index(n, below=5))),
    (
        "multilabel_soft_margin",
        F.multilabel_soft_margin_loss,
        lambda n: (values(n, 5), between(n, 5)),
    ),
    (
        "multilabel_margin",
        F.multilabel_margin_loss,
        lambda n: (values(n, 5), index(n, 5, below=5)),
    ),
    (
        "cosine_embedding",
        F.cosine_embedding_loss,
        lambda n: (values(n, 5), values(n, 5) * 0.5 + 1, signs(n)),
    ),
    (
        "triplet_margin",
        F.triplet_margin_loss,
        lambda n: (values(n, 5), values(n, 5) * 0.5, values(n, 5) + 0.1),
    ),
    (
        "gaussian_nll",
        F.gaussian_nll_loss,
        lambda n: (values(n, 5), values(n, 5) * 0.5, between(n, 5)),
    ),
    ("cross_entropy", F.cross_entropy, lambda n: (values(n, 5), index(n, below=5))),
    (
        "cross_entropy, some ignored",
        partial(F.cross_entropy, ignore_index=2),
        lambda n: (values(n, 5), index(n, below=5)),
    ),
    (
        "cross_entropy, smoothed",
        partial(F.cross_entropy, label_smoothing=0.1),
        lambda n: (values(n, 5), index(n, below=5)),
    ),
    (
        "cross_entropy of images",
        F.cross_entropy,
        lambda n: (values(n, 5, 2, 3), index(n, 2, 3, below=5)),
    ),
    ("cross_entropy, soft", F.cross_entropy, lambda n: (values(n, 5), between(n, 5))),
    (
        "cross_entropy, weighted",
        lambda x, i, w, **how: F.cross_entropy(x, i, w.detach().exp(), **how),
        lambda n: (values(n, 5), index(n, below=5), values(5)),
    ),
    ("nll", F.nll_loss, lambda n: (values(n, 5), index(n, below=5))),
)

LOSSES = {
    f"{name}, {reduction}": (partial(loss, reduction=reduction), operands)
    for (name, loss, operands), reduction in product(_LOSSES, REDUCTIONS)
}
LOSSES["kl_div, batchmean"] = (
    partial(F.kl_div, reduction="batchmean"),
    lambda n: (values(n, 5), between(n, 5)),
)


def rows(*others):
    return lambda n: (values(n, *others),)


REDUCED = {
    **{
        f"{name}{suffix}": (how, rows(5))
        for name, function in {
            "sum": torch.sum,
            "mean": torch.mean,
            "nansum": torch.nansum,
            "nanmean": torch.nanmean,
            "amax": torch.amax,
            "amin": torch.amin,
            "logsumexp": torch.logsumexp,
            "var": torch.var,
            "std": torch.std,
            "norm": torch.linalg.vector_norm,
        }.items()
        for suffix, how in {
            " over rows": partial(function, dim=0),
            " of rows": partial(function, dim=1),
            " of all": partial(function, dim=(0, 1)),
            " of all, kept": partial(function, dim=(0, 1), keepdim=True),
        }.items()
    },
    **{
        f"{function.__name__} of all": (lambda x, f=function: f(x.detach()), rows(5))
        for function in (torch.all, torch.any, torch.count_nonzero)
    },
    **{
        f"{function.__name__} {d}": (lambda x, f=function, d=d: f(x, d).values, rows(5))
        for function in (torch.max, torch.min, torch.median, torch.mode, torch.cummax, torch.sort)
        for d in (0, 1)
    },
    **{
        f"{function.__name__} {d}": (lambda x, f=function, d=d: f(x.detach(), d), rows(5))
        for function in (torch.prod, torch.argmax, torch.argmin, torch.cumprod)
        for d in (0, 1)
    },
    **{
        f"{function.__name__} {d}": (partial(function, dim=d), rows(5))
        for function in (torch.cumsum, torch.logcumsumexp, torch.softmax, torch.log_softmax)
        for d in (0, 1)
    },
    **{
        f"norm of order {order}": (lambda x, p=order: torch.linalg.vector_norm(x, p), rows(5))
        for order in (0, 1, 2, 3.0, float("inf"), -1.0)
    },
    "prod of all": (lambda x: torch.prod(x.detach()), rows(5)),
    "max of all": (torch.max, rows(5)),
    "median of all": (torch.median, rows(5)),
    "argmax of all": (lambda x: x.detach().argmax(), rows(5)),
    "topk of rows": (lambda x: x.topk(2, 1).values, rows(5)),
    "topk over rows": (lambda x: x.topk(min(2, x.shape[0]), 0).values, rows(5)),
    "aminmax": (lambda x: sum(torch.aminmax(x)), rows(5)),
    "aminmax of rows": (lambda x: sum(torch.aminmax(x, dim=1)), rows(5)),
    "std_mean": (lambda x: sum(torch.std_mean(x, 0)), rows(5)),
    "var_mean of rows": (lambda x: sum(torch.var_mean(x, 1)), rows(5)),
    "kthvalue of rows": (lambda x: x.kthvalue(2, dim=1).values, rows(5)),
    "quantile of rows": (lambda x: x.nanmedian(1).values, rows(5)),
}


def scaled(*others, channels):
    return lambda n: (values(n, *others), values(channels), values(channels) * 0.5)


def batch_norm(x, w, b, training=True):
    return F.batch_norm(x, None, None, w, b, training=True)


NORMS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), scaled(4, 6, channels=6)),
    "layer_norm, bare": (lambda x: F.layer_norm(x, (6,)), rows(4, 6)),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, (6,), w), scaled(4, 6, channels=6)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), scaled(4, 3, channels=4)),
    "batch_norm": (batch_norm, scaled(4, 3, channels=4)),
    "batch_norm in use": (
        lambda x, w, b: F.batch_norm(x, w.detach(), b.detach().exp(), w, b),
        scaled(4, 3, channels=4),
    ),
    "instance_norm": (
        lambda x, w, b: F.instance_norm(x, None, None, w, b),
        scaled(4, 3, channels=4),
    ),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), rows(4, 6)),
    "normalize": (F.normalize, rows(6)),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 0.5), rows(5)),
    "cosine_similarity": (F.cosine_similarity, lambda n: (values(n, 5), values(n, 5) + 1)),
    "pairwise_distance": (F.pairwise_distance, lambda n: (values(n, 5), values(n, 5) + 1)),
}

POOLS = {
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), rows(4, 6)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), rows(4, 6, 6)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), rows(2, 4, 4, 4)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), rows(4, 6)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), rows(4, 6, 6)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), rows(2, 4, 4, 4)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 2), rows(4, 6, 6)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 3), rows(4, 6)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), rows(4, 6, 6)),
    "adaptive_avg_pool2d to 1": (lambda x: F.adaptive_avg_pool2d(x, 1), rows(4, 6, 6)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), rows(4, 6, 6)),
    "interpolate": (lambda x: F.interpolate(x, 7, mode="linear"), rows(4, 6)),
    "interpolate, nearest": (lambda x: F.interpolate(x, scale_factor=2), rows(4, 6, 6)),
    "grid_sample": (
        partial(F.grid_sample, align_corners=True),
        lambda n: (values(n, 4, 5, 5), values(n, 3, 3, 2)),
    ),
    "reflection": (lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), rows(4, 6, 6)),
    "replication": (lambda x: F.pad(x, (1, 2), mode="replicate"), rows(4, 6)),
    "constant": (lambda x: F.pad(x, (1, 2, 0, 1)), rows(4, 6)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), rows(4, 3, 3)),
    "unfold": (lambda x: F.unfold(x, 2), rows(4, 3, 3)),
}

PRODUCTS = {
    "linear": (F.linear, lambda n: (values(n, 5), values(4, 5), values(4))),
    "linear of n": (F.linear, lambda n: (values(4, 5), values(n, 5), values(n))),
    "mm over n": (lambda x, y: x.t() @ y, lambda n: (values(n, 5), values(n, 4))),
    "bmm": (torch.bmm, lambda n: (values(n, 5, 3), values(n, 3, 4))),
    "baddbmm": (torch.baddbmm, lambda n: (values(n, 5, 4), values(n, 5, 3), values(n, 3, 4))),
    "mv": (torch.mv, lambda n: (values(n, 5), values(5))),
    "addmv": (torch.addmv, lambda n: (values(n), values(n, 5), values(5))),
    "dot": (torch.dot, lambda n: (values(n), values(n))),
    "outer": (torch.outer, lambda n: (values(n), values(4))),
    "conv1d": (F.conv1d, lambda n: (values(n, 4, 6), values(3, 4, 2), values(3))),
    "conv2d": (F.conv2d, lambda n: (values(n, 2, 5, 5), values(3, 2, 2, 2))),
    "conv_transpose1d": (F.conv_transpose1d, lambda n: (values(n, 4, 6), values(4, 3, 2))),
    "attention": (
        F.scaled_dot_product_attention,
        lambda n: (values(n, 4, 6, 8), values(n, 4, 6, 8), values(n, 4, 6, 8)),
    ),
    "cdist": (torch.cdist, lambda n: (values(n, 4), values(6, 4) + 1)),
    "bilinear": (F.bilinear, lambda n: (values(n, 6), values(n, 5), values(3, 6, 5), values(3))),
    "embedding": (F.embedding, lambda n: (index(n, 3, below=6), values(6, 4))),
    "gather": (lambda x, i: x.gather(1, i), lambda n: (values(n, 6), index(n, 3, below=6))),
    "index_select": (
        lambda x, i: x.index_select(1, i),
        lambda n: (values(n, 6), index(3, below=6)),
    ),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s),
        lambda n: (values(n, 6), index(n, 3, below=6), values(n, 3)),
    ),
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s),
        lambda n: (values(6, 5), index(n, below=6), values(n, 5)),
    ),
    "masked_fill": (lambda x, y: x.masked_fill(y > 0, 2.0), lambda n: (values(n, 5), values(n, 5))),
    "where": (lambda x, y: torch.where(x > 0, x, y), lambda n: (values(n, 5), values(n, 5))),
    "cat": (lambda x, y: torch.cat([x, y]), lambda n: (values(n, 5), values(3, 5))),
    "stack": (lambda x, y: torch.stack([x, y]), lambda n: (values(n, 5), values(n, 5))),
    "glu": (F.glu, rows(6)),
    "flip": (lambda x: x.flip(0), rows(5)),
    "roll": (lambda x: x.roll(1, 0), rows(5)),
    "tril": (lambda x: x.tril(), rows(3, 4)),
    "fft": (lambda x: torch.view_as_real(torch.fft.fft(x)).sum(-1), rows(6)),
    "rfft": (lambda x: torch.fft.rfft(x).abs(), rows(6)),
    "solve": (
        lambda x, y: torch.linalg.solve(x @ x.mT + y @ y.mT, y),
        lambda n: (values(n, 3, 3), values(n, 3, 5)),
    ),
    "inverse": (
        lambda x, y: torch.linalg.inv(x @ x.mT + y @ y.mT),
        lambda n: (values(n, 3, 3), values(n, 3, 5)),
    ),
    "eigvalsh": (lambda x: torch.linalg.eigvalsh(x @ x.mT), rows(3, 3)),
    "svdvals": (torch.linalg.svdvals, rows(3, 4)),
    "det": (torch.linalg.det, rows(3, 3)),
    "cross": (lambda x, y: torch.linalg.cross(x, y), lambda n: (values(n, 3), values(n, 3) + 1)),
    "trace": (lambda x: x.detach().trace(), rows(5)),
    "diagonal": (lambda x: x.diagonal(), rows(5)),
    "diag_embed": (torch.diag_embed, rows(5)),
    "block_diag": (torch.block_diag, rows(5)),
    "bucketize": (
        lambda x, y: torch.bucketize(x.detach(), y.detach().sort().values),
        lambda n: (values(n, 5), values(4)),
    ),
    "isin": (torch.isin, lambda n: (index(n, 5, below=9), index(4, below=9))),
    "one_hot": (lambda i: F.one_hot(i, 6), lambda n: (index(n, below=6),)),
    "dropout": (lambda x: F.dropout(x, 0.0), rows(5)),
    "prelu": (F.prelu, lambda n: (values(n, 4), values(4))),
    "gelu": (F.gelu, rows(5)),
}
FAMILIES = {
    "losses": LOSSES,
    "reduced": REDUCED,
    "norms": NORMS,
    "pools": POOLS,
    "products": PRODUCTS,
}

# Of no rows, torch's code for sizes fails on a number, a gradient is a plain tensor, one device
# raises and several need not, or torch's kernel returns uninitialized memory.
WITH_ROWS = {
    *("interpolate, nearest", "attention", "pixel_shuffle"),
    *[f"multi_margin, {reduction}" for reduction in REDUCTIONS],
}

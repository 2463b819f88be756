"""Ops along a sharded dim that exchange states, rows by number or halos: time, bytes received and
memory, by torch and here.

python -m benchmarks.folds                # 4 processes over gloo, tensors of 64 MB
python -m benchmarks.folds --megabytes 1 --repeats 1      # quickly

What is measured, and how, is that of benchmarks.movement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from benchmarks.movement import Pattern, compare
from benchmarks.sides import ALL

ROWS, IMAGES = (4096, 4096), (16, 64, 128, 128)


def _beside(
    *operands: Callable[[DTensor], tuple[torch.Tensor, Placement]],
) -> Callable[[DTensor], tuple[DTensor, ...]]:
    """Tensors, and the placement of each on the mesh of the pattern's own."""
    return lambda x: tuple(
        [distribute_tensor(y, x.device_mesh, [p]) for y, p in (make(x) for make in operands)]
    )


def _weights(dim: int, placement: Placement) -> Any:
    return lambda x: (torch.ones(x.shape[dim]), placement)


def _numbers(count: int, dim: int) -> Any:
    """So many numbers of the rows of a dim; 0: one for each row of dim 0."""
    return lambda x: (
        torch.arange(count or x.shape[0]).mul(7919).remainder(x.shape[dim]),
        Replicate(),
    )


COLUMNS = Shard(1)
PATTERNS = (
    Pattern("softmax", ROWS, COLUMNS, lambda x: x.softmax(1)),
    Pattern("softmax of 16 bits", ROWS, COLUMNS, lambda x: x.softmax(1), dtype=torch.bfloat16),
    Pattern("log_softmax", ROWS, COLUMNS, lambda x: x.log_softmax(1)),
    Pattern("logsumexp", ROWS, COLUMNS, lambda x: x.logsumexp(1)),
    Pattern("var", ROWS, COLUMNS, lambda x: x.var(1)),
    Pattern("max with indices", ROWS, COLUMNS, lambda x: list(x.max(1))),
    Pattern("argmax", ROWS, COLUMNS, lambda x: x.argmax(1)),
    Pattern(
        "layer_norm",
        ROWS,
        COLUMNS,
        lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b),
        _beside(_weights(1, Shard(0)), _weights(1, Shard(0))),
    ),
    Pattern(
        "rms_norm",
        ROWS,
        COLUMNS,
        lambda x, w: F.rms_norm(x, x.shape[1:], w),
        _beside(_weights(1, Shard(0))),
    ),
    Pattern(
        "group_norm, over channels",
        IMAGES,
        Shard(1),
        lambda x, w, b: F.group_norm(x, 2, w, b),
        _beside(_weights(1, Shard(0)), _weights(1, Shard(0))),
    ),
    Pattern(
        "batch_norm, over images",
        IMAGES,
        Shard(0),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        _beside(_weights(1, Replicate()), _weights(1, Replicate())),
    ),
    Pattern(
        "cross_entropy", ROWS, COLUMNS, lambda x, t: F.cross_entropy(x, t), _beside(_numbers(0, 1))
    ),
    Pattern("rows by number, x[t]", ROWS, Shard(0), lambda x, t: x[t], _beside(_numbers(512, 0))),
    Pattern(
        "columns by number, gather",
        ROWS,
        COLUMNS,
        lambda x, t: x.gather(1, t[:, None]).redistribute(placements=[Replicate()]),
        _beside(_numbers(0, 1)),
    ),
    Pattern(
        "rows written, index_add",
        ROWS,
        Shard(0),
        lambda x, t, y: x.index_add(0, t, y),
        _beside(_numbers(512, 0), lambda x: (torch.ones(512, x.shape[1]), Replicate())),
    ),
    Pattern(
        "conv2d, over height",
        IMAGES,
        Shard(2),
        lambda x, w: F.conv2d(x, w, padding=1),
        _beside(lambda x: (torch.ones(4, x.shape[1], 3, 3), Replicate())),
    ),
    Pattern("max_pool2d, over height", IMAGES, Shard(2), lambda x: F.max_pool2d(x, 3, 1, 1)),
    Pattern("avg_pool2d, over height", IMAGES, Shard(2), lambda x: F.avg_pool2d(x, 2)),
)


if __name__ == "__main__":
    compare("benchmarks.folds", PATTERNS, ALL, __doc__)

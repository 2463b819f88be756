"""Folds: ops along a sharded dim that gather no rows. Each device folds its rows to a small state,
the devices combine their states, and each finishes its own rows.

A state has the shape of the op's operand, with one row of each folded dim. It is a tensor with a
pending reduction, and combining it is a redistribution of that tensor (:mod:`.redistribute`): one
all-reduce, or what is cheaper, eager and in graphs. A device without rows has the neutral state and
takes part. Numbers of 16 bits are folded in 32, as PyTorch's kernels do; squares are summed about
the mean, and exponentials below the maximum.

The states and their gradients are well known: of a softmax (Milakov and Gimelshein 2018), of a
variance in two passes (Chan, Golub and LeVeque 1983).

- :mod:`.states`: how the states of an op lie, and how devices combine them
- ops whose states a reduction combines: :mod:`.along`, :mod:`.searches`, :mod:`.norms`,
  :mod:`.images`, :mod:`.classes`, :mod:`.attention`
- :mod:`.scans`: scans, and the greatest rows: each device gets the states of all
- :mod:`.by_number`: rows and elements that a device finds by their numbers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_sharding.dtensor.run.folds import (
    along,
    attention,
    by_number,
    classes,
    images,
    norms,
    scans,
    searches,
)

# By the names in the rows of the table.
FOLDS: dict[str, Callable[..., Any]] = {
    name: function
    for module in (along, searches, norms, images, classes, attention, scans, by_number)
    for name, function in module.FUNCTIONS.items()
}

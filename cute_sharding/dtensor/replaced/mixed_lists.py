"""Lists of DTensors and plain tensors that optimizers and ``clip_grad_norm_`` make of a program's
parameters, to run one op on each list (torch/utils/_foreach_utils.py).

Such an op is one op for each element, so the plain parameters do not meet the DTensors; but torch
refuses the list. Here the plain ones are given as replicas, which share their memory: what is
written to a replica is written to the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed
from cute_sharding.dtensor.replaced.tensor_specs import as_replica

__all__ = ["install_mixed_lists"]


def install_mixed_lists(installed: Installed) -> None:
    """Have lists of DTensors and plain tensors be lists of DTensors."""
    for patch in (patches.LISTS_OF_OPTIMIZERS, patches.LISTS_OF_GRADIENTS):
        installed.replace(patch, _grouping)


def _grouping(stock: Callable[..., Any]) -> Callable[..., Any]:
    def _group_tensors_by_device_and_dtype(
        tensorlistlist: Sequence[Any], with_indices: bool = False
    ) -> Any:
        if not torch.compiler.is_compiling():
            tensorlistlist = _of_dtensors(tensorlistlist)
        return stock(tensorlistlist, with_indices)

    return _group_tensors_by_device_and_dtype


def _of_dtensors(lists: Sequence[Any]) -> Sequence[Any]:
    """The lists, of which the first is of parameters or gradients, with replicas for its plain
    tensors, and for what the other lists have in these places. A list of plain tensors beside
    DTensors, such as the numbers of steps, stays.
    """
    first = lists[0]
    mesh = next((x.device_mesh for x in first if isinstance(x, DTensor)), None)
    if mesh is None or not any(map(_is_plain, first)):
        return lists
    if not mesh._is_current_rank_part_of_mesh():
        return lists  # here an op on DTensors computes nothing
    beside = [i for i, x in enumerate(first) if isinstance(x, DTensor)]
    return [
        some
        if any(_is_plain(some[i]) for i in beside if some)
        else [as_replica(x, mesh) if _is_plain(x) else x for x in some]
        for some in lists
    ]


def _is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)

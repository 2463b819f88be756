"""Functions of torch that are told which placements their inputs have, and raise for others: the
losses of loss_parallel (torch/distributed/tensor/parallel/loss.py), local_map
(torch/distributed/tensor/experimental/_func_map.py) and distribute_tensor (_api.py).

Their entries and the function behind them may be replaced here, once a program imports them; of
distribute_tensor the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_sharding.dtensor.torch_private import patches
from cute_sharding.dtensor.torch_private.patch import Installed, beginning_with
from cute_sharding.dtensor.torch_private.tensor_specs import Replicate, is_dtensor

__all__ = ["install_given_placements"]


def install_given_placements(
    installed: Installed,
    handler: Callable[[Callable[..., Any]], Callable[..., Any]],
    diverged: Callable[[Any], bool],
) -> None:
    """Have ``handler(torch's)`` compute losses, and local_map and distribute_tensor redistribute
    what they are given on meshes for which ``diverged(mesh)`` holds.
    """

    def brought(tensor: Any, mesh: Any, placements: Any) -> Any:
        # To what torch's slices and views would have made of it, and to nothing else.
        wanted = (Replicate(),) * tensor.device_mesh.ndim if placements is None else (*placements,)
        is_cut_here = tuple(tensor.placements) != wanted and all(
            p == q or q.is_replicate() for p, q in zip(tensor.placements, wanted)
        )
        if is_cut_here and mesh in (None, tensor.device_mesh) and diverged(tensor.device_mesh):
            return tensor.redistribute(placements=wanted)
        return tensor

    installed.put(patches.DISTRIBUTE_NAMES, {"_cute_sharding_brought": brought})
    installed.replace(patches.DISTRIBUTE, beginning_with(_BEGINNING, patches.DISTRIBUTE))

    def losses() -> None:
        theirs = patches.LOSSES.found()
        installed.put(patches.LOSSES, {op: handler(stock) for op, stock in theirs.items()})

    installed.once_imported(patches.LOSSES, losses)
    installed.once_imported(
        patches.LOCAL_MAP,
        lambda: installed.replace(patches.LOCAL_MAP, lambda stock: _lenient(stock, diverged)),
    )


_BEGINNING = """
if tensor.__class__ is DTensor:
    tensor = _cute_sharding_brought(tensor, device_mesh, placements)
"""


def _lenient(stock: Callable[..., Any], diverged: Callable[[Any], bool]) -> Callable[..., Any]:
    # By torch's names: what the program gives by name stands in kwargs.
    def _local_map_wrapped(
        func: Any,
        out_placements: Any,
        in_placements: Any,
        in_grad_placements: Any,
        device_mesh: Any,
        redistribute_inputs: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if in_placements is not None and not redistribute_inputs:
            # A compiler cannot be asked which meshes these are: there it is for all.
            redistribute_inputs = torch.compiler.is_compiling() or any(
                is_dtensor(x) and diverged(x.device_mesh) for x in args
            )
        settings = in_grad_placements, device_mesh, redistribute_inputs
        return stock(func, out_placements, in_placements, *settings, *args, **kwargs)

    return _local_map_wrapped

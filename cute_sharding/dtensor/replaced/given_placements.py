"""Functions of torch that are told which placements their inputs have, and raise for others: the
losses of loss_parallel (torch/distributed/tensor/parallel/loss.py), local_map
(torch/distributed/tensor/experimental/_func_map.py) and distribute_tensor (_api.py).

Their entries and the function behind them may be replaced here, once a program imports them; of
distribute_tensor the code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed, beginning_with
from cute_sharding.dtensor.replaced.tensor_specs import (
    Replicate,
    is_dtensor,
    may_be_uneven,
    placed_as,
)

__all__ = ["brought", "install_given_placements"]


def install_given_placements(
    installed: Installed,
    handler: Callable[[Callable[..., Any]], Callable[..., Any]],
    shaped: Callable[[Any], Any],
) -> None:
    """Have ``handler(torch's)`` compute losses, and local_map and distribute_tensor redistribute
    what they are given to the replicas that they are told of, which torch raises for: views and
    slices leave cut here what torch's make such replicas of. ``shaped`` gives what local_map makes
    of uneven shards its global shape.
    """
    installed.replace(patches.DISTRIBUTE, beginning_with(_BEGINNING, patches.DISTRIBUTE))

    def losses() -> None:
        theirs = patches.LOSSES.found()
        installed.put(patches.LOSSES, {op: handler(stock) for op, stock in theirs.items()})

    installed.once_imported(patches.LOSSES, losses)
    installed.once_imported(
        patches.LOCAL_MAP,
        lambda: installed.replace(patches.LOCAL_MAP, partial(_lenient, shaped)),
    )


# Dynamo follows this code, as a part of a program: so it imports what it needs, where there is
# something to do.
_BEGINNING = f"""
if tensor.__class__ is DTensor and (placements is None or tensor.placements != (*placements,)):
    from {__name__} import brought
    tensor = brought(tensor, device_mesh, placements)
"""


def brought(tensor: Any, mesh: Any, placements: Any) -> Any:
    """A DTensor that is to be distributed, gathered where that is all that is missing."""
    wanted = (Replicate(),) * tensor.device_mesh.ndim if placements is None else (*placements,)
    if mesh in (None, tensor.device_mesh) and _gathers(tensor.placements, wanted):
        return tensor.redistribute(placements=wanted)
    return tensor


def _gathers(given: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether to redistribute from the one to the other is to replicate alone."""
    return tuple(given) != tuple(wanted) and all(
        p == q or q.is_replicate() for p, q in zip(given, wanted)
    )


def _lenient(shaped: Callable[[Any], Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    # Since 2.14 it is given one more setting, before what the program gives.
    named = [p for p in signature(stock).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = len(named) - 6

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
        uneven = _some_are_uneven(args[others:], in_placements)
        if in_placements is not None and not redistribute_inputs:
            differing = [
                (x.placements, wanted)
                for x, wanted in zip(tree_leaves(args[others:]), in_placements)
                if is_dtensor(x) and wanted is not None and tuple(x.placements) != tuple(wanted)
            ]
            redistribute_inputs = all(_gathers(*each) for each in differing)
        settings = in_grad_placements, device_mesh, redistribute_inputs
        found = stock(func, out_placements, in_placements, *settings, *args, **kwargs)
        return tree_map(lambda x: shaped(x) if is_dtensor(x) else x, found) if uneven else found

    return _local_map_wrapped


def _some_are_uneven(args: Any, in_placements: Any) -> bool:
    """Whether ranks are given different numbers of rows of some DTensor. Of sizes that are symbols
    it is not asked: a compiled program goes on as in torch.
    """
    leaves = tree_leaves(args)
    for x, wanted in zip(leaves, in_placements or [None] * len(leaves)):
        if is_dtensor(x) and all(type(n) is int for n in x.shape):
            spec = x._spec if wanted is None else placed_as(x._spec, tuple(wanted))
            if may_be_uneven(spec):
                return True
    return False

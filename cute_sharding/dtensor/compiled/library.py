"""Ops of our own, for graphs: ``after``, and the library that redistributing/dynamic.py defines
``redistribute`` in, and movement/dynamic.py ``move``.
"""

from __future__ import annotations

import torch

library = torch.library.Library("cute_sharding", "DEF")


def _after(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


library.define("after(Tensor tensor, Tensor other) -> Tensor")
library.impl("after", _after, "CompositeExplicitAutograd")
torch.library.register_fake(
    "cute_sharding::after", lambda tensor, other: tensor.clone(), lib=library
)


def after(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """``tensor`` as something for which the others are needed, though nothing of them is in it.

    The graphs of the ranks differ in what is copied, and must not differ in their collectives. A
    compiler leaves out a collective of which a rank uses nothing, and moves one that a rank gives
    nothing to: of a backward pass into the forward pass, as nothing of the gradients is in it. So
    on each rank what is sent needs all that any rank sends of, and a result all that any rank's
    result is made of.
    """
    for other in others:
        tensor = torch.ops.cute_sharding.after(tensor, other)
    return tensor

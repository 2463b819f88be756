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


def after(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` for which ``other`` is needed, though nothing of it is: so a compiler
    does not leave out the collective that it comes from, which other ranks wait in.
    """
    return torch.ops.cute_sharding.after(tensor, other)

"""Ops of our own, for graphs: ``after``, and the library that run/dynamic.py defines ``exchange``
in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

library = torch.library.Library("cute_sharding", "DEF")


def in_own_memory(result: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of an op in memory of its own, from the beginning of that on: as compilers expect
    of what an op gives.
    """
    if any(result is x for x in given) or result.storage_offset():
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()


def _after(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


library.define("after(Tensor tensor, Tensor other) -> Tensor")
library.impl("after", _after, "CompositeExplicitAutograd")


def after(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """``tensor`` as something for which the others are needed, though nothing of them is in it.

    The graphs of the ranks differ in what is copied, and must not differ in what depends on a
    collective and on what it depends: by that it is decided whether a checkpointed region runs it
    again, and a backward graph loses what depends on no gradient and is used by nothing. So on each
    rank what is sent needs all that any rank sends of, and a result all that any rank's result is
    made of.
    """
    for other in others:
        tensor = torch.ops.cute_sharding.after(tensor, other)
    return tensor

"""Our own ops for graphs: ``after``, and the library of run/dynamic.py's ``exchange``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

library = torch.library.Library("cute_sharding", "DEF")


def in_own_memory(result: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of an op in memory of its own and at the start of that memory, as compilers expect
    of an op's results.
    """
    if any(result is x for x in given) or result.storage_offset():
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()


def _after(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


library.define("after(Tensor tensor, Tensor other) -> Tensor")
library.impl("after", _after, "CompositeExplicitAutograd")


def after(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """``tensor``, made to depend on the others, though it contains nothing of them.

    The graphs of ranks differ in what is copied, but must not differ in what depends on a
    collective and what it depends on. For that decides whether a checkpointed region runs the
    collective again, and a backward graph drops what depends on no gradient and is not used. So on
    each rank, what is sent depends on all that any rank sends from, and a result on all that any
    rank's result is made of.
    """
    for other in others:
        tensor = torch.ops.cute_sharding.after(tensor, other)
    return tensor

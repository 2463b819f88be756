"""The library of our own ops for graphs (run/in_graphs.py)."""

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

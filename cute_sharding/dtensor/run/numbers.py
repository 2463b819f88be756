"""Results without dims are never left pending: their reduction runs together with the op.

Programs read a loss, a norm or a flag on one rank alone (``if rank == 0: print(loss.item())``). A
reduction at that point would wait for the other ranks forever. Results with dims may stay pending:
programs read them on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.replaced.redistribution_hook import reduce_value
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial


class Pending(NamedTuple):
    """The pending reductions of a result, by mesh dim."""

    mesh: Any
    placements: tuple[tuple[int, Partial], ...]


def pending_of(spec: Any) -> Pending | None:
    """The pending reductions of a number; None for a tensor with dims, or if nothing is pending.
    (A mesh of one device is torch's stand-in for any mesh.)
    """
    if not isinstance(spec, DTensorSpec) or len(spec.shape) or spec.mesh.size() == 1:
        return None
    placements = tuple([(m, p) for m, p in enumerate(spec.placements) if isinstance(p, Partial)])
    return Pending(spec.mesh, placements) if placements else None


def finished(results: Any, pending: Sequence[Pending | None]) -> Any:
    """The local results of an op, of which the pending numbers are reduced."""
    if not isinstance(results, tuple):  # mostly
        return _reduced(results, pending[0])
    every = dict(enumerate(results))
    return tuple((every | finish(every, dict(enumerate(pending)))).values())


def finish(numbers: Mapping[Any, Any], pending: Mapping[Any, Pending | None]) -> dict[Any, Any]:
    """The numbers with pending reductions, reduced: those with the same reductions and dtype
    together, once for each mesh dim.
    """
    of_a_kind = defaultdict(list)
    for key, of in pending.items():
        if of is not None:
            of_a_kind[of, numbers[key].dtype].append(key)
    found: dict[Any, Any] = {}
    for (of, _), keys in of_a_kind.items():
        some = [numbers[key] for key in keys]
        x = _reduced(some[0] if len(some) == 1 else torch.stack(some), of)
        found.update(zip(keys, [x] if len(some) == 1 else x.unbind()))
    return found


def _reduced(x: torch.Tensor, pending: Any) -> torch.Tensor:
    for m, placement in pending.placements:
        x = reduce_value(placement, x, pending.mesh, m)
    return x

"""Results without dims: what is pending of them is finished with the op.

Programs read such a number, a loss, a norm, a flag, on one rank alone (``if rank == 0:
print(loss.item())``), where nothing can be waited for. So none is handed on pending. Others are:
what is read of those is read by all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.redistribution_hook import reduce_value
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial, Replicate


class Pending(NamedTuple):
    """What is pending of a result, and on which mesh dims."""

    mesh: Any
    placements: tuple[tuple[int, Partial], ...]


def with_scalars_finished(found: Any, schema: OpSchema) -> Any:
    """The answer for an op, where it leaves something pending of a result without dims, with that
    finished as part of the op.

    Not of a view, which is the memory of another tensor; nor of what is written to; nor of lists of
    results, such as the norms of all gradients, which programs go on to reduce to one. And a mesh
    of one device is torch's stand-in for any: it has no more to say of it than torch.
    """
    op = schema.op._schema
    if op._is_view_op() or op.is_mutable:
        return found
    if any(isinstance(result.type, torch.ListType) for result in op.returns):
        return found
    specs = answers.specs_of_results(found)
    pending = [pending_of(spec) for spec in specs]
    if not any(pending):
        return found
    finished = answers.with_outputs(
        found, lambda spec: _replicated(spec) if pending_of(spec) else spec.placements
    )
    return answers.instead(
        finished,
        schema,
        partial(_run, answers.kernel_of(found, schema), pending),
        reduced=(
            *answers.finished_by(found),
            *[spec for spec, of in zip(specs, pending) if of is not None],
        ),
    )


def pending_of(spec: Any) -> Pending | None:
    """What is pending of a number; None of another tensor, and where nothing is."""
    if not isinstance(spec, DTensorSpec) or len(spec.shape) or spec.mesh.size() == 1:
        return None
    placements = tuple([(m, p) for m, p in enumerate(spec.placements) if isinstance(p, Partial)])
    return Pending(spec.mesh, placements) if placements else None


def _replicated(spec: DTensorSpec) -> list[Any]:
    return [Replicate() if isinstance(p, Partial) else p for p in spec.placements]


def _run(
    function: Callable[..., Any], pending: Sequence[Pending | None], *args: Any, **kwargs: Any
) -> Any:
    results = function(*args, **kwargs)
    if not isinstance(results, tuple):
        return finish([results], pending[0])[0]
    done = list(results)
    of_a_kind = defaultdict(list)
    for i, (x, of) in enumerate(zip(results, pending)):
        if of is not None:
            of_a_kind[of, x.dtype].append(i)
    for (of, _), places in of_a_kind.items():
        for i, x in zip(places, finish([results[i] for i in places], of)):
            done[i] = x
    return tuple(done)


def finish(numbers: Sequence[torch.Tensor], pending: Pending | None) -> list[torch.Tensor]:
    """Numbers that the same is pending of, in one reduction for each mesh dim."""
    if pending is None:
        return list(numbers)
    x = numbers[0] if len(numbers) == 1 else torch.stack(list(numbers))
    for m, placement in pending.placements:
        x = reduce_value(placement, x, pending.mesh, m)
    return [x] if len(numbers) == 1 else list(x.unbind())

"""Results without dims are never left pending: their reduction runs together with the op.

Programs read a loss, a norm or a flag on one rank alone (``if rank == 0: print(loss.item())``). A
reduction at that point would wait for the other ranks forever. Results with dims may stay pending:
programs read them on all ranks.
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
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial
from cute_sharding.dtensor.run.placements import without


class Pending(NamedTuple):
    """The pending reductions of a result, by mesh dim."""

    mesh: Any
    placements: tuple[tuple[int, Partial], ...]


def with_scalars_finished(found: Any, schema: OpSchema) -> Any:
    """The answer for an op; a result without dims that it leaves pending is reduced with the op.

    Except results of a view, which share the memory of another tensor; tensors that are written to;
    and lists of results, such as the norms of all gradients, which programs reduce to one number.
    On a mesh of one device, torch's stand-in for any mesh, torch's answer is kept.
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
        found,
        lambda spec: without((Partial,) if pending_of(spec) else (), spec.placements),
    )
    return answers.with_fields(
        finished,
        schema,
        runs=partial(_run, answers.kernel_of(found, schema), pending),
        reduced=(
            *answers.finished_by(found),
            *[spec for spec, of in zip(specs, pending) if of is not None],
        ),
    )


def pending_of(spec: Any) -> Pending | None:
    """The pending reductions of a number; None for a tensor with dims, or if nothing is pending."""
    if not isinstance(spec, DTensorSpec) or len(spec.shape) or spec.mesh.size() == 1:
        return None
    placements = tuple([(m, p) for m, p in enumerate(spec.placements) if isinstance(p, Partial)])
    return Pending(spec.mesh, placements) if placements else None


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
    """Numbers with the same pending reductions, reduced together: once for each mesh dim."""
    if pending is None:
        return list(numbers)
    x = numbers[0] if len(numbers) == 1 else torch.stack(list(numbers))
    for m, placement in pending.placements:
        x = reduce_value(placement, x, pending.mesh, m)
    return [x] if len(numbers) == 1 else list(x.unbind())

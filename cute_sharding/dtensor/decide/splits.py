"""``tensor_split``, with its parts in one exchange.

torch decomposes ``tensor_split`` (and hsplit, vsplit, dsplit) into slices before DTensor sees it.
They stay slices: to autograd and to writes each part is a view of the tensor, with the placements
of any slice. But slices that lack rows on some devices become one movement with several results. It
runs with the first of these slices, and the others take their results from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import registry, symints, tensor_specs
from cute_sharding.dtensor.run.calls import made_of, plan_for
from cute_sharding.dtensor.run.moving import Movement
from cute_sharding.dtensor.run.ops import Runner
from cute_sharding.exchange import Exchange
from cute_sharding.relations.dim_map import normalize_dim
from cute_sharding.relations.table import BY_OP

_SLICE = BY_OP["Tensor.__getitem__"].overloads[0]


def slices_together(args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """A function that answers the slices of a ``tensor_split`` one after the other; those that lack
    rows share one exchange. None if fewer than two do.
    """
    slices = _slices(*args)
    lacking = [each.runner.movement for each in slices if each]
    if len(lacking) < 2:
        return None
    exchange = _joined_exchange(tuple([movement.exchange for movement in lacking]))
    joined = Movement.on(exchange, lacking[0].mesh, lacking[0].pending)
    if joined is None:  # the ranks have no common process group
        return None
    (x, *_), remaining, results = args, iter(slices), list[torch.Tensor]()

    def take(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The next result, as a list of one; the first call moves all of them."""
        results[:] = results or joined(operands)
        return [results.pop(0)]

    def answer(op: Any, *given: Any) -> Any:
        each = next(remaining) if given[0] is x else None
        if each is None:
            return op(*given)
        return made_of(each.runner.run([x._local_tensor], take), each.spec)

    return answer


class _Slice(NamedTuple):
    """A slice that lacks rows: the function that would run it alone, and the spec of its result."""

    runner: Runner
    spec: Any


def _slices(x: Any, parts: int | Sequence[int], dim: int = 0) -> list[_Slice | None]:
    """One entry for each part; None for a slice that lacks no rows."""
    spec = x._spec
    shape = tuple(spec.shape)
    if symints.is_symbolic(shape, parts) or not spec.mesh._is_current_rank_part_of_mesh():
        return []
    try:
        d = normalize_dim(dim, len(shape))
        bounds = _bounds(shape[d], parts)
    except IndexError:
        return []  # torch raises the error
    if all(cut is None or cut[0] != d for cut in map(tensor_specs.cut_of, spec.placements)):
        return []
    plans = [plan_for(registry.overload(_SLICE), x, d, *b) for b in bounds]
    return [
        _Slice(plan.kernel, plan.results)
        if plan and isinstance(plan.kernel, Runner) and plan.kernel.movement.dims
        else None
        for plan in plans
    ]


@remembered
def _joined_exchange(exchanges: tuple[Exchange, ...]) -> Exchange:
    """One exchange to all results, from exchanges of the same operand to one result each."""
    moves = [exchange.move for exchange in exchanges]
    links = [link._replace(target=k) for k, move in enumerate(moves) for link in move.links]
    outputs = tuple([move.outputs[0] for move in moves])
    targets = tuple([exchange.targets[0] for exchange in exchanges])
    move = moves[0]._replace(outputs=outputs, links=tuple(links))
    return replace(exchanges[0], relation=move, targets=targets)


def _bounds(n: int, parts: int | Sequence[int]) -> list[tuple[int, int | None]]:
    """The slices that ``torch.tensor_split`` takes of a dim of ``n`` rows: ``parts`` of them, some
    of the first a row longer; or one up to each index, and one after the last.
    """
    if not isinstance(parts, int):
        return [*zip([0, *parts], [*parts, None])]
    size, more = divmod(n, max(parts, 1))
    firsts = [k * size + min(k, more) for k in range(parts + 1)]
    return [*pairwise(firsts)]

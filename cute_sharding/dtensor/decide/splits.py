"""``tensor_split``, and its parts one exchange.

torch takes ``tensor_split`` (and hsplit, vsplit, dsplit) apart into slices before DTensor meets it.
So they stay: each part is a view of the tensor to autograd and to writes, of the placements that
any slice has. Those that lack rows are one movement with several results. It runs when the first of
them does, and the others take theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.answer.running import made_of, runner_of
from cute_sharding.dtensor.replaced import registry, symints, tensor_specs
from cute_sharding.dtensor.run.moving import Movement
from cute_sharding.dtensor.run.ops import Runner
from cute_sharding.exchange import Exchange
from cute_sharding.relations.dim_map import normalize_dim
from cute_sharding.relations.table import BY_OP

_SLICE = BY_OP["Tensor.__getitem__"].overloads[0]


def slices_together(args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What answers the ops that ``tensor_split`` comes to, one after the other: those slices that
    lack rows are one exchange. None: there are not several.
    """
    slices = _slices(*args)
    joined = _joined([each.runner for each in slices if each])
    if joined is None:
        return None
    (x, *_), parts, remaining = args, _Parts(joined), iter(slices)

    def answer(op: Any, *given: Any) -> Any:
        each = next(remaining) if given[0] is x else None
        if each is None:
            return op(*given)
        return made_of(each.runner.run([x._local_tensor], parts.take), each.spec)

    return answer


class _Slice(NamedTuple):
    """A slice that lacks rows: what would run it by itself, and the spec of the result."""

    runner: Runner
    spec: Any


def _slices(x: Any, parts: int | Sequence[int], dim: int = 0) -> list[_Slice | None]:
    """Of each part; None for one that lacks no rows."""
    spec = x._spec
    shape = tuple(spec.shape)
    if symints.is_symbolic(shape, parts) or not spec.mesh._is_current_rank_part_of_mesh():
        return []
    try:
        d = normalize_dim(dim, len(shape))
        bounds = _bounds(shape[d], parts)
    except IndexError:
        return []  # torch says what is wrong
    if all(cut is None or cut[0] != d for cut in map(tensor_specs.cut_of, spec.placements)):
        return []
    every = [runner_of(registry.overload(_SLICE), x, d, *b) for b in bounds]
    return [
        _Slice(run, of_it) if isinstance(run, Runner) and run.movement.dims else None
        for run, of_it in every
    ]


def _joined(runners: Sequence[Runner]) -> Movement | None:
    """One that gives the results of several; None where no process group is for its mesh dims."""
    if len(runners) < 2:
        return None
    first = runners[0].movement
    exchange = _joined_exchange(tuple([runner.movement.exchange for runner in runners]))
    return Movement.on(exchange, first.mesh, first.pending)


class _Parts:
    """The results of a movement, each asked for by itself: what is first has all of them moved."""

    def __init__(self, joined: Movement) -> None:
        self._joined = joined
        self._results: list[torch.Tensor] = []

    def take(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The next of them."""
        self._results = self._results or self._joined(operands)
        return [self._results.pop(0)]


@lru_cache(maxsize=1 << 10)
def _joined_exchange(exchanges: tuple[Exchange, ...]) -> Exchange:
    """Of exchanges from one operand to one result each, that to all results."""
    moves = [exchange.move for exchange in exchanges]
    links = [link._replace(target=k) for k, move in enumerate(moves) for link in move.links]
    outputs = tuple([move.outputs[0] for move in moves])
    targets = tuple([exchange.targets[0] for exchange in exchanges])
    move = replace(moves[0], outputs=outputs, links=tuple(links))
    return replace(exchanges[0], relation=move, targets=targets)


def _bounds(n: int, parts: int | Sequence[int]) -> list[tuple[int, int | None]]:
    """The slices that ``torch.tensor_split`` takes of a dim of ``n`` rows: as many as it is to have
    parts, the first of which have a row more; or up to each index, and from the last one on.
    """
    if not isinstance(parts, int):
        return [*zip([0, *parts], [*parts, None])]
    size, more = divmod(n, max(parts, 1))
    firsts = [k * size + min(k, more) for k in range(parts + 1)]
    return [*pairwise(firsts)]

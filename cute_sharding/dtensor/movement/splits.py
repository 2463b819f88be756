"""``tensor_split``, and its parts one exchange.

torch takes ``tensor_split`` (and hsplit, vsplit, dsplit) apart into slices before DTensor meets it.
So they stay: each part is a view of the tensor to autograd and to writes, of the placements that
any slice has. Those that lack rows are one movement with several results. It runs when the first of
them does, and the others take theirs (:mod:`.together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from cute_sharding.dtensor.answer.running import function_of
from cute_sharding.dtensor.movement.running import Runner
from cute_sharding.dtensor.movement.together import Parts, one_exchange
from cute_sharding.dtensor.replaced import registry, symints, tensor_specs
from cute_sharding.dtensor.run.groups import dims_of_group
from cute_sharding.exchange import Exchange
from cute_sharding.relations.table.movement import at

# Ops that torch takes apart into slices.
SLICE = "slice.Tensor"
SPLITS = ("tensor_split.sections", "tensor_split.indices")


def slices_together(args: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Inside, the slices that ``tensor_split`` comes to are one exchange."""
    return one_exchange(_parts(*args))


def _parts(x: Any, parts: int | Sequence[int], dim: int = 0) -> Parts | None:
    """The slices that lack rows; None where there are not several."""
    spec = x._spec
    shape = tuple(spec.shape)
    if symints.is_symbolic(shape, parts):
        return None
    try:
        d = at(shape, dim)
        bounds = _bounds(shape[d], parts)
    except IndexError:
        return None  # torch says what is wrong
    if all(cut is None or cut[0] != d for cut in map(tensor_specs.cut_of, spec.placements)):
        return None
    functions = [function_of(registry.overload(SLICE), x, d, *b) for b in bounds]
    runners = [each for each in functions if isinstance(each, Runner) and each.dims]
    joined = _joined(runners) if len(runners) > 1 else None
    if joined is None:
        return None
    return Parts([runner.exchange for runner in runners], joined.copies)


def _joined(runners: Sequence[Runner]) -> Runner | None:
    """One that gives the results of all; None where no process group is for its mesh dims."""
    first = runners[0]
    exchange = _joined_exchange(tuple([runner.exchange for runner in runners]))
    dims = dims_of_group(first.mesh, exchange.mesh_dims)
    metas = [meta for runner in runners for meta in runner.metas]
    return None if dims is None else replace(first, exchange=exchange, dims=dims, metas=metas)


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

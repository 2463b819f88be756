"""Slices that are parts of one op, and their exchanges one.

torch takes ``tensor_split`` (and hsplit, vsplit, dsplit) apart into slices before DTensor meets it.
Each is answered as any slice is, to the placements of its own; those that lack rows are one
movement with several results. It runs when the first of them does, and the others find theirs.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from cute_sharding.dtensor.redistributing.groups import dims_of_group
from cute_sharding.dtensor.torch_private import dispatch, registry, symints, tensor_specs
from cute_sharding.movement import Movement
from cute_sharding.movement.rules import at, tensor_split_bounds

if TYPE_CHECKING:
    from cute_sharding.dtensor.movement.running import Runner

# Ops that torch takes apart into slices.
SLICE = "slice.Tensor"
SPLITS = ("tensor_split.sections", "tensor_split.indices")
# .waiting: the slices that this thread is about to run as one
_thread = threading.local()


class _Waiting:
    """Slices of one tensor, till each has been run."""

    def __init__(self, runners: Sequence[Runner], joined: Runner) -> None:
        self._joined = joined
        self._source: torch.Tensor | None = None
        self._results: dict[Movement, list[Any]] = defaultdict(list)
        for k, runner in enumerate(runners):
            self._results[runner.movement].insert(0, k)

    def result_of(
        self, movement: Movement, given: torch.Tensor, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        if self._source is None and movement in self._results:
            self._source, results = given, self._joined.copies(operands)
            self._results = {
                each: [results[k] for k in numbers] for each, numbers in self._results.items()
            }
        if self._source is not given or not self._results.get(movement):
            return None
        return self._results[movement].pop()


def result_of(
    runner: Runner, given: torch.Tensor, operands: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """The result of a slice that is run as one with others; None where it is not."""
    waiting = getattr(_thread, "waiting", None)
    return None if waiting is None else waiting.result_of(runner.movement, given, operands)


@contextmanager
def slices_together(args: tuple[Any, ...]) -> Iterator[None]:
    """Inside, the slices that ``tensor_split`` comes to are one exchange."""
    before = getattr(_thread, "waiting", None)
    _thread.waiting = _waiting(*args)
    try:
        yield
    finally:
        _thread.waiting = before


def _waiting(x: Any, parts: int | Sequence[int], dim: int = 0) -> _Waiting | None:
    spec = x._spec
    shape = tuple(spec.shape)
    if symints.is_symbolic(shape, parts):
        return None
    try:
        d = at(shape, dim)
        bounds = tensor_split_bounds(shape[d], parts)
    except IndexError:
        return None  # torch says what is wrong
    if all(cut is None or cut[0] != d for cut in map(tensor_specs.cut_of, spec.placements)):
        return None
    functions = [dispatch.function_of(registry.overload(SLICE), x, d, *b) for b in bounds]
    runners = [each for each in functions if getattr(each, "dims", ())]
    joined = _joined(runners) if len(runners) > 1 else None
    return None if joined is None else _Waiting(runners, joined)


def _joined(runners: Sequence[Runner]) -> Runner | None:
    """One that gives the results of all; None where no process group is for its mesh dims."""
    first = runners[0]
    movement = _joined_movement(tuple([runner.movement for runner in runners]))
    dims = dims_of_group(first.mesh, movement.mesh_dims)
    return None if dims is None else replace(first, movement=movement, dims=dims)


@lru_cache(maxsize=1 << 10)
def _joined_movement(movements: tuple[Movement, ...]) -> Movement:
    """Of movements of one operand to one result each, that to all results."""
    moves = [movement.move for movement in movements]
    links = [link._replace(target=k) for k, move in enumerate(moves) for link in move.links]
    outputs = tuple([move.outputs[0] for move in moves])
    targets = tuple([movement.targets[0] for movement in movements])
    move = replace(moves[0], outputs=outputs, links=tuple(links))
    return replace(movements[0], move=move, targets=targets)

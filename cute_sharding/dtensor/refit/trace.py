"""A generator as one relation: its code is run once on tensors without data, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_sharding._words import counted
from cute_sharding.dtensor.refit.calls import seen_by
from cute_sharding.dtensor.refit.record import (
    MemoryRecording,
    at_meta_only,
    without_value,
)
from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.relations import NotOnlyMoved, Relation, beside

Generator: TypeAlias = (
    "Callable[[dict[str, torch.Tensor]], "
    "Mapping[str, torch.Tensor | None] | Iterable[tuple[str, torch.Tensor]]]"
)

GENERATOR = "the generator (the function that makes the results)"
MOVES = (
    "views, permutes, slices, cats, stacks, splits, expands, repeats, rolls, flips, pads, rows by "
    "number, and one cast"
)


class Traced(NamedTuple):
    """What a generator says.

    Attributes:
        relation: of its results to its sources.
        names, dtypes: of the results.
    """

    relation: Relation
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]


def trace(generator: Generator, sources: Mapping[str, tuple[Any, torch.dtype]]) -> Traced:
    """The relation that a generator's code is, of sources of those shapes and dtypes.

    Raises:
        NotOnlyMoved: it computes a result, or reads values.
        TypeError: it does not give tensors by name.
        ValueError: it gives nothing.
    """
    with dispatch_modes.no_modes(), torch.no_grad(), at_meta_only(GENERATOR, MOVES):
        recording = MemoryRecording(sources, of=GENERATOR)
        with seen_by(recording):
            results: Any = generator(GivenTensors(zip(sources, recording.given)))
            if isinstance(results, Iterator):  # pairs of name and tensor, as engines take them
                results = dict(results)
    if isinstance(results, Mapping):
        results = {name: result for name, result in results.items() if result is not None}
    if not isinstance(results, Mapping) or not all(
        isinstance(name, str) and isinstance(result, torch.Tensor)
        for name, result in results.items()
    ):
        raise TypeError(
            "the generator (the function that makes the results) returns "
            f"{_kind(results)}: let it return a dict from names to tensors"
        )
    if not results:
        raise ValueError(
            "the generator (the function that makes the results) returns no tensor: let it return "
            "a dict from names to tensors"
        )
    relations = [relation_to(recording, name, result) for name, result in results.items()]
    dtypes = tuple([result.dtype for result in results.values()])
    return Traced(beside(relations), tuple(results), dtypes)


class UnknownSource(KeyError):
    """A generator takes a source that is not there; ``name`` is its name."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class GivenTensors(dict[str, torch.Tensor]):
    """The sources by name, which say what they are if a name is not among them."""

    def __init__(self, sources: Any, of: str = "") -> None:
        super().__init__(sources)
        self._of = of or GENERATOR

    def __missing__(self, name: str) -> Any:
        near = next(map(repr, get_close_matches(name, self, 1, 0)), "another checkpoint")
        raise UnknownSource(
            f"{self._of} takes {name!r}, which is not among the {counted(len(self), 'source')}: "
            f"did you mean {near}?",
            name,
        )


def _kind(results: Any) -> str:
    if not isinstance(results, Mapping):
        return f"a {type(results).__name__}"
    kinds = sorted({f"{type(k).__name__} to {type(v).__name__}" for k, v in results.items()})
    return f"a mapping of {', '.join(kinds)}"


# -- results ---------------------------------------------------------------------------------------


def relation_to(recording: MemoryRecording, name: str, tensor: torch.Tensor) -> Relation:
    """What a result is, of the sources.

    Raises:
        NotOnlyMoved: it is computed, or has elements without a value.
    """
    pieces = recording.read(tensor)
    left = tensor.numel() - sum(each.size for each in pieces)
    if left:
        raise NotOnlyMoved(
            f"a refit cannot make result {name!r}: {without_value(left, tensor.shape)}"
        )
    wrong = recording.operands.not_moved(pieces)
    if wrong is not None:
        raise NotOnlyMoved(
            f"a refit cannot make result {name!r} from its sources ({wrong.sources}): {wrong.why}. "
            f"A refit only moves elements ({MOVES}). Remove the op from the generator (the "
            "function that makes the results), and apply the op before or after the refit"
        )
    some, constants = recording.operands.of_sources(pieces)
    return Relation(recording.shapes, (tuple(tensor.shape),), some, constants)

"""A model of many layers, of models of few: what each further layer adds is the same, or else all
are run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from cute_sharding.estimates.memory import Memory
from cute_sharding.estimates.traffic import Amount, Traffic

Key = TypeVar("Key")

# How many layers the models have that are run. Two more times one layer: whether that adds the same
# is seen, and a first and a last layer are there in each.
DEPTHS = (2, 3, 4)


def traffic_of(layers: int, found: Mapping[int, Traffic]) -> Traffic | None:
    """What a model of so many layers receives, of what models of ``DEPTHS`` do. None where a
    further layer does not add the same each time.

    >>> traffic_of(126, dict.fromkeys(DEPTHS, Traffic({}))).collectives
    0
    """
    rows = _each([found[depth].rows for depth in DEPTHS], Amount())
    grown = {
        alike: _line([[*amount] for amount in amounts], layers) for alike, amounts in rows.items()
    }
    if None in grown.values():
        return None
    return Traffic({alike: Amount(*numbers) for alike, numbers in grown.items() if numbers})


def memory_of(layers: int, found: Mapping[int, Memory]) -> Memory | None:
    """What a model of so many layers holds, in each stretch of its step. What is held while one of
    the layers runs grows with the layers before it and with those behind: so it is the most in the
    first or in the last of them, and these are in every depth. None as in :func:`traffic_of`.
    """
    moments = [
        {moment: held for moment, held in found[depth].moments.items() if moment.at != 1}
        for depth in DEPTHS
    ]
    if any({*one} != {*other} for one, other in pairwise(moments)):
        return None
    grown = {}
    for moment in moments[0]:
        held = _each([each[moment] for each in moments], 0)
        sizes = {of: _line([[n] for n in some], layers) for of, some in held.items()}
        if None in sizes.values():
            return None
        grown[moment] = {of: numbers[0] for of, numbers in sizes.items() if numbers}
    return Memory(grown)


def _each(found: Sequence[Mapping[Key, Any]], nothing: Any) -> dict[Key, list[Any]]:
    """What each depth has of each key."""
    keys = dict.fromkeys(key for each in found for key in each)
    return {key: [each.get(key, nothing) for each in found] for key in keys}


def _line(found: Sequence[Sequence[int]], layers: int) -> list[int] | None:
    """Where the straight line through what ``DEPTHS`` have is at ``layers``; None where they are on
    no line.
    """
    grown = []
    for first, second, third in zip(*found):
        if third - second != second - first:
            return None
        grown.append(third + (layers - DEPTHS[-1]) * (third - second))
    return grown

"""Computes the figures of a model with many layers from runs with few layers. If the layers do not
all add the same, all layers have to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from cute_sharding.tools.estimate.memory import Memory
from cute_sharding.tools.estimate.traffic import Traffic, TrafficAmount

Key = TypeVar("Key")

# The numbers of layers of the models that run. Two steps of one layer show whether each layer adds
# the same. Each model has a first and a last layer.
DEPTHS = (2, 3, 4)


def traffic_of(layers: int, found: Mapping[int, Traffic]) -> Traffic | None:
    """The bytes that a model of so many layers receives, from models of ``DEPTHS`` layers. None if
    further layers do not all add the same.

    >>> traffic_of(126, dict.fromkeys(DEPTHS, Traffic({}))).collectives
    0
    """
    rows = _each([found[depth].rows for depth in DEPTHS], TrafficAmount())
    grown = {
        alike: _line([[*amount] for amount in amounts], layers) for alike, amounts in rows.items()
    }
    if None in grown.values():
        return None
    return Traffic({alike: TrafficAmount(*numbers) for alike, numbers in grown.items() if numbers})


def memory_of(layers: int, found: Mapping[int, Memory]) -> Memory | None:
    """The memory of a model of so many layers, in each part of its step. While a layer runs, the
    held memory grows linearly with the layers before it and after it. So the peak is in the
    first or in the last layer, and each of the ``DEPTHS`` has these two. None as in
    :func:`traffic_of`.
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
    """For each key, the values of all depths."""
    keys = dict.fromkeys(key for each in found for key in each)
    return {key: [each.get(key, nothing) for each in found] for key in keys}


def _line(found: Sequence[Sequence[int]], layers: int) -> list[int] | None:
    """The value at ``layers`` of the straight line through the values of ``DEPTHS``; None if the
    values are not on a straight line.
    """
    grown = []
    for first, second, third in zip(*found):
        if third - second != second - first:
            return None
        grown.append(third + (layers - DEPTHS[-1]) * (third - second))
    return grown

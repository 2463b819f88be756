"""Comparing two functions on the same inputs, in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any


def seconds(function: Callable[[], Any], rounds: int = 7, least: float = 0.002) -> float:
    """The least time of one call, over rounds that each take at least ``least`` seconds."""
    number = 1
    while True:
        start = time.perf_counter()
        for _ in range(number):
            function()
        elapsed = time.perf_counter() - start
        if elapsed >= least:
            break
        number *= 2
    best = elapsed / number
    for _ in range(rounds - 1):
        start = time.perf_counter()
        for _ in range(number):
            function()
        best = min(best, (time.perf_counter() - start) / number)
    return best


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int = 7) -> float:
    """Our time over theirs, measured in turns so that a busy machine hurts both."""
    a = b = math.inf
    for _ in range(3):
        a = min(a, seconds(ours, rounds))
        b = min(b, seconds(theirs, rounds))
    return a / b


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))

"""What the package remembers of what it has computed, with one bound for all of it.

A function that is :func:`remembered` is computed once for the same arguments, until the package has
remembered as many results as it may: then all are forgotten. Programs whose shapes change at every
step would else keep a little of each function for each shape. A program that soon asks again for
what was forgotten has more shapes in use than fit, so twice as many results may be remembered from
then on.

Results never depend on what is remembered: all may be forgotten at any time, on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import _lru_cache_wrapper, cache, wraps
from itertools import count
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")

# Results that may be remembered at first: a thousand slices or redistributions of new shapes, some
# 50 results each, then keep less than PyTorch's own caches do.
AT_FIRST = 1 << 9
# So many of the last results are recognized when they are asked for again, by a bit each.
RECOGNIZED = 1 << 17
BITS = 8 * RECOGNIZED


class _Memory:
    """How many results there are, and which were computed of late."""

    def __init__(self) -> None:
        self.functions: list[_lru_cache_wrapper[Any]] = []
        self.start()

    def start(self) -> None:
        """Nothing is remembered, nor was anything before."""
        self.most: float = AT_FIRST
        self.results = self.again = 0
        self.noted, self.late, self.before = 0, bytearray(BITS // 8), b""

    def note(self, key: int) -> None:
        """A result is about to be remembered, which a number stands for."""
        at, bit = key % BITS // 8, 1 << (key & 7)
        if self.late[at] & bit or (self.before and self.before[at] & bit):
            self.again += 1
        self.late[at] |= bit
        self.noted += 1
        if self.noted >= RECOGNIZED:
            self.noted, self.late, self.before = 0, bytearray(BITS // 8), bytes(self.late)
        self.results += 1
        if self.results >= self.most:
            if 2 * self.again > self.results:
                self.most *= 2
            self.forget()

    def forget(self) -> None:
        self.results = self.again = 0
        for function in self.functions:
            function.cache_clear()


_memory = _Memory()
_numbers = count()


def remembered(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """The function, which remembers its results within the bound of all.

    >>> @remembered
    ... def doubled(n):
    ...     print("computed")
    ...     return 2 * n
    >>> doubled(3), doubled(3)
    computed
    (6, 6)
    """
    number = next(_numbers)

    @cache
    @wraps(function)
    def compute(*args: Any, **kwargs: Any) -> T:
        _memory.note(hash((number, args, *kwargs.values())))
        return function(*args, **kwargs)

    _memory.functions.append(compute)
    return compute


def remember_all() -> None:
    """Forget nothing from now on: for a process that soon ends."""
    _memory.most = inf


def forget() -> None:
    """Forget all results, and that there were any.

    >>> forget()
    """
    _memory.start()
    _memory.forget()

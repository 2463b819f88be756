"""One option for each mesh dim: of all those that can be carried, or the one of least cost.

What an option is, its user says: the cut of a result or of an operand, or the name of a signature
that is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, prod
from operator import itemgetter
from typing import NamedTuple, TypeVar

Option = TypeVar("Option", bound=Hashable)
State = TypeVar("State")
Found = TypeVar("Found")

# Combinations weighed at most; with more, the mesh dims are decided one after the other.
COMBINATIONS = 512

# All split factors of a dim are tried up to this size, of longer dims those that divide and those
# in use.
ALL_FACTORS = 64


class Cost(NamedTuple):
    """What a choice costs: of several the least is taken.

    Attributes:
        received: the elements that the busiest device receives, now, and later of what comes of it.
        now: those of these that it receives now, where some are received later.
        pending: how many reductions are left pending.
        held: the elements that the device with the most holds.
        changed: how many mesh dims change.
        strides: how many split factors above 1 there are: Shard reads better than _StridedShard.

    >>> min(Cost(3), Cost(2, held=9), Cost(2, held=8))
    Cost(received=2, now=0, pending=0, held=8, changed=0, strides=0)
    """

    received: int
    now: int = 0
    pending: int = 0
    held: int = 0
    changed: int = 0
    strides: int = 0


@dataclass
class Budget:
    """How many steps a search may still take.

    >>> budget = Budget(1)
    >>> budget.take(), budget.take()
    (True, False)
    """

    left: int

    def take(self, steps: int = 1) -> bool:
        """Whether there is some left; that many less then."""
        if self.left <= 0:
            return False
        self.left -= steps
        return True


def carried(
    count: int,
    options: Callable[[tuple[Option, ...], State], Iterable[Option]],
    carry: Callable[[tuple[Option, ...], State, Option], State | None],
    start: State,
    budget: Budget,
    decided: tuple[Option, ...] = (),
) -> Iterator[tuple[tuple[Option, ...], State]]:
    """Every choice of one option for each of ``count`` mesh dims, decided from left to right, and
    what it leads to. What cannot be carried is given up at once, with all that begins so.

    Args:
        options: of the next mesh dim, after those that are decided, and what they lead to.
        carry: what one more leads to; None: it cannot be carried.
        start: what nothing leads to.
        budget: a step is an option that is tried.

    >>> def carry(decided, total, option):
    ...     return total + option if total + option <= 2 else None
    >>> [found for found, _ in carried(2, lambda *_: (0, 1, 2), carry, 0, Budget(9))]
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    """
    if len(decided) == count:
        yield decided, start
        return
    tried: set[Option] = set()
    for option in options(decided, start):  # the next is looked for once this one is given up
        if option in tried:
            continue
        tried.add(option)
        if not budget.take():
            return
        state = carry(decided, start, option)
        if state is not None:
            yield from carried(count, options, carry, state, budget, (*decided, option))


def least(
    options: Sequence[Sequence[Option]],
    weighed: Callable[[tuple[Option, ...]], tuple[Cost, Found] | None],
    allowed: Sequence[Option],
) -> tuple[Cost, Found]:
    """The combination of least cost, and what it leads to; of more than :data:`COMBINATIONS` the
    mesh dims are decided one after the other.

    Args:
        options: of each mesh dim.
        weighed: what a combination costs, and leads to; None: it is not allowed. Of several of one
            cost the first is taken.
        allowed: a combination that is, to start from.

    >>> least([(0, 1), (0, 1)], lambda both: (Cost(sum(both)), both) if any(both) else None, (0, 1))
    (Cost(received=1, now=0, pending=0, held=0, changed=0, strides=0), (0, 1))
    """
    if prod(map(len, options)) <= COMBINATIONS:
        every = (found for some in product(*options) if (found := weighed(some)) is not None)
        return min(every, key=itemgetter(0))
    chosen = tuple(allowed)
    for m, some in enumerate(options):
        tried = [(*chosen[:m], option, *chosen[m + 1 :]) for option in some]
        ranked = [(of[0], each) for each in tried if (of := weighed(each)) is not None]
        if ranked:
            chosen = min(ranked, key=itemgetter(0))[1]
    best = weighed(chosen)
    assert best is not None, "what was allowed to start from is"
    return best


def split_factors(n: int, used: Sequence[int] = (), every: int = ALL_FACTORS) -> list[int]:
    """The split factors that are tried of ``n`` rows: all, up to ``every`` rows, else those that
    divide them, and those that are ``used``.

    >>> split_factors(4), split_factors(100, (3,))
    ([1, 2, 3, 4], [1, 2, 3, 4, 5, 10, 20, 25, 50, 100])
    """
    if n <= every:
        return list(range(1, max(n, 1) + 1))
    small = [f for f in range(1, min(isqrt(n), 1 << 12) + 1) if n % f == 0]
    return sorted({*small, *(n // f for f in small), *used})

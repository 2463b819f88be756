"""The search for one option for each mesh dim: all that can be carried, or the cheapest.

The caller defines what an option is: a cut of a result or of an operand, or a name of a signature
to cut.
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

# The most combinations that are compared; beyond that, mesh dims are decided one after the other.
COMBINATIONS = 512

# Up to this size all split factors of a dim are tried; of longer dims only those that divide the
# size and those in use.
ALL_FACTORS = 64


class Cost(NamedTuple):
    """The cost of a choice; costs are compared field by field.

    Attributes:
        received: the elements that the busiest device receives, now and later.
        now: those of ``received`` that it receives now, if some are received later.
        pending: how many reductions are left pending.
        held: the elements that the fullest device holds.
        changed: how many mesh dims change.
        strides: how many split factors are above 1: we prefer Shard to _StridedShard.

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
    """The number of steps that a search may still take.

    >>> budget = Budget(1)
    >>> budget.take(), budget.take()
    (True, False)
    """

    left: int

    def take(self, steps: int = 1) -> bool:
        """Take ``steps`` off the budget; return whether any was left."""
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
    """Yield every choice of one option for each of ``count`` mesh dims that can be carried, with
    its final state. If an option cannot be carried, no choice that begins with it is tried.

    Args:
        options: gives the options of the next mesh dim, after the decided ones and their state.
        carry: gives the state after one more option; None: it cannot be carried.
        start: the state before the first option.
        budget: each option that is tried is a step.

    >>> def carry(decided, total, option):
    ...     return total + option if total + option <= 2 else None
    >>> [found for found, _ in carried(2, lambda *_: (0, 1, 2), carry, 0, Budget(9))]
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    """
    if len(decided) == count:
        yield decided, start
        return
    tried: set[Option] = set()
    for option in options(decided, start):  # lazily: the next only after this one is done
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
    """The cheapest combination's cost and outcome. If there are more than :data:`COMBINATIONS`, the
    mesh dims are decided one after the other.

    Args:
        options: for each mesh dim.
        weighed: gives a combination's cost and outcome; None: it is not allowed. Of several with
            the same cost the first is taken.
        allowed: a combination that is allowed, to start from.

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
    """The split factors to try for ``n`` rows: all, if there are at most ``every`` rows, else those
    that divide ``n`` and those that are ``used``.

    >>> split_factors(4), split_factors(100, (3,))
    ([1, 2, 3, 4], [1, 2, 3, 4, 5, 10, 20, 25, 50, 100])
    """
    if n <= every:
        return list(range(1, max(n, 1) + 1))
    small = [f for f in range(1, min(isqrt(n), 1 << 12) + 1) if n % f == 0]
    return sorted({*small, *(n // f for f in small), *used})

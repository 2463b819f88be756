"""Running an operation here and in another implementation, and judging both by the definition.

An oracle may be wrong and may refuse what has an answer, so agreement alone proves little.
:class:`Tally` judges every case by the brute-force definition: ours must be right whenever it
answers, must answer whenever the oracle is right, and must then be the same function. What the
oracle gets wrong is counted, never skipped.
"""

from __future__ import annotations

from collections import Counter

from layout_bruteforce import values_of

from cute_sharding.layout import LayoutError


def attempt(operation, *args):
    try:
        return operation(*args)
    except LayoutError:
        return None


class Tally:
    def __init__(self, name):
        self.name = name
        self.counts = Counter()
        self.examples = {}

    def case(self, args, ours, theirs, right, same=None):
        """``ours`` and ``theirs`` are layouts, or None for a refusal; ``right`` is the definition;
        ``same`` compares two right answers.
        """
        same = same or (lambda a, b: values_of(a) == values_of(b))
        ours_right = ours is not None and right(ours)
        assert ours is None or ours_right, f"{self.name}{args}: {ours} is wrong"
        theirs_right = theirs is not None and right(theirs)
        assert not theirs_right or ours_right, (
            f"{self.name}{args}: the oracle's {theirs} is right and we refuse"
        )
        assert not theirs_right or same(ours, theirs), (
            f"{self.name}{args}: {ours} and the oracle's {theirs} are both right but differ"
        )
        ours_word = "answer" if ours_right else "refuse"
        theirs_word = "refuses" if theirs is None else "is right" if theirs_right else "is wrong"
        kind = f"we {ours_word}, it {theirs_word}"
        self.counts[kind] += 1
        self.examples.setdefault(kind, (args, ours, theirs))

    def check(self, cases, *, agreed=None):
        print(f"\n{self.name}: {dict(self.counts)}")
        assert sum(self.counts.values()) >= cases
        assert self.counts["we answer, it is right"] >= (
            cases // 4 if agreed is None else agreed
        ), self.counts

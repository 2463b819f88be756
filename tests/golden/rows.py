"""A small fixed set of cases that meets every row of the table of relations, read from the golden
table: for each row some case is among them whose ops have it.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product

from golden import table
from golden.cases import PLACEMENTS

from cute_sharding.relations.table import OF_TORCH, ROWS, TABLE, Row

# Each case runs in every way on the first mesh, and in one way on one of the others.
FIRST, OTHERS = (2,), ((3,), (2, 2), (2, 2, 2))
ON_OTHERS = list(product(OTHERS, PLACEMENTS))

# Results that are drawn, or that no one writes to, cannot be compared.
DRAWN = ("rand", "normal", "bernoulli", "multinomial", "exponential", "cauchy", "geometric")
DRAWN += ("uniform", "dropout", "empty", "rrelu", "multi_head", "lowrank")
# Nor can these be run twice, or their signs are any; and these run for seconds.
NOT_COMPARED = (*DRAWN, "batch_norm", "instance_norm", "linalg.eig")
LONG = ("householder", "_upsample_bilinear2d_aa", "op native_group_norm", "ormqr", "vander")
LONG += ("op gradient", "corrcoef")


@cache
def rows_of_cases() -> dict[str, frozenset[Row]]:
    """The rows that each case meets."""
    found = {}
    for name, (head, *_) in table.read().items():
        ops = head.rpartition("; ")[2].split(", ")
        found[name] = frozenset(ROWS[op] for op in ops if op in ROWS) | taken_apart(name)
    return found


def taken_apart(name: str) -> frozenset[Row]:
    """The rows of an op that torch replaces by others, before a DTensor meets it."""
    op = name.removeprefix("op ")
    made = {row for row in OF_TORCH.values() if row.made_of or row.makes_constants}
    return frozenset(row for row in made if op in {o.partition(".")[0] for o in row.overloads})


@cache
def kept_apart(name: str) -> int:
    """In how many ways results or gradients of the case are not replicas: these show the most."""
    lines = table.read()[name][1:]
    return sum(bool(re.search(r"\bS[(\d]|\bP\b", line.partition(" -> ")[2])) for line in lines)


def fewest(rows_of: dict[str, frozenset[Row]], left: set[Row]) -> list[str]:
    """Cases that meet all of these rows: the next always adds the most, in the most ways."""
    kept = []
    while left:
        best = max(sorted(rows_of), key=lambda name: (len(rows_of[name] & left), kept_apart(name)))
        kept.append(best)
        left = left - rows_of[best]
    return kept


@cache
def chosen() -> tuple[str, ...]:
    """Cases whose values can be compared, and that meet all rows that such cases meet."""
    words = (*NOT_COMPARED, *LONG)
    rows_of = {
        name: rows
        for name, rows in rows_of_cases().items()
        if not any(word in name for word in words)
    }
    kept = fewest(rows_of, {row for rows in rows_of.values() for row in rows})
    return tuple(name for name in rows_of if name in kept)


def not_compared() -> list[str]:
    """Cases that meet the rows which only the golden table has."""
    met = {row for name in chosen() for row in rows_of_cases()[name]}
    return fewest(rows_of_cases(), {row for rows in rows_of_cases().values() for row in rows} - met)


def ways_of(name: str) -> list[tuple[tuple[int, ...], str]]:
    """On which meshes and with which placements a case runs; all are met by some."""
    elsewhere = ON_OTHERS[chosen().index(name) % len(ON_OTHERS)]
    return [*((FIRST, way) for way in PLACEMENTS), elsewhere]


def unmet() -> list[tuple[str, ...]]:
    """The overloads of each row that no chosen case meets."""
    met = {row for name in chosen() for row in rows_of_cases()[name]}
    unmet = [(*row.overloads, *row.by_names) for row in TABLE if row not in met]
    return [overloads for overloads in unmet if overloads]  # else torch decomposes the op

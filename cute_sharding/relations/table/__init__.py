"""The table: one row for each op, or for several with one relation; each aten overload once.

A row gives the relation between an op's operands and its results, in one of the ways of
:mod:`.row`. Rows and their rules are grouped by family:

- by DimMaps: :mod:`.views`; by rows: :mod:`.movement`; steps of both: :mod:`.steps`.
- by names: :mod:`.along` (pointwise, along dims, reductions), :mod:`.indexing`, :mod:`.products`,
  :mod:`.normalization`, :mod:`.losses`, :mod:`.windows`, :mod:`.attention`.
- without a relation, for ops that torch's own rules answer: :mod:`.torchs`.
- what rules are written with: :mod:`.names`, :mod:`.kernels`.

docs/lists/rules.md shows the table.
"""

from cute_sharding.relations.table.registry import (
    BY_OP,
    MOVEMENTS,
    OF_TORCH,
    ROWS,
    SIGNATURES,
    STEPS,
    TABLE,
    VIEWS,
    relation_of,
)
from cute_sharding.relations.table.row import ByDimMap, ByRows, BySteps, OfTorch, Row

__all__ = [
    "BY_OP",
    "MOVEMENTS",
    "OF_TORCH",
    "ROWS",
    "SIGNATURES",
    "STEPS",
    "TABLE",
    "VIEWS",
    "ByDimMap",
    "ByRows",
    "BySteps",
    "OfTorch",
    "Row",
    "relation_of",
]

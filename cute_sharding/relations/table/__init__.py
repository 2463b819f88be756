"""The table: one row for each op, or for several that do the same to dims; each aten overload once.

A row says of an op what the relation between its operands and its results is, in one of the ways of
:mod:`.row`. Rows and their rules stand together, by family:

- views, by DimMaps: :mod:`.views`; movement, by rows: :mod:`.movement`; both, one after the other:
  :mod:`.steps`.
- by names: :mod:`.along` (pointwise, along dims, reductions), :mod:`.indexing`, :mod:`.products`,
  :mod:`.normalization`, :mod:`.losses`, :mod:`.windows`, :mod:`.attention`.
- without a relation, of ops that torch answers for: :mod:`.torchs`.
- what they are written with: :mod:`.names`, :mod:`.kernels`; the signature that follows from a
  relation: :mod:`.derived`.

docs/rules.md shows the table.
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

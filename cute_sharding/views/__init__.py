"""View ops as layouts: op -> DimMap -> View -> carried placements. Imports no torch."""

from cute_sharding.sharding.chains import Cut
from cute_sharding.views.carry import Carried, carry
from cute_sharding.views.table import BY_OP, BY_OVERLOAD, TABLE, Row
from cute_sharding.views.view import View, view_of

__all__ = ["BY_OP", "BY_OVERLOAD", "TABLE", "Carried", "Cut", "Row", "View", "carry", "view_of"]

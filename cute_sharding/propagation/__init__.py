"""Placements are carried through a relation, one mesh dim after the other. Imports no torch.

- :mod:`.solver`: picks one option for each mesh dim: all that can be carried, or the cheapest.
- :mod:`.views`: carries cuts through a view, free or not at all; why a view is not free, and the
  cheapest placements that make it so.
- :mod:`.movements`: chooses the placements of a movement's results, free ones if there are any,
  else the cheapest; views and movements one after the other.
- :mod:`.signatures`: assigns mesh dims to the names of a signature; an op's operands, and the cost
  of redistributing them.
"""

from cute_sharding.propagation.movements import Choice, chosen
from cute_sharding.propagation.signatures import Assignment, Operand, assign
from cute_sharding.propagation.solver import Budget, Cost, carried, least
from cute_sharding.propagation.views import Carried, Target, carry, cheapest

__all__ = [
    "Assignment",
    "Budget",
    "Carried",
    "Choice",
    "Cost",
    "Operand",
    "Target",
    "assign",
    "carried",
    "carry",
    "cheapest",
    "chosen",
    "least",
]

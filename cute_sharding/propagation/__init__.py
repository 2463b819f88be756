"""Placements are carried through a relation, one mesh dim after the other. Imports no torch.

- :mod:`.solver`: picks one option for each mesh dim: all that can be carried, or the cheapest.
- :mod:`.carry`: carries cuts through a view, free or not at all. :mod:`.targets`: the cheapest
  placements that make a view free; :mod:`.splits`: why a view of a split dim is not.
- :mod:`.choose`, :mod:`.free`: choose the placements of a movement's results, free ones if there
  are any, else the cheapest; :mod:`.steps`: for views and movements one after the other.
- :mod:`.assign`: assigns mesh dims to the names of a signature. :mod:`.operands`: an op's operands,
  and the cost of redistributing them.
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

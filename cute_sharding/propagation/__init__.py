"""How placements go through a relation, decided mesh dim by mesh dim. Imports no torch.

- :mod:`.solver`: one option for each mesh dim, of those that can be carried, or of least cost.
- :mod:`.carry`: through a view, free or not at all. :mod:`.targets`: the cheapest placements that
  make a view free; :mod:`.suggestions`: those that an error suggests, and why the view is not free.
- :mod:`.choose`, :mod:`.free`: through a movement: free placements of the results, if there are
  any, or the cheapest; :mod:`.steps`: through views and movements, one after the other.
- :mod:`.assign`: through a signature: which mesh dim cuts which name. :mod:`.operands`: what an op
  is given, and what it costs to bring it to other placements.
"""

from cute_sharding.propagation.assign import Assignment, assign
from cute_sharding.propagation.carry import Carried, carry
from cute_sharding.propagation.choose import Choice, chosen
from cute_sharding.propagation.operands import Operand
from cute_sharding.propagation.solver import Budget, Cost, carried, least
from cute_sharding.propagation.targets import Target, free_targets

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
    "chosen",
    "free_targets",
    "least",
]

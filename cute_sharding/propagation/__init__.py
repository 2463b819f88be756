"""How placements go through a relation, decided mesh dim by mesh dim. Imports no torch.

- :mod:`.solver`: one option for each mesh dim, of those that can be carried, or of least cost.
"""

from cute_sharding.propagation.solver import Budget, carried, least

__all__ = ["Budget", "carried", "least"]

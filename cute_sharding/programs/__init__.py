"""Whole programs: what their ops can do, and the plan that no op could choose alone.

Nothing here imports torch. A :class:`.program.Program` comes from a recorder, and :func:`solve`
finds how it runs at the least price.
"""

from cute_sharding.programs.program import FreeValues, Op, OpWay, Placing, Price, Program, Solved
from cute_sharding.programs.solve import solve

__all__ = ["FreeValues", "Op", "OpWay", "Placing", "Price", "Program", "Solved", "solve"]

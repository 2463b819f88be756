"""A dry run: what a step of a program would receive and hold, with each flag. No torch is imported
here; the processes that run the step do (:mod:`cute_sharding.dtensor.estimate`).

- :mod:`.run`: ``estimate``
- :mod:`.processes`: a process for each setting
- :mod:`.traffic`, :mod:`.memory`: what is received, line by line; what is held, layer by layer
- :mod:`.layers`: many layers, of few
- :mod:`.values`: the result; :mod:`.table`, :mod:`.verdict`: as text
"""

from cute_sharding.estimates.run import estimate
from cute_sharding.estimates.table import Estimate

__all__ = ["Estimate", "estimate"]

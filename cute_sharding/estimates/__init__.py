"""Dry runs: the communication and memory of a step of a program, with each flag. This package does
not import torch; the processes that run the step import torch
(:mod:`cute_sharding.dtensor.estimate`).

- :mod:`.run`: ``estimate``
- :mod:`.processes`: a process for each setting
- :mod:`.traffic`, :mod:`.memory`: the bytes that lines receive, and that layers hold
- :mod:`.layers`: the figures of many layers from runs with few layers
- :mod:`.values`: the result; :mod:`.table`: the result as text
"""

from cute_sharding.estimates.run import estimate
from cute_sharding.estimates.table import Estimate

__all__ = ["Estimate", "estimate"]

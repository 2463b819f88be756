"""Dry runs: the communication and memory of a step of a program, with each flag. No torch is
imported here, but by the processes that run the step.

- :mod:`.run`: ``estimate``
- :mod:`.processes`: a process for each setting
- :mod:`.traffic`, :mod:`.memory`: the bytes that lines receive, and that layers hold
- :mod:`.layers`: the figures of many layers from runs with few layers
- :mod:`.values`: the results of runs; :mod:`.table`: all of them, as values and as text

These run in such a process (``python -m cute_sharding.tools.estimate``), and import torch. The
process ends with the run, so that they may tell torch of devices and ranks that do not exist:

- :mod:`.dry_run`: runs the step
- :mod:`.stand_ins`: what stands in for the devices
- :mod:`.modules`: the layer of the model that runs, forward or backward
- :mod:`.storages`: the memory of this rank, by layer, at its peak
- :mod:`.programs`: the program's function, and the line of an error
"""

from cute_sharding.tools.estimate.run import estimate
from cute_sharding.tools.estimate.table import Estimate

__all__ = ["Estimate", "estimate"]

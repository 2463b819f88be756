"""Dry runs: the communication and memory of a step of a program, with each flag. No torch is
imported here, but by the processes that run the step.

- :mod:`.estimates`: ``estimate``, a process for each setting, and what it gives
- :mod:`.values`: the bytes that lines receive and that layers hold, also of many layers

These run in such a process (``python -m cute_sharding.tools.estimate``), and import torch:

- ``__main__``: runs the step
- :mod:`.stand_ins`: what stands in for the devices
- :mod:`.storages`: the memory of this rank, by layer, at its peak
"""

from cute_sharding.tools.estimate.estimates import Estimate, estimate

__all__ = ["Estimate", "estimate"]

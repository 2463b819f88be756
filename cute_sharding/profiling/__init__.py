"""What a program sends, line by line: values, and how they are shown. No torch is needed;
:mod:`cute_sharding.dtensor.profile` fills them in.

- :mod:`.collective`: one collective, and the line that it ran for
"""

from cute_sharding.profiling.collective import Collective, Place

__all__ = ["Collective", "Place"]

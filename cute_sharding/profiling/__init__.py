"""The communication of a program, line by line, as plain values. This package does not import
torch; :mod:`cute_sharding.dtensor.profile` fills in the values.

- :mod:`.collective`: one collective, and the line for which it ran
- :mod:`.report`: all collectives, by cause and by line of the program
"""

from cute_sharding.profiling.collective import Collective, Place
from cute_sharding.profiling.report import Cause, Event, Line, Moved, Report

__all__ = ["Cause", "Collective", "Event", "Line", "Moved", "Place", "Report"]

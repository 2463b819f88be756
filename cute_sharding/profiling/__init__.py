"""What a program sends, line by line: values, and how they are shown. No torch is needed;
:mod:`cute_sharding.dtensor.profile` fills them in.

- :mod:`.collective`: one collective, and the line that it ran for
- :mod:`.report`: all of them, by what they were for and the line of the program
"""

from cute_sharding.profiling.collective import Collective, Place
from cute_sharding.profiling.report import Cause, Event, Line, Moved, Other, Report

__all__ = ["Cause", "Collective", "Event", "Line", "Moved", "Other", "Place", "Report"]

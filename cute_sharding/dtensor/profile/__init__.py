"""Records the communication of a program while it runs: every collective, and the line of the
program for which the collective runs.

The package observes ops and changes none of them. When the ``with`` block has ended, nothing
remains installed.

- :mod:`.amounts`: the collectives of torch's libraries, and the elements that ranks receive
- :mod:`.places`: the line of the program for which something runs
- :mod:`.recorder`: all collectives inside a ``with`` block
- :mod:`.profiler`: a recorder that also records causes and times
- :mod:`.decided`: which rule decided an op, by asking the rule in force once more
- :mod:`.causes`, :mod:`.reporting`: the results as plain values, line by line
- :mod:`.refusing`: a block that raises an error before anything is sent
"""

from cute_sharding.dtensor.profile.profiler import Profiler
from cute_sharding.dtensor.profile.recorder import Recorder
from cute_sharding.dtensor.profile.refusing import no_communication
from cute_sharding.dtensor.profile.reporting import report

__all__ = ["Profiler", "Recorder", "no_communication", "report"]

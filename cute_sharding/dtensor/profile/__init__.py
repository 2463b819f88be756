"""What a program sends, as it runs: every collective, and the line of the program that it runs for.

Ops are watched; none is changed, and nothing is kept once the ``with`` block has ended.

- :mod:`.amounts`: the collectives of torch's libraries, a row each: what ranks receive
- :mod:`.places`: which line of the program what runs is for
- :mod:`.recorder`: all collectives inside a ``with`` block
- :mod:`.profiler`: and what each was for, and how long it took
- :mod:`.asking`: what an op needs, by PyTorch's rule and by ours; :mod:`.avoiding`: what would
  avoid it; :mod:`.gradients`: what would of a gradient
- :mod:`.causes`, :mod:`.reporting`: all of it in words, line by line
- :mod:`.refusing`: a block in which nothing may be sent
"""

from cute_sharding.dtensor.profile.profiler import Profiler
from cute_sharding.dtensor.profile.recorder import Recorder
from cute_sharding.dtensor.profile.refusing import no_communication
from cute_sharding.dtensor.profile.reporting import report

__all__ = ["Profiler", "Recorder", "no_communication", "report"]

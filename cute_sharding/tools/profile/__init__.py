"""What a program sends, line by line: ``profile``. No torch is imported until a profile begins.

While it runs, a profile observes ops and changes none of them. When its block has ended, nothing
remains installed.

- :mod:`.profiles`: ``profile``, and what it gives
- :mod:`.report`: all that a profile says, as plain values
- :mod:`.table`: as text, for a terminal
- :mod:`.trace`: for Perfetto and chrome://tracing
- :mod:`.page`: as one page of HTML; :mod:`.flame`: a part of it

These import torch:

- :mod:`.amounts`: the collectives of torch's libraries, and the elements that ranks receive
- :mod:`.places`: the line of the program for which something runs
- :mod:`.recorder`: all collectives inside a ``with`` block
- :mod:`.profiler`: a recorder that also records causes and times
- :mod:`.causes`, :mod:`.reporting`: the results as plain values, line by line
- :mod:`.refusing`: a block that raises an error before anything is sent
"""

from cute_sharding.tools.profile.profiles import Profile, profile

__all__ = ["Profile", "profile"]

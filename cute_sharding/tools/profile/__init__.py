"""What a program sends, line by line: ``profile``. No torch is imported until a profile begins.

While it runs, a profile observes ops and changes none of them. When its block has ended, nothing
remains installed.

- :mod:`.profiles`: ``profile``, and what it gives; :mod:`.values`: the plain values it is made of

These import torch:

- :mod:`.collectives`: the collectives of torch's libraries, and the elements that ranks receive
- :mod:`.recorder`: all collectives inside a ``with`` block, with lines and times
- :mod:`.causes`: from the records to the lines of a profile
- :mod:`.refusing`: a block that raises an error before anything is sent
"""

from cute_sharding.tools.profile.profiles import Profile, profile

__all__ = ["Profile", "profile"]

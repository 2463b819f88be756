"""What a program sends, shown: ``profile``, and its table, trace and page. No torch is imported
until a profile begins.

- :mod:`.profiles`: ``profile``, and what it gives
- :mod:`.table`: as text, for a terminal
- :mod:`.trace`: for Perfetto and chrome://tracing
- :mod:`.page`: as one page of HTML; :mod:`.flame`, :mod:`.pictures`: parts of it
"""

from cute_sharding.showing.profiles import Profile, profile

__all__ = ["Profile", "profile"]

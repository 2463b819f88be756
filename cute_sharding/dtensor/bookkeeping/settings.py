"""The settings in force in this process. What settings there are is the table of
:mod:`cute_sharding._settings`.

Every room reads :func:`in_force`; the switch alone changes it. Whoever keeps an answer that depends
on a setting makes the setting a part of the key under which it is kept, or is made anew when it
changes, as the switch makes what it installs. All ranks are to have the same settings.
"""

from __future__ import annotations

from cute_sharding._settings import Implicit, Settings

__all__ = ["Implicit", "Settings", "in_force", "put_in_force"]

_current: Settings | None = None


def in_force() -> Settings | None:
    """What is switched on; None where nothing is."""
    return _current


def put_in_force(settings: Settings | None) -> None:
    """For the switch alone, which installs what they say."""
    global _current
    _current = settings

"""The settings in force in this process. What settings there are is the table of
:mod:`cute_sharding._settings`.

Every room reads :func:`in_force`; the switch alone changes it. Whoever keeps an answer that depends
on a setting makes the setting a part of the key under which it is kept, or is made anew when it
changes, as the switch makes what it installs. All ranks are to have the same settings.
"""

from __future__ import annotations

from cute_sharding._settings import (
    Implicit,
    Settings,
    in_force,
    network_in_force,
    put_in_force,
)

__all__ = ["Implicit", "Settings", "in_force", "network_in_force", "put_in_force"]

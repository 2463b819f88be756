"""The settings in force in this process. The table of settings is :mod:`cute_sharding._settings`.

Every room reads :func:`in_force`; only the switch changes it. An answer that depends on a setting
may be kept only under a key that has the setting, or must be made anew when it changes, as the
switch does with what it installs. All ranks must have the same settings.
"""

from __future__ import annotations

from cute_sharding._settings import (
    Settings,
    in_force,
    network_in_force,
    put_in_force,
)

__all__ = ["Settings", "in_force", "network_in_force", "put_in_force"]

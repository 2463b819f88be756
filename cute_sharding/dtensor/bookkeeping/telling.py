"""What the log has written, each thing once in a process."""

from __future__ import annotations

from collections.abc import Hashable

MOST_TOLD = 1 << 12
_told: set[Hashable] = set()


def is_new(what: Hashable) -> bool:
    """Whether ``what`` was not logged yet; it counts as logged from now on. After ``MOST_TOLD``
    things the log may repeat one.
    """
    if what in _told:
        return False
    if len(_told) >= MOST_TOLD:
        _told.clear()
    _told.add(what)
    return True

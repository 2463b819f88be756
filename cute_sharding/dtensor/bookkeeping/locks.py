"""Locks for state in programs that fork."""

from __future__ import annotations

import os
import threading
from typing import Any


def fork_safe_lock() -> Any:
    """A lock that no thread holds while the process forks. Otherwise the child would wait forever
    for a thread that it does not have, and find what the lock guards half changed.
    """
    lock: Any = threading.RLock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock._at_fork_reinit
    )
    return lock

"""Who watches what is sent, and is told what a rank that sends does not see: how much the busiest
rank receives. Nobody, unless a program asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Watcher(Protocol):
    """Watches what is sent (:mod:`..profile.recorder`)."""

    def exchange(self, busiest: Callable[[], int]) -> AbstractContextManager[Any]:
        """What is sent inside the context is one exchange, of which the busiest rank receives so
        many bytes.
        """


watchers: list[Watcher] = []
_NOBODY = nullcontext()


def exchange(busiest: Callable[[], int]) -> AbstractContextManager[Any]:
    """A context in which one exchange is sent, whose busiest rank receives ``busiest()`` bytes."""
    return watchers[-1].exchange(busiest) if watchers else _NOBODY

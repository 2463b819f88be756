"""Memory that is let go while a model moves: given back to the system, where there is a limit."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any | None:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no C library that can be asked, as on Windows
        return None


def give_back() -> None:
    """Have the C library give back what was freed. glibc keeps pieces of up to 32 MiB that lie
    between others, so that what was let go stays resident (malloc_trim(3)).
    """
    trim = _trim()
    if trim is not None:
        trim(0)

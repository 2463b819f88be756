"""Names of tensors in errors."""

from __future__ import annotations

from collections.abc import Sequence

# The most names that an error writes out.
NAMES_SHOWN = 8


def as_text(names: Sequence[str]) -> str:
    """Names as an error writes them; only the first if there are many.

    >>> as_text(["a", "b"]), as_text([])
    ("'a', 'b'", 'none')
    """
    shown = ", ".join(map(repr, names[:NAMES_SHOWN]))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{shown}{more}" or "none"

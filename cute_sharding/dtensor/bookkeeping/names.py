"""Names of tensors in errors."""

from __future__ import annotations

from collections.abc import Sequence

# So many names are written out in an error.
NAMES_SHOWN = 8


def listed(names: Sequence[str]) -> str:
    """Names, as an error tells them: of many the first.

    >>> listed(["a", "b"]), listed([])
    ("'a', 'b'", 'none')
    """
    shown = ", ".join(map(repr, names[:NAMES_SHOWN]))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{shown}{more}" or "none"

"""Files of what people look at: the suffix of the name gives the form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def save(path: str | Path, what: str, forms: Mapping[str, Callable[[], str | bytes]]) -> Path:
    """Write a value to a file, by the form of its suffix.

    Args:
        what: the value, in words.
        forms: by suffix, what makes the text or the bytes.

    Returns:
        The path.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    if path.suffix not in forms:
        raise ValueError(
            f"{str(path)!r} ends in {path.suffix!r}: give a file name for the {what} that ends in "
            f"one of {', '.join(forms)}"
        )
    content = forms[path.suffix]()
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path

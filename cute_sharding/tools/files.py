"""Files of what people look at: the suffix of the name gives the form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

# Of data, a page and text.
SUFFIXES = (".json", ".html", ".txt")


def checked(path: str | Path, what: str, suffixes: Iterable[str] = SUFFIXES) -> Path:
    """The path.

    Args:
        what: what the file is for, in words.

    Raises:
        ValueError: it has another suffix.
    """
    path = Path(path)
    if path.suffix not in suffixes:
        raise ValueError(
            f"{str(path)!r} ends in {path.suffix!r}: give a file name for the {what} that ends in "
            f"one of {', '.join(suffixes)}"
        )
    return path


def save(path: str | Path, what: str, forms: Mapping[str, Callable[[], str | bytes]]) -> Path:
    """Write a value to a file.

    Args:
        what: the value, in words.
        forms: by suffix, what makes the text or the bytes.

    Returns:
        The path.

    Raises:
        ValueError: another suffix.
    """
    path = checked(path, what, forms)
    content = forms[path.suffix]()
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path

"""Words for messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "dim"), counted(2, "dim"), counted(0, "entry", "entries")
    ('1 dim', '2 dims', '0 entries')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

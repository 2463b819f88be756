"""Bytes and seconds as text."""

from __future__ import annotations


def bytes_text(n: float) -> str:
    """
    >>> bytes_text(950), bytes_text(12_300), bytes_text(4_500_000)
    ('950 B', '12.3 kB', '4.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000 or unit == "GB":
            break
        n /= 1000
    return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.3g} {unit}"


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(2.5), seconds_text(0.0034), seconds_text(6e-06)
    ('2.5 s', '3.4 ms', '6 us')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def of_many(n: int, one: str, many: str = "") -> str:
    """
    >>> of_many(1, "line"), of_many(2, "line"), of_many(2, "all-to-all")
    ('1 line', '2 lines', '2 all-to-alls')
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"

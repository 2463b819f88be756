"""Words for messages."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "dim"), counted(2, "dim"), counted(0, "entry", "entries")
    ('1 dim', '2 dims', '0 entries')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def mesh_text(sizes: Sequence[int], names: Sequence[str] | None = None) -> str:
    """The sizes of a mesh, with the names of its dims if it has some.

    >>> mesh_text((2, 4)), mesh_text((2, 4), ("dp", "tp"))
    ('(2, 4)', '(dp=2, tp=4)')
    """
    said = zip(names or ("",) * len(sizes), sizes)
    return f"({', '.join(f'{name}={n}' if name else str(n) for name, n in said)})"


def bytes_text(n: float, digits: int = 3) -> str:
    """Bytes, as people read them, with so many digits.

    >>> bytes_text(950), bytes_text(12_300), bytes_text(4_500_000)
    ('950 B', '12.3 kB', '4.5 MB')
    """
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if n < 1000 - 0.5 * 10 ** (3 - digits):  # it would be shown as 1000
            break
        n, unit = n / 1000, larger
    return f"{n:.{digits}g} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds, as people read them.

    >>> seconds_text(2.5), seconds_text(0.0034), seconds_text(6e-06), seconds_text(0)
    ('2.5 s', '3.4 ms', '6 us', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:.3g} s"


def columns(rows: Sequence[Sequence[str]], *, right: int = 0, left: int = 0) -> list[str]:
    """Rows of cells as lines of text: the first ``left`` columns to the left, the next ``right``
    ones to the right, and the others to the left.

    >>> columns([("op", "n"), ("view", "12")], left=1, right=1)
    ['op     n', 'view  12']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    signs = "<" * left + ">" * right + "<" * len(widths)
    cells = [[f"{x:{sign}{n}}" for x, sign, n in zip(row, signs, widths)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]

"""``profile``: what a program sends, line by line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cute_sharding.exchange.network import Network
from cute_sharding.tools.profile import page, table, trace
from cute_sharding.tools.profile.report import Collective, Line, Report

SUFFIXES = (".json", ".html", ".txt")


class Profile:
    """The result of :func:`profile`: the communication inside the block, for each line of the
    program.

    ``print`` shows a table. Sizes are in bytes, and times in seconds. Received bytes are those of
    the busiest rank, and all other values are those of this rank. Only :attr:`collectives` also
    count elements.

    Attributes:
        report: the whole profile, as plain values.

    >>> with profile() as p:
    ...     pass
    >>> isinstance(p, Profile), p.lines, p.collectives
    (True, (), [])
    """

    def __init__(self, read: Callable[[], Report]) -> None:
        self._read = read
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """The whole profile, as plain values. Inside the block, the values until now."""
        return self._read() if self._report is None else self._report

    def end(self, report: Report) -> None:
        """The block has ended, and no more will be seen."""
        self._report = report

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines that communicate, with the most bytes first."""
        return self.report.lines

    @property
    def collectives(self) -> list[Collective]:
        """All collectives, in the order in which they ran. ``received``, ``sent`` and ``busiest``
        of a collective count elements. ``received_bytes``, ``sent_bytes`` and ``busiest_bytes``
        count bytes.
        """
        events = [event for line in self.lines for event in line.events]
        return [event.collective for event in sorted(events, key=lambda event: event.start)]

    def table(self, width: int | None = None, most: int = 20) -> str:
        """The profile as text, in ``width`` columns (default: the width of the terminal), with at
        most ``most`` lines of the program.
        """
        columns = shutil.get_terminal_size((100, 24)).columns if width is None else width
        return table.text(self.report, columns, most)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Profile of {len(self.collectives)} collectives>"

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain data for JSON, in bytes and seconds."""
        return self.report.to_dict()

    def trace(self) -> dict[str, Any]:
        """The profile as data of a trace in Chrome's format: an event for each collective."""
        return trace.trace(self.report)

    def html(self) -> str:
        """The profile as one HTML page without other files: a sortable table, a flame graph of the
        lines, and pictures of which rank sends to which. Without matplotlib, the page has no
        pictures.
        """
        return page.html(self.report)

    def save(self, path: str | Path) -> Path:
        """Write the profile to a file. The suffix gives the form: a trace (.json), the page (.html)
        or the table (.txt).

        Returns:
            The path.

        Raises:
            ValueError: another suffix.
        """
        path = Path(path)
        if path.suffix == ".json":
            content = json.dumps(self.trace())
        elif path.suffix == ".html":
            content = self.html()
        elif path.suffix == ".txt":
            content = self.table() + "\n"
        else:
            raise ValueError(
                f"{str(path)!r} ends in {path.suffix!r}: give a file name for the profile that "
                f"ends in one of {', '.join(SUFFIXES)}"
            )
        path.write_text(content, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        return page.fragment(self.report)


@contextmanager
def profile(*, network: Network | str | None = None) -> Iterator[Profile]:
    """Record the communication inside the ``with`` block, for each line of the program: with this
    package on or off, eager or compiled, forward and backward.

    Nothing is changed outside of the block. A profile records this rank and this thread, and the
    backward passes that this thread starts. The bytes of the busiest rank are known for planned
    redistributions, and for collectives in which all ranks receive the same.
    ``cute_sharding.exchange.step`` says how bytes are counted. On backends whose collectives
    run asynchronously, such as NCCL, measured seconds are those of the host.

    In a compiled program, a profile records the collectives of the graphs. With the backends
    ``eager`` and ``aot_eager``, it knows the line of each collective. With Inductor, it lists all
    collectives under the line that calls the compiled program.

    Args:
        network: the network that gives the modeled seconds, as for :func:`cute_sharding.enable`. By
            default the network of the settings, or NVLink within hosts of eight devices and
            InfiniBand between.

    Returns:
        A :class:`Profile`.

    >>> with profile() as p:
    ...     pass
    >>> print(p.table().partition("off.")[2].strip())
    No communication.
    """
    from cute_sharding.tools.profile.profiler import Profiler
    from cute_sharding.tools.profile.reporting import report

    profiler = Profiler()
    found = Profile(lambda: report(profiler, network))
    try:
        with profiler:
            yield found
    except BaseException:
        with suppress(Exception):  # what the program raises comes first
            found.end(report(profiler, network))
        raise
    found.end(report(profiler, network))

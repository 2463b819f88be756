"""A line on the terminal while a command computes for long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import perf_counter
from typing import TextIO

QUIET = 5.0  # seconds without a line


@contextmanager
def progress(what: str, out: TextIO | None = None, quiet: float = QUIET) -> Iterator[None]:
    """Say ``what`` runs, and for how long, while the block takes longer than ``quiet`` seconds: on
    one line of the terminal, which is gone after the block. Nothing is said to a pipe or a file.

    Args:
        what: the command, and what it does.
        out: the terminal; by default that of errors.
    """
    out = sys.stderr if out is None else out
    if not out.isatty():
        yield
        return
    ended, started = Event(), perf_counter()

    def say() -> None:
        wait, width = quiet, 0
        while not ended.wait(wait):
            text = f"{what}: {perf_counter() - started:.0f} s"
            wait, width = 1.0, max(width, len(text))
            out.write(f"\r{text}")
            out.flush()
        if width:
            out.write(f"\r{' ' * width}\r")
            out.flush()

    thread = Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

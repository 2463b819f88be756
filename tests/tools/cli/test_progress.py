"""What a command that computes for long says meanwhile."""

import io
import time

from cute_sharding.tools.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def said(out, seconds):
    with progress("estimate", out, quiet=0.1):
        time.sleep(seconds)
    return out.getvalue()


def test_a_long_command_says_that_it_runs_and_leaves_nothing():
    first, last = said(Terminal(), 0.5).rsplit("\r", 2)[0:2]
    assert first == "\restimate: 0 s" and last == " " * len("estimate: 0 s")


def test_a_short_command_and_a_pipe_hear_nothing():
    assert said(Terminal(), 0) == said(io.StringIO(), 0.3) == ""

"""What a compiler measures and writes down for people to look at, which takes a tenth of its time:
left out in tests.

pytest listens to every logger, so that torch writes the trace it otherwise keeps to itself
(torch/_logging/_internal.py); and after each graph it empties the caches of the processor, to time
the guards for its log (torch/_dynamo/guards.py).
"""

import logging
import sys

from torch._logging import _internal


def write_no_trace():
    """Before the compiler is imported, parts of which take the logger with them."""
    _internal.trace_log = logging.Logger("heard by none")


def time_no_guards():
    """Once it has been."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *_: 0.0

"""What a movement program gives on torch alone, and how much it receives."""

from movement_programs import listed
from op_programs import assert_close
from simulation import distribute

from benchmarks.received import Received

# On eight devices torch derives the rule of this one for minutes, if it comes back.
LEFT_OUT = "pixel_unshuffle"


def ran(program, full, mesh, placements):
    """The results, and what the busiest rank received; or what was raised."""
    x = distribute(full, mesh, placements)
    try:
        with Received() as received:
            results = listed(program(x))
            for result in results:
                result.to_local()
    except Exception as error:  # torch alone raises of many kinds
        return error, 0
    return results, max(received.by_rank.values(), default=0)


def is_right(results, wanted):
    try:
        for result, want in zip(results, wanted, strict=True):
            assert_close(result, want, "torch alone")
    except (AssertionError, TypeError, RuntimeError):  # the last: local tensors of other shapes
        return False
    return True

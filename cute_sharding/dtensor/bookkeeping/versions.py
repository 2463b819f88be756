"""The releases of torch that the adapter was checked with. This is a module of its own, because it
must work even if replaced/, which imports private names of torch, cannot be imported.
"""

from __future__ import annotations

import re
import warnings

import torch

FIRST, LAST = (2, 13), (2, 15)
RANGE = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
CHECKED = f"torch {RANGE}"
RELEASES = tuple([f"{FIRST[0]}.{minor}" for minor in range(FIRST[1], LAST[1] + 1)])

_warned = False


def release() -> tuple[int, int] | None:
    """The running torch's release, such as (2, 15), also for 2.15.0+cu132 and 2.15.0a0+git. None if
    its version does not say.
    """
    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(found[1]), int(found[2])) if found else None


def refuse_older() -> None:
    """
    Raises:
        RuntimeError: this torch is older than any that was checked, and lacks what is needed.
    """
    running = release()
    if running is not None and running < FIRST:
        raise RuntimeError(
            f"cute_sharding works with PyTorch {RANGE}, but PyTorch {torch.__version__} is "
            f"installed: install PyTorch {FIRST[0]}.{FIRST[1]} or newer"
        )


def check() -> None:
    """Refuse an older torch; for one that is newer than all that were checked, warn once in a
    process.

    Raises:
        RuntimeError: as :func:`refuse_older`.
    """
    global _warned
    refuse_older()
    running = release()
    if (running is None or running > LAST) and not _warned:
        _warned = True
        warnings.warn(
            f"cute_sharding was tested with PyTorch {RANGE}, but PyTorch {torch.__version__} is "
            "installed. cute_sharding stays on. If PyTorch's private functions have changed, "
            "results may be wrong, or ops may raise errors. For correct results, install a "
            "tested release of PyTorch.",
            RuntimeWarning,
            stacklevel=4,  # the caller of enable()
        )


refuse_older()

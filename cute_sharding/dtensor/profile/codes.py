"""What the codes are of frames that were met. A code stays what it is, so that is kept, for the
next recording as well.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import TypeAlias

from cute_sharding.dtensor.replaced import observing

# A code, what it is, and whether no more is of interest than its name.
Known: TypeAlias = tuple[CodeType, observing.Kind, bool]

# By the number (``id``) of the code, which is kept with it, so that no other code gets its address.
KNOWN: dict[int, Known] = {}
# The numbers of those that are the program's own, and of those that are not.
OWN: set[int] = set()
OTHERS: set[int] = set()
# So many are kept from one recording to the next.
MOST = 1 << 14


def learn(frame: FrameType) -> Known:
    """What the code of a frame is that is not known."""
    code, kind = frame.f_code, observing.kind_of(frame)
    is_on_the_way = not (
        kind.is_own or kind.starts_backward or kind.recomputes or kind.moves or kind.is_graph
    )
    found = KNOWN[id(code)] = code, kind, is_on_the_way
    (OWN if kind.is_own else OTHERS).add(id(code))
    return found


def forget_many() -> None:
    """Forget all where they are too many: a number before the code that has it."""
    if len(KNOWN) > MOST:
        OWN.clear()
        OTHERS.clear()
        KNOWN.clear()

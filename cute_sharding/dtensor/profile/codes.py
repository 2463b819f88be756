"""Facts about the code objects of frames. A code object never changes, so the next recording uses
the same facts.
"""

from __future__ import annotations

from types import CodeType, FrameType

from cute_sharding.dtensor.replaced import observing

# What a code is, by the number (``id``) of the code, which is kept with it, so that no other code
# gets its address.
KNOWN: dict[int, tuple[CodeType, observing.Kind]] = {}
# The numbers of those that are the program's own; and of those that are not, what they are called,
# or None where more is of interest than that.
OWN: set[int] = set()
OTHERS: dict[int, tuple[str, str] | None] = {}
# So many are kept from one recording to the next.
MOST = 1 << 14


def kind_of(frame: FrameType) -> observing.Kind:
    """The facts about the code of a frame."""
    code = frame.f_code
    known = KNOWN.get(id(code))
    if known is not None:
        return known[1]
    kind = observing.kind_of(frame)
    KNOWN[id(code)] = code, kind
    if kind.is_own:
        OWN.add(id(code))
    else:
        is_more = kind.starts_backward or kind.recomputes or kind.moves or kind.is_graph
        OTHERS[id(code)] = None if is_more else kind.called
    return kind


def forget_many() -> None:
    """Forget all facts if there are too many. Each number is removed before its code object."""
    if len(KNOWN) > MOST:
        OWN.clear()
        OTHERS.clear()
        KNOWN.clear()

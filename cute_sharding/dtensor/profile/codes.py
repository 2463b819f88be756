"""Facts about the code objects of frames. A code object never changes, so the next recording uses
the same facts.
"""

from __future__ import annotations

from types import CodeType, FrameType

from cute_sharding.dtensor.replaced import observing

# The facts about a code object, by its number (``id``). The code object is kept too, so that no
# other code object gets its address.
KNOWN: dict[int, tuple[CodeType, observing.Kind]] = {}
# The numbers of the program's own code objects. For all others, the name, or None if the name is
# not enough.
OWN: set[int] = set()
OTHERS: dict[int, tuple[str, str] | None] = {}
# The most code objects to keep from one recording to the next.
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

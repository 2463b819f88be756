"""Facts about the code objects of frames. A code object never changes, so the next recording uses
the same facts.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import TypeAlias

from cute_sharding.dtensor.replaced import observing

# A line: its code object, and its number.
Line: TypeAlias = tuple[CodeType, int]

# The facts about a code object, by its number (``id``). The code object is kept too, so that no
# other code object gets its address.
KNOWN: dict[int, tuple[CodeType, observing.FrameKind]] = {}
# The numbers of the program's own code objects. For all others, the name, or None if the name is
# not enough.
OWN: set[int] = set()
OTHERS: dict[int, tuple[str, str] | None] = {}
# The most code objects to keep.
MOST = 1 << 14


def kind_of(frame: FrameType) -> observing.FrameKind:
    """The facts about the code of a frame."""
    code = frame.f_code
    known = KNOWN.get(id(code))
    if known is not None:
        return known[1]
    kind = observing.kind_of(frame)
    if len(KNOWN) > MOST:  # each number is removed before its code object
        OWN.clear()
        OTHERS.clear()
        KNOWN.clear()
    KNOWN[id(code)] = code, kind
    if kind.is_own:
        OWN.add(id(code))
    else:
        is_more = kind.starts_backward or kind.recomputes or kind.moves or kind.is_graph
        OTHERS[id(code)] = None if is_more else kind.called
    return kind


def line_of_program(start: FrameType | None) -> Line | None:
    """The line of the program that runs in this frame, or in a frame around it; None if no frame is
    the program's own.
    """
    frame = start
    while frame is not None:
        number = id(frame.f_code)
        if number in OWN or (number not in OTHERS and kind_of(frame).is_own):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def line_text(line: Line | None) -> str:
    """A line as errors name it: ``file:number``."""
    return "an unknown line" if line is None else f"{line[0].co_filename}:{line[1]}"

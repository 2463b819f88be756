"""Which line of the program something runs for: the innermost frame outside of torch, this package
and Python's own modules; of a gradient, the line of the op that it is the gradient of.

Autograd numbers the nodes that it makes, in order. So at each op that made nodes the numbers since
the last op are noted with the line, and in the backward the number of the node at work leads back
to it. What runs again in the backward, for a checkpoint, is of the line that runs again.
"""

from __future__ import annotations

import sys
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

from cute_sharding.dtensor.replaced import observing
from cute_sharding.profiling import Place


class Found(NamedTuple):
    """Where something runs.

    Attributes:
        place: the line that it runs for; None where none is known.
        backward: whether gradients are computed now.
        recomputed: whether it runs again, for a checkpoint.
        at: when, in seconds of a clock.
        moved: the specs before and after, if a redistribution is on its way.
        traced_op: what the program called, where a graph's own code runs.
        within: the names of torch's and this package's functions on the way, from the inside out.
    """

    place: Place | None
    backward: bool
    recomputed: bool
    at: float
    moved: tuple[Any, Any] | None
    within: tuple[tuple[str, str], ...]
    traced_op: str | None = None


class Lines:
    """The lines that made autograd's nodes."""

    def __init__(self) -> None:
        self._of_node: dict[int, Place | None] = {}
        self._noted = observing.nodes_made()
        self._known: dict[Place, Place] = {}

    def note(self) -> None:
        """An op runs: the nodes made since the last one are of the line that runs it."""
        made = observing.nodes_made()
        if made > self._noted:
            if observing.current_node() is None:
                place = self._innermost(sys._getframe(2))
            else:
                place = self.found(sys._getframe(2)).place
            for number in range(self._noted, made):
                self._of_node.setdefault(number, place)
            self._noted = made

    def here(self) -> tuple[Place | None, bool]:
        """(the line, whether it is a gradient) of an op that runs; as :meth:`note`, and told."""
        self.note()
        node = observing.current_node()
        if node is None:
            return self._innermost(sys._getframe(2)), False
        found = self.found(sys._getframe(2))
        return found.place, not found.recomputed

    def _innermost(self, start: FrameType) -> Place | None:
        for frame, is_own in observing.frames_of_program(start):
            if is_own:
                return self._place(frame)
        return None

    def found(self, start: FrameType) -> Found:
        """Where what runs in the frame ``start`` is."""
        node = observing.current_node()
        place, recomputed, moved, traced = None, False, None, None
        within: list[tuple[str, str]] = []
        is_inside = True  # of what autograd's engine runs, if it is at work
        for frame, is_own in observing.frames_of_program(start):
            if is_own and place is None:
                place = self._place(frame)
            if place is not None and (node is None or not is_inside):
                break
            if place is None and is_inside:
                within.append((str(frame.f_globals.get("__name__")), frame.f_code.co_name))
                moved = moved or observing.is_redistribution(frame)
                traced = traced or observing.node_of_graph(frame)
            recomputed = recomputed or (node is not None and observing.is_recomputing(frame))
            is_inside = is_inside and not observing.is_backward(frame)
        if node is not None and not recomputed:
            place = self._of_node.get(observing.number_of_node(node), place)
        op = None
        if traced is not None:
            line, op = observing.line_of_node(traced), observing.op_of_node(traced)
            place = place if line is None else self._known.setdefault(Place(*line), Place(*line))
        at = perf_counter()
        return Found(place, node is not None, recomputed, at, moved, tuple(within), op)

    def _place(self, frame: FrameType) -> Place:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
        place = Place(code.co_filename, frame.f_lineno, name)
        return self._known.setdefault(place, place)

"""Which line of the program something runs for: the innermost frame outside of torch, this package
and Python's own modules; of a gradient, the line of the op that it is the gradient of.

Autograd numbers the nodes that it makes, in order. So at each op that made nodes the numbers since
the last op are noted with the line, and in the backward the number of the node at work leads back
to it. What runs again in the backward, for a checkpoint, is of the line that runs again.
"""

from __future__ import annotations

import sys
from time import perf_counter
from types import CodeType, FrameType
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
        within: (module, name) of torch's and this package's functions on the way, from the inside
            out.
        traced_op: what the program called, where a graph's own code runs.
    """

    place: Place | None
    backward: bool
    recomputed: bool
    at: float
    moved: tuple[Any, Any] | None
    within: tuple[tuple[str, str], ...]
    traced_op: str | None = None


class Lines:
    """The lines that made autograd's nodes.

    Attributes:
        noted: the number of the next node whose line is to be noted.
    """

    def __init__(self) -> None:
        self._of_node: dict[int, Place | None] = {}
        self.noted = observing.nodes_made()
        self._places: dict[tuple[int, int], Place] = {}
        # What each code is that was met. Kept with it, so that no other code gets its address.
        self._codes: dict[int, tuple[CodeType, observing.Kind]] = {}
        self._others: set[int] = set()  # those of them that are not the program's own

    def here(self) -> tuple[Place | None, bool]:
        """(the line, whether it is a gradient) of an op that runs. The nodes made since the last
        one are of that line.
        """
        node = observing.current_node()
        if node is None:
            place, is_gradient = self._innermost(sys._getframe(1)), False
        elif not observing.may_recompute():
            number = observing.number_of_node(node)
            place, is_gradient = self._of_node.get(number, _UNSEEN), True
            if place is _UNSEEN:
                place = self._innermost(sys._getframe(1))
        else:
            found = self.found(sys._getframe(1))
            place, is_gradient = found.place, not found.recomputed
        made = observing.nodes_made()
        if made > self.noted:
            for number in range(self.noted, made):
                self._of_node.setdefault(number, place)
            self.noted = made
        return place, is_gradient

    def _innermost(self, start: FrameType) -> Place | None:
        frame: FrameType | None = start
        others = self._others  # this runs for each op: without a call for each frame
        while frame is not None:
            if id(frame.f_code) not in others and self._known(frame)[1].is_own:
                return self._place(frame)
            frame = frame.f_back
        return None

    def found(self, start: FrameType) -> Found:
        """Where what runs in the frame ``start`` is."""
        node = observing.current_node()
        place, recomputed, moved, traced = None, False, None, None
        within: list[tuple[str, str]] = []
        is_inside = True  # of what autograd's engine runs, if it is at work
        frame: FrameType | None = start
        while frame is not None:
            kind = self._known(frame)[1]
            if place is None and kind.is_own:
                place = self._place(frame)
            if place is not None and (node is None or not is_inside):
                break
            if place is None and is_inside:
                within.append(kind.called)
                if kind.moves:
                    moved = moved or observing.moved_in(frame)
                if kind.is_graph:
                    traced = traced or observing.node_of_graph(frame)
            recomputed = recomputed or (kind.recomputes and node is not None)
            is_inside = is_inside and not kind.starts_backward
            frame = frame.f_back
        if node is not None and not recomputed:
            place = self._of_node.get(observing.number_of_node(node), place)
        op = None
        if traced is not None:
            line, op = observing.line_of_node(traced), observing.op_of_node(traced)
            place = place if line is None else Place(*line)
        at = perf_counter()
        return Found(place, node is not None, recomputed, at, moved, tuple(within), op)

    def _known(self, frame: FrameType) -> tuple[CodeType, observing.Kind]:
        code = frame.f_code
        known = self._codes.get(id(code))
        if known is None:
            known = self._codes[id(code)] = code, observing.kind_of(frame)
            if not known[1].is_own:
                self._others.add(id(code))
        return known

    def _place(self, frame: FrameType) -> Place:
        code = frame.f_code
        key = id(code), frame.f_lineno
        place = self._places.get(key)
        if place is None:
            name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
            place = self._places[key] = Place(code.co_filename, frame.f_lineno, name)
        return place


_UNSEEN = Place("", 0, "")

"""The line of the program for which something runs: the innermost frame outside of torch, this
package and Python's own modules. For a gradient, the line of the forward op.

Autograd numbers its nodes in the order in which it makes them. If an op of a DTensor, a collective
or a Python function makes nodes, the numbers of the nodes are recorded with the line. In the
backward pass, the number of the current node gives the line. A number between two recorded numbers
belongs to an op on plain tensors, and gives the earlier line. If a checkpoint runs code again in
the backward pass, the line is that of the code.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

from cute_sharding.dtensor.replaced import observing
from cute_sharding.dtensor.replaced.observing import Line, line_of_program
from cute_sharding.tools.profile.report import Place

# The line of a node that autograd made before the recording began.
UNSEEN: Line = (compile("", "", "exec"), 0)


class Found(NamedTuple):
    """The place where something runs.

    Attributes:
        line: the line for which it runs; None if the line is unknown.
        caller: the line that called the function of ``line``; None for a gradient.
        traced: the line from which it was traced, if the code of a graph runs.
        backward: whether gradients are computed now.
        recomputed: whether it runs again, for a checkpoint.
        at: the time, in seconds of a clock.
        moved: the specs before and after, if a redistribution runs.
        within: (module, name) of the frames of torch and this package, from the inside out.
        traced_op: the op that the program called, if the code of a graph runs.
    """

    line: Line | None
    caller: Line | None
    traced: Place | None
    backward: bool
    recomputed: bool
    at: float
    moved: tuple[Any, Any] | None
    within: tuple[tuple[str, str], ...]
    traced_op: str | None = None


class Lines:
    """The lines that made autograd's nodes.

    Attributes:
        started: the number of the first node whose line was recorded.
        noted: the number of the next node whose line has to be recorded.
    """

    def __init__(self) -> None:
        self.noted = observing.nodes_made()
        self.started = observing.NO_NUMBER
        self._thread = get_ident()  # each thread numbers its nodes
        self._first: list[int] = []  # numbers of nodes, ascending, with the line of each node and
        self._lines: list[Line | None] = []  # of the nodes after it, up to the next number
        self._places: dict[tuple[int, int], Place] = {}

    def here(self, node: Any) -> tuple[Line | None, bool]:
        """The line of the running code and of autograd's current node, and whether it is a
        gradient.
        """
        if node is None:
            return line_of_program(sys._getframe(1)), False
        if observing.may_recompute():
            found = self.found(sys._getframe(1))
            return found.line, not found.recomputed
        line = self.of_node(observing.number_of_node(node))
        return line_of_program(sys._getframe(1)) if line is UNSEEN else line, True

    def note(self, first: int, line: Line | None, next_one: int) -> None:
        """Record that the nodes from the number ``first`` on belong to the line; ``next_one`` may
        belong to another line. Nothing is recorded in another thread, for example if a backward
        pass runs a forward pass again in another thread.
        """
        if get_ident() == self._thread:
            if not self._first:
                self.started = first
            self._first.append(first)
            self._lines.append(line)
            self.noted = next_one

    def of_node(self, number: int) -> Line | None:
        """The line that made a node; :data:`UNSEEN` if the line was not recorded."""
        at = bisect_right(self._first, number) - 1
        return UNSEEN if at < 0 else self._lines[at]

    def place(self, line: Line | None) -> Place | None:
        """The line as plain values."""
        if line is None:
            return None
        code, number = line
        key = id(code), number
        place = self._places.get(key)
        if place is None:
            name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
            place = self._places[key] = Place(code.co_filename, number, name)
        return place

    def found(self, start: FrameType) -> Found:
        """The place of the code that runs in the frame ``start``."""
        node, others, own = observing.current_node(), observing.OTHERS, observing.OWN
        recomputes, moved, traced = False, None, None
        within: list[tuple[str, str]] = []
        frame: FrameType | None = start
        while frame is not None:  # up to a line of the program, or to autograd's engine
            number = id(frame.f_code)
            called = others.get(number)
            if called is None:
                if number in own:
                    break
                kind = observing.kind_of(frame)
                if kind.is_own or (kind.starts_backward and node is not None):
                    break
                called, recomputes = kind.called, recomputes or kind.recomputes
                if kind.moves and moved is None:
                    moved = observing.moved_in(frame, kind.moves)
                elif kind.is_graph and traced is None:
                    traced = observing.node_of_graph(frame)
            within.append(called)
            frame = frame.f_back
        line = caller = written = op = None
        recomputed = False
        if node is not None:
            line, recomputed = self._in_backward(frame, node, recomputes)
        elif frame is not None:
            line, caller = (frame.f_code, frame.f_lineno), line_of_program(frame.f_back)
        if traced is not None:
            written, op = observing.line_of_node(traced), observing.op_of_node(traced)
        return Found(
            line,
            caller,
            None if written is None else Place(*written),
            node is not None,
            recomputed,
            perf_counter(),
            moved,
            tuple(within),
            op,
        )

    def _in_backward(
        self, start: FrameType | None, node: Any, recomputes: bool
    ) -> tuple[Line | None, bool]:
        """The line for which autograd's node runs, and whether a forward pass runs again.
        ``recomputes``: whether one runs again in the frames inside of ``start``.
        """
        line: Line | None = None
        frame = start
        while frame is not None:
            kind = observing.kind_of(frame)
            if kind.is_own and line is None:
                line = frame.f_code, frame.f_lineno
            recomputes = recomputes or kind.recomputes
            if kind.starts_backward:
                break
            frame = frame.f_back
        made_by = UNSEEN if recomputes else self.of_node(observing.number_of_node(node))
        if made_by is not UNSEEN:
            return made_by, False
        return line or line_of_program(frame), recomputes

"""All collectives inside a ``with`` block, in order, each with the line of the program that it runs
for, its cause and its times: torch's functional collectives, the collectives of
``torch.distributed``, of DTensor and of this package.

The line is the innermost frame outside of torch, this package and Python's own modules; for a
gradient, the line of the forward op. Autograd numbers its nodes in the order in which it makes
them. If an op of a DTensor, a collective or a Python function makes nodes, the numbers of the nodes
are recorded with the line. In the backward pass, the number of the current node gives the line. A
number between two recorded numbers belongs to an op on plain tensors, and gives the earlier line.
If a checkpoint runs code again in the backward pass, the line is that of the code.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.replaced import observing
from cute_sharding.dtensor.replaced.observing import (
    NO_NUMBER,
    OTHERS,
    OWN,
    Line,
    current_node,
    kind_of_code,
    line_of_program,
    may_recompute,
    memory_of,
    nodes_made,
    number_of_node,
)
from cute_sharding.tools.profile.collectives import (
    MESSAGES,
    CollectiveRow,
    batch_of,
    collective_of,
    ops,
)
from cute_sharding.tools.profile.values import Collective, Place

# The line of a node that autograd made before the recording began.
UNSEEN: Line = (compile("", "", "exec"), 0)
# Stands for a plain tensor among the arguments, whose elements are not kept.
PLAIN = "a plain tensor"


class Found(NamedTuple):
    """The place where something runs."""

    line: Line | None  # for which it runs; None if it is unknown
    caller: Line | None  # of the function of the line; None for a gradient
    traced: Place | None  # from which it was traced, if the code of a graph runs
    backward: bool  # whether gradients are computed now
    recomputed: bool  # whether it runs again, for a checkpoint
    at: float  # seconds of a clock
    moved: tuple[Any, Any] | None  # the specs before and after, if a redistribution runs
    within: tuple[tuple[str, str], ...]  # (module, name) of frames of torch and us, innermost first
    traced_op: str | None = None  # the op that the program called, if the code of a graph runs


class Lines:
    """The lines that made autograd's nodes.

    Attributes:
        started: the number of the first node whose line was recorded.
        noted: the number of the next node whose line has to be recorded.
    """

    def __init__(self) -> None:
        self.noted = nodes_made()
        self.started = NO_NUMBER
        self._thread = get_ident()  # each thread numbers its nodes
        self._first: list[int] = []  # numbers of nodes, ascending, with the line of each node and
        self._lines: list[Line | None] = []  # of the nodes after it, up to the next number

    def here(self, node: Any) -> tuple[Line | None, bool]:
        """The line of the running code and of autograd's current node, and whether it is a
        gradient.
        """
        if node is None:
            return line_of_program(sys._getframe(1)), False
        if may_recompute():
            found = self.found(sys._getframe(1))
            return found.line, not found.recomputed
        line = self.of_node(number_of_node(node))
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

    def found(self, start: FrameType) -> Found:
        """The place of the code that runs in the frame ``start``."""
        node = current_node()
        recomputes, moved, traced = False, None, None
        within: list[tuple[str, str]] = []
        frame: FrameType | None = start
        while frame is not None:  # up to a line of the program, or to autograd's engine
            number = id(frame.f_code)
            called = OTHERS.get(number)
            if called is None:
                if number in OWN:
                    break
                kind = kind_of_code(frame)
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
        recomputed, is_backward = False, node is not None
        if node is not None:
            line, recomputed = self._in_backward(frame, node, recomputes)
        elif frame is not None:
            line, caller = (frame.f_code, frame.f_lineno), line_of_program(frame.f_back)
        if traced is not None:
            written, op = observing.line_of_node(traced), observing.op_of_node(traced)
        place = None if written is None else Place(*written)
        at, frames = perf_counter(), tuple(within)
        return Found(line, caller, place, is_backward, recomputed, at, moved, frames, op)

    def _in_backward(
        self, start: FrameType | None, node: Any, recomputes: bool
    ) -> tuple[Line | None, bool]:
        """The line for which autograd's node runs, and whether a forward pass runs again.
        ``recomputes``: whether one runs again in the frames inside of ``start``.
        """
        line: Line | None = None
        frame = start
        while frame is not None:
            kind = kind_of_code(frame)
            if kind.is_own and line is None:
                line = frame.f_code, frame.f_lineno
            recomputes = recomputes or kind.recomputes
            if kind.starts_backward:
                break
            frame = frame.f_back
        made_by = UNSEEN if recomputes else self.of_node(number_of_node(node))
        if made_by is not UNSEEN:
            return made_by, False
        return line or line_of_program(frame), recomputes


# The record of an op, made while the program waits: the line for which it runs, or None for a
# gradient, whose node gives the line; op, args, kwargs and settings of a Source; and for a
# gradient, the number of autograd's node for which it runs, otherwise None.
Met: TypeAlias = tuple[
    "Line | None", Any, list[Any], "dict[str, Any] | None", "Settings | None", "int | None"
]


class Source(NamedTuple):
    """What communicates: an op that a line runs on DTensors with certain placements, a function
    that the program calls, or code that runs. The same op on another line, or on tensors with other
    placements, is another source.

    Attributes:
        place, backward: the line, and whether a gradient of the line is computed.
        kind: one of those of :class:`.values.Cause`.
        op: the aten overload of an op; otherwise, the name of the function.
        args: the arguments of an op, with the spec of each DTensor; lists as tuples.
        kwargs: the keyword arguments of an op, by name.
        moved: the specs before and after, if no op but a redistribution runs.
        settings: the settings of the package; None if the package was off.
        asker: what has called a function for the program, as in :class:`.observing.Asked`.
    """

    place: Place | None
    backward: bool
    kind: str
    op: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    moved: tuple[Any, Any] | None = None
    settings: Settings | None = None
    asker: str = ""


class Seen:
    """A collective, or a batch of messages, in the form in which it is recorded while the program
    waits.
    """

    def __init__(
        self,
        one: Collective,  # without its line and times
        found: Found,  # the place where it, or its first message, ran
        busiest: Callable[[], int] | None,  # the bytes that the busiest rank receives, by the plan
        met: Met | None,  # the last op on DTensors before
    ) -> None:
        self.one, self.found, self.busiest, self.met = one, found, busiest, met
        self.settings = in_force()
        self.end = found.at  # when it was done, in seconds of a clock

    @property
    def is_torchs(self) -> bool:
        """Whether a function of PyTorch's own ran it, which skips the rule of the op."""
        return observing.is_in_torchs_function(self.found.within)


class Recorder:
    """Records the collectives that run inside the ``with`` block, in this thread and in the
    backward passes that this thread starts. For a compiled program, it records the collectives
    that run, but none of the tracing.

    Attributes:
        seen: the collectives, in order.
        started, ended: seconds of a clock.
        settings: the settings when the recording began; None if the package was off.
        member: the rank of this process, and the number of ranks, as the first collective ran;
            None if none did.
    """

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.started = self.ended = 0.0
        self.settings: Settings | None = None
        self.member: tuple[int, int] | None = None
        self._last: Met | None = None
        self._lines = Lines()
        self._places: dict[tuple[int, int], Place] = {}
        self._busiest: Callable[[], int] | None = None  # the bytes of the exchange that runs now
        self._messages: list[tuple[Collective, Found]] | None = None
        self._sent_before = 0  # the number of collectives when the exchange began
        self._groups: dict[Any, tuple[list[int], int]] = {}  # for :func:`collective_of`
        self._in_flight: dict[int, Seen] = {}

    def __enter__(self) -> Recorder:
        self._lines = Lines()
        observing.start(self, ops())
        self.settings, self.started = in_force(), perf_counter()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.ended = perf_counter()
        observing.stop(self)
        self._groups.clear()  # this recorder must not keep groups alive

    # -- what the program does, while it waits -----------------------------------------------------

    def exchange(self, busiest: Callable[[], int]) -> _Exchange:
        """Record the collectives inside the block as one exchange, of which the busiest rank
        receives the given number of bytes.
        """
        self._busiest, self._messages, self._sent_before = busiest, [], len(self.seen)
        return _Exchange(self)

    def exchange_ends(self) -> None:
        """Record that the exchange has been sent."""
        messages, busiest = self._messages, self._busiest
        self._busiest = self._messages = None
        if messages:
            batch = batch_of([one for one, _ in messages])
            self.seen.append(Seen(batch, messages[0][1], busiest, self._last))
        now = perf_counter()
        for seen in self.seen[self._sent_before :]:
            seen.end = now

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        # This runs for each op, so it calls no function for each frame or node.
        lines, node = self._lines, current_node()
        line: Line | None = None
        # The line that made a recorded node is looked up later.
        number: int | None = None if node is None or may_recompute() else node._sequence_nr()
        if number is None or not lines.started <= number < NO_NUMBER:
            number = None
            if node is None:
                frame: FrameType | None = sys._getframe(2)
                while frame is not None and id(frame.f_code) in OTHERS:
                    frame = frame.f_back
                if frame is not None and id(frame.f_code) in OWN:
                    line = frame.f_code, frame.f_lineno
                else:
                    line = line_of_program(frame)
            else:
                line, is_gradient = lines.here(node)
                number = number_of_node(node) if is_gradient else None
            made = nodes_made()
            if made > lines.noted:
                of = lines.of_node(-1 if number is None else number) if line is None else line
                lines.note(lines.noted, of, made)
        kept = [
            arg._spec if type(arg) is DTensor else arg if type(arg) in _SIMPLE else _kept(arg)
            for arg in args
        ]
        named = kwargs and {name: _kept(value) for name, value in kwargs.items()}
        self._last = line, func, kept, named, in_force(), number

    def last_line(self) -> Line | None:
        """The line for which the last op on DTensors ran."""
        if self._last is None:
            return None
        line, *_, number = self._last
        return self._lines.of_node(number) if line is None and number is not None else line

    def node_made(self) -> None:
        made = nodes_made()
        self._lines.note(made - 1, self._lines.here(current_node())[0], made)

    def sends(self, of: tuple[Any, CollectiveRow], args: Any, kwargs: Any) -> None:
        lines = self._lines
        self.member = self.member or (dist.get_rank(), dist.get_world_size())
        found = lines.found(sys._getframe(1))
        made = nodes_made()
        if made > lines.noted:
            lines.note(made - 1, found.line, made)
        self.about_to_send(collective_of(*of, args, kwargs, self._groups), found)

    def about_to_send(self, one: Collective, found: Found) -> None:
        """Called before a collective runs."""
        if self._messages is not None and one.op in MESSAGES:
            self._messages.append((one, found))
        else:
            self.seen.append(Seen(one, found, self._busiest, self._last))

    def sent(self, result: Any) -> None:
        if self.seen and not self._messages:  # messages of a batch are not recorded yet
            seen = self.seen[-1]
            seen.end = perf_counter()
            for tensor in result if isinstance(result, list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self._in_flight[memory_of(tensor)] = seen

    def waited(self, tensor: Any) -> None:
        seen = self._in_flight.pop(memory_of(tensor), None)
        if seen is not None:
            seen.end = perf_counter()

    # -- what was recorded -------------------------------------------------------------------------

    @property
    def collectives(self) -> list[Collective]:
        """All collectives that ran, in order."""
        return [*map(self.collective_of, self.seen)]

    def collective_of(self, seen: Seen) -> Collective:
        """A collective with its line and its times."""
        one, found = seen.one, seen.found
        if seen.busiest is not None:
            one = one._replace(busiest=max(seen.busiest() // one.itemsize, one.received))
        return one._replace(
            place=self._place_of(found),
            backward=found.backward,
            recomputed=found.recomputed,
            caller=self._place(found.caller),
            start=found.at - self.started,
            measured=seen.end - found.at,
        )

    def source_of(self, seen: Seen) -> Source:
        """What a collective runs for."""
        found = seen.found
        kind, function, asker = observing.asked_by(found.within)
        if kind in ("op", "planned") and seen.met is not None:
            line, op, args, kwargs, settings, number = seen.met
            if number is not None and line is None:
                line = self._lines.of_node(number)
            named = tuple((kwargs or {}).items())
            place, backward = self._place(line), number is not None
            return Source(place, backward, kind, op, tuple(args), named, settings=settings)
        if kind == "compiled":
            function = found.traced_op or function
        moved = found.moved if found.moved and None not in found.moved else None
        return Source(
            self._place_of(found),
            found.backward,
            kind,
            function,
            moved=moved,
            settings=seen.settings,
            asker=asker,
        )

    def _place_of(self, found: Found) -> Place | None:
        return found.traced or self._place(found.line)

    def _place(self, line: Line | None) -> Place | None:
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


class _Exchange:
    """The context of one exchange. A context of contextlib would take two more calls each time."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        self._recorder.exchange_ends()


_SIMPLE = {int, float, bool, type(None), str}
_SIMPLE |= {torch.dtype, torch.device, torch.layout, torch.memory_format}


def _kept(value: Any) -> Any:
    """An argument without the elements of tensors, in a form that can be hashed."""
    if type(value) is list and _SIMPLE.issuperset(map(type, value)):
        return tuple(value)
    if isinstance(value, torch.Tensor):
        return value._spec if isinstance(value, DTensor) else PLAIN
    if isinstance(value, (list, tuple)):
        return tuple([_kept(each) for each in value])
    try:
        hash(value)
    except TypeError:
        return PLAIN  # the rules cannot be applied to it
    return value

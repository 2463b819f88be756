"""A recorder that also records the cause and the time of each collective."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.profile.codes import OTHERS, OWN
from cute_sharding.dtensor.profile.places import Found, Line
from cute_sharding.dtensor.profile.recorder import Recorder
from cute_sharding.dtensor.replaced import observing
from cute_sharding.dtensor.replaced.observing import (
    NO_NUMBER,
    current_node,
    may_recompute,
    nodes_made,
    number_of_node,
)
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.profiling import Place


class When:
    """A period without changes of the settings: ``settings``, or None if the package was off."""

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings


class Call(NamedTuple):
    """An op that a line runs on DTensors with certain placements. The same op on another line, or
    on tensors with other placements, is another ``Call``.

    Attributes:
        place, backward: the line, and whether the op computes a gradient of the line.
        op: the aten overload.
        args: the arguments, with the spec of each DTensor; lists as tuples.
        kwargs: the keyword arguments, by name.
        when: the settings of the package.
    """

    place: Place | None
    backward: bool
    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    when: When


class Asked(NamedTuple):
    """A function that the program called, or code that ran, outside of the ops of DTensors.

    Attributes:
        place, backward: as in :class:`Call`.
        function: the name of the function.
        kind: "asked", "direct" or "compiled", as in :class:`..profiling.Cause`.
        before, after: the specs, if a tensor is redistributed.
        when: the settings of the package.
    """

    place: Place | None
    backward: bool
    function: str
    kind: str
    before: DTensorSpec | None
    after: DTensorSpec | None
    when: When


# The record of an op, made while the program waits: the line for which it runs, or None for a
# gradient, whose node gives the line; op, args, kwargs and when of a Call; the number of autograd's
# node that was made for it (-1: none); and for a gradient, the number and the class of the node for
# which it runs, otherwise None.
Met: TypeAlias = tuple[
    "Line | None",
    Any,
    tuple[Any, ...],
    tuple[tuple[str, Any], ...],
    When,
    int,
    "type | None",
]


class Note:
    """The time of a collective, and the last op before it.

    Attributes:
        found, when: the place where the collective ran, and the settings of the package.
        met: the last op on DTensors before the collective.
        start, end: seconds since the recording began.
    """

    def __init__(self, found: Found, met: Met | None, when: When, start: float) -> None:
        self.found, self.met, self.when, self.start, self.end = found, met, when, start, start


class Ran(NamedTuple):
    """The result for a :class:`Note`.

    Attributes:
        source: the cause of the collective.
        start, end: seconds since the recording began.
        moved: the specs before and after the redistribution.
    """

    source: Call | Asked
    start: float
    end: float
    moved: tuple[Any, Any] | None


# Stands for a plain tensor among the arguments, whose elements are not kept.
PLAIN = "a plain tensor"
# The most calls that wait to be counted.
MOST_MET = 1 << 15


class Profiler(Recorder):
    """Records collectives, their causes and their times.

    Attributes:
        started, ended: seconds of a clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started = self.ended = 0.0
        self._notes: list[Note] = []
        self._last: Met | None = None
        self._met: list[Met] = []
        self._calls: dict[Call, int] = {}
        self._forward: dict[Call, Call] = {}
        self._of_node: dict[int, Call] = {}
        self._now = When(None)
        self._in_flight: dict[int, Note] = {}
        self._sent_before = 0  # the number of notes when an exchange began

    def exchange_begins(self, busiest: Callable[[], int]) -> None:
        super().exchange_begins(busiest)
        self._sent_before = len(self._notes)

    def exchange_ends(self) -> None:
        super().exchange_ends()
        for note in self._notes[self._sent_before :]:
            note.end = max(note.end, perf_counter() - self.started)

    def __enter__(self) -> Profiler:
        super().__enter__()
        self._when()
        self.started = perf_counter()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.ended = perf_counter()
        super().__exit__(*raised)

    @property
    def seconds(self) -> float:
        """The duration of the recording, until now if it has not ended."""
        return (self.ended or perf_counter()) - self.started

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        # This runs for each op, so it calls no function for each frame, argument or node.
        lines, node, made = self._lines, current_node(), nodes_made()
        line: Line | None = None
        number, kind = -1, None
        if node is None:
            frame: FrameType | None = sys._getframe(2)
            while frame is not None and id(frame.f_code) in OTHERS:
                frame = frame.f_back
            if frame is not None and id(frame.f_code) in OWN:
                line = frame.f_code, frame.f_lineno
            else:
                line = lines.innermost(frame)
        elif lines.started <= (number := node._sequence_nr()) < NO_NUMBER and not may_recompute():
            kind = type(node)  # the line that made it is looked up later
        else:
            line, is_gradient = lines.here(node)
            number, kind = (number_of_node(node), type(node)) if is_gradient else (-1, None)
        if made > lines.noted:
            lines.note(lines.noted, lines.of_node(number) if line is None else line, made)
            if kind is None:
                number = made - 1  # the node was made just before
        kept = tuple(
            [
                arg._spec if type(arg) is DTensor else arg if type(arg) in _SIMPLE else _kept(arg)
                for arg in args
            ]
        )
        named = tuple([(name, _kept(value)) for name, value in kwargs.items()]) if kwargs else ()
        now = self._now if in_force() is self._now.settings else self._when()
        self._last = met = line, func, kept, named, now, number, kind
        self._met.append(met)
        if len(self._met) > MOST_MET:
            self._count()

    @property
    def times(self) -> list[When]:
        """The settings during all recorded events; if nothing ran, the first settings."""
        ran = [source.when for source in (*self.calls, *(note.source for note in self.notes))]
        return ran or [self._now]

    @property
    def calls(self) -> dict[Call, int]:
        """The number of times that each op ran on DTensors with certain placements."""
        self._count()
        return self._calls

    def forward_of(self, call: Call) -> Call | None:
        """The forward op of a gradient's op; None if the forward op was not recorded."""
        self._count()
        return self._forward.get(call)

    @property
    def notes(self) -> list[Ran]:
        """The results, one for each of ``collectives``."""
        return [
            Ran(self.source_of(note), note.start, note.end, note.found.moved)
            for note in self._notes
        ]

    def source_of(self, note: Note) -> Call | Asked:
        """The cause of a collective."""
        found = note.found
        kind, function = observing.asked_by(found.within)
        if kind == "op" and note.met is not None:
            return self._call_of(note.met)
        if kind == "compiled":
            function = found.traced_op or function
        before, after = found.moved or (None, None)
        place = self.place_of(found)
        return Asked(place, found.backward, function, kind, before, after, note.when)

    def _call_of(self, met: Met) -> Call:
        line, op, args, kwargs, when, number, kind = met
        if kind is not None and line is None:
            line = self._lines.of_node(number)
        return Call(self._lines.place(line), kind is not None, op, args, kwargs, when)

    def _count(self) -> None:
        """Calls that are equal are one: not worked out while the program waits."""
        for met in self._met:
            call, node, kind = self._call_of(met), met[5], met[6]
            self._calls[call] = self._calls.get(call, 0) + 1
            if kind is None:
                self._of_node[node] = call
                continue
            forward = self._of_node.get(node)
            if forward is not None and observing.is_gradient_of(kind, forward.op):
                self._forward.setdefault(call, forward)
        self._met.clear()

    def _when(self) -> When:
        settings = in_force()
        if settings is not self._now.settings:
            self._now = When(settings)
        return self._now

    def added(self, found: Found) -> None:
        start = found.at - self.started
        self._notes.append(Note(found, self._last, self._when(), start))

    def sent(self, result: Any) -> None:
        if not self._notes or self.is_in_batch:
            return
        note = self._notes[-1]
        note.end = perf_counter() - self.started
        for tensor in result if isinstance(result, list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._in_flight[observing.memory_of(tensor)] = note

    def wait(self, tensor: Any, run: Callable[[], Any]) -> Any:
        result = run()
        note = self._in_flight.pop(observing.memory_of(tensor), None)
        if note is not None:
            note.end = perf_counter() - self.started
        return result


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

"""A recorder that also records the cause and the time of each collective."""

from __future__ import annotations

import sys
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.replaced import observing
from cute_sharding.dtensor.replaced.observing import (
    NO_NUMBER,
    OTHERS,
    OWN,
    Line,
    current_node,
    line_of_program,
    may_recompute,
    memory_of,
    nodes_made,
    number_of_node,
)
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.tools.profile.recorder import Met, Recorder, Seen
from cute_sharding.tools.profile.report import Place


class Call(NamedTuple):
    """An op that a line runs on DTensors with certain placements. The same op on another line, or
    on tensors with other placements, is another ``Call``.

    Attributes:
        place, backward: the line, and whether the op computes a gradient of the line.
        op: the aten overload.
        args: the arguments, with the spec of each DTensor; lists as tuples.
        kwargs: the keyword arguments, by name.
        settings: the settings of the package; None if the package was off.
    """

    place: Place | None
    backward: bool
    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    settings: Settings | None


class Asked(NamedTuple):
    """A function that the program called, or code that ran, outside of the ops of DTensors.

    Attributes:
        place, backward: as in :class:`Call`.
        function: the name of the function.
        kind: "asked", "direct" or "compiled", as in :class:`..profiling.Cause`.
        before, after: the specs, if a tensor is redistributed.
        settings: as in :class:`Call`.
    """

    place: Place | None
    backward: bool
    function: str
    kind: str
    before: DTensorSpec | None
    after: DTensorSpec | None
    settings: Settings | None


class Ran(NamedTuple):
    """The result for a :class:`Seen`.

    Attributes:
        source: the cause of the collective.
        start, end: seconds since the recording began.
        moved: the specs before and after the redistribution.
        is_torchs: whether a function of PyTorch's own ran it, which skips the rule of the op.
    """

    source: Call | Asked
    start: float
    end: float
    moved: tuple[Any, Any] | None
    is_torchs: bool


# Stands for a plain tensor among the arguments, whose elements are not kept.
PLAIN = "a plain tensor"
# The most calls that wait to be counted.
MOST_MET = 1 << 15


class Profiler(Recorder):
    """Records collectives, their causes and their times.

    Attributes:
        started, ended: seconds of a clock.
        settings: the settings when the recording began; None if the package was off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started = self.ended = 0.0
        self.settings: Settings | None = None
        self._met: list[Met] = []
        self._calls: dict[Call, int] = {}
        self._in_flight: dict[int, Seen] = {}

    def __enter__(self) -> Profiler:
        super().__enter__()
        self.settings = in_force()
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
        self._last = met = line, func, kept, named, in_force(), number
        self._met.append(met)
        if len(self._met) > MOST_MET:
            self._count()

    @property
    def calls(self) -> dict[Call, int]:
        """The number of times that each op ran on DTensors with certain placements."""
        self._count()
        return self._calls

    @property
    def notes(self) -> list[Ran]:
        """The results, one for each of ``collectives``."""
        return [*map(self.note_of, self._seen)]

    def note_of(self, seen: Seen) -> Ran:
        """The result for a collective, which may still have to run."""
        found, began = seen.found, self.started
        is_torchs = observing.is_in_torchs_function(found.within)
        return Ran(self.source_of(seen), found.at - began, seen.end - began, found.moved, is_torchs)

    def source_of(self, seen: Seen) -> Call | Asked:
        """The cause of a collective."""
        found = seen.found
        kind, function = observing.asked_by(found.within)
        if kind == "op" and seen.met is not None:
            return self._call_of(seen.met)
        if kind == "compiled":
            function = found.traced_op or function
        before, after = found.moved or (None, None)
        place = self.place_of(found)
        return Asked(place, found.backward, function, kind, before, after, seen.settings)

    def _call_of(self, met: Met) -> Call:
        line, op, args, kwargs, settings, number = met
        if number is not None and line is None:
            line = self._lines.of_node(number)
        place, named = self._lines.place(line), tuple((kwargs or {}).items())
        return Call(place, number is not None, op, tuple(args), named, settings)

    def _count(self) -> None:
        """Count equal calls. This is done after the program has run, or if many calls wait."""
        for met in self._met:
            call = self._call_of(met)
            self._calls[call] = self._calls.get(call, 0) + 1
        self._met.clear()

    def sent(self, result: Any) -> None:
        if self._seen and not self._messages:  # messages of a batch are not recorded yet
            seen = self._seen[-1]
            seen.end = perf_counter()
            for tensor in result if isinstance(result, list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self._in_flight[memory_of(tensor)] = seen

    def waited(self, tensor: Any) -> None:
        seen = self._in_flight.pop(memory_of(tensor), None)
        if seen is not None:
            seen.end = perf_counter()


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

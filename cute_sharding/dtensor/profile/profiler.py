"""A recorder that also notes what each collective was for, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.profile.places import Found
from cute_sharding.dtensor.profile.recorder import Recorder
from cute_sharding.dtensor.replaced import observing
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.profiling import Collective, Place


class When:
    """A time in which the settings stayed: ``settings``, None where nothing was on."""

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings


class Call(NamedTuple):
    """An op that a line runs on DTensors that lie in one way; of another line, or for tensors that
    lie otherwise, it is another.

    Attributes:
        place, backward: the line, and whether it is a gradient of it.
        op: the aten overload.
        args: its arguments, with the spec of each DTensor; lists as tuples.
        kwargs: its keywords, by name.
        when: what of this package was on.
    """

    place: Place | None
    backward: bool
    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    when: When


class Asked(NamedTuple):
    """A function that was called for, or code that ran, where no op of a DTensor is at work.

    Attributes:
        place, backward: as of :class:`Call`.
        function: its name.
        kind: "asked", "direct" or "compiled", as of a :class:`..profiling.Cause`.
        before, after: the specs, where a tensor is redistributed.
        when: what of this package was on.
    """

    place: Place | None
    backward: bool
    function: str
    kind: str
    before: DTensorSpec | None
    after: DTensorSpec | None
    when: When


class Note:
    """When a collective ran, and what for."""

    def __init__(self, source: Call | Asked, start: float, moved: tuple[Any, Any] | None) -> None:
        self.source, self.start, self.moved, self.end = source, start, moved, start


# A plain tensor among the arguments: what it holds is the program's, and is not kept.
PLAIN = "a plain tensor"
# So many calls wait to be counted.
MOST_MET = 1 << 15


class Profiler(Recorder):
    """Records collectives, what each was for, and how long it took.

    Attributes:
        notes: of each of ``collectives``.
        started, ended: seconds of a clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Note] = []
        self.started = self.ended = 0.0
        self._call: Call | None = None
        self._met: list[tuple[Call, Call | None]] = []  # and of a gradient, its forward op
        self._calls: dict[Call, int] = {}
        self._forward: dict[Call, Call] = {}
        self._of_node: dict[int, Call] = {}
        self._now = When(None)
        self._in_flight: dict[int, Note] = {}

    @contextmanager
    def exchange(self, busiest: Callable[[], int]) -> Iterator[None]:
        count = len(self.collectives)
        with super().exchange(busiest):
            yield
        for note in self.notes[count:]:
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
        """How long it took, or takes until now."""
        return (self.ended or perf_counter()) - self.started

    def met(self, func: Any, args: Any, kwargs: Any) -> None:
        noted = self._lines.noted
        place, backward = self._lines.here()
        named = tuple([(name, _kept_of(value)) for name, value in kwargs.items()]) if kwargs else ()
        self._call = call = Call(place, backward, func, _kept(args), named, self._when())
        forward = None
        if backward:
            node = observing.current_node()
            forward = self._of_node.get(observing.number_of_node(node))
            if forward is not None and not observing.is_gradient_of(node, forward.op):
                forward = None
        elif self._lines.noted > noted:
            self._of_node[self._lines.noted - 1] = call  # the node was made just before
        self._met.append((call, forward))
        if len(self._met) > MOST_MET:
            self._count()

    @property
    def times(self) -> list[When]:
        """What was on, of all that ran; where nothing ran, when it began."""
        ran = [source.when for source in (*self.calls, *(note.source for note in self.notes))]
        return ran or [self._now]

    @property
    def calls(self) -> dict[Call, int]:
        """How often each op ran on DTensors that lie in one way."""
        self._count()
        return self._calls

    def forward_of(self, call: Call) -> Call | None:
        """The op that a gradient's op is the gradient of; None where that was not seen."""
        self._count()
        return self._forward.get(call)

    def _count(self) -> None:
        """Calls that are equal are one: not worked out while the program waits."""
        for call, forward in self._met:
            self._calls[call] = self._calls.get(call, 0) + 1
            if forward is not None:
                self._forward.setdefault(call, forward)
        self._met.clear()

    def _when(self) -> When:
        settings = in_force()
        if settings is not self._now.settings:
            self._now = When(settings)
        return self._now

    def added(self, collective: Collective, found: Found) -> None:
        source = self.source_of(found)
        start = found.at - self.started
        self.notes.append(Note(source, start, found.moved))

    def source_of(self, found: Found) -> Call | Asked:
        """What a collective is for."""
        kind, function = observing.asked_by(found.within)
        if kind == "compiled":
            function = found.traced_op or function
        if kind == "op" and self._call is not None:
            return self._call
        before, after = found.moved or (None, None)
        return Asked(found.place, found.backward, function, kind, before, after, self._when())

    def send(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().send(func, args, kwargs)
        if self.notes and not self.is_in_batch:
            note = self.notes[-1]
            note.end = perf_counter() - self.started
            for tensor in result if isinstance(result, list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self._in_flight[observing.memory_of(tensor)] = note
        return result

    def wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().wait(func, args, kwargs)
        note = self._in_flight.pop(observing.memory_of(args[0]), None)
        if note is not None:
            note.end = perf_counter() - self.started
        return result


def _kept(args: Sequence[Any]) -> Any:
    """Arguments, without the elements of tensors, and such as can be hashed."""
    return tuple([_SIMPLE.get(type(arg), _kept_of)(arg) for arg in args])


def _kept_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value._spec if isinstance(value, DTensor) else PLAIN
    if isinstance(value, (list, tuple)):
        return _kept(value)
    try:
        hash(value)
    except TypeError:
        return PLAIN  # nothing can be asked about it
    return value


_SIMPLE: dict[type, Callable[[Any], Any]] = {
    DTensor: lambda value: value._spec,
    **dict.fromkeys((int, float, bool, type(None), torch.dtype), lambda value: value),
}

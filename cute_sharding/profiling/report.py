"""The communication of a program as plain values: collectives, their causes, and the lines of the
program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from cute_sharding.profiling.collective import Collective, Place


class Moved(NamedTuple):
    """A tensor that was redistributed.

    Attributes:
        shape: the global shape.
        mesh: the sizes of the mesh.
        names: the names of the mesh dims; a mesh dim without a name has its number.
        before, after: the placements, as DTensor prints them.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    names: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def changed(self) -> tuple[int, ...]:
        """The mesh dims on which the placement changes."""
        return tuple([m for m, (p, q) in enumerate(zip(self.before, self.after)) if p != q])

    @property
    def change(self) -> str:
        """The placements that change, such as ``S(0) -> R``."""
        if len(self.before) == 1:
            return f"{self.before[0]} -> {self.after[0]}"
        return f"[{', '.join(self.before)}] -> [{', '.join(self.after)}]"

    @property
    def where(self) -> str:
        """The names of the mesh dims on which the placement changes."""
        return ", ".join(self.names[m] for m in self.changed)


class Other(NamedTuple):
    """The bytes that one call would receive under other rules: PyTorch without this package, or
    this package with all flags.

    Attributes:
        received: the bytes that the busiest rank would receive; None if the call raises, or if the
            number is unknown.
        seconds: the seconds by the network's model; None if unknown.
        error: the error that the call would raise.
    """

    received: int | None
    seconds: float | None = None
    error: str | None = None


UNKNOWN = Other(None)


class Root(NamedTuple):
    """An op that sends nothing, and from which the communication of other ops may follow, because a
    tensor became sharded.

    Attributes:
        place, backward, op: as in :class:`Cause`.
        text: the op, its tensors, and the redistribution that avoids the communication.
    """

    place: Place | None
    backward: bool
    op: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        """The op as plain data."""
        return {**self._asdict(), "place": None if self.place is None else self.place._asdict()}


class Cause(NamedTuple):
    """The cause of a collective: an op on tensors with certain placements, on a line of the
    program.

    Attributes:
        place: the line; for a gradient, the line of the forward op.
        backward: whether the op computes a gradient.
        op: the op, such as "slice", or the function that the program called.
        kind: "op" (an op of a DTensor), "asked" (the program redistributes a DTensor itself),
            "direct" (the program or a library calls a collective) or "compiled" (a compiled
            program).
        moved: the tensors that were redistributed for it.
        operands, results: all tensors, as text: shape and placements.
        why: the reason for the communication, in a sentence.
        todo: ways to avoid the communication, in sentences, the cheapest first.
        torch: the bytes that PyTorch alone would send for the same tensors.
        package: the bytes that this package would send, with all flags.
        root: the op from which the communication may follow; None: unknown.
    """

    place: Place | None
    backward: bool
    op: str
    kind: str
    moved: tuple[Moved, ...] = ()
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    why: str = ""
    todo: tuple[str, ...] = ()
    torch: Other = UNKNOWN
    package: Other = UNKNOWN
    root: Root | None = None


class Event(NamedTuple):
    """A collective with its times.

    Attributes:
        collective: the collective.
        start: seconds since the profile began.
        measured: seconds from the start until the program waited for the result; if the profile saw
            no wait, until the backend took the collective.
        model: seconds by the network's model.
    """

    collective: Collective
    start: float
    measured: float
    model: float

    @property
    def received(self) -> int:
        """The bytes that the busiest rank received, or this rank, if the number is unknown."""
        busiest = self.collective.busiest_bytes
        return self.collective.received_bytes if busiest is None else busiest


class Line(NamedTuple):
    """All communication of one cause.

    Attributes:
        cause: the cause.
        calls: the number of calls.
        events: the collectives, in order; empty if this package made the calls free.
    """

    cause: Cause
    calls: int
    events: tuple[Event, ...]

    @property
    def received(self) -> int:
        """The bytes that the busiest rank received."""
        return sum(event.received for event in self.events)

    @property
    def is_of_busiest(self) -> bool:
        """Whether all bytes are those of the busiest rank, and none are those of this rank."""
        return all(event.collective.busiest is not None for event in self.events)

    @property
    def model(self) -> float:
        """The seconds by the network's model."""
        return sum(event.model for event in self.events)

    @property
    def measured(self) -> float:
        """The measured seconds."""
        return sum(event.measured for event in self.events)

    @property
    def kinds(self) -> dict[str, int]:
        """The number of collectives of each kind."""
        found: dict[str, int] = {}
        for event in self.events:
            found[event.collective.op] = found.get(event.collective.op, 0) + 1
        return found

    @property
    def callers(self) -> dict[Place, int]:
        """The lines that called the function of this line, as far as known, and the number of
        collectives of each; the most first.
        """
        found = Counter(event.collective.caller for event in self.events)
        return {line: n for line, n in found.most_common() if line is not None}

    def of(self, other: Other) -> int | None:
        """The bytes that the other rules would receive in all calls."""
        return None if other.received is None else other.received * self.calls

    def to_dict(self) -> dict[str, Any]:
        """The line as plain data: bytes and seconds."""
        cause = self.cause
        return {
            "place": None if cause.place is None else cause.place._asdict(),
            "backward": cause.backward,
            "op": cause.op,
            "kind": cause.kind,
            "calls": self.calls,
            "moved": [moved._asdict() for moved in cause.moved],
            "operands": list(cause.operands),
            "results": list(cause.results),
            "why": cause.why,
            "todo": list(cause.todo),
            "root": None if cause.root is None else cause.root.to_dict(),
            "collectives": self.kinds,
            "received_bytes": self.received,
            "model_seconds": self.model,
            "measured_seconds": self.measured,
            "torch": {**cause.torch._asdict(), "received": self.of(cause.torch)},
            "package": {**cause.package._asdict(), "received": self.of(cause.package)},
            "events": [
                {
                    **event.collective.to_dict(),
                    "start": event.start,
                    "measured_seconds": event.measured,
                    "model_seconds": event.model,
                }
                for event in self.events
            ],
        }


class Report(NamedTuple):
    """The results of a profile.

    Attributes:
        lines: the lines that communicate, with the most bytes first; then the lines that this
            package made free, and for which PyTorch alone would communicate.
        rank, world: the rank of this process, and the number of ranks.
        meshes: the meshes of the DTensors, as text.
        settings: the settings of this package, as text; empty if the package was off.
        network: the network of the modeled seconds, as text.
        version: the version of torch.
        seconds: the duration of the profile.
    """

    lines: tuple[Line, ...]
    rank: int
    world: int
    meshes: tuple[str, ...]
    settings: str
    network: str
    version: str
    seconds: float

    @property
    def communicating(self) -> list[Line]:
        """The lines that communicate."""
        return [line for line in self.lines if line.events]

    @property
    def freed(self) -> list[Line]:
        """The lines that do not communicate, but would without this package."""
        return [line for line in self.lines if not line.events]

    def total(self, of: Callable[[Line], float], lines: Iterable[Line] | None = None) -> float:
        """The sum over lines."""
        return sum(map(of, self.lines if lines is None else lines))

    def compared(self, other: Callable[[Cause], Other]) -> tuple[int, int, int]:
        """(bytes received, bytes that the other rules would receive, lines left out because a
        number is unknown), for the lines with both numbers.
        """
        known = [(line, line.of(other(line.cause))) for line in self.lines]
        both = [(line.received, n) for line, n in known if n is not None]
        return sum(a for a, _ in both), sum(b for _, b in both), len(known) - len(both)

    def compared_seconds(self) -> tuple[float, float]:
        """(seconds, seconds of PyTorch's rules for the same ops and placements) by the network's
        model, for the lines with both numbers.
        """
        known = [line for line in self.lines if line.cause.torch.seconds is not None]
        theirs = [line.calls * (line.cause.torch.seconds or 0.0) for line in known]
        return sum(line.model for line in known), sum(theirs)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: bytes and seconds."""
        theirs, ours = (self.compared(of) for of in (_torch, _package))
        return {
            "rank": self.rank,
            "world": self.world,
            "meshes": list(self.meshes),
            "settings": self.settings,
            "network": self.network,
            "torch_version": self.version,
            "seconds": self.seconds,
            "collectives": sum(len(line.events) for line in self.lines),
            "received_bytes": self.total(lambda line: line.received),
            "model_seconds": self.total(lambda line: line.model),
            "measured_seconds": self.total(lambda line: line.measured),
            "compared_with_torch": dict(zip(("received", "by_torch", "unknown_lines"), theirs)),
            "compared_with_package": dict(zip(("received", "by_package", "unknown_lines"), ours)),
            "lines": [line.to_dict() for line in self.lines],
        }


def _torch(cause: Cause) -> Other:
    return cause.torch


def _package(cause: Cause) -> Other:
    return cause.package


def in_order(lines: Sequence[Line]) -> tuple[Line, ...]:
    """The lines with the most bytes first; among lines without bytes, those for which PyTorch would
    receive the most.
    """

    def key(line: Line) -> tuple[int, int]:
        return -line.received, -(line.of(line.cause.torch) or 0)

    return tuple(sorted(lines, key=key))

"""What a program sent, as plain values: collectives as they ran, what each was for, and the lines
of the program that they belong to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from cute_sharding.profiling.collective import Collective, Place


class Moved(NamedTuple):
    """A tensor that was redistributed.

    Attributes:
        shape: its global shape.
        mesh: the sizes of its mesh.
        names: of the mesh dims; those without a name have their number.
        before, after: its placements, as DTensor prints them.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    names: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def changed(self) -> tuple[int, ...]:
        """The mesh dims on which its placement changes."""
        return tuple([m for m, (p, q) in enumerate(zip(self.before, self.after)) if p != q])

    @property
    def change(self) -> str:
        """The placements that change, such as ``S(0) -> R``."""
        if len(self.before) == 1:
            return f"{self.before[0]} -> {self.after[0]}"
        return f"[{', '.join(self.before)}] -> [{', '.join(self.after)}]"

    @property
    def where(self) -> str:
        """The mesh dims on which it changes, by name."""
        return ", ".join(self.names[m] for m in self.changed)


class Other(NamedTuple):
    """What somebody else would have sent in the place of one call: PyTorch without this package, or
    this package, with all its flags.

    Attributes:
        received: bytes, by the busiest rank; None where it raises, or is not known.
        seconds: by the network's model; None where that is not known.
        error: what it raises.
    """

    received: int | None
    seconds: float | None = None
    error: str | None = None


UNKNOWN = Other(None)


class Cause(NamedTuple):
    """What a collective was for: an op on tensors that lie in one way, on a line of the program.

    Attributes:
        place: the line; of a gradient, that of the op that it is the gradient of.
        backward: whether it is a gradient.
        op: the op, such as "slice", or the function that the program called.
        kind: "op" (an op of a DTensor), "asked" (the program redistributes a DTensor itself),
            "direct" (a collective that the program calls, or a library) or "compiled" (of a
            compiled program).
        moved: the tensors that were redistributed for it.
        operands, results: all tensors, as text: shape and placements.
        why: why something is sent, in a sentence.
        todo: what would avoid it, a sentence each; the cheapest first.
        torch: what PyTorch alone would have sent for the same tensors.
        package: what this package would have sent, with all its flags.
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


class Event(NamedTuple):
    """A collective as it ran.

    Attributes:
        collective: what was sent.
        start: seconds since the profile began.
        measured: seconds from its start until its result was waited for; where nothing waited in
            sight, until it was handed to the backend.
        model: seconds by the network's model.
    """

    collective: Collective
    start: float
    measured: float
    model: float

    @property
    def received(self) -> int:
        """Bytes that the busiest rank received; where that is not known, this rank."""
        busiest = self.collective.busiest_bytes
        return self.collective.received_bytes if busiest is None else busiest


class Line(NamedTuple):
    """All that was sent for one cause.

    Attributes:
        cause: what it was for.
        calls: how often it ran.
        events: its collectives, in order; none where this package made it free.
    """

    cause: Cause
    calls: int
    events: tuple[Event, ...]

    @property
    def received(self) -> int:
        """Bytes that the busiest rank received."""
        return sum(event.received for event in self.events)

    @property
    def is_of_busiest(self) -> bool:
        """Whether that is known of the busiest rank; else some of it is of this rank."""
        return all(event.collective.busiest is not None for event in self.events)

    @property
    def model(self) -> float:
        """Seconds by the network's model."""
        return sum(event.model for event in self.events)

    @property
    def measured(self) -> float:
        """Seconds as measured."""
        return sum(event.measured for event in self.events)

    @property
    def kinds(self) -> dict[str, int]:
        """How often each kind of collective ran."""
        found: dict[str, int] = {}
        for event in self.events:
            found[event.collective.op] = found.get(event.collective.op, 0) + 1
        return found

    @property
    def callers(self) -> dict[Place, int]:
        """From which lines the function of this one was called, as far as that is known, and how
        many collectives each call led to; the most first.
        """
        found = Counter(event.collective.caller for event in self.events)
        return {line: n for line, n in found.most_common() if line is not None}

    def of(self, other: Other) -> int | None:
        """Bytes that another would have received in all calls."""
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
    """All that a profile found.

    Attributes:
        lines: what communicates, that of the most bytes first; then what this package has made
            free, of which PyTorch alone would have sent something.
        rank, world: of this process.
        meshes: the meshes that DTensors were on, as text.
        settings: what of this package was switched on, as text; empty where nothing was.
        network: by which seconds are modelled, as text.
        version: of torch.
        seconds: how long the profile took.
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
        """The lines that do not, and would have without this package."""
        return [line for line in self.lines if not line.events]

    def total(self, of: Callable[[Line], float], lines: Iterable[Line] | None = None) -> float:
        """The sum over lines."""
        return sum(map(of, self.lines if lines is None else lines))

    def compared(self, other: Callable[[Cause], Other]) -> tuple[int, int, int]:
        """(bytes received, bytes that another would have received, lines left out as that is not
        known) of the lines of which both are known.
        """
        known = [(line, line.of(other(line.cause))) for line in self.lines]
        both = [(line.received, n) for line, n in known if n is not None]
        return sum(a for a, _ in both), sum(b for _, b in both), len(known) - len(both)

    def compared_seconds(self) -> tuple[float, float]:
        """(seconds, seconds that PyTorch's rules would take for the same ops on the same
        placements) by the network's model, of the lines of which both are known.
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
    """Those that receive the most first; of those that receive nothing, what PyTorch would have."""

    def key(line: Line) -> tuple[int, int]:
        return -line.received, -(line.of(line.cause.torch) or 0)

    return tuple(sorted(lines, key=key))

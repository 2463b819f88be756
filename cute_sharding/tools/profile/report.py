"""The communication of a program as plain values: collectives, their causes, and the lines of the
program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A line of the program.

    Attributes:
        file: the file name, as Python knows it.
        line: the line number, from 1.
        function: the name of the function that contains the line.

    >>> str(Place("/home/me/model.py", 12, "forward"))
    'model.py:12 forward'
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line} {self.function}"


class Collective(NamedTuple):
    """One collective, or one batch of messages between ranks, as this rank ran it.

    Attributes:
        op: the kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast",
            "reduce", "scatter", "gather", "send", "receive", "messages" (a batch of both) or
            "barrier".
        name: the op of torch that ran it, such as "_c10d_functional.all_reduce".
        ranks: the ranks of the group, ascending.
        dtype: the dtype of the sent elements, such as "float32"; "uint8" if elements are sent as
            bytes.
        itemsize: the bytes of a sent element.
        received, sent: the elements that this rank received from other ranks, and sent to them, by
            the rules of ``cute_sharding.exchange.step``.
        busiest: the elements that the busiest rank received: of all ranks for a plan of this
            package, and of the ranks of the group otherwise. None if this rank cannot know the
            number, for example for an all-to-all of the program with different splits.
        place: the line of the program for which it ran; for a gradient, the line of the forward op.
            None if the line is unknown.
        backward: whether it ran while gradients were computed.
        recomputed: whether it ran again in the backward pass, for a checkpointed region.
        caller: the line that called the function of ``place``. None for a gradient, or if the line
            is unknown.

    >>> place = Place("model.py", 12, "forward")
    >>> one = Collective("all-gather", "", (0, 1), "float32", 4, 10, 10, 10, place)
    >>> one.received_bytes, one.busiest_bytes
    (40, 40)
    """

    op: str
    name: str
    ranks: tuple[int, ...]
    dtype: str
    itemsize: int
    received: int
    sent: int
    busiest: int | None
    place: Place | None
    backward: bool = False
    recomputed: bool = False
    caller: Place | None = None

    @property
    def received_bytes(self) -> int:
        """The bytes that this rank received."""
        return self.received * self.itemsize

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank sent."""
        return self.sent * self.itemsize

    @property
    def busiest_bytes(self) -> int | None:
        """The bytes that the busiest rank received; None if this rank cannot know the number."""
        return None if self.busiest is None else self.busiest * self.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The collective as plain data."""
        lines = {"place": self.place, "caller": self.caller}
        return {
            **self._asdict(),
            "ranks": list(self.ranks),
            **{name: None if line is None else line._asdict() for name, line in lines.items()},
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "busiest_bytes": self.busiest_bytes,
        }


class MovedTensor(NamedTuple):
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
        return f"{_in_brackets(self.before)} -> {_in_brackets(self.after)}"

    @property
    def where(self) -> str:
        """The names of the mesh dims on which the placement changes."""
        return ", ".join(self.names[m] for m in self.changed)

    @property
    def text(self) -> str:
        """The redistribution in words."""
        before, after = map(_in_brackets, (self.before, self.after))
        return f"a tensor of {self.shape} from {before} to {after}"


# By the word for the rule that decided an op, a phrase.
RULES = {
    "view": "cute_sharding's rule for views",
    "movement": "cute_sharding's rule for movement ops",
    "signature": "cute_sharding's signature of the op",
    "fallback": "cute_sharding's fallback",
    "PyTorch": "PyTorch's rule",
    "program": "a rule that the program registered",
}
# The most tensors that a sentence names one by one.
MOST_NAMED = 3


class Cause(NamedTuple):
    """The cause of a collective, as it was recorded: an op on tensors with certain placements, on a
    line of the program.

    Attributes:
        place: the line; for a gradient, the line of the forward op.
        backward: whether the op computes a gradient.
        op: the op, such as "slice", or the function that the program called.
        kind: "op" (an op of a DTensor), "asked" (the program redistributes a DTensor itself),
            "direct" (the program or a library calls a collective) or "compiled" (a compiled
            program).
        rule: the rule that decided, one of ``RULES``; "program" if the program itself asks for the
            communication. Empty if the rule is unknown.
        moved: the tensors that were redistributed for it.
        operands, results: all tensors, as text: shape and placements.
    """

    place: Place | None
    backward: bool
    op: str
    kind: str
    rule: str = ""
    moved: tuple[MovedTensor, ...] = ()
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The cause in a sentence.

        >>> moved = MovedTensor((4, 6), (2,), ("tp",), ("S(1)",), ("R",))
        >>> Cause(None, False, "slice", "op", "PyTorch", (moved,)).text
        "slice redistributes a tensor of (4, 6) from [S(1)] to [R], by PyTorch's rule"
        """
        moved = _named([each.text for each in self.moved])
        if self.kind == "direct":
            return f"{self.op} communicates outside of the ops of DTensors"
        if self.kind == "compiled":
            return f"{self.op} communicates in a compiled graph, which records no tensors"
        if self.kind == "asked":
            who = f"the backward pass of {self.op}()" if self.backward else f"{self.op}()"
            return f"{who} redistributes {moved}" if moved else f"{who} communicates"
        if moved:
            beside = _named(self._beside)
            said = f"{self.op} redistributes {moved}" + (f", beside {beside}" if beside else "")
        else:
            operands, results = map(_named, (self.operands, self.results))
            to = f" to {results}" if results else ""
            said = f"{self.op} communicates" + (f", from {operands}{to}" if operands else "")
        return f"{said}, by {RULES[self.rule]}" if self.rule else said

    @property
    def _beside(self) -> list[str]:
        """The operands that were not redistributed."""
        left = Counter(self.operands)
        left.subtract([f"{each.shape} {_in_brackets(each.before)}" for each in self.moved])
        return [operand for operand, n in left.items() if n > 0]


def _named(tensors: Sequence[str]) -> str:
    """Tensors as text, of which the first are named."""
    some = list(dict.fromkeys(tensors))
    left = len(some) - MOST_NAMED
    return " and ".join([*some[:MOST_NAMED], *([f"{left} more"] if left > 0 else [])])


def _in_brackets(placements: Sequence[str]) -> str:
    return f"[{', '.join(placements)}]"


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
        events: the collectives, in order.
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
            "rule": cause.rule,
            "text": cause.text,
            "collectives": self.kinds,
            "received_bytes": self.received,
            "model_seconds": self.model,
            "measured_seconds": self.measured,
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
        lines: the lines that communicate, with the most bytes first.
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

    def total(self, of: Callable[[Line], float], lines: Iterable[Line] | None = None) -> float:
        """The sum over lines."""
        return sum(map(of, self.lines if lines is None else lines))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: bytes and seconds."""
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
            "lines": [line.to_dict() for line in self.lines],
        }

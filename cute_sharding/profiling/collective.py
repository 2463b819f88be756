"""A collective that ran, and the line of the program that it ran for."""

from __future__ import annotations

from typing import Any, NamedTuple


class Place(NamedTuple):
    """A line of the program.

    Attributes:
        file: as Python knows it.
        line: its number, from 1.
        function: the name of the function that it is in.

    >>> str(Place("/home/me/model.py", 12, "forward"))
    'model.py:12 forward'
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line} {self.function}"


class Collective(NamedTuple):
    """One collective, or one batch of messages from rank to rank, as this rank ran it.

    Attributes:
        op: what it is: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast",
            "reduce", "scatter", "gather", "send", "receive", "messages" (a batch of both) or
            "barrier".
        name: the op of torch's that ran it, such as "_c10d_functional.all_reduce".
        ranks: those of its group, ascending.
        dtype: of what is sent, such as "float32"; "uint8" where elements go as bytes.
        itemsize: the bytes of an element that is sent.
        received, sent: elements that this rank received of others, and sent to others, by the rule
            of ``cute_sharding.exchange.collectives``.
        busiest: elements that the busiest rank received: of all ranks where a plan of this package
            runs, else of those of its group. None where this rank cannot know, as of an all-to-all
            of the program's own with splits that differ.
        place: the line of the program that it ran for; of a gradient, that of the op that it is
            the gradient of. None where that is not known.
        backward: whether it ran while gradients were computed.
        recomputed: whether it ran again in the backward, for a checkpointed region.
        caller: the line that called the function that ``place`` is in. None of a gradient, and
            where that is not known.

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
        """Bytes that this rank received."""
        return self.received * self.itemsize

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent."""
        return self.sent * self.itemsize

    @property
    def busiest_bytes(self) -> int | None:
        """Bytes that the busiest rank received; None where this rank cannot know."""
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

"""A collective that ran, and the line of the program for which it ran."""

from __future__ import annotations

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
            the rules of ``cute_sharding.exchange.collectives``.
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

"""All collectives inside a ``with`` block, in order: torch's functional collectives, the
collectives of ``torch.distributed``, of DTensor and of this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeAlias

from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force
from cute_sharding.dtensor.replaced import observing
from cute_sharding.dtensor.replaced.observing import Line
from cute_sharding.tools.profile.amounts import (
    MESSAGES,
    CollectiveFacts,
    Posted,
    Sent,
    ops,
    posted,
    sent_by,
    together,
)
from cute_sharding.tools.profile.places import Found, Lines
from cute_sharding.tools.profile.report import Collective, Place

# The record of an op, made while the program waits: the line for which it runs, or None for a
# gradient, whose node gives the line; op, args, kwargs and settings of a Call; and for a gradient,
# the number of autograd's node for which it runs, otherwise None.
Met: TypeAlias = tuple[
    "Line | None", Any, list[Any], "dict[str, Any] | None", "Settings | None", "int | None"
]


class Seen:
    """A collective, or a batch of messages, in the form in which it is recorded while the program
    waits.

    Attributes:
        posts: the calls.
        found: the place where the first call ran.
        busiest: the bytes that the busiest rank receives, if the plan gives them.
        met: the last op on DTensors before the collective.
        settings: the settings of the package; None if the package was off.
        end: the time at which the collective was done, in seconds of a clock.
    """

    def __init__(
        self,
        posts: tuple[Posted, ...],
        found: Found,
        busiest: Callable[[], int] | None,
        met: Met | None,
    ) -> None:
        self.posts, self.found, self.busiest, self.met = posts, found, busiest, met
        self.settings, self.end = in_force(), found.at


class Recorder:
    """Records the collectives that run inside the ``with`` block, in this thread and in the
    backward passes that this thread starts. For a compiled program, it records the collectives
    that run, but none of the tracing.
    """

    def __init__(self) -> None:
        self._collectives: list[Collective] = []
        self._seen: list[Seen] = []
        self._last: Met | None = None
        self._lines = Lines()
        self._busiest: Callable[[], int] | None = None  # the bytes of the exchange that runs now
        self._messages: list[tuple[Posted, Found]] | None = None
        self._sent_before = 0  # the number of collectives when the exchange began
        self._places: dict[Any, tuple[list[int], int]] = {}  # by group, for :func:`posted`

    def __enter__(self) -> Recorder:
        self._lines = Lines()
        observing.start(self, ops())
        return self

    def __exit__(self, *raised: Any) -> None:
        observing.stop(self)
        self._places.clear()  # this recorder must not keep groups alive

    @property
    def collectives(self) -> list[Collective]:
        """All collectives that ran, in order."""
        for seen in self._seen[len(self._collectives) :]:
            self._collectives.append(self.collective_of(seen, self.place_of(seen.found)))
        return self._collectives

    def collective_of(self, seen: Seen, place: Place | None) -> Collective:
        """The collective as a value, with this line."""
        return collective_of(seen, place, self._lines.place(seen.found.caller))

    def place_of(self, found: Found) -> Place | None:
        """The line as plain values."""
        return found.traced or self._lines.place(found.line)

    def exchange(self, busiest: Callable[[], int]) -> _Exchange:
        """Record the collectives inside the block as one exchange, of which the busiest rank
        receives the given number of bytes.
        """
        return _Exchange(self, busiest)

    def exchange_begins(self, busiest: Callable[[], int]) -> None:
        """Record all collectives as parts of one exchange from now on."""
        self._busiest, self._messages, self._sent_before = busiest, [], len(self._seen)

    def exchange_ends(self) -> None:
        """Record that the exchange has been sent."""
        messages, busiest = self._messages, self._busiest
        self._busiest = self._messages = None
        if messages:
            posts, found = tuple([post for post, _ in messages]), messages[0][1]
            self._seen.append(Seen(posts, found, busiest, self._last))
        now = perf_counter()
        for seen in self._seen[self._sent_before :]:
            seen.end = now

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        made = observing.nodes_made()
        if made > self._lines.noted:
            self._lines.note(self._lines.noted, self._lines.here(observing.current_node())[0], made)

    def node_made(self) -> None:
        made = observing.nodes_made()
        self._lines.note(made - 1, self._lines.here(observing.current_node())[0], made)

    def sends(self, of: CollectiveFacts, args: Any, kwargs: Any) -> None:
        lines = self._lines
        found = lines.found(sys._getframe(1))
        made = observing.nodes_made()
        if made > lines.noted:
            lines.note(made - 1, found.line, made)
        self.about_to_send(posted(of, args, kwargs, self._places), found)

    def sent(self, result: Any) -> None:
        pass

    def waited(self, tensor: Any) -> None:
        pass

    def about_to_send(self, post: Posted, found: Found) -> None:
        """Called before a collective runs."""
        if self._messages is not None and post.of.row.kind in MESSAGES:
            self._messages.append((post, found))
        else:
            self._seen.append(Seen((post,), found, self._busiest, self._last))


class _Exchange:
    """The context of one exchange. A context of contextlib would take two more calls each time."""

    def __init__(self, recorder: Recorder, busiest: Callable[[], int]) -> None:
        self._recorder, self._of = recorder, busiest

    def __enter__(self) -> None:
        self._recorder.exchange_begins(self._of)

    def __exit__(self, *raised: object) -> None:
        self._recorder.exchange_ends()


def collective_of(seen: Seen, place: Place | None, caller: Place | None) -> Collective:
    """The collective as a value, with this line, which is in a function that ``caller`` calls."""
    every = [sent_by(post) for post in seen.posts]
    sent = every[0] if len(every) == 1 and seen.posts else _one_batch(every)
    itemsize, amount = sent.tensor.dtype.itemsize, sent.amount
    found, busiest = seen.found, seen.busiest
    return Collective(
        sent.kind,
        observing.name_of(seen.posts[0].of.op),
        sent.ranks,
        str(sent.tensor.dtype).removeprefix("torch."),
        itemsize,
        amount.received,
        amount.sent,
        amount.busiest if busiest is None else max(busiest() // itemsize, amount.received),
        place,
        found.backward,
        found.recomputed,
        caller,
    )


def _one_batch(messages: list[Sent]) -> Sent:
    ranks = tuple(sorted({rank for sent in messages for rank in sent.ranks}))
    amount = together([sent.amount for sent in messages])
    return Sent("messages", ranks, messages[0].tensor, amount)

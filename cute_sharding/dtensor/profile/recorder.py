"""All collectives inside a ``with`` block, in order: torch's functional ones, those that
``torch.distributed`` is called for, DTensor's, and this package's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from cute_sharding.dtensor.profile.amounts import (
    MESSAGES,
    WAIT,
    Of,
    Posted,
    Sent,
    ops,
    posted,
    sent_by,
    together,
)
from cute_sharding.dtensor.profile.places import Found, Lines
from cute_sharding.dtensor.replaced import observing, watching
from cute_sharding.profiling import Collective, Place


class Seen(NamedTuple):
    """A collective, as it is noted while the program waits; or messages that are one batch.

    Attributes:
        posts: the calls.
        found: where the first of them ran.
        busiest: the bytes that the busiest rank receives, if the plan says so.
    """

    posts: tuple[Posted, ...]
    found: Found
    busiest: Callable[[], int] | None


class Recorder:
    """Records the collectives that run inside the ``with`` block, of this thread and of the
    backwards that it starts. Of a compiled program, those that it runs, and none of its tracing.
    """

    def __init__(self) -> None:
        self._collectives: list[Collective] = []
        self._seen: list[Seen] = []
        self._lines = Lines()
        self._busiest: Callable[[], int] | None = None  # bytes, of the exchange that is sent now
        self._messages: list[tuple[Posted, Found]] | None = None

    def __enter__(self) -> Recorder:
        self._lines = Lines()
        watching.start(self, ops())
        return self

    def __exit__(self, *raised: Any) -> None:
        watching.stop(self)

    @property
    def collectives(self) -> list[Collective]:
        """All that ran, in order."""
        for seen in self._seen[len(self._collectives) :]:
            self._collectives.append(self.collective_of(seen, self.place_of(seen.found)))
        return self._collectives

    def collective_of(self, seen: Seen, place: Place | None) -> Collective:
        """As a value, of that line."""
        return collective_of(seen, place, self._lines.place(seen.found.caller))

    def place_of(self, found: Found) -> Place | None:
        """The line as plain values."""
        return found.traced or self._lines.place(found.line)

    def exchange(self, busiest: Callable[[], int]) -> _Exchange:
        """What is sent inside is one exchange, of which the busiest rank receives so many bytes."""
        return _Exchange(self, busiest)

    def exchange_begins(self, busiest: Callable[[], int]) -> None:
        """Collectives are a part of one exchange from now on."""
        self._busiest, self._messages = busiest, []

    def exchange_ends(self) -> None:
        """It has been sent."""
        messages, busiest = self._messages, self._busiest
        self._busiest = self._messages = None
        if messages:
            posts, found = tuple([post for post, _ in messages]), messages[0][1]
            self._add(Seen(posts, found, busiest))

    @property
    def is_in_batch(self) -> bool:
        """Whether messages are being handed over that are one batch."""
        return bool(self._messages)

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        made = observing.nodes_made()
        if made > self._lines.noted:
            self._lines.note(self._lines.noted, self._lines.here(observing.current_node())[0], made)

    def node_made(self) -> None:
        made = observing.nodes_made()
        self._lines.note(made - 1, self._lines.here(observing.current_node())[0], made)

    def run(self, of: Of, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        if of.row is WAIT:
            return self.wait(args[0] if args else kwargs["tensor"], run)
        found = self._lines.found(sys._getframe(1))
        made = observing.nodes_made()
        if made > self._lines.noted:
            self._lines.note(made - 1, found.line, made)
        self.about_to_send(posted(of, args, kwargs), found)
        result = run()
        self.sent(result)
        return result

    def wait(self, tensor: Any, run: Callable[[], Any]) -> Any:
        """Wait for what a collective brings."""
        return run()

    def sent(self, result: Any) -> None:
        """A collective has run, and this is what it gives."""

    def about_to_send(self, post: Posted, found: Found) -> None:
        """A collective is about to run."""
        if self._messages is not None and post.of.row.kind in MESSAGES:
            self._messages.append((post, found))
        else:
            self._add(Seen((post,), found, self._busiest))

    def _add(self, seen: Seen) -> None:
        self._seen.append(seen)
        self.added(seen.found)

    def added(self, found: Found) -> None:
        """A collective is about to run, or a batch of messages has been handed over."""


class _Exchange:
    """While one exchange is sent; in Python's own such context each would take two calls more."""

    def __init__(self, recorder: Recorder, busiest: Callable[[], int]) -> None:
        self._recorder, self._of = recorder, busiest

    def __enter__(self) -> None:
        self._recorder.exchange_begins(self._of)

    def __exit__(self, *raised: object) -> None:
        self._recorder.exchange_ends()


def collective_of(seen: Seen, place: Place | None, caller: Place | None) -> Collective:
    """As a value, of that line, which is in a function that ``caller`` calls."""
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

"""All collectives inside a ``with`` block, in order: torch's functional ones, those that
``torch.distributed`` is called for, DTensor's, and this package's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cute_sharding.dtensor.bookkeeping import watching
from cute_sharding.dtensor.profile.amounts import AROUND, WAIT, Row, Sent, row_of, sent_by, together
from cute_sharding.dtensor.profile.places import Found, Lines
from cute_sharding.dtensor.replaced import observing
from cute_sharding.profiling import Collective


class Recorder(observing.Observer):
    """Records the collectives that run inside the ``with`` block, of this thread and of the
    backwards that it starts. Of a compiled program, those that it runs, and none of its tracing.

    Attributes:
        collectives: all that ran, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self._lines = Lines()
        self._busiest: Callable[[], int] | None = None  # bytes, of the exchange that is sent now
        self._messages: list[tuple[Sent, str, Found]] | None = None

    def __enter__(self) -> Recorder:
        self._lines = Lines()
        watching.watchers.append(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        watching.watchers.remove(self)
        super().__exit__(*raised)

    @contextmanager
    def exchange(self, busiest: Callable[[], int]) -> Iterator[None]:
        """What is sent inside is one exchange, of which the busiest rank receives so many bytes."""
        self._busiest, self._messages = busiest, []
        try:
            yield
        finally:
            messages, self._busiest, self._messages = self._messages, None, None
            if messages:
                self._add(_one_batch([sent for sent, _, _ in messages]), *messages[0][1:], busiest)

    @property
    def is_in_batch(self) -> bool:
        """Whether messages are being handed over that are one batch."""
        return bool(self._messages)

    def met(self, func: Any, args: Any, kwargs: Any) -> None:
        if observing.nodes_made() > self._lines.noted:
            self._lines.here()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        row = row_of(func)
        if observing.nodes_made() > self._lines.noted:
            self._lines.here()
        if row is None:
            return func(*args, **kwargs)
        if row is WAIT:
            return self.wait(func, args, kwargs)
        if row is AROUND:
            return self.run_inside(func, args, kwargs)
        found = self._lines.found(sys._getframe(1))
        self.about_to_send(row, func, args, kwargs, found)
        return self.send(func, args, kwargs)

    def wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Wait for what a collective brings."""
        return func(*args, **kwargs)

    def send(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a collective."""
        return func(*args, **kwargs)

    def added(self, collective: Collective, found: Found) -> None:
        """A collective is about to run, or a batch of messages has been handed over."""

    def about_to_send(self, row: Row, func: Any, args: Any, kwargs: Any, found: Found) -> None:
        """A collective is about to run."""
        sent, name = sent_by(row, func, args, kwargs), ".".join(observing.name_of(func))
        if self._messages is not None and sent.kind in ("send", "receive"):
            self._messages.append((sent, name, found))
        else:
            self._add(sent, name, found, self._busiest)

    def _add(self, sent: Sent, name: str, found: Found, busiest: Callable[[], int] | None) -> None:
        collective = collective_of(sent, name, found, busiest)
        self.collectives.append(collective)
        self.added(collective, found)


def collective_of(
    sent: Sent, name: str, found: Found, busiest: Callable[[], int] | None
) -> Collective:
    """As a value. ``busiest`` is in bytes."""
    itemsize, amount = sent.tensor.element_size(), sent.amount
    return Collective(
        sent.kind,
        name,
        sent.ranks,
        str(sent.tensor.dtype).removeprefix("torch."),
        itemsize,
        amount.received,
        amount.sent,
        amount.busiest if busiest is None else max(busiest() // itemsize, amount.received),
        found.place,
        found.backward,
        found.recomputed,
    )


def _one_batch(messages: list[Sent]) -> Sent:
    ranks = tuple(sorted({rank for sent in messages for rank in sent.ranks}))
    amount = together([sent.amount for sent in messages])
    return Sent("messages", ranks, messages[0].tensor, amount)

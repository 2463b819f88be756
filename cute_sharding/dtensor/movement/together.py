"""Movements of one tensor that are one exchange: what is kept for each of them while a thread runs
them one after the other (:mod:`.splits`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from cute_sharding.exchange import Exchange

# .parts: of the op that this thread runs
_thread = threading.local()


class Parts:
    """The results of movements of one operand, till each has been asked for.

    Attributes:
        run: gives them all from the operand, in the order of ``exchanges``. Called when the first
            of them is asked for.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    ) -> None:
        self._exchanges = list(exchanges)
        self._run = run
        self._source: torch.Tensor | None = None
        self._results: list[torch.Tensor] = []

    def take(
        self, exchange: Exchange, source: torch.Tensor, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        if exchange not in self._exchanges:
            return None
        if self._source is None:
            self._source, self._results = source, self._run(operands)
        if self._source is not source:
            return None
        k = self._exchanges.index(exchange)
        del self._exchanges[k]
        return self._results.pop(k)


@contextmanager
def one_exchange(parts: Parts | None) -> Iterator[None]:
    """Inside, the movements of ``parts`` are done together; of none where it is None."""
    before = getattr(_thread, "parts", None)
    _thread.parts = parts
    try:
        yield
    finally:
        _thread.parts = before


def result_of(
    exchange: Exchange, source: torch.Tensor, operands: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """The result of a movement of the local tensor ``source`` that is done together with others;
    None where it is not. ``operands``: that tensor, brought to where the movement starts.
    """
    parts: Parts | None = getattr(_thread, "parts", None)
    return None if parts is None else parts.take(exchange, source, operands)

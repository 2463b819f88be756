"""Long messages of one tensor by themselves: straight from the memory of a source, or into that of
a target, where they lie there as one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.run.packing import Letter, post_messages, write
from cute_sharding.exchange import BundlePart
from cute_sharding.exchange.alone import Single


class Sole(NamedTuple):
    """A message by itself: the number of its tensor, whether this rank sends it, its elements one
    behind the other, and whether they are those of the tensor itself.
    """

    number: int
    is_sent: bool
    single: Single
    memory: torch.Tensor
    is_in_place: bool


class Straight:
    """What goes by itself of a bucket, from when it is posted until it has landed.

    Args:
        part: of this rank.
        dtypes: of each tensor on its way.
        given: what this rank has of each.
        made: what some of them are to be, by their numbers.
        make: the same of the others, where something goes straight into it.
        buffer: gives so many bytes for a message on this device.
    """

    def __init__(
        self,
        part: BundlePart,
        dtypes: Sequence[torch.dtype],
        given: Sequence[torch.Tensor | None],
        made: dict[int, torch.Tensor],
        make: Callable[[int], torch.Tensor],
        buffer: Callable[[int, torch.device], torch.Tensor],
    ) -> None:
        self._part, self._dtypes, self._given = part, dtypes, given
        self.made, self._make, self._buffer = made, make, buffer
        self._posted: list[tuple[list[Sole], list[Any]]] = []

    def post(self, group: Any | None, tag: int, *, is_run: bool) -> None:
        """Send and expect the messages that are a run where they come from, or that are none."""
        singles = self._part.singles(is_run=is_run)
        soles = [(self._sent if is_sent else self._taken)(k, x) for k, is_sent, x in singles]
        letters = [Letter(s.memory.view(torch.uint8), s.single.peer, s.is_sent) for s in soles]
        self._posted.append((soles, post_messages(letters, group, tag)))

    def _sent(self, k: int, single: Single) -> Sole:
        local = self._given[k]
        assert local is not None
        if single.start is not None and local.is_contiguous():
            run = local.view(-1).narrow(0, single.start, single.size)
            return Sole(k, True, single, run, True)
        buffer = self._buffer_for(k, single, local.device)
        for copy in single.copies:
            write(copy, local, buffer)
        return Sole(k, True, single, buffer, False)

    def _taken(self, k: int, single: Single) -> Sole:
        if k not in self.made:
            self.made[k] = self._make(k)
        made = self.made[k]
        if single.start is not None and made.is_contiguous():
            run = made.view(-1).narrow(0, single.start, single.size)
            return Sole(k, False, single, run, True)
        return Sole(k, False, single, self._buffer_for(k, single, made.device), False)

    def _buffer_for(self, k: int, single: Single, device: torch.device) -> torch.Tensor:
        dtype = self._dtypes[k]
        return self._buffer(single.size * dtype.itemsize, device).view(dtype)

    def land(self) -> None:
        """Wait for all of it; what was received into buffers is copied."""
        for soles, works in self._posted:
            for work in works:
                work.wait()
            for k, is_sent, single, memory, is_in_place in soles:
                for copy in () if is_sent or is_in_place else single.copies:
                    write(copy, memory, self.made[k])
        self._posted.clear()

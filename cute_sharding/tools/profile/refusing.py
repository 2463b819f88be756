"""A block that raises an error at the first collective, before anything is sent."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from cute_sharding.tools.profile.causes import cause_of, name_of
from cute_sharding.tools.profile.recorder import Found, Recorder, Seen
from cute_sharding.tools.profile.values import Cause, Collective, Place

ACTIONS = ("raise", "warn")


class CommunicationError(RuntimeError):
    """A collective was about to run inside of :func:`no_communication`. All ranks raise this error
    before any rank sends.
    """


class _Refusing(Recorder):
    """Raises, or warns, before a collective runs."""

    def __init__(self, action: str, *, allow_explicit: bool) -> None:
        super().__init__()
        self._action, self._allow_explicit = action, allow_explicit
        self._warned: set[tuple[Place | None, bool, str]] = set()

    def about_to_send(self, one: Collective, found: Found) -> None:
        seen = Seen(one, found, None, self._last)
        source = self.source_of(seen)
        if self._allow_explicit and source.kind in ("asked", "direct"):
            return
        key = source.place, source.backward, name_of(source)
        if key in self._warned:
            return
        self._warned.add(key)
        cause = cause_of(source, [seen])
        if self._action == "raise":
            raise CommunicationError(communicates(one.op, one.ranks, cause))
        said = communicates(one.op, one.ranks, cause)
        place = cause.place or Place("unknown", 0, "")
        warnings.warn_explicit(said, RuntimeWarning, place.file, place.line)


def communicates(kind: str, ranks: tuple[int, ...], cause: Cause) -> str:
    """The message for a collective in such a block: the line, the op, and what was recorded."""
    place = cause.place
    where = "an unknown line" if place is None else f"{place.file}:{place.line} in {place.function}"
    what = f"{cause.op}, for a gradient of {where}," if cause.backward else f"{cause.op} at {where}"
    return (
        f"{what} communicates inside a no_communication() block: {kind} among "
        f"{len(ranks)} ranks, because {cause.text}. What to do: redistribute the "
        "operand before the block, or move the line out of the block."
    )


@contextmanager
def no_communication(
    *, action: Literal["raise", "warn"] = "raise", allow_explicit: bool = False
) -> Iterator[None]:
    """Raise an error at the first collective inside the ``with`` block, on all ranks, before
    anything is sent. The message names the line, the op, its tensors, and the rule that decided.

    Args:
        action: "warn" gives a RuntimeWarning instead of an error: once for each op of a line, and
            once for the gradient of the op.
        allow_explicit: permit communication that the program asks for: ``redistribute()``,
            ``full_tensor()``, and the functions of ``torch.distributed``.

    Raises:
        CommunicationError: a collective was about to run. This is a RuntimeError.
        ValueError: ``action`` has another value.

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import DTensor, Shard
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> store = FakeStore()  # this process is rank 0 of two, of which the other is made up
    >>> torch.distributed.init_process_group("fake", rank=0, world_size=2, store=store)
    >>> mesh = init_device_mesh("cpu", (2,))
    >>> columns = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(1)])  # of (4, 6)
    >>> with no_communication():
    ...     doubled = columns * 2
    >>> try:
    ...     with no_communication():
    ...         first = columns[:, :3]
    ... except RuntimeError as error:
    ...     print(str(error).split(", because ")[1].split(". ")[0])
    slice redistributes a tensor of (4, 6) from [S(1)] to [R], by PyTorch's rule
    >>> torch.distributed.destroy_process_group()
    """
    if action not in ACTIONS:
        raise ValueError(f"action={action!r} is not one of {', '.join(map(repr, ACTIONS))}")
    with _Refusing(action, allow_explicit=allow_explicit):
        yield

"""What the ranks of a group tell one another: where one fails all do, for its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cute_sharding.dtensor.replaced import communication

T = TypeVar("T")


class Ranks:
    """The ranks of a process group.

    Attributes:
        group: the group; None: the world.
        of: the name of the function that is called on all of them, for errors.
        all: its ranks, in its order. They are those of the world, unless the group was made over
            the processes of several worlds.
        this: this process's.
    """

    def __init__(self, group: Any | None, of: str) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.all: list[int] = dist.get_process_group_ranks(self.group)
        place = self.group.rank() if isinstance(self.group, dist.ProcessGroup) else -1
        if place < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group of {of}, which has the ranks "
                f"{self.all}: call {of} only on the ranks of the group"
            )
        self.this = self.all[place]

    @property
    def is_first(self) -> bool:
        """Whether this is the first of them."""
        return self.this == self.all[0]

    def told_by(self, rank: int, value: T) -> T:
        """What a rank has, told to all."""
        one: list[Any] = [value]
        number = self.all.index(rank)
        dist.broadcast_object_list(one, group=self.group, group_src=number)
        return one[0]

    def of_first(self, what: str, make: Callable[[], T]) -> T:
        """What the first rank makes, told to all.

        Raises:
            RuntimeError: it has failed to; on that rank, its own error.
        """
        value, error = _tried(make) if self.is_first else (None, None)
        value, said = self.told_by(self.all[0], (value, _text(error)))
        _raise(what, error, {self.all[0]: said})
        found: Any = value
        return found

    def on_each(self, what: str, make: Callable[[], T], tell: Callable[[T], Any]) -> tuple[T, Any]:
        """What each makes for itself; and by rank what each tells of it.

        Raises:
            RuntimeError: another has failed to; on that rank, its own error.
        """
        both, error = _tried(lambda: (value := make(), tell(value)))
        value, mine = both or (None, None)
        every: list[Any] = [None] * len(self.all)
        dist.all_gather_object(every, (mine, _text(error)), group=self.group)
        _raise(what, error, {rank: said for rank, (_, said) in zip(self.all, every)})
        found: Any = value
        return found, {rank: told for rank, (told, _) in zip(self.all, every)}

    def in_common(self, what: str, make: Callable[[], T]) -> tuple[T, list[tuple[list[int], T]]]:
        """What each makes for itself; and what all have made, each different value once, with the
        ranks that have made it. Values are told apart by their ``repr``.

        Raises:
            RuntimeError: as :meth:`on_each`.
        """
        mine, digests = self.on_each(what, make, lambda x: sha256(repr(x).encode()).digest())
        alike: dict[bytes, list[int]] = {}
        for rank, digest in digests.items():
            alike.setdefault(digest, []).append(rank)
        return mine, [(some, self.told_by(some[0], mine)) for some in alike.values()]

    def greatest(self, numbers: Sequence[int]) -> list[int]:
        """Number by number, the greatest that a rank has."""
        device = torch.device("cpu")
        if communication.backend_name(self.group, "cpu") is None:
            device = torch.device("cuda", torch.cuda.current_device())
        every = torch.tensor(numbers, dtype=torch.int64, device=device)
        if len(numbers):
            dist.all_reduce(every, dist.ReduceOp.MAX, group=self.group)
        return [*map(int, every.tolist())]


def _tried(make: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What is made, or why not."""
    try:
        return make(), None
    except (Exception, SystemExit) as error:
        return None, error


def _text(error: BaseException | None) -> str | None:
    """What another rank says of an error, whose own text may fail."""
    if error is None:
        return None
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _raise(what: str, error: BaseException | None, said: Mapping[int, str | None]) -> None:
    """Raise this rank's error; else one that says the first that another rank has had."""
    if error is not None:
        raise error
    for rank, reason in said.items():
        if reason is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {reason}")

"""What the ranks of a load tell one another: where one fails all do, for its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Failed(RuntimeError):
    """Something has failed on another rank."""


class Ranks:
    """The ranks of a process group.

    Attributes:
        group: the group.
        all: its ranks, in its order.
        this: this process's.
    """

    def __init__(self, group: Any | None) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.all: list[int] = dist.get_process_group_ranks(self.group)
        self.this = dist.get_rank()
        if self.this not in self.all:
            raise ValueError(
                f"rank {self.this} is not in the process group of load_checkpoint, which has the "
                f"ranks {self.all}: call load_checkpoint only on the ranks of the group"
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the first of them."""
        return self.this == self.all[0]

    def of_first(self, what: str, make: Callable[[], T]) -> T:
        """What the first rank makes, told to all.

        Raises:
            RuntimeError: it has failed to; on that rank, its own error.
        """
        value: Any = None
        error: Exception | None = None
        if self.is_first:
            try:
                value = make()
            except Exception as failed:
                error = failed
        said = None if error is None else f"{type(error).__name__}: {error}"
        both = [value, said]
        dist.broadcast_object_list(both, src=self.all[0], group=self.group)
        if error is not None:
            raise error
        if both[1] is not None:
            raise Failed(f"{what} failed on rank {self.all[0]}: {both[1]}")
        return both[0]

    def told_by(self, rank: int, value: T) -> T:
        """What a rank has, told to all."""
        one: list[Any] = [value]
        dist.broadcast_object_list(one, src=rank, group=self.group)
        return one[0]

    def on_each(self, what: str, make: Callable[[], T], tell: Callable[[T], Any]) -> tuple[T, Any]:
        """What each makes for itself; and by rank what each tells of it.

        Raises:
            RuntimeError: another has failed to; on that rank, its own error.
        """
        value: Any = None
        error: Exception | None = None
        mine: tuple[str | None, Any] = (None, None)
        try:
            value = make()
            mine = None, tell(value)
        except Exception as failed:
            error = failed
            mine = f"{type(failed).__name__}: {failed}", None
        every: list[Any] = [None] * len(self.all)
        dist.all_gather_object(every, mine, group=self.group)
        if error is not None:
            raise error
        for rank, (said, _) in zip(self.all, every):
            if said is not None:
                raise Failed(f"{what} failed on rank {rank}: {said}")
        return value, {rank: told for rank, (_, told) in zip(self.all, every)}

"""What the ranks of a load tell one another: where one fails all do, for its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


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

    def told_by(self, rank: int, value: T) -> T:
        """What a rank has, told to all."""
        one: list[Any] = [value]
        dist.broadcast_object_list(one, src=rank, group=self.group)
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


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What is made, or why not."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _raise(what: str, error: Exception | None, said: Mapping[int, str | None]) -> None:
    """Raise this rank's error; else one that says the first that another rank has had."""
    if error is not None:
        raise error
    for rank, reason in said.items():
        if reason is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {reason}")

"""What plans have in common that run: the rank and the process groups of one process; errors that
say what has moved; and no memory that is both read and written, as what is written early may be
read late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from cute_sharding.dtensor.bookkeeping.stats import as_text
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.run.runner import PlanRunner


class ReshardError(RuntimeError):
    """Not all tensors have moved.

    Attributes:
        moved: the names of those that have, wholly.
        left: the names of those that are as they were.
    """

    def __init__(self, message: str, moved: Sequence[str], left: Sequence[str]) -> None:
        super().__init__(message)
        self.moved, self.left = tuple(moved), tuple(left)


class OfThisProcess:
    """A plan that runs: an immutable value, so a copy of it is itself. On DeviceMeshes it is not
    pickled: they keep the rank of their process, and yet are equal to other processes' meshes.
    """

    @property
    def _runner(self) -> PlanRunner:
        """What runs it."""
        raise NotImplementedError

    @property
    def _meshes(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """The meshes from which, and those to which it is planned."""
        raise NotImplementedError

    @property
    def _names(self) -> tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]:
        """Of each operand, and of each result, its names."""
        raise NotImplementedError

    def __copy__(self) -> OfThisProcess:
        return self

    def __deepcopy__(self, memo: Any) -> OfThisProcess:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if any(isinstance(mesh, DeviceMesh) for side in self._meshes for mesh in side):
            raise TypeError(
                "a plan on DeviceMeshes cannot be pickled, because the plan has the rank and the "
                "process groups of one process. Make the plan on each rank, which needs no "
                "communication, or pickle plan.to_dict()"
            )
        return vars(self)

    def _check_side(self, method: str, *, is_target: bool) -> None:
        """Raises:
        ValueError: this rank is on a mesh of that side, of which the method knows nothing.
        """
        rank = communication.this_rank()
        if any(mesh._is_current_rank_part_of_mesh() for mesh in self._meshes[is_target]):
            raise ValueError(
                f"{method} cannot run on rank {rank}, because rank {rank} is on a "
                f"{'target' if is_target else 'source'} mesh of the plan. Call run(state) on rank "
                f"{rank}"
            )

    def _check_apart(
        self,
        given: Mapping[int, torch.Tensor],
        onto: Mapping[int, Sequence[torch.Tensor]],
        finished: Collection[int] = (),
    ) -> None:
        """
        Args:
            finished: operands of which something is pending: what they become is made before the
                result of the same number is written.

        Raises:
            ValueError: an operand is written over before it is sent, for all that is known.
        """
        for i, k, x in meetings(given, onto):
            is_read_before = i == k and i in finished
            if not (is_read_before or lie_alike(self._runner.kept_view(k, given), x)):
                raise ValueError(
                    f"the target tensor {self._names[1][k][0]!r} shares memory with the source "
                    f"tensor {self._names[0][i][0]!r}: give into= tensors with memory of their own"
                )

    @contextmanager
    def _said(
        self, how: tuple[str, str, str], those: Iterable[int], moved: Collection[int]
    ) -> Iterator[None]:
        """What fails is said by the results that have moved, and by the others of ``those``.
        ``how``: what fails, what has become of the ones, and of the others.
        """
        what, done, rest = how
        try:
            yield
        except Exception as error:
            some, left = (
                [name for k in those if (k in moved) == is_moved for name in self._names[1][k]]
                for is_moved in (True, False)
            )
            raise ReshardError(
                f"{what} failed with {type(error).__name__}: {error}. Completely {done} tensors: "
                f"{as_text(some)}. {rest} tensors: {as_text(left)}",
                some,
                left,
            ) from error


class _Span(NamedTuple):
    start: int
    end: int
    number: int
    tensor: torch.Tensor
    is_written: bool


def meetings(
    read: Mapping[int, torch.Tensor], written: Mapping[int, Sequence[torch.Tensor]]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Where a tensor is written to memory from which another one is read: their keys, and the
    tensor that is written. Of contiguous tensors: strided ones may interleave.

    >>> memory = torch.zeros(8)
    >>> read, written = {0: memory[:4], 1: memory[4:]}, {0: [torch.zeros(4)], 1: [memory[3:5]]}
    >>> [(i, k) for i, k, _ in meetings(read, written)]
    [(0, 1), (1, 1)]
    """
    both = [(i, x, False) for i, x in read.items()]
    both += [(k, x, True) for k, some in written.items() for x in some]
    spans = [
        _Span(x.data_ptr(), x.data_ptr() + x.nbytes, i, x, is_written)
        for i, x, is_written in both
        if x.numel() and not x.is_meta and x.is_contiguous()
    ]
    open_: list[_Span] = []
    for span in sorted(spans, key=lambda each: each.start):
        open_ = [each for each in open_ if each.end > span.start]
        for each in open_:
            if each.is_written != span.is_written:
                one, other = (span, each) if each.is_written else (each, span)
                yield one.number, other.number, other.tensor
        open_.append(span)


def lie_alike(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same memory: no copy is needed."""
    return (
        one is not None
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    )

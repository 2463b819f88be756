"""What a program asks of a DTensor by its placements (torch/distributed/tensor/_api.py,
_redistribute.py): to redistribute it, and for its local tensor; and what the gradients of both ask.

They are watched only in the process of a dry run, which ends with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._api import _FromTorchTensor, _ToTorchTensor

__all__ = ["Ask", "watched"]

# Functions that autograd calls with a context and a DTensor, by class and name. What the first ones
# give does not depend on how the DTensor lies.
_REDISTRIBUTES: tuple[tuple[Any, str], ...] = (
    (_redistribute.Redistribute, "forward"),
    (_redistribute.NestedRedistribute, "forward"),
    (_FromTorchTensor, "backward"),
)
_READS: tuple[tuple[Any, str], ...] = ((_ToTorchTensor, "forward"),)


@dataclass(frozen=True)
class Ask:
    """What a program asks of a DTensor, to be asked of another one.

    Attributes:
        told: what tells it from others.
        redistributes: or it reads how the DTensor lies.
        is_free: whether it gives the same for the DTensor in other placements.
        run: what is called with the DTensor.
    """

    told: tuple[Any, ...]
    redistributes: bool
    is_free: bool
    run: Callable[[DTensor], Any] = field(compare=False)

    def __call__(self, tensor: DTensor) -> Any:
        return self.run(tensor)


# Gives what the program asks of a DTensor, as the function says that comes last.
Answer: TypeAlias = Callable[[DTensor, Ask, Callable[[], Any]], Any]


@contextmanager
def watched(answer: Answer, others: Sequence[tuple[Any, str]] = ()) -> Iterator[None]:
    """Have ``answer`` give what the program asks of DTensors inside the ``with`` block.

    Args:
        others: functions besides torch's that autograd calls to redistribute a DTensor.
    """
    local, placements = DTensor.to_local, DTensor.placements.fget  # type: ignore[attr-defined]
    watching: list[tuple[Any, str, Any]] = [
        (of, name, staticmethod(_of_autograd(answer, getattr(of, name), redistributes)))
        for functions, redistributes in (((*_REDISTRIBUTES, *others), True), (_READS, False))
        for of, name in functions
    ]
    watching.append((DTensor, "to_local", _reading(answer, local)))
    watching.append((DTensor, "placements", property(_reading(answer, placements))))
    watching.append((DTensor, "data", _becoming(answer, DTensor.data)))
    before = [(of, name, vars(of)[name]) for of, name, _ in watching]
    for of, name, watches in watching:
        setattr(of, name, watches)
    try:
        yield
    finally:
        for of, name, stock in before:
            setattr(of, name, stock)


def _of_autograd(
    answer: Answer, function: Callable[..., Any], redistributes: bool
) -> Callable[..., Any]:
    @wraps(function)
    def asks(context: Any, tensor: Any, *others: Any) -> Any:
        run = partial(function, context, tensor, *others)
        if not isinstance(tensor, DTensor):  # no gradient
            return run()
        name, before = function.__qualname__, dict(vars(context))

        def again(other: DTensor) -> Any:
            return function(SimpleNamespace(**before), other, *others)

        told = (name, *map(_told, before.items()), *map(_told, others))
        # A gradient goes back to where the tensor lay.
        is_free = redistributes and not tensor.requires_grad
        return answer(tensor, Ask(told, redistributes, is_free, again), run)

    return asks


def _told(argument: Any) -> Any:
    """An argument, or its text if it has no hash."""
    return argument if isinstance(argument, Hashable) else repr(argument)


def _reading(answer: Answer, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def asks(self: DTensor, **arguments: Any) -> Any:
        run = partial(method, **arguments)
        return answer(self, Ask((method.__qualname__,), False, False, run), partial(run, self))

    return asks


def _becoming(answer: Answer, data: Any) -> Any:
    """The property ``data``, which asks a DTensor that another one becomes."""

    def put(self: DTensor, other: Any) -> None:
        run = partial(data.__set__, self)
        if isinstance(other, DTensor):
            answer(other, Ask(("DTensor.data",), False, False, run), partial(run, other))
        else:
            run(other)

    return property(data.__get__, put)

"""Which elements of a generator's own tensors have a value.

``torch.empty`` gives what the memory held before, which differs from rank to rank. So the values do
not say which elements the generator has written, and are not asked: it follows from the ops alone.
For each memory that such an op gives, the elements written so far are kept as strided runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cute_sharding.dtensor.replaced.local_tensors import leaves, storage_of
from cute_sharding.layout.layout import row_major
from cute_sharding.relations import piece
from cute_sharding.relations.relation import read_once, subtract
from cute_sharding.sharding.rows import Run, count_rows, join

# Ops that give memory without values, and those that may make a tensor's memory longer.
ALLOCATES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
RESIZES = frozenset({"resize_", "resize_as_"})
# In-place ops that do not read what they write over. (Others that do not draw random numbers, and
# torch says that of an op.)
OVERWRITES = frozenset({"copy_", "fill_", "zero_"})


@dataclass
class _PartlyWritten:
    """Memory of which not all elements had a value when it was given.

    Attributes:
        storage: kept, so that no other gets its id.
        itemsize: of its elements, in bytes.
        written: the elements that have a value (x and y alike), each in one run.
        values: what was written to them by ops that write one value; None for any other.
    """

    storage: torch.UntypedStorage
    itemsize: int
    written: list[Run] = field(default_factory=list)
    values: set[Any] = field(default_factory=set)


class Unwritten:
    """The memory without values of a generator that is being traced."""

    def __init__(self) -> None:
        self._memories: dict[int, _PartlyWritten] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of an op on the generator's own tensors. It is no op that reads elements
        without a value, except to write the result of that into one of its operands.
        """
        name = func.__name__.partition(".")[0].removeprefix("_foreach_")
        written = _written(func, args, kwargs)
        if not written:
            out = func(*args, **kwargs)
            if name in ALLOCATES:
                self._give(out, 0)
            return out
        is_resized = name in RESIZES
        before = [storage_of(x).nbytes() if is_resized else 0 for x in written]
        every = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        others = [x for x in every if not any(x is one for one in written)]
        is_without = any(map(self.left_in, others))
        out = func(*args, **kwargs)
        is_over = name in OVERWRITES or torch.Tag.nondeterministic_seeded in func.tags
        value = _value(name, args)
        for x, n in zip(written, before):
            if is_resized:
                if storage_of(x).nbytes() > n:
                    self._give(x, n)
            elif is_without:
                self._take(x)
            elif is_over or any(x is given for given in leaves(kwargs)):
                self._write(x, value)
        return out

    def left_in(self, tensor: torch.Tensor) -> int:
        """How many elements of a tensor have no value."""
        memory = self._of(tensor)
        if memory is None or not tensor.numel():
            return 0
        if memory.itemsize != tensor.itemsize:  # seen as another dtype
            whole = memory.storage.nbytes() // memory.itemsize
            return 0 if count_rows(memory.written) == whole else tensor.numel()
        left = subtract(_runs(tensor), memory.written)
        return min(tensor.numel(), count_rows(left))

    def value_in(self, tensor: torch.Tensor) -> Any | None:
        """The value that was written to all elements of the tensor's memory, if that is known and
        the memory once had none.
        """
        memory = self._of(tensor)
        return None if memory is None or len(memory.values) != 1 else next(iter(memory.values))

    def _of(self, tensor: torch.Tensor) -> _PartlyWritten | None:
        return self._memories.get(storage_of(tensor)._cdata) if self._memories else None

    def _give(self, tensor: torch.Tensor, having: int) -> None:
        """A tensor's memory has no values beyond so many bytes."""
        storage, before = storage_of(tensor), self._of(tensor)
        if before is None:
            rows = having // tensor.itemsize
            written = [Run(0, 0, (), rows)] if rows else []
            values = {None} if rows else set()
            self._memories[storage._cdata] = _PartlyWritten(
                storage, tensor.itemsize, written, values
            )

    def _write(self, tensor: torch.Tensor, value: Any | None) -> None:
        memory = self._of(tensor)
        if memory is not None and tensor.numel() and memory.itemsize == tensor.itemsize:
            memory.written = join([*memory.written, *subtract(_runs(tensor), memory.written)])
            memory.values.add(value)

    def _take(self, tensor: torch.Tensor) -> None:
        """What is written to the tensor has no value."""
        memory = self._of(tensor)
        if memory is None:
            memory = _PartlyWritten(storage_of(tensor), tensor.itemsize, values={None})
            self._memories[memory.storage._cdata] = memory
        memory.written = subtract(memory.written, _runs(tensor))


def _runs(tensor: torch.Tensor) -> list[Run]:
    """The elements of a tensor in its memory, each once."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    modes, first = zip(shape, strides, row_major(shape)), int(tensor.storage_offset())
    return read_once([piece(0, 0, first, 0, modes)])


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The operands that an op writes to."""
    given = {x.name: value for x, value in zip(func._schema.arguments, args)} | kwargs
    named = [x.name for x in func._schema.arguments if x.is_write]
    return [x for x in leaves([given.get(name) for name in named]) if isinstance(x, torch.Tensor)]


def _value(name: str, args: Sequence[Any]) -> Any | None:
    """The one value that an op writes; None if it is not known."""
    if name == "zero_":
        return 0
    is_known = name == "fill_" and not isinstance(args[1], torch.Tensor)
    return args[1] if is_known else None

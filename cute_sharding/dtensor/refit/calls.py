"""What code calls while it is recorded that is no op: functions that read memory or hand it out,
and numbers and lists that are the values of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cute_sharding.dtensor.refit.operands import at, calling_line
from cute_sharding.dtensor.refit.record import NO_VALUES, MemoryRecording, replaced, with_data
from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.relations import NotOnlyMoved

# Functions that read memory, or copy it, without an op.
READS = frozenset(
    {
        torch.Tensor.tolist,
        torch.Tensor.apply_,
        torch.Tensor.map_,
        torch.Tensor.map2_,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__reduce_ex__,
    }
)
# Functions that hand memory out, to be read and written without an op.
HANDS_OUT = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
        torch.Tensor.share_memory_,
    }
)
# Functions that say where memory is.
LOCATES = frozenset({torch.Tensor.data_ptr, torch.Tensor.storage, torch.Tensor.untyped_storage})
# Functions that make tensors of numbers, arrays and lists; that take these as rows; and that write
# one number to a tensor.
TAKES_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor})
INDEXES = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
TAKES_ONE = frozenset({torch.Tensor.fill_, torch.Tensor.__setitem__})
_DEEP_COPY = torch.Tensor.__deepcopy__  # of a tensor without data: an op
_LOOKS_AT = READS | HANDS_OUT | LOCATES


class Number(torch.Tensor):
    """The one element of a tensor without data, as ``item()`` gives it. Tensors may be filled with
    it, and all else reads its value.
    """


class Calls(TorchFunctionMode):
    """Sees what a recording's ops do not: whether code stands in autocast, functions that read or
    hand out memory, and what has values as no tensor.
    """

    def __init__(self, recording: MemoryRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._recording.in_autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        kwargs = kwargs or {}
        if func in _LOOKS_AT:
            try:
                self._look_at(func, args[0])
            except NotOnlyMoved as error:
                self._recording.refused.append(error)
                raise
        elif func is torch.Tensor.item and self._recording.is_of_sources(args[0]):
            return args[0].reshape(()).as_subclass(Number)
        elif func in TAKES_DATA:
            kwargs = with_data(kwargs)
        elif func in INDEXES:
            args = (args[0], _as_index(args[1]), *args[2:])
        elif func is torch.Tensor.new_tensor:
            args, kwargs = args[1:], with_data({**_like(args[0]), **kwargs})
            func = torch.tensor
        numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, Number)]
        if numbers:
            plain = {id(x): x.as_subclass(torch.Tensor) for x in numbers}
            if func not in TAKES_ONE:
                return plain[id(numbers[0])].item()
            args, kwargs = replaced(args, plain), replaced(kwargs, plain)
        return func(*args, **kwargs)

    def _look_at(self, func: Any, tensor: Any) -> None:
        """A function that reads memory, hands it out, or says where it is.

        Raises:
            NotOnlyMoved: the memory has, or is to have, elements of sources.
        """
        recording = self._recording
        if not isinstance(tensor, torch.Tensor) or (func is _DEEP_COPY and tensor.is_meta):
            return
        is_own = recording.has_own(tensor)
        if not is_own and (func not in LOCATES or not recording.is_into(tensor)):
            of, name = recording.named([tensor]), func.__name__
            raise NotOnlyMoved(
                f"{recording.of} reads the values of {of} with Tensor.{name}{at(calling_line())}, "
                f"but {NO_VALUES}"
            )
        if is_own and func in HANDS_OUT:
            recording.hand_out(tensor)


def _as_index(x: Any) -> Any:
    """Lists and arrays of rows as tensors of their numbers, with data."""
    if isinstance(x, tuple):
        return tuple(map(_as_index, x))
    is_array = hasattr(x, "__array__") and not isinstance(x, torch.Tensor)
    return torch.as_tensor(x) if is_array or isinstance(x, (list, range)) else x


def _like(tensor: torch.Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


@contextmanager
def seen_by(recording: MemoryRecording) -> Iterator[None]:
    """What runs inside is recorded.

    Raises:
        NotOnlyMoved, NotImplementedError: what the code may not do, also if it has caught that.
    """
    try:
        with recording, dispatch_modes.eagerly(), Calls(recording):
            yield
        recording.check_looked_at()
    finally:
        if recording.refused:
            raise recording.refused[0]

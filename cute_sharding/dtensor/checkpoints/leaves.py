"""The tensors and objects of a state, by name, as torch.distributed.checkpoint names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.models.nests import storage_of


class Leaf(NamedTuple):
    """What stands in a state.

    Attributes:
        name: keys and places, joined by dots.
        value: a tensor, or an object of any other kind.
        put: puts another object there.
    """

    name: str
    value: Any
    put: Callable[[Any], None]

    @property
    def is_tensor(self) -> bool:
        """Whether it is written to in place."""
        return isinstance(self.value, torch.Tensor)


class Leaves:
    """All that stands in a state: a dict or list, or what has a state dict, as modules have.

    Attributes:
        all: in the order of the state.
    """

    def __init__(self, state: Any) -> None:
        self._after: list[Callable[[], Any]] = []
        if not (isinstance(state, Mapping) or _has_state(state) or isinstance(state, list)):
            raise TypeError(
                f"a state of type {type(state).__name__} does not name its tensors: pass a "
                "module, or a dict from names to tensors, modules and other states"
            )
        self.all = list(self._walk(state, "", _nowhere))

    def finish(self) -> None:
        """Hand over what was loaded to what has its state elsewhere than in its state dict."""
        for each in self._after:
            each()

    def _walk(self, value: Any, name: str, put: Callable[[Any], None]) -> Iterator[Leaf]:
        below = f"{name}." if name else ""
        if isinstance(value, torch.Tensor):
            yield Leaf(name, value, put)
        elif _has_state(value):
            yield from self._of(value, name)
        elif isinstance(value, Mapping):
            for key in list(value):
                into = (
                    partial(value.__setitem__, key) if hasattr(value, "__setitem__") else _nowhere
                )
                yield from self._walk(value[key], f"{below}{key}", into)
        elif isinstance(value, list) and not _is_object(value):
            for i, part in enumerate(list(value)):
                yield from self._walk(part, f"{below}{i}", partial(value.__setitem__, i))
        else:
            yield Leaf(name, value, put)

    def _of(self, value: Any, name: str) -> Iterator[Leaf]:
        """What has a state dict. Of a module that is mostly its own memory; what is not is handed
        over at the end.
        """
        state = value.state_dict()
        found = list(self._walk(state, name, _nowhere))
        own = set()
        if isinstance(value, torch.nn.Module):
            own = {storage_of(x) for x in (*value.parameters(), *value.buffers())}
        if not all(leaf.is_tensor and storage_of(leaf.value) in own for leaf in found):
            self._after.append(partial(value.load_state_dict, state))
        yield from found


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _is_object(value: list[Any]) -> bool:
    """Whether torch's checkpoints have a list as one object: it has no tensors and no dicts."""
    return not any(
        isinstance(part, (torch.Tensor, Mapping))
        or (isinstance(part, list) and not _is_object(part))
        for part in value
    )


def _nowhere(value: Any) -> None:
    """Of what is no part of a dict or list."""

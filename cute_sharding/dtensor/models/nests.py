"""The DTensors of a state, by name, and how one is put where another stood.

A state is a module, an optimizer, or a nest of dicts, lists and tuples of those and of tensors.
Names are as in a state dict: ``layers.0.weight``, below the key in the nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced import fully_sharded, local_tensors, tensor_specs

Put = Callable[[Any], None]
Nest: TypeAlias = (
    "torch.nn.Module | torch.optim.Optimizer | torch.Tensor | Mapping[str, Any] | Sequence[Any]"
)
"""What a state may be.

>>> nest: Nest = {"model": torch.nn.Linear(2, 2), "steps": [torch.zeros(1)]}
"""


class LeafPlace(NamedTuple):
    """Where a tensor stands.

    Attributes:
        name: of the tensor.
        tensor: what stands there.
        put: puts another there; None: the tensor itself is changed, as modules, optimizers and
            programs all know it (a parameter).
        like: the name of the parameter that it goes with, as an optimizer's state does; else its
            own.
    """

    name: str
    tensor: DTensor
    put: Put | None
    like: str


class State:
    """A state, and its tensors.

    Attributes:
        places: of all DTensors, in the order of the state.
    """

    def __init__(self, state: Any) -> None:
        self._whole = [state]
        self._tuples: list[Callable[[], None]] = []
        self._parameters = dict(_parameters(state, ""))
        self.places = list(self._walk(state, "", partial(self._whole.__setitem__, 0)))

    @property
    def result(self) -> Any:
        """The state with what was put into it: the same object, but for tuples and tensors."""
        for finish in reversed(self._tuples):
            finish()
        return self._whole[0]

    def _walk(self, value: Any, name: str, put: Put) -> Iterator[LeafPlace]:
        below = f"{name}." if name else ""
        if isinstance(value, DTensor):
            yield LeafPlace(name, value, put, name)
        elif isinstance(value, torch.nn.Module):
            yield from _of_module(value, below)
        elif isinstance(value, torch.optim.Optimizer):
            yield from self._of_optimizer(value, below)
        elif isinstance(value, MutableMapping):
            for key in list(value):
                into = partial(value.__setitem__, key)
                yield from self._walk(value[key], f"{below}{key}", into)
        elif isinstance(value, (list, tuple)):
            parts = value if isinstance(value, list) else list(value)
            if isinstance(value, tuple):
                self._tuples.append(lambda: put(_tuple_like(value, parts)))
            for i, part in enumerate(list(parts)):
                yield from self._walk(part, f"{below}{i}", partial(parts.__setitem__, i))

    def _of_optimizer(self, optimizer: torch.optim.Optimizer, below: str) -> Iterator[LeafPlace]:
        for g, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [f"{g}.{i}" for i in range(len(group["params"]))]
            for parameter, name in zip(group["params"], names):
                like = self._parameters.get(id(parameter), f"{below}{name}")
                if isinstance(parameter, DTensor):
                    yield LeafPlace(like, parameter, None, like)
                state = optimizer.state.get(parameter, {})
                for place in self._walk(state, f"{below}state.{name}", _kept_where_it_is):
                    goes_with = place.tensor.shape == parameter.shape
                    yield place._replace(like=like) if goes_with else place


def _kept_where_it_is(value: Any) -> None:
    """What an optimizer has of a parameter is a dict, which is changed in place."""


def _of_module(module: torch.nn.Module, below: str) -> Iterator[LeafPlace]:
    fully_sharded.put_back(module)
    for path, part in module.named_modules(remove_duplicate=False):
        before = f"{below}{path}." if path else below
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                yield LeafPlace(f"{before}{name}", parameter, None, f"{before}{name}")
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if isinstance(buffer, DTensor):
                into = partial(setattr, part, name)
                yield LeafPlace(f"{before}{name}", buffer, into, f"{before}{name}")


def check_movable(places: Iterable[LeafPlace]) -> None:
    """Raises:
    ValueError: a tensor has a gradient, or is to have one; or it is kept by fully_shard.
    """
    kept = fully_sharded.kept_parameters()
    for name, tensor, put_there, _ in places:
        if tensor.grad_fn is not None or tensor.grad is not None:
            raise ValueError(
                f"reshard does not move gradients, and {name} has a gradient or a grad_fn. For a "
                "gradient, first call optimizer.zero_grad(). For a grad_fn, use "
                "cute_sharding.redistribute"
            )
        if put_there is None and id(tensor) in kept:
            raise ValueError(
                f"fully_shard manages {name}, and cannot use parameters on another mesh. Pass "
                "module.state_dict() instead of the module, or write into a module on the target "
                "mesh with plan_reshard(source, module).run(source, into=module)"
            )


def _parameters(value: Any, name: str) -> Iterator[tuple[int, str]]:
    """The names that the modules of a nest have for their parameters."""
    below = f"{name}." if name else ""
    if isinstance(value, torch.nn.Module):
        for path, parameter in value.named_parameters():
            yield id(parameter), f"{below}{path}"
    elif isinstance(value, (Mapping, list, tuple)) and not isinstance(value, str):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _parameters(part, f"{below}{key}")


def memory_of(tensor: torch.Tensor) -> Any:
    """What says that a tensor is another one: the same elements of the same memory."""
    spec = tensor._spec if isinstance(tensor, DTensor) else None
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    lies = local.storage_offset(), local.shape, local.stride(), local.dtype
    return storage_of(tensor), *lies, spec


def storage_of(tensor: torch.Tensor) -> int:
    """What says that the memory is another's; torch keeps the object as long as the memory."""
    return id(local_tensors.storage_of(getattr(tensor, "_local_tensor", tensor)))


def _tuple_like(value: Any, parts: list[Any]) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def put_in_places(places: Sequence[LeafPlace], local: torch.Tensor, spec: Any) -> None:
    """Put the tensor of that local tensor and spec into all of those places."""
    changed = {id(place.tensor): place.tensor for place in places if place.put is None}
    for tensor in changed.values():
        tensor_specs.become(tensor, local, spec)
    one: torch.Tensor
    if changed:
        one = next(iter(changed.values()))
    else:
        old = places[0].tensor
        one = tensor_specs.dtensor_of(local, spec, requires_grad=old.requires_grad)
        if isinstance(old, torch.nn.Parameter):
            one = torch.nn.Parameter(one, requires_grad=old.requires_grad)
    for place in places:
        if place.put is not None:
            place.put(one)

"""The weights of a step whose placements a plan chooses: which they are, what tells them apart, and
how they are brought elsewhere before the step runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from cute_sharding.dtensor.programs.numbers import Key, given_key
from cute_sharding.dtensor.programs.recording import dtensors_in
from cute_sharding.dtensor.replaced.fully_sharded import kept_parameters
from cute_sharding.dtensor.replaced.observing import Line, TorchDispatchMode, line_text
from cute_sharding.dtensor.replaced.tensor_specs import Placement, become


class MakingWeights(TorchDispatchMode):
    """Notes in which order tensors are made inside the ``with`` block, and on which lines.

    Args:
        line: gives the line of the program for which the last op ran.
    """

    def __init__(self, line: Callable[[], Line | None]) -> None:
        super().__init__()
        self._line, self._count = line, count()
        self._made: dict[int, tuple[int, Line | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if DTensor in types:
            known = set(map(id, dtensors_in(args)))
            for x in dtensors_in(result):
                if id(x) not in known:  # torch swaps no tensors to which there are references
                    self._made[id(x)] = next(self._count), self._line()
        return result

    def weights(self) -> Weights:
        """The parameters that were made in the block and are alive, in their order; but those that
        fully_shard manages.
        """
        gc.collect()
        managed = kept_parameters()
        found: list[Any] = [
            x
            for x in gc.get_objects()
            if issubclass(type(x), DTensor)
            and isinstance(x, torch.nn.Parameter)
            and id(x) in self._made
            and id(x) not in managed
        ]
        found.sort(key=lambda x: self._made[id(x)][0])
        return Weights(found, [line_text(self._made[id(x)][1]) for x in found])


class Weights:
    """The weights of a step, in the order in which they were made.

    Attributes:
        tensors: the weights.
        lines: those that made them.
    """

    def __init__(self, tensors: Sequence[DTensor], lines: Sequence[str]) -> None:
        self.tensors, self.lines = tensors, lines
        self._optimizers: list[torch.optim.Optimizer] = []

    @contextmanager
    def optimized(self) -> Iterator[None]:
        """A context in which the optimizers are found that take steps."""
        hook = register_optimizer_step_post_hook(lambda made, *_: self._optimizers.append(made))
        try:
            yield
        finally:
            hook.remove()

    def names(self, step: Any) -> list[str]:
        """For each weight a name of its own: that in the module that has it, if one has; else that
        in the function of the step; else the line that made it.
        """
        modules = [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)]
        parts = {id(part) for module in modules for part in module.children()}
        known = dict(_named(step, ""))
        for module in modules:
            if id(module) not in parts:
                known |= {id(x): name for name, x in module.named_parameters()}
        found: dict[str, None] = {}
        for x, line in zip(self.tensors, self.lines):
            name, many = known.get(id(x), line), 1
            while name in found:
                many += 1
                name = f"{known.get(id(x), line)} ({many})"
            found[name] = None
        return list(found)

    def alike(self) -> list[tuple[Key, ...]]:
        """For each weight the keys of all that lies as it does, its own first."""
        return [tuple([key for _, key in of]) for of in self._keys()]

    def key(self) -> Callable[[DTensor], Key]:
        """What tells values that are given apart: weights by their number, and what lies as they do
        by the weight.
        """
        known = {id(x): key for of in self._keys() for x, key in of}
        return lambda x: known.get(id(x)) or given_key(x)

    def _keys(self) -> list[list[tuple[DTensor, Key]]]:
        found: list[list[tuple[DTensor, Key]]] = []
        for i, weight in enumerate(self.tensors):
            states: dict[Hashable, Any] = {
                (k, name): x
                for k, optimizer in enumerate(dict.fromkeys(self._optimizers))
                for name, x in optimizer.state.get(weight, {}).items()
            }
            kept = [("weight", weight), ("gradient", weight.grad), *states.items()]
            found.append(
                [
                    (x, ("of a weight", i, name))
                    for name, x in kept
                    if isinstance(x, DTensor) and x.shape == weight.shape
                ]
            )
        return found

    def place(self, placements: Sequence[Sequence[Placement]]) -> None:
        """Bring each weight to its placements. It stays the same object."""
        for weight, to in zip(self.tensors, placements, strict=True):
            if tuple(to) != tuple(weight.placements):
                moved: Any = weight.detach()
                moved = moved.redistribute(placements=to)
                become(weight, moved._local_tensor, moved._spec)


def _named(value: Any, name: str) -> Iterator[tuple[int, str]]:
    """The tensors that a function closes over, also in dicts and lists, by name."""
    if isinstance(value, torch.Tensor):
        yield id(value), name
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _named(part, f"{key}")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _named(part, f"{name}[{i}]")
    elif isinstance(value, FunctionType) and not name:
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            yield from _named(cell.cell_contents, variable)

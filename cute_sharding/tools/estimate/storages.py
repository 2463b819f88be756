"""The memory of this rank, in bytes: every storage from its creation until it is freed, with its
layer and its purpose; and the storages at the peak.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from cute_sharding.dtensor.replaced import observing
from cute_sharding.dtensor.replaced.dispatch_modes import fake_mode
from cute_sharding.tools.estimate.stand_ins import tensors_in
from cute_sharding.tools.estimate.values import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS

OUTSIDE = ""  # of all modules


class Layers:
    """The layers of all modules that run inside the ``with`` block: in the forward pass, the path
    of the innermost module; in the backward pass, of the module whose gradient is computed.
    Autograd numbers its nodes in the order in which it makes them, so the numbers at which each
    module begins and ends give the module of a node.

    Attributes:
        found: a function that is called with each outermost module, before the module runs.
    """

    def __init__(self, found: Any = lambda module: None) -> None:
        self.found = found
        self._paths: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._running: list[nn.Module] = []
        self._numbers, self._layers = [0], [OUTSIDE]  # the layer of the nodes from this number on

    def __enter__(self) -> Layers:
        self._hooks = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        return self

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def now(self) -> str:
        """The path of the module that runs, or whose gradient is computed, such as
        ``layers.3.attention``. Empty outside of all modules.
        """
        node = observing.current_node()
        if node is None or self._running:  # a checkpoint runs modules in the backward pass
            return self._layers[-1]
        at = bisect_right(self._numbers, observing.number_of_node(node)) - 1
        return self._layers[max(at, 0)]

    def _begins(self, module: nn.Module, args: Any) -> None:
        if not self._running:
            if module not in self._paths:
                self._paths.update((child, path) for path, child in module.named_modules())
            self.found(module)
        self._running.append(module)
        self._note()

    def _ends(self, module: nn.Module, args: Any, result: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass  # a module that raised an error, which the program caught
        self._note()

    def _note(self) -> None:
        layer = self._paths.get(self._running[-1], OUTSIDE) if self._running else OUTSIDE
        if layer != self._layers[-1]:
            self._numbers.append(observing.nodes_made())
            self._layers.append(layer)


class Block:
    """A storage that is held: its bytes, and their purpose (kind, layer)."""

    def __init__(self, size: int, of: tuple[str, str]) -> None:
        self.size, self.of = size, of
        self.freed: Any = None


class Storages(observing.Observer):
    """The memory of all storages that are made inside the ``with`` block, and of the parameters of
    the modules that run there, or that ``find_parameters`` finds.

    Args:
        mode: the mode of the tensors without elements.

    Attributes:
        peaks: for each (whether gradients were computed, layer), the most memory while it ran:
            bytes by (kind, layer).
    """

    def __init__(self, layers: Layers, mode: Any = None) -> None:
        super().__init__()
        self.peaks: dict[tuple[bool, str], Counter[tuple[str, str]]] = {}
        self.optimized = False
        self._layers, self._modes = layers, (None, mode)
        self._blocks: dict[int, Block] = {}
        self._held: Counter[tuple[str, str]] = Counter()
        self._total = 0
        self._most: dict[tuple[bool, str], int] = {}
        self._layer_of: dict[int, str] = {}  # by the id of a parameter
        self._trained: set[int] = set()  # the ids of parameters whose gradients are looked for

    def __enter__(self) -> Storages:
        self._layers.found = self._of_module
        self._hook = register_optimizer_step_post_hook(self._of_optimizer)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hook.remove()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if fake_mode() in self._modes:  # otherwise, torch would call this for the shape of a result
            for tensor in tensors_in(result):
                self._holds(tensor.untyped_storage())
            self._look()
        return result

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Inside the block, also record storages that a program frees by hand, as FSDP does."""
        stock = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = stock(storage, size)
            block = self._blocks.get(storage._cdata)
            if block is not None:
                self._add(block.of, storage.nbytes() - block.size)
                block.size = storage.nbytes()
                self._look()
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = stock  # type: ignore[method-assign]

    def forget_peaks(self) -> None:
        """Forget all peaks. Held storages stay held."""
        self.peaks, self._most = {}, {}
        self._look()

    def _holds(self, storage: Any, of: tuple[str, str] | None = None) -> None:
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            block = Block(storage.nbytes(), of or (ACTIVATIONS, self._layers.now))
            block.freed = ref(storage, partial(self._frees, key))
            self._blocks[key] = block
            self._add(block.of, block.size)
        elif of is not None and of != block.of:
            self._add(block.of, -block.size)
            block.of = of
            self._add(block.of, block.size)

    def _frees(self, key: int, _: Any) -> None:
        block = self._blocks.pop(key)
        self._add(block.of, -block.size)

    def _add(self, of: tuple[str, str], size: int) -> None:
        self._held[of] += size
        self._total += size

    def _look(self) -> None:
        where = observing.current_node() is not None, self._layers.now
        if self._total > self._most.get(where, -1):
            self._most[where] = self._total
            self.peaks[where] = Counter({of: n for of, n in self._held.items() if n})

    def find_parameters(self) -> None:
        """Hold what the program trains of the tensors that exist, as parameters outside of all
        layers; a module that runs later says of which layer they are.
        """
        for x in gc.get_objects():
            if isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad:
                self._of_parameter(x, OUTSIDE)

    def _of_module(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._of_parameter(parameter, name.rpartition(".")[0])

    def _of_parameter(self, parameter: torch.Tensor, layer: str) -> None:
        self._hold_all([parameter], (PARAMETERS, layer))
        if self._layer_of.get(id(parameter), OUTSIDE) == OUTSIDE:
            self._layer_of[id(parameter)] = layer
        if parameter.requires_grad and id(parameter) not in self._trained:
            self._trained.add(id(parameter))
            parameter.register_post_accumulate_grad_hook(self._of_gradient)

    def _of_gradient(self, parameter: torch.Tensor) -> None:
        self._hold_all([parameter.grad], (GRADIENTS, self._layer_of[id(parameter)]))

    def _of_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimized = True
        for parameter, state in optimizer.state.items():
            layer = self._layer_of.get(id(parameter), OUTSIDE)
            self._hold_all(state.values(), (OPTIMIZER, layer))

    @torch.no_grad()  # otherwise, to_local() is an op of autograd
    def _hold_all(self, tensors: Iterable[Any], of: tuple[str, str]) -> None:
        for tensor in tensors_in(list(tensors)):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._holds(local.untyped_storage(), of)

"""The layer of a model that runs now: in the forward pass, the path of the innermost module; in the
backward pass, the path of the module whose gradient is computed.

Autograd numbers its nodes in the order in which it makes them. So the numbers at which each module
begins and ends give the module of a node.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from cute_sharding.dtensor.replaced import observing

OUTSIDE = ""


class Layers:
    """The layers of all modules that run inside the ``with`` block.

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
    def is_backward(self) -> bool:
        """Whether gradients are computed now."""
        return observing.current_node() is not None

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

    def path(self, module: nn.Module) -> str:
        """The path of the module in its model; empty for the model itself."""
        return self._paths.get(module, OUTSIDE)

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
        layer = self.path(self._running[-1]) if self._running else OUTSIDE
        if layer != self._layers[-1]:
            self._numbers.append(observing.nodes_made())
            self._layers.append(layer)

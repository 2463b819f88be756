"""Watchers of what this thread runs, and of the backwards that it starts (torch/_library, c10d,
autograd): a watcher is told of each op of a DTensor, of each collective, of each node that autograd
makes for a Python function, and of what the busiest rank receives.

A dispatch mode would see all of this, but also each op on local tensors, which makes a small step
two thirds slower. So a few places of torch are replaced while any thread has a watcher: the lookup
of rules for tensor classes, the calls of collectives, and the constructor of a function's context.
Each then does what torch's own does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock
from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.collective_ops import WAIT
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.observing import is_not_compiled
from cute_sharding.dtensor.replaced.patch import Installed, calling

__all__ = ["Watcher", "are_there", "exchange", "start", "stop"]


class Watcher(Protocol):
    """Receives the calls below while it watches."""

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """DTensor is about to answer an op."""

    def node_made(self) -> None:
        """Autograd has just made the node of a Python function."""

    def sends(self, of: Any, args: Any, kwargs: Any) -> None:
        """An op that communicates is about to run. ``of``: what :func:`start` was given for it."""

    def sent(self, result: Any) -> None:
        """It has run."""

    def waited(self, tensor: torch.Tensor) -> None:
        """The program has waited for this result of an op that communicates."""

    def exchange(self, busiest: Callable[[], int]) -> AbstractContextManager[Any]:
        """Return a context: all that is sent inside it is one exchange, in which the busiest rank
        receives ``busiest()`` bytes; ``busiest`` may be called later.
        """


# Objects that torch keeps for a thread, and passes to the threads of a backward that it starts.
_C: Any = torch._C
_is_known, _known, _know = _C._is_key_in_tls, _C._get_obj_in_tls, _C._stash_obj_in_tls
_KEY = "cute_sharding.watchers"
_modes_on = _C._len_torch_dispatch_stack
_NOBODY = nullcontext()

_lock = fork_safe_lock()
_everyone: list[Watcher] = []
_installed = Installed()


def _watchers() -> tuple[Watcher, ...]:
    """The watchers of this thread, the newest first: it may raise before the others are told."""
    return _known(_KEY) if _is_known(_KEY) else ()


def start(watcher: Watcher, ops: Mapping[Any, Any]) -> None:
    """Start to watch this thread. ``ops``: the ops that communicate, with what watchers are given
    for each; the same for all watchers.
    """
    with _lock:
        if not _everyone:
            try:
                _install(ops)
            except BaseException:
                _installed.undo()
                raise
        _everyone.append(watcher)
    _know(_KEY, (watcher, *_watchers()))


def stop(watcher: Watcher) -> None:
    """Stop watching."""
    _know(_KEY, tuple([each for each in _watchers() if each is not watcher]))
    with _lock:
        _everyone.remove(watcher)
        if not _everyone:
            _installed.undo()


def are_there() -> bool:
    """Whether anybody watches, in any thread."""
    return bool(_everyone)


def exchange(busiest: Callable[[], int]) -> AbstractContextManager[Any]:
    """A context for one exchange in which the busiest rank receives ``busiest()`` bytes."""
    if not _everyone:
        return _NOBODY
    watchers = _watchers()
    if len(watchers) == 1:
        return watchers[0].exchange(busiest)
    told = ExitStack()
    for watcher in watchers:
        told.enter_context(watcher.exchange(busiest))
    return told


# -- what torch calls ------------------------------------------------------------------------------


def _met(kind: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The rule of every op for DTensors: it notifies watchers, and leaves the op to DTensor."""
    if _is_known(_KEY) and not (_modes_on() and is_tracing() and _is_compiled()):
        for watcher in _known(_KEY):
            watcher.met(func, args, kwargs)
    return NotImplemented


def _made(stock: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for watcher in _watchers():
            watcher.node_made()
        stock(self, *args, **kwargs)

    is_not_compiled(__init__)
    return __init__


class _Called:
    """Calls an op that communicates. Its hash, by which ops are told apart, is torch's."""

    def __init__(self, of: Any, stock: Callable[..., Any]) -> None:
        self._of, self._stock = of, stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _sent(self._of, self._stock, args, kwargs)

    def __hash__(self) -> int:
        return hash(self._stock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class _Waits(_Called):
    """Calls the op that waits for a result of an op that communicates."""

    def __call__(self, tensor: Any) -> Any:
        result = self._stock(tensor)
        if _is_known(_KEY):
            for watcher in _known(_KEY):
                watcher.waited(tensor)
        return result


# A dispatch key of tensors above the backends, at which c10d's ops have no kernel.
_SEEN_AT = DispatchKey.ADInplaceOrView
_BELOW = _C._dispatch_keyset_full_after(_SEEN_AT)
_is_excluded, _exclude = (
    _C._dispatch_tls_is_dispatch_key_excluded,
    _C._dispatch_tls_set_dispatch_key_excluded,
)


def _kernel(
    redispatch: Callable[..., Any], of: Any, keys: DispatchKeySet, *args: Any, **kwargs: Any
) -> Any:
    return _sent(of, partial(redispatch, keys & _BELOW), args, kwargs)


def _seen(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a process group that calls such an op, with the key of its kernel included:
    tensors of inference mode do not have that key.
    """

    def method(*args: Any, **kwargs: Any) -> Any:
        with _C._IncludeDispatchKeyGuard(_SEEN_AT):
            return stock(*args, **kwargs)

    is_not_compiled(method)
    return method


def _sent(of: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an op that communicates. The ops that it runs in turn are part of it."""
    watchers = _known(_KEY) if _is_known(_KEY) else ()
    if not watchers:
        return run(*args, **kwargs)
    if ((_modes_on() and is_tracing()) or _has_no_elements(args)) and _is_compiled():
        return run(*args, **kwargs)
    for watcher in watchers:
        watcher.sends(of, args, kwargs)
    _know(_KEY, ())
    was_excluded = _is_excluded(_SEEN_AT)
    _exclude(_SEEN_AT, True)  # torch's guard takes ten times as long
    try:
        result = run(*args, **kwargs)
    finally:
        _exclude(_SEEN_AT, was_excluded)
        _know(_KEY, watchers)
    for watcher in watchers:
        watcher.sent(result)
    return result


def _has_no_elements(args: Any) -> bool:
    first = args[:1]
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return isinstance(first, FakeTensor)


# Other modules of dynamo are on the stack also if nothing is compiled.
_COMPILERS = ("torch._dynamo.convert_frame", "torch._functorch.", "torch._inductor.")


def _is_compiled() -> bool:
    """Whether a compiler is computing the shape of an op's result. It does so in modes and with
    tensors without elements, which a program may use as well.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False


for _function in (_met, _kernel, _Called.__call__, _Waits.__call__):
    is_not_compiled(_function)

# -- installed while somebody watches --------------------------------------------------------------


# c10d's ops, which C++ calls from the methods of process groups. Python calls all others.
_BY_GROUPS = "c10d"
_METHODS = (
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "alltoall",
    "broadcast",
    "send",
    "recv",
    "barrier",
)


def _install(ops: Mapping[Any, Any]) -> None:
    library = torch.library.Library(_BY_GROUPS, "IMPL")
    _installed.note(patches.KERNELS, _BY_GROUPS, library._destroy)
    for op, of in ops.items():
        if op.namespace == _BY_GROUPS:
            kernel = partial(_kernel, op.redispatch, of)
            library.impl(op, kernel, _SEEN_AT.name, with_keyset=True)
        else:
            _install_call(op, partial(_Called, of))
    _install_call(WAIT, partial(_Waits, None))
    group = ProcessGroup
    for name, stock in list(vars(group).items()):
        if any(part in name for part in _METHODS):
            _installed.note(patches.GROUPS, name, partial(setattr, group, name, stock))
            setattr(group, name, _seen(stock))
    _installed.replace(patches.CLASS_RULES, calling(_rule, patches.CLASS_RULES))
    _installed.replace(patches.NODES, _made)


def _rule(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function for the rule of a class, which for DTensors is :func:`_met`."""

    def find_torch_dispatch_rule(op: Any, torch_dispatch_class: type) -> Any:
        if issubclass(torch_dispatch_class, DTensor):
            return _met
        return stock(op, torch_dispatch_class)

    return find_torch_dispatch_rule


def _install_call(op: Any, wrap: Callable[[Any], Any]) -> None:
    for called in (op, op.overloadpacket):
        stock = called._op
        _installed.note(patches.CALLS, op, partial(setattr, called, "_op", stock))
        called._op = wrap(stock)

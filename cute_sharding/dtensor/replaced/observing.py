"""Observes what runs below a program (torch/utils/_python_dispatch.py, _library, c10d, autograd),
and the frames and code objects for which it runs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch._C import DispatchKey, DispatchKeySet
from torch._C._autograd import _get_sequence_nr as nodes_made
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock
from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.communication import WAIT
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.patch import Installed, calling

__all__ = [
    "NO_NUMBER",
    "TAKING_APART",
    "Asked",
    "FrameKind",
    "LightMode",
    "Observer",
    "TorchDispatchMode",
    "Watcher",
    "are_there",
    "arguments_by_name",
    "asked_by",
    "current_node",
    "exchange",
    "group_of_argument",
    "is_in_torchs_function",
    "is_not_compiled",
    "kind_of",
    "line_of_node",
    "may_recompute",
    "memory_of",
    "moved_in",
    "name_of",
    "node_of_graph",
    "nodes_made",
    "note_op",
    "number_of_node",
    "op_of_node",
    "overloads",
    "start",
    "stop",
]


# -- codes -----------------------------------------------------------------------------------------
# Facts about the code objects of frames. A code object never changes, so the next recording uses
# the same facts.

# A line: its code object, and its number.
Line: TypeAlias = tuple[CodeType, int]

# The facts about a code object, by its number (``id``). The code object is kept too, so that no
# other code object gets its address.
KNOWN: dict[int, tuple[CodeType, FrameKind]] = {}
# The numbers of the program's own code objects. For all others, the name, or None if the name is
# not enough.
OWN: set[int] = set()
OTHERS: dict[int, tuple[str, str] | None] = {}
# The most code objects to keep.
MOST = 1 << 14


def kind_of_code(frame: FrameType) -> FrameKind:
    """The facts about the code of a frame."""
    code = frame.f_code
    known = KNOWN.get(id(code))
    if known is not None:
        return known[1]
    kind = kind_of(frame)
    if len(KNOWN) > MOST:  # each number is removed before its code object
        OWN.clear()
        OTHERS.clear()
        KNOWN.clear()
    KNOWN[id(code)] = code, kind
    if kind.is_own:
        OWN.add(id(code))
    else:
        is_more = kind.starts_backward or kind.recomputes or kind.moves or kind.is_graph
        OTHERS[id(code)] = None if is_more else kind.called
    return kind


def line_of_program(start: FrameType | None) -> Line | None:
    """The line of the program that runs in this frame, or in a frame around it; None if no frame is
    the program's own.
    """
    frame = start
    while frame is not None:
        number = id(frame.f_code)
        if number in OWN or (number not in OTHERS and kind_of_code(frame).is_own):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def line_text(line: Line | None) -> str:
    """A line as errors name it: ``file:number``."""
    return "an unknown line" if line is None else f"{line[0].co_filename}:{line[1]}"


# -- observing -------------------------------------------------------------------------------------
# Observes the ops that run below a program (torch/utils/_python_dispatch.py, autograd), and the
# program's own lines that they run for.
#
# Nothing is replaced here.

current_node: Callable[[], Any] = torch._C._current_autograd_node
# Whether a forward may run again inside of a backward: gradients are off in most backwards, and on
# where they are to have gradients themselves.
may_recompute: Callable[[], bool] = torch.is_grad_enabled


def is_not_compiled(function: Any) -> None:
    """Have dynamo compile neither the function nor the functions that it calls, if a compiled
    program runs it.
    """
    skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skipped)


class LightMode(TorchDispatchMode):
    """A mode for code that no compiler traces. (torch wraps the function of other modes for its
    compiler, which it imports for that.)
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Observer(TorchDispatchMode):
    """Sees ops inside the ``with`` block as they run: all but those on DTensors, which run others
    on local tensors.

    Programs stay compiled: the ops that a compiled program runs are seen, traced ops are not.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's check takes a fifth of the mode's time

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, and return its result."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return self.run(func, args, kwargs or {})


is_not_compiled(Observer.__torch_dispatch__)


def name_of(op: Any) -> str:
    """An op's name with its namespace, without its overload."""
    return f"{op.namespace}.{op._opname}"


def overloads(namespace: str, name: str) -> list[Any]:
    """The overloads of an op; none if this torch has no such op."""
    op = getattr(getattr(torch.ops, namespace), name, None)
    return [] if op is None else [getattr(op, overload) for overload in op.overloads()]


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the tensor's memory, unique while the memory exists."""
    return tensor.untyped_storage()._cdata


def number_of_node(node: Any) -> int:
    """The number that autograd gave a node: :func:`nodes_made` just before it was made. -1 for a
    node that accumulates a leaf's gradient: it has the highest number, so that it runs first.
    """
    number: int = node._sequence_nr()
    return number if number < NO_NUMBER else -1


# From here on numbers are those of nodes which add up the gradients of leaves.
NO_NUMBER = 1 << 62


def arguments_by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of an op, by their names in its schema."""
    return {**dict(zip(_names_of_arguments(func), args)), **kwargs}


@lru_cache(maxsize=1 << 8)
def _names_of_arguments(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def group_of_argument(group: Any) -> Any:
    """The process group of an argument: a name, a script object or the group itself."""
    if isinstance(group, str):
        c10d: Any = distributed_c10d
        return c10d._resolve_process_group(group)
    return dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


# -- frames ----------------------------------------------------------------------------------------

_REDISTRIBUTE = ("torch.distributed.tensor._redistribute", "cute_sharding.dtensor.run.redistribute")


# Class names of autograd contexts -> the API that runs them, forward and backward.
_GRADIENTS = {"_FromTorchTensorBackward": "from_local", "_ToTorchTensorBackward": "to_local"}
# Where DTensor takes an op apart to find its rule.
TAKING_APART = "torch.distributed.tensor._decompositions"
_TORCH = str(Path(torch.__file__).parent)
_NOT_OWN = (_TORCH, f"{Path(__file__).parents[2]}{os.sep}")


class FrameKind(NamedTuple):
    """The kind of code that a frame runs.

    Attributes:
        is_own: whether it is the program's own: not of torch, this package or Python's modules, and
            not made by a compiler.
        called: the module and the name of the function; in autograd's functions of DTensor's API
            the name of the API, and ``.backward`` for a gradient.
        starts_backward: whether it starts autograd's engine.
        recomputes: whether it is of a checkpoint, which runs a forward again in a backward.
        moves: if it redistributes, the names of the specs before and after; see :func:`moved_in`.
        is_graph: whether it is an fx graph's own code; see :func:`node_of_graph`.
    """

    is_own: bool
    called: tuple[str, str]
    starts_backward: bool
    recomputes: bool
    moves: tuple[str, ...]
    is_graph: bool


def kind_of(frame: FrameType) -> FrameKind:
    """The kind of code that a frame runs."""
    code = frame.f_code
    first = code.co_varnames[:3]
    gradient = _GRADIENTS.get(type(frame.f_locals["ctx"]).__name__) if "ctx" in first[:1] else None
    module = frame.f_globals.get("__name__")
    return _kind(str(module or ""), code.co_filename, code.co_name, first[1:], gradient)


@remembered
def _kind(
    module: str, file: str, name: str, arguments: tuple[str, ...], gradient: str | None
) -> FrameKind:
    top, is_graph = module.partition(".")[0], file.startswith("<eval_with_key>")
    is_others = top in ("torch", "cute_sharding", "torchgen", "functorch")
    is_made = is_graph or file.startswith(("<frozen", *_NOT_OWN))
    return FrameKind(
        not is_others and not is_made and top not in sys.stdlib_module_names,
        (module, name if gradient is None else gradient + _BACKWARD * (name == "backward")),
        name == "_engine_run_backward",
        module == "torch.utils.checkpoint",
        arguments if name == "redistribute_local_tensor" and module in _REDISTRIBUTE else (),
        is_graph,
    )


def moved_in(frame: FrameType, names: tuple[str, ...]) -> tuple[Any, Any]:
    """The specs before and after in a frame that redistributes, torch's or ours."""
    found = frame.f_locals
    return found.get(names[0]), found.get(names[1])


def node_of_graph(frame: FrameType) -> Any | None:
    """The node that a frame of an fx graph's own code is running."""
    module = frame.f_locals.get("self")
    if not isinstance(module, torch.fx.GraphModule):
        return None
    lines: Any = module._lineno_map
    number = (lines or {}).get(frame.f_lineno - frame.f_code.co_firstlineno)
    nodes = list(module.graph.nodes)
    return nodes[number] if number is not None and number < len(nodes) else None


def line_of_node(node: Any) -> tuple[str, int, str] | None:
    """(file, line, function): the program's own line that a node was traced from."""
    found = re.findall(r'File "(.*)", line (\d+), in (.*)', node.meta.get("stack_trace") or "")
    own = [(file, int(line), name) for file, line, name in found if not file.startswith(_NOT_OWN)]
    return own[-1] if own else None


def op_of_node(node: Any) -> str | None:
    """The name of what the program called at a node; for a node of a backward, of what it is the
    gradient of.
    """
    meta = node.meta
    stack = meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack")
    target = stack[-1][1] if stack else None
    return (
        target if target is None or isinstance(target, str) else getattr(target, "__name__", None)
    )


# -- who asks --------------------------------------------------------------------------------------

_API = "torch.distributed.tensor._api"
_COMPILED = ("torch._functorch", "torch._inductor", "torch.fx")
# Modules of libraries that communicate on their own -> the libraries' names.
_LIBRARIES = {"torch.distributed.fsdp": "FSDP"}
# Our modules whose functions a program calls.
_ASKED = (".run.any_mesh", ".models.reshard", ".refit.plan")
# Where a plan of a step redistributes.
_PLANNED = ("cute_sharding.dtensor.programs.planned", "brought")
# What calls the backward pass of a function.
GRADIENT = "autograd"
_BACKWARD = ".backward"
# Our module that observes programs, in the room of those that communicate for them.
_WATCHING = "cute_sharding.dtensor.replaced.observing"


class Asked(NamedTuple):
    """Why a collective runs.

    Attributes:
        kind: "op" (for the last DTensor op seen), "planned" (a plan redistributes a DTensor for
            that op), "asked" (to redistribute a DTensor), "direct" (to communicate) or "compiled".
        function: what the program, or a library that it uses, has called; empty for an op.
        caller: the module of torch that has called it for the program; :data:`GRADIENT` if this is
            its backward pass; empty if the program has called it.
    """

    kind: str
    function: str = ""
    caller: str = ""


def asked_by(within: Sequence[tuple[str, str]]) -> Asked:
    """Why a collective runs, by (module, function) of the frames around it, innermost first."""
    if _PLANNED in within:
        return Asked("planned")
    api = [i for i, (module, name) in enumerate(within) if module == _API and name[0] not in "_<"]
    asked = [name for module, name in within if module.endswith(_ASKED)]
    outer = [name for module, name in within if module.startswith("torch.distributed")]
    outer = [name for name in outer if name != "wrapper"]  # the wrapper logs the call
    outer += [name for module, _ in within for of, name in _LIBRARIES.items() if of in module]
    for module, name in within:
        if module == _REDISTRIBUTE[0] and name in ("forward", "backward"):
            return _of_api(within, api) if api else Asked("asked", "redistribute", GRADIENT)
        if module.startswith(_COMPILED):
            return Asked("compiled", "compiled program")
        if module == "torch.distributed.distributed_c10d" and name[0] != "_":
            if api:
                return _of_api(within, api)
            return Asked("asked", asked[-1]) if asked else Asked("direct", (outer or [name])[-1])
        if module == "torch.distributed.tensor._dispatch":
            return Asked("op")
    if asked:
        return Asked("asked", asked[-1])
    modules = [module for module, _ in within]
    is_ours = any(
        module.startswith("cute_sharding.dtensor.") and not module.startswith(_WATCHING)
        for module in modules
    )
    if is_ours or any(module.startswith("torch.distributed.tensor") for module in modules):
        return _of_api(within, api) if api else Asked("op")
    return Asked("direct", (outer or ["a collective"])[-1])


def _of_api(within: Sequence[tuple[str, str]], api: Sequence[int]) -> Asked:
    """The outermost call of DTensor's API, and who has called it."""
    name, is_gradient, _ = within[api[-1]][1].partition(_BACKWARD)
    around = (module for module, _ in within[api[-1] + 1 :])
    library = next((of for of in around if of.startswith("torch.distributed") and of != _API), "")
    return Asked("asked", name, GRADIENT if is_gradient else library)


def is_in_torchs_function(within: Sequence[tuple[str, str]]) -> bool:
    """Whether torch runs an op by a function of its own, which skips the rule of the op: those of
    convolutions, searches, loss_parallel and gradient scalers (``_custom_op_handlers``).
    """
    return any(
        module.startswith("torch.distributed.tensor.") and name.endswith("_handler")
        for module, name in within
    )


# -- watching --------------------------------------------------------------------------------------
# Watchers of what this thread runs, and of the backwards that it starts (torch/_library, c10d,
# autograd): a watcher is told of each op of a DTensor, of each collective, of each node that
# autograd makes for a Python function, and of what the busiest rank receives.
#
# A dispatch mode would see all of this, but also each op on local tensors, which makes a small step
# two thirds slower. So a few places of torch are replaced while any thread has a watcher: the
# lookup of rules for tensor classes, the calls of collectives, and the constructor of a function's
# context. Each then does what torch's own does.


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


def note_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell watchers of an op of a DTensor for which something is sent before DTensor sees it."""
    for watcher in _watchers():
        watcher.met(func, args, kwargs)


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
_COMPILERS = (
    "torch._dynamo.convert_frame",
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd",
    "torch._inductor.",
)


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

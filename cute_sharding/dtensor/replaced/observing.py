"""Observes the ops that run below a program (torch/utils/_python_dispatch.py, autograd), and the
program's own lines that they run for.

Nothing is replaced here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._autograd import _get_sequence_nr as nodes_made
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cute_sharding._memory import remembered

__all__ = [
    "NO_NUMBER",
    "TAKING_APART",
    "FrameKind",
    "Observer",
    "TorchDispatchMode",
    "arguments_by_name",
    "asked_by",
    "current_node",
    "group_of_argument",
    "group_position",
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
    "number_of_node",
    "op_of_node",
    "overloads",
]

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


def group_position(op: Any) -> tuple[int, str]:
    """The number and the name of an op's argument that is a process group; (-1, "") without one."""
    names = _names_of_arguments(op)
    return next(((i, name) for i, name in enumerate(names) if name in _GROUPS), (-1, ""))


_GROUPS = ("group_name", "process_group")


def group_of_argument(group: Any) -> Any:
    """The process group of an argument: a name, a script object or the group itself."""
    if isinstance(group, str):
        c10d: Any = distributed_c10d
        return c10d._resolve_process_group(group)
    return dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


# -- frames ----------------------------------------------------------------------------------------

_REDISTRIBUTE = ("torch.distributed.tensor._redistribute", "cute_sharding.dtensor.run.redistribute")


# Class names of autograd contexts -> the API that a program calls to run them.
_GRADIENTS = {"_FromTorchTensorBackward": "from_local", "_ToTorchTensorBackward": "to_local"}
# Where DTensor takes an op apart to find its rule.
TAKING_APART = "torch.distributed.tensor._decompositions"
_TORCH = str(Path(torch.__file__).parent)
_NOT_OWN = (_TORCH, str(Path(__file__).parents[2]))


class FrameKind(NamedTuple):
    """The kind of code that a frame runs.

    Attributes:
        is_own: whether it is the program's own: not of torch, this package or Python's modules, and
            not made by a compiler.
        called: the module and the name of the function; for a gradient's, the name of the API.
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
    is_made = is_graph or file.startswith(("<frozen", _TORCH))
    return FrameKind(
        not is_others and not is_made and top not in sys.stdlib_module_names,
        (module, gradient or name),
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
# Our module that observes programs, in the room of those that communicate for them.
_WATCHING = "cute_sharding.dtensor.replaced.watching"


def asked_by(within: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Why a collective runs, by (module, function) of the frames around it, innermost first: ("op",
    "") for the last DTensor op seen; otherwise the name of what the program has called, to
    redistribute a DTensor ("asked") or to communicate ("direct"), or "compiled".
    """
    api = [name for module, name in within if module == _API and name[0] not in "_<"]
    asked = [name for module, name in within if module.endswith(_ASKED)]
    outer = [name for module, name in within if module.startswith("torch.distributed")]
    outer = [name for name in outer if name != "wrapper"]  # the wrapper logs the call
    outer += [name for module, _ in within for of, name in _LIBRARIES.items() if of in module]
    for module, name in within:
        if module == _REDISTRIBUTE[0] and name in ("forward", "backward"):
            return "asked", (api or ["redistribute"])[-1]
        if module.startswith(_COMPILED):
            return "compiled", "compiled program"
        if module == "torch.distributed.distributed_c10d" and name[0] != "_":
            called = api or asked
            return ("asked", called[-1]) if called else ("direct", (outer or [name])[-1])
        if module == "torch.distributed.tensor._dispatch":
            return "op", ""
    if asked:
        return "asked", asked[-1]
    modules = [module for module, _ in within]
    is_ours = any(
        module.startswith("cute_sharding.dtensor.") and not module.startswith(_WATCHING)
        for module in modules
    )
    if is_ours or any(module.startswith("torch.distributed.tensor") for module in modules):
        return ("asked", api[-1]) if api else ("op", "")
    return "direct", (outer or ["a collective"])[-1]


def is_in_torchs_function(within: Sequence[tuple[str, str]]) -> bool:
    """Whether torch runs an op by a function of its own, which skips the rule of the op: those of
    convolutions, searches, loss_parallel and gradient scalers (``_custom_op_handlers``).
    """
    return any(
        module.startswith("torch.distributed.tensor.") and name.endswith("_handler")
        for module, name in within
    )

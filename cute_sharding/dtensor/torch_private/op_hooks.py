"""Ops beside views, in propagator and dispatcher (torch/distributed/tensor/_sharding_prop.py,
_dispatch.py): what is asked before torch's rules, and what follows ops that write.

The propagator's way from specs to placements, schema infos, functions of single ops and the code of
the dispatcher's last step may be replaced here, and are put back.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import _dispatch
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo

from cute_sharding.dtensor.stats import logger
from cute_sharding.dtensor.torch_private.answers import WrittenBack
from cute_sharding.dtensor.torch_private.op_schemas import WRITERS
from cute_sharding.dtensor.torch_private.registry import op_handlers, overload, propagator

__all__ = [
    "HANDLED",
    "OpRules",
    "Writes",
    "install_propagation",
    "restore_propagation",
]


@dataclass(frozen=True)
class OpRules:
    """What the propagator and the dispatcher have of ops: what to put back."""

    infos: tuple[tuple[Any, tuple[Any, ...]], ...]
    handlers: tuple[tuple[Any, Any], ...]
    tail: Any


# Ops that torch's dispatcher takes past the propagator; the last two since 2.15.
HANDLED = (
    "convolution.default",
    "convolution_backward.default",
    "argmin.default",
    "argmax.default",
    "max.dim",
    "min.dim",
)


class Writes(NamedTuple):
    """What is to be done about ops that write.

    Attributes:
        reach: called with (op, args, kwargs) after each, while there are ``copies``.
        take_back: called with the same and torch's answer after one that wrote to copies (see
            :class:`WrittenBack`), before ``reach``; the answer to go on with.
        copies: empty, as long as no view is a copy.
    """

    reach: Callable[..., None]
    take_back: Callable[..., OutputSharding]
    copies: set[int]


def install_propagation(
    propagate: Callable[[OpSchema], OutputSharding],
    names: Sequence[str],
    handler: Callable[[Callable[..., Any]], Callable[..., Any]],
    writing: Callable[..., Any],
    writes: Writes,
) -> OpRules:
    """Make ``propagate`` the propagator's way, on all arguments of the ops of those names;
    ``handler(torch's)`` the function of the ops that go past it; ``writing`` that of
    :data:`WRITERS`; and have ops that write followed by ``writes``.

    torch keeps what it found by the arguments that the op's schema info names: of ops that it
    decomposes it names none.
    """
    p = propagator()
    infos, handlers = [], []
    for op in filter(None, map(overload, names)):
        infos.append(
            (
                op,
                tuple(
                    table.get(op)
                    for table in (p.op_to_schema_info, p.op_to_schema_info_for_single_dim_strategy)
                ),
            )
        )
        lists = any(
            "Tensor[]" in str(argument.type) or "List[Tensor]" in str(argument.type)
            for argument in op._schema.arguments
        )
        info = RuntimeSchemaInfo(
            0,
            [
                *(argument.name for argument in op._schema.arguments if argument.kwarg_only),
                "cute_sharding",
            ],
            lists,
        )
        p.op_to_schema_info[op] = info
        if infos[-1][1][1] is not None:
            p.op_to_schema_info_for_single_dim_strategy[op] = info
    for op in filter(None, map(overload, HANDLED)):
        stock = op_handlers().get(op)
        if stock is not None:
            handlers.append((op, stock))
            op_handlers()[op] = handler(stock)
    for op in filter(None, map(overload, WRITERS)):
        handlers.append((op, op_handlers().get(op)))
        op_handlers()[op] = writing
    p.propagate_op_sharding_non_cached = propagate
    code = _begin_with(_dispatch.OpDispatcher._dispatch_fast_path_python_tail, writes)
    return OpRules(tuple(infos), tuple(handlers), code)


def _begin_with(function: Any, writes: Writes) -> Any:
    """Have the function of torch's that ends ops that write begin with ``writes``; returns its
    code, to be put back.

    C++ keeps the function from its first call on, so another in its place would not be met: it gets
    other code. And every write comes by here: one more call would cost a tenth of the op, so what
    is added is a statement.
    """
    code = function.__code__
    try:
        tree = ast.parse(dedent(inspect.getsource(function)))
    except OSError:  # a torch without its sources
        logger.warning(
            "torch %s comes without its sources: writes to slices of sharded dims are lost, as "
            "torch has it (see dtensor/writes.py)",
            torch.__version__,
        )
        return code
    body: list[ast.stmt] = tree.body[0].body  # type: ignore[attr-defined]
    body[1:1] = ast.parse(_BEGINNING).body  # after the docstring
    made: dict[str, Any] = {}
    exec(
        compile(ast.fix_missing_locations(tree), code.co_filename, "exec"),
        function.__globals__,
        made,
    )
    names = {**writes._asdict(), "WrittenBack": WrittenBack}
    function.__globals__.update({f"_cute_sharding_{name}": value for name, value in names.items()})
    function.__code__ = made[function.__name__].__code__
    return code


_BEGINNING = """
if output_sharding.__class__ is _cute_sharding_WrittenBack and participating:
    output_sharding = _cute_sharding_take_back(op_call, args, kwargs, output_sharding)
if _cute_sharding_copies and participating:
    _cute_sharding_reach(op_call, args, kwargs)
"""


def restore_propagation(saved: OpRules) -> None:
    p = propagator()
    vars(p).pop("propagate_op_sharding_non_cached", None)
    for op, entries in saved.infos:
        for table, entry in zip(
            (p.op_to_schema_info, p.op_to_schema_info_for_single_dim_strategy), entries
        ):
            if entry is None:
                table.pop(op, None)
            else:
                table[op] = entry
    for op, stock in saved.handlers:
        if stock is None:
            op_handlers().pop(op, None)
        else:
            op_handlers()[op] = stock
    function: Any = _dispatch.OpDispatcher._dispatch_fast_path_python_tail
    function.__code__ = saved.tail
    for name in [name for name in function.__globals__ if name.startswith("_cute_sharding_")]:
        del function.__globals__[name]

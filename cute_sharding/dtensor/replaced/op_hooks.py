"""Ops beside views, in propagator and dispatcher (torch/distributed/tensor/_sharding_prop.py,
_dispatch.py): what is asked before torch's rules, and what follows ops that write.

The propagator's way from specs to placements, schema infos, functions of single ops and the code of
the dispatcher's last step may be replaced here, and are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.op_schemas import drawn_in_place, unseen_writers
from cute_sharding.dtensor.replaced.patch import Installed, beginning_with
from cute_sharding.dtensor.replaced.registry import (
    op_handlers,
    overload,
    propagator,
    schema_info,
    with_rules,
)
from cute_sharding.relations.table import ROWS

__all__ = [
    "install_handlers",
    "install_propagation",
]


def install_handlers(installed: Installed, by_name: Mapping[str, Callable[..., Any]]) -> None:
    """Have ops be run by functions of ours, by name, of which torch has no function of its own."""
    by_op = {overload(name): function for name, function in by_name.items()}
    theirs = op_handlers()
    put = {op: function for op, function in by_op.items() if op is not None and op not in theirs}
    installed.put(patches.HANDLERS, put)


def install_propagation(
    installed: Installed,
    propagate: Callable[[OpSchema], OutputSharding],
    names: Sequence[str],
    handler: Callable[[Callable[..., Any]], Callable[..., Any]],
    writing: Callable[..., Any],
    in_nodes: Mapping[Any, Callable[..., Any]],
    reach: Callable[..., None],
    live: set[Any],
) -> None:
    """Make ``propagate`` the propagator's way, on all arguments of the ops of those names;
    ``handler(torch's)`` the function of the ops that go past it; ``writing`` that of those that
    write without torch's dispatcher seeing it; ``in_nodes`` those that answer inside of nodes of
    autograd; and have each op that does followed by ``reach(op,
    args, kwargs)``, while there are ``live`` copies.

    torch keeps what it found by the arguments that the op's schema info names: of ops that it
    decomposes it names none. And C++ keeps it in each thread for itself, and a thread cannot clear
    another's: a keyword that no call ever passes keeps ours apart from torch's in every thread, of
    every op that has a rule, and torch's are found again once its way is back. It does not keep one
    setting of ours apart from another.
    """
    of_one_dim = propagator().op_to_schema_info_for_single_dim_strategy
    infos = _infos(tuple(names))
    infos = {**infos, **_infos_of_others(infos)}
    handlers = op_handlers()
    installed.put(patches.SCHEMA_INFOS, infos)
    installed.put(
        patches.SCHEMA_INFOS_OF_ONE_DIM,
        {op: info for op, info in infos.items() if of_one_dim.get(op) is not None},
    )
    handled = [overload(name) for name, row in ROWS.items() if row.has_function]
    past = [op for op in handled if op is not None and op in handlers]
    installed.put(patches.HANDLERS, {op: handler(handlers[op]) for op in past})
    writers = [*unseen_writers(), *drawn_in_place()]
    installed.put(patches.HANDLERS, dict.fromkeys(writers, writing))
    installed.put(patches.HANDLERS, in_nodes)
    installed.replace(patches.PROPAGATION, lambda stock: propagate)
    # Every write comes by here: one more call would cost a tenth of the op.
    followed = beginning_with(_BEGINNING, patches.TAIL, live=live, reach=reach)
    installed.replace(patches.TAIL, followed)


# A keyword that no call ever passes.
_OURS = "cute_sharding"


def _infos_of_others(named: Mapping[Any, Any]) -> dict[Any, RuntimeSchemaInfo]:
    """torch's schema infos of all other ops that have a rule, as any answer may be ours, with the
    keywords that say how results lie, of which torch's may lack some: what one call was given would
    be taken for another's. And kept apart where they can be: C++ tells an info without keywords
    from one with some, whichever these are. So ours has one where torch's has none, and none where
    torch's are no keywords of the op.
    """
    found, none = {}, RuntimeSchemaInfo()
    for op in with_rules().difference(named):
        info = schema_info(op) or none
        keywords = info.static_kwargkey or []
        lacking = _of_results(op).difference(keywords)
        if lacking:
            named_too = [*keywords, *sorted(lacking), _OURS]
            found[op] = RuntimeSchemaInfo(info.static_argnum, named_too, info.needs_pytree)
        elif not (keywords and _has_one_of(op, keywords)):
            found[op] = _kept_apart(info.static_argnum, bool(keywords), info.needs_pytree)
    return found


@cache
def _of_results(op: Any) -> frozenset[str]:
    """The keywords of an op that say of which dtype its results are, and how they lie."""
    return _KINDS_OF_RESULTS.intersection(
        [each.name for each in op._schema.arguments if each.kwarg_only]
    )


_KINDS_OF_RESULTS = frozenset(("dtype", "output_dtype", "layout", "memory_format"))


def _has_one_of(op: Any, keywords: Sequence[str]) -> bool:
    return any(each.kwarg_only and each.name in keywords for each in op._schema.arguments)


@lru_cache(maxsize=1 << 8)
def _kept_apart(static_argnum: int, has_keywords: bool, needs_pytree: bool) -> RuntimeSchemaInfo:
    """torch's info of those fields as ours: with keywords where that has none."""
    return RuntimeSchemaInfo(static_argnum, None if has_keywords else [_OURS], needs_pytree)


@lru_cache(maxsize=16)
def _infos(names: tuple[str, ...]) -> dict[Any, RuntimeSchemaInfo]:
    """Schema infos that name all arguments, of the ops of those names that this torch has."""
    return {op: _naming_all(op._schema.arguments) for op in filter(None, map(overload, names))}


def _naming_all(arguments: Sequence[Any]) -> RuntimeSchemaInfo:
    by_name = [argument.name for argument in arguments if argument.kwarg_only]
    has_lists = any(
        isinstance(argument.type, torch.ListType) and "Tensor" in str(argument.type)
        for argument in arguments
    )
    return RuntimeSchemaInfo(0, [*by_name, _OURS], has_lists)


_BEGINNING = """
if cute_sharding.live and participating:
    cute_sharding.reach(op_call, args, kwargs)
"""

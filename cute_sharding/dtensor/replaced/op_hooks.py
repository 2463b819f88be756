"""Ops beside views, in propagator and dispatcher (torch/distributed/tensor/_sharding_prop.py,
_dispatch.py): what is called before torch's rules, and after ops that write.

The propagator's function from specs to placements, schema infos, functions of single ops and the
code of the dispatcher's last step may be replaced here, and are put back.
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
    """Have our functions run these ops (by name), if torch has no function of its own for them."""
    by_op = {overload(name): function for name, function in by_name.items()}
    theirs = op_handlers()
    put = {op: function for op, function in by_op.items() if op is not None and op not in theirs}
    installed.put(patches.HANDLERS, put)


def install_propagation(
    installed: Installed,
    propagate: Callable[[OpSchema], OutputSharding],
    names: Sequence[str],
    handler: Callable[[Any, Callable[..., Any]], Callable[..., Any]],
    writing: Callable[..., Any],
    in_nodes: Mapping[Any, Callable[..., Any]],
    reach: Callable[..., None],
    live: set[Any],
    finished: Callable[..., Any],
) -> None:
    """Make ``propagate`` the propagator's function, with all arguments of the ops ``names`` in its
    cache keys. ``handler(op, torch's)`` replaces torch's function for an op that skips the
    propagator. ``writing`` runs ops that write without torch's dispatcher noticing, and
    ``in_nodes`` those that answer inside nodes of autograd. While there are ``live`` copies,
    ``reach(op, args, kwargs)`` is called after each op that writes. ``finished(found, op, args,
    kwargs, info)`` may give an op's results in place of what the propagator has ``found`` for it.

    torch caches propagations by the arguments that the op's schema info names: none for ops that it
    decomposes. C++ keeps a cache for each thread, and a thread cannot clear another's. So our infos
    name a keyword that no call ever passes: this keeps our entries apart from torch's in every
    thread, for every op that has a rule, and torch's are found again once its function is back. It
    does not keep one setting of ours apart from another.
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
    installed.put(patches.HANDLERS, {op: handler(op, handlers[op]) for op in past})
    writers = [*unseen_writers(), *drawn_in_place()]
    installed.put(patches.HANDLERS, dict.fromkeys(writers, writing))
    installed.put(patches.HANDLERS, in_nodes)
    installed.replace(patches.PROPAGATION, lambda stock: propagate)
    installed.replace(patches.FOUND, lambda stock: _finishing(stock, finished))
    # Every write passes here: one more call would cost a tenth of the op.
    followed = beginning_with(_BEGINNING, patches.TAIL, live=live, reach=reach)
    installed.replace(patches.TAIL, followed)


def _finishing(stock: Callable[..., Any], finished: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step that asks the propagator. As torch itself does for ops that it decomposes there,
    it may return results: the dispatcher then returns these, and caches nothing.
    """

    def found(
        self: Any, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool
    ) -> Any:
        answer = stock(self, op_call, args, kwargs, op_info, try_cache)
        return finished(answer, op_call, args, kwargs, op_info)

    return found


# A keyword that no call ever passes.
_OURS = "cute_sharding"


def _infos_of_others(named: Mapping[Any, Any]) -> dict[Any, RuntimeSchemaInfo]:
    """Schema infos for all other ops that have a rule, since any answer may be ours: torch's, plus
    the keywords that determine the layout of results, of which torch's may lack some; one call's
    answer would be taken for another's. They also differ from torch's where possible: C++ tells an
    info without keywords from one with some, whichever these are. So ours has a keyword if torch's
    has none, and none if torch's are no keywords of the op.
    """
    found, none = {}, RuntimeSchemaInfo()
    for op in with_rules().difference(named):
        info = schema_info(op) or none
        keywords, of_op = info.static_kwargkey or [], _keywords(op)
        lacking = _KINDS_OF_RESULTS.intersection(of_op).difference(keywords)
        if lacking:
            named_too = [*keywords, *sorted(lacking), _OURS]
            found[op] = RuntimeSchemaInfo(info.static_argnum, named_too, info.needs_pytree)
        elif of_op.isdisjoint(keywords):
            found[op] = _kept_apart(info.static_argnum, bool(keywords), info.needs_pytree)
    return found


@cache
def _keywords(op: Any) -> frozenset[str]:
    return frozenset([each.name for each in op._schema.arguments if each.kwarg_only])


# The keywords of ops that determine the dtype and layout of results.
_KINDS_OF_RESULTS = frozenset(("dtype", "output_dtype", "layout", "memory_format"))


@lru_cache(maxsize=1 << 8)
def _kept_apart(static_argnum: int, has_keywords: bool, needs_pytree: bool) -> RuntimeSchemaInfo:
    """torch's info with these fields, made different: with keywords if torch's has none."""
    return RuntimeSchemaInfo(static_argnum, None if has_keywords else [_OURS], needs_pytree)


@lru_cache(maxsize=16)
def _infos(names: tuple[str, ...]) -> dict[Any, RuntimeSchemaInfo]:
    """Schema infos that name all arguments, for those of these ops that this torch has."""
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

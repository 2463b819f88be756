"""Ops beside views, in propagator and dispatcher (torch/distributed/tensor/_sharding_prop.py,
_dispatch.py): what is called before torch's rules, and after ops that write.

The propagator's function from specs to placements, functions of single ops and the code of the
dispatcher's last step may be replaced here, and are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.keys import install_keys
from cute_sharding.dtensor.replaced.op_schemas import drawn_in_place, unseen_writers
from cute_sharding.dtensor.replaced.patch import Installed, calling
from cute_sharding.dtensor.replaced.registry import op_handlers, overload
from cute_sharding.relations.table import ROWS

__all__ = [
    "install_propagation",
]


def install_propagation(
    installed: Installed,
    propagate: Callable[[OpSchema], OutputSharding],
    handler: Callable[[Any, Callable[..., Any]], Callable[..., Any]],
    writing: Callable[..., Any],
    others: Mapping[Any, Callable[..., Any]],
    reach: Callable[..., None],
    live: set[Any],
    finished: Callable[..., Any],
) -> None:
    """Make ``propagate`` the propagator's function, for schemas that name what tells calls apart.
    ``handler(op, torch's)`` replaces torch's function for an op that skips the
    propagator. ``writing`` runs ops that write without torch's dispatcher noticing, and
    ``others`` are functions of single ops. While there are ``live`` copies,
    ``reach(op, args, kwargs)`` is called after each op that writes. ``finished(found, op, args,
    kwargs, info)`` may give an op's results in place of what the propagator has ``found`` for it.
    """
    complete = install_keys(installed)
    handlers = op_handlers()
    handled = [overload(name) for name, row in ROWS.items() if row.has_function]
    past = [op for op in handled if op is not None and op in handlers]
    installed.put(patches.HANDLERS, {op: handler(op, handlers[op]) for op in past})
    writers = [*unseen_writers(), *drawn_in_place()]
    installed.put(patches.HANDLERS, dict.fromkeys(writers, writing))
    installed.put(patches.HANDLERS, others)
    installed.replace(patches.PROPAGATION, lambda stock: lambda schema: propagate(complete(schema)))
    installed.replace(patches.FOUND, lambda stock: _finishing(stock, finished))
    installed.replace(patches.TAIL, calling(partial(_reaching, live, reach), patches.TAIL))


def _reaching(
    live: set[Any], reach: Callable[..., None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    """torch's step after an op that writes, after ``reach``."""

    def tail(
        self: Any, op: Any, args: Any, kwargs: Any, mesh: Any, answer: Any, local: Any, *how: Any
    ) -> Any:
        if live and how[0]:  # this rank takes part
            reach(op, args, kwargs)
        return stock(self, op, args, kwargs, mesh, answer, local, *how)

    return tail


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

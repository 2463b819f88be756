"""Switching DTensor's view ops to our rules, and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cute_sharding.dtensor import compat
from cute_sharding.dtensor.executor import TorchExecutor
from cute_sharding.dtensor.propagate import decide
from cute_sharding.dtensor.stats import count, logger
from cute_sharding.views import BY_OVERLOAD, Row


@dataclass(frozen=True)
class Settings:
    implicit_redistribution: bool = False


_lock = threading.RLock()
_settings: Settings | None = None  # None: disabled
_stock: list[compat.Registration] = []


def enable(*, implicit_redistribution: bool = False) -> None:
    """Propagate DTensor's view ops by layout algebra, from the next op on, in every thread.

    Args:
        implicit_redistribution: let strict views (``view`` and friends, hence also ``reshape``) redistribute their input where no placements of the
            output make them free, instead of raising.

    Calling it again changes the setting. If it fails, everything is as it was. One thing a thread cannot take from another: after a change from
    ``implicit_redistribution=True`` to False, other threads may go on redistributing (rightly) for calls they have cached, where they would now be refused.
    """
    with _lock:
        _switch(Settings(implicit_redistribution))


def disable() -> None:
    """Go back to torch's own rules, from the next op on. Does nothing where they are in force."""
    with _lock:
        _switch(None)


@contextmanager
def enabled(*, implicit_redistribution: bool = False) -> Iterator[None]:
    """:func:`enable` inside the ``with`` block, and what was before after it."""
    with _lock:
        before = _settings
        _switch(Settings(implicit_redistribution))
    try:
        yield
    finally:
        with _lock:
            _switch(before)


def is_enabled() -> bool:
    """Whether view ops are propagated by layout algebra."""
    return _settings is not None


def _switch(settings: Settings | None) -> None:
    global _settings
    if settings == _settings:
        return
    before, _settings = _settings, settings
    try:
        _install(settings)
    except BaseException:
        _settings = before
        _install(before)
        raise
    logger.debug("view propagation by layout algebra: %s", "off" if settings is None else settings)


def _install(settings: Settings | None) -> None:
    """Put torch's registrations back, and then, unless ``settings`` is None, ours in their place."""
    for registration in _stock:
        compat.restore(registration)
    _stock.clear()
    if settings is not None:
        for name, (row, strict) in BY_OVERLOAD.items():
            op = compat.overload(name)
            if op is not None:
                stock = compat.registration(op)
                _stock.append(stock)
                compat.install_strategy(op, _strategy(row, name, strict, stock, settings))
    compat.clear_propagation_caches()


def _strategy(row: Row, name: str, strict: bool, stock: compat.Registration, settings: Settings) -> Callable[[compat.OpSchema], compat.OpStrategy]:
    """The sharding strategy of one aten overload."""

    def strategy(schema: compat.OpSchema) -> compat.OpStrategy:
        given: Any = schema.args_schema[0]
        shape = tuple(given.shape)
        arguments = schema.args_schema[1:]
        mesh = schema.get_mesh_from_args(validate=False)
        if stock.strategy is not None and compat.is_symbolic(shape, arguments, *(p for s in given.strategies for p in compat.split_factors(s.output_spec))):
            count(name, "stock")
            logger.debug("%s: shape %s is symbolic: left to torch's own rule", name, shape)
            return stock.strategy(schema)
        sizes = tuple(mesh.shape)
        if sizes == (1,):
            # On one device every placement is right, and torch uses just such a mesh as a stand-in: for an op without a rule it traces the decomposition there, and takes
            # what it learns for true of the real mesh (_decompositions.py). So nothing may be answered that is true of one device only.
            if stock.strategy is not None:
                count(name, "stock")
                return stock.strategy(schema)
            sizes = (2,)
        view = row.view(shape, *arguments, **schema.kwargs_schema)
        result = compat.OpStrategy([])
        for option in given.strategies:
            spec = option.output_spec
            compat.check_shard_order(spec, name)
            decision = decide(
                view,
                spec.placements,
                sizes,
                strict=strict,
                op=name,
                row=row,
                mesh_names=mesh.mesh_dim_names,
                implicit_redistribution=settings.implicit_redistribution,
                executor=TorchExecutor(spec),
                stock=(lambda: compat.stock_input_placements(stock, schema)) if len(given.strategies) == 1 else None,
            )
            result.strategies.append(compat.op_spec(given, spec, mesh, decision.source, decision.output))
        return result

    return strategy

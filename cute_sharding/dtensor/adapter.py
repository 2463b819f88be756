"""Switching DTensor's view ops and redistribution to our rules, and back."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cute_sharding.dtensor import compat, ledger, state, versions
from cute_sharding.dtensor.groups import prepared_key
from cute_sharding.dtensor.locks import fork_safe_lock
from cute_sharding.dtensor.ops import gated_handler, propagation, writing_handler
from cute_sharding.dtensor.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.settings import Settings
from cute_sharding.dtensor.slices import WHOLE_SLICES, slice_strategy
from cute_sharding.dtensor.stats import count_left_to_torch, logger
from cute_sharding.dtensor.stock import is_torchs
from cute_sharding.dtensor.strided import as_view
from cute_sharding.dtensor.symbols import equate, has_values, known, symbols_of, unknown
from cute_sharding.dtensor.view_strategy import strategy_of
from cute_sharding.dtensor.writes import LIVE, note_copy, reach, take_back
from cute_sharding.layout import Undecided
from cute_sharding.ops.table import BY_OVERLOAD as SIGNATURES
from cute_sharding.sharding.deal import local_size
from cute_sharding.views import BY_OVERLOAD

_lock = fork_safe_lock()
_settings: Settings | None = None  # None: disabled
_stock: list[compat.Registration] = []
_stock_redistribution: compat.Redistribution | None = None
_stock_ops: compat.OpRules | None = None
_stock_state: compat.StateRules | None = None
_tracing: compat.Tracing | None = None
# .now: this thread is redistributing the input of a view op, whose rule is ours; .moved: what the
# op that it runs writes to instead of its arguments
_in_view = threading.local()


def enable(
    *,
    implicit_redistribution: bool | str = False,
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
) -> None:
    """Propagate DTensor's view ops by layout algebra, from the next op on, in every thread.

    Args:
        implicit_redistribution: let strict views (``view`` and friends, hence also ``reshape``)
            redistribute their input where no placements of the output make them free, instead of
            raising: to the "cheapest" placements under which they are (also True), or as torch's
            rules for other views do, with what blocks the view replicated and the rest kept
            ("replicate"). Other views do so in any case, as torch's do; under "cheapest" to the
            cheapest placements.
        redistribution: let every redistribution of DTensor (``redistribute``, ``full_tensor``, and
            what ops do to their inputs) run by plan: each missing element moves once. Without it
            only the inputs of view ops are redistributed so, and all else by torch.
        views: False leaves the view ops to torch, for ``redistribution`` alone.
        ops: what views make, other ops are handed as their signatures say (cute_sharding/ops). With
            False, by torch's own rules, some of which are wrong on it. Without ``views`` it does
            nothing.

    Raises:
        ValueError: ``implicit_redistribution`` is none of those.

    A torch newer than those that were checked gives one RuntimeWarning in a process; one that is
    older raises a RuntimeError.

    Calling it again changes the setting. If it fails, everything is as it was. One thing a thread
    cannot take from another: after a change from ``implicit_redistribution=True`` to False, other
    threads may go on redistributing (rightly) for calls they have cached, where they would now be
    refused.

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import DTensor, Shard
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> store = FakeStore()  # this process is rank 0 of two, of which the other is made up
    >>> torch.distributed.init_process_group("fake", rank=0, world_size=2, store=store)
    >>> mesh = init_device_mesh("cpu", (2,))
    >>> columns = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(1)])  # of (4, 6)
    >>> enable()
    >>> columns.view(24).placements
    (_StridedShard(dim=0, sf=4),)
    >>> disable()
    >>> torch.distributed.destroy_process_group()
    """
    switch_to(Settings.of(views, implicit_redistribution, redistribution, ops))


def disable() -> None:
    """Go back to torch's own rules, from the next op on. Does nothing where they are in force.

    >>> enable()
    >>> disable()
    >>> is_enabled()
    False
    """
    switch_to(None)


@contextmanager
def enabled(
    *,
    implicit_redistribution: bool | str = False,
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
) -> Iterator[None]:
    """:func:`enable` inside the ``with`` block, and what was before after it.

    Raises:
        ValueError, RuntimeError: as :func:`enable`.

    >>> with enabled(redistribution=True):
    ...     settings().redistribution
    True
    >>> is_enabled()
    False
    """
    with _lock:
        before = _settings
        switch_to(Settings.of(views, implicit_redistribution, redistribution, ops))
    try:
        yield
    finally:
        switch_to(before)


def is_enabled() -> bool:
    """Whether anything is switched on; :func:`settings` says what.

    >>> with enabled(views=False, redistribution=True):
    ...     is_enabled()
    True
    """
    return _settings is not None


def settings() -> Settings | None:
    """What is switched on, as the arguments of :func:`enable`; None where nothing is.

    >>> with enabled(implicit_redistribution=True):
    ...     settings().implicit_redistribution, settings().redistribution
    ('cheapest', False)
    >>> settings() is None
    True
    """
    return _settings


def parts_replaced() -> list[str]:
    """What of torch is replaced now, by name."""
    with _lock:
        if _tracing is None:
            return []
        redistribution = [
            f"{module.__name__}.redistribute_local_tensor" for module in compat.REDISTRIBUTION_USERS
        ] + ["OpDispatcher.redistribute_local_args"]
        ops = (
            [
                "ShardingPropagator.propagate_op_sharding_non_cached",
                "OpDispatcher._dispatch_fast_path_python_tail",
                *(f"the handler of {op}" for op, _ in _stock_ops.handlers),
            ]
            if _stock_ops is not None
            else []
        )
        held = (
            [
                *(f"{owner.__name__}.{name}" for owner, name, _ in _stock_state.methods),
                *(f"{owner.__name__}.{name}" for owner, name, _ in _stock_state.functions),
            ]
            if _stock_state is not None
            else []
        )
        return [
            *(f"the sharding rule of aten.{compat.name_of(stock.op)}" for stock in _stock),
            *redistribution,
            *ops,
            *held,
            *_tracing.names(),
        ]


def switch_to(settings: Settings | None) -> None:
    """Switch on what these settings say, as :func:`settings` had them. If it fails, everything is
    as it was.
    """
    global _settings
    with _lock:
        if settings is not None:
            versions.check()
        if settings == _settings:
            return
        before, _settings = _settings, settings
        try:
            _install(settings)
        except BaseException:
            _settings = before
            _install(before)
            raise
    logger.debug("layout algebra: %s", "off" if settings is None else settings)


def _install(settings: Settings | None) -> None:
    """Put torch's registrations back, and then, unless ``settings`` is None, ours in their
    place.
    """
    global _stock_ops, _stock_redistribution, _stock_state, _tracing
    if _stock_ops is not None:
        compat.restore_propagation(_stock_ops)
        _stock_ops = None
    if _stock_state is not None:
        compat.restore_state(_stock_state)
        _stock_state = None
    for registration in _stock:
        compat.restore(registration)
    _stock.clear()
    if _stock_redistribution is not None:
        compat.restore_redistribution(_stock_redistribution)
        _stock_redistribution = None
    if _tracing is not None:
        _tracing.restore()
        _tracing = None
    if settings is not None:
        _tracing = compat.Tracing(_local_size, equate, as_view)
        _stock_redistribution = compat.redistribution()
        compat.install_redistribution(
            _redistribution(_stock_redistribution),
            _redistribution_of_arguments(_stock_redistribution),
        )
        for name, (row, strict) in BY_OVERLOAD.items() if settings.views else ():
            op = compat.overload(name)
            if op is not None:
                stock = compat.registration(op)
                _stock.append(stock)
                rule = strategy_of(row, name, strict, stock, settings, _tag_traced)
                compat.install_strategy(op, rule)
        for name, first in WHOLE_SLICES.items() if settings.views else ():
            op = compat.overload(name)
            if op is not None and compat.registration(op).strategy is not None:
                stock = compat.registration(op)
                _stock.append(stock)
                compat.install_strategy(op, slice_strategy(first, stock))
        if settings.views and settings.ops:
            _stock_ops = compat.install_propagation(
                propagation(compat.propagation()),
                tuple(SIGNATURES),
                gated_handler,
                writing_handler,
                compat.Writes(reach, _take_back, LIVE),
            )
            _stock_state = compat.install_state(
                state.METHODS, state.distribute, state.visualization
            )
    _tag_compiled_graphs(settings)
    ledger.forget()
    compat.clear_propagation_caches()
    compat.forget_compiled_code()


def _tag_compiled_graphs(settings: Settings | None) -> None:
    """Keep the graphs that torch.compile caches on disk apart by version, settings and rank: what a
    rank sends and holds stands in its graph, and torch's keys do not tell ranks apart.
    """
    if settings is None:
        compat.tag_compiled_graphs(None)
        return
    rank = compat.this_rank() if dist.is_initialized() else None
    compat.tag_compiled_graphs(f"{_fingerprint()}:{settings.key}:{rank}:{prepared_key()}")


def _tag_traced() -> None:
    _tag_compiled_graphs(_settings)


@cache
def _fingerprint() -> str:
    """Of this package's code: another version may answer otherwise, and compiled graphs outlive the
    process.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _local_size(n: Any, *cuts: tuple[Any, int, int]) -> Any:
    """How many of ``n`` rows a device holds after ``cuts``, each (split factor, devices, its
    coordinate), where some sizes are SymInts; None where it cannot be said.
    """
    try:
        with symbols_of(n, *(split_factor for split_factor, _, _ in cuts)):
            rows = known(n)
            for split_factor, parts, coordinate in cuts:
                rows = local_size(rows, known(split_factor), parts, coordinate)
            return unknown(rows, local=True)
    except Undecided:
        return None


def _redistribution(stock: compat.Redistribution) -> Callable[..., torch.Tensor]:
    """What stands in for torch's redistribute_local_tensor: a plan's steps where they are wanted,
    else torch's own.
    """

    def redistribute(
        local: torch.Tensor,
        current: compat.DTensorSpec,
        target: compat.DTensorSpec,
        *,
        async_op: bool = False,
        is_explicit: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        settings = _settings
        if compat.is_tracing():
            _tag_compiled_graphs(settings)  # dynamo comes by here before a cache is asked
            current, target = compat.settled_spec(current), compat.settled_spec(target)
        wanted = settings is not None and (
            settings.redistribution or getattr(_in_view, "now", False)
        )
        shape = tuple(current.shape)
        if not wanted and settings is not None:
            if not compat.is_symbolic(shape):
                wanted = not is_torchs(
                    current, target
                )  # as views make them that torch would not have
            elif compat.is_tracing():
                wanted = bool(
                    compat.split_factors(current) or compat.split_factors(target)
                )  # torch counts the rows of such shards one by one, which it cannot
        if (
            wanted
            and not compat.is_wrapper(local)
            and (
                not compat.is_symbolic(shape) or (compat.has_shape_env(shape) and has_values(shape))
            )
        ):
            counted = (
                settings is None or settings.redistribution or not getattr(_in_view, "now", False)
            )
            return redistribute_local_tensor(
                local, current, target, async_op=async_op, is_explicit=is_explicit, counted=counted
            )
        if settings is not None and settings.redistribution:
            count_left_to_torch()
        return stock.local_tensor(
            local, current, target, async_op=async_op, is_explicit=is_explicit, **options
        )

    return redistribute


class _Care(NamedTuple):
    """What is to be done where the arguments of an op are redistributed: by plan; of a view, the
    specs before and after, to take note of the copy; whether keyword arguments are, too.
    """

    by_plan: bool
    copied: tuple[compat.DTensorSpec, compat.DTensorSpec] | None
    keywords: bool


def _care(op_info: Any, schema: compat.OpSchema) -> _Care | None:
    keywords = bool(compat.keywords(schema))
    moves = keywords or compat.moves(op_info, schema)
    found = _Care(
        moves and (compat.is_by_plan(schema) or compat.name_of(schema.op) in BY_OVERLOAD),
        compat.viewed(op_info, schema),
        keywords,
    )
    return found if any(found) or compat.writes(schema) else None


def _redistribution_of_arguments(stock: compat.Redistribution) -> Callable[..., None]:
    """The dispatcher's step that redistributes the arguments of an op, with a note of the ops whose
    rules are ours.
    """

    local_args = stock.local_args

    def redistribute_local_args(op_info: Any, schema: compat.OpSchema, *options: Any) -> None:
        try:
            # Each view comes by here: what there is to care for is found once.
            care = schema._cute_sharding_care  # type: ignore[attr-defined]
        except AttributeError:
            care = schema._cute_sharding_care = _care(op_info, schema)  # type: ignore[attr-defined]
        settings = _settings
        if care is None or settings is None or not settings.views:
            return local_args(op_info, schema, *options)
        before = op_info.local_args
        outer, _in_view.now = getattr(_in_view, "now", False), care.by_plan
        try:
            local_args(op_info, schema, *options)
            if care.keywords:
                compat.redistribute_keywords(op_info, schema)
        finally:
            _in_view.now = outer
        if settings.ops and care.copied is not None:
            spec, spec_of_moved = care.copied
            note_copy(before[0], spec, spec_of_moved, op_info.local_args[0])
        if settings.ops and compat.writes(schema):
            _in_view.moved = compat.moved_to(op_info, schema, before)

    return redistribute_local_args


def _take_back(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Any:
    """After an op that wrote to copies of what it was given; torch's answer, for what now is so."""
    moved, _in_view.moved = _in_view.moved, None
    return compat.with_specs(found, take_back(op, args, kwargs, moved))

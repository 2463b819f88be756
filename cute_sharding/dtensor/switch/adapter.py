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

from cute_sharding.dtensor.bookkeeping import ledger, versions
from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock
from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.bookkeeping.stats import count_left_to_torch, logger
from cute_sharding.dtensor.compiled.strided import as_view
from cute_sharding.dtensor.compiled.symbols import equate, has_values, known, symbols_of, unknown
from cute_sharding.dtensor.memory import state
from cute_sharding.dtensor.memory.writes import LIVE, note_copy, reach, take_back
from cute_sharding.dtensor.movement import movement_first
from cute_sharding.dtensor.ops import gated_handler, propagation, writing_handler
from cute_sharding.dtensor.redistributing.groups import prepared_key
from cute_sharding.dtensor.redistributing.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.redistributing.stock import is_torchs
from cute_sharding.dtensor.torch_private import (
    answers,
    compiler,
    dispatch,
    dispatch_modes,
    local_tensors,
    op_hooks,
    op_schemas,
    patches,
    process_groups,
    redistribution_hook,
    registry,
    state_dicts,
    symints,
    tensor_specs,
    tracing,
)
from cute_sharding.dtensor.torch_private.patch import Installed, require
from cute_sharding.dtensor.view_propagation.slices import WHOLE_SLICES, slice_strategy
from cute_sharding.dtensor.view_propagation.view_strategy import strategy_of
from cute_sharding.layout import Undecided
from cute_sharding.movement import BY_OVERLOAD as MOVEMENTS
from cute_sharding.ops.table import BY_OVERLOAD as SIGNATURES
from cute_sharding.sharding.deal import local_size
from cute_sharding.views import BY_OVERLOAD

_lock = fork_safe_lock()
_settings: Settings | None = None  # None: disabled
_installed: Installed | None = None
# .now: this thread is redistributing the input of a view op, whose rule is ours; .moved: what the
# op that it runs writes to instead of its arguments
_in_view = threading.local()


def enable(
    *,
    implicit_redistribution: bool | str = False,
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
    movement: bool = False,
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
        movement: slices, splits, cat, roll, flip, pad and unfold of a sharded dim move what is
            missing, in one exchange, or nothing, where some placements of the result are free; what
            torch gathers the dim for. An in-place write to such a result that is a copy, and on a
            plain tensor a view, raises.

    Raises:
        ValueError: ``implicit_redistribution`` is none of those; or ``movement`` without ``views``
            and ``ops``.

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
    switch_to(Settings.of(views, implicit_redistribution, redistribution, ops, movement))


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
    movement: bool = False,
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
        switch_to(Settings.of(views, implicit_redistribution, redistribution, ops, movement))
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
        return [] if _installed is None else _installed.names()


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
        if settings is not None:
            require(patches.TABLE)
        before, _settings = _settings, settings
        try:
            _install(settings)
        except BaseException:
            _settings = before
            _install(before)
            raise
    logger.debug("layout algebra: %s", "off" if settings is None else settings)


def _install(settings: Settings | None) -> None:
    """Put torch's own back, and then, unless ``settings`` is None, ours in its place."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None
    if settings is not None:
        _installed = Installed()  # at once: what fails half way is undone by the next call
        _fill(_installed, settings)
    _tag_compiled_graphs(settings)
    ledger.forget()
    registry.clear_propagation_caches()
    compiler.forget_compiled_code()


def _fill(installed: Installed, settings: Settings) -> None:
    """Replace what these settings need of torch_private/patches.py."""
    tracing.Tracing(installed, _local_size, equate, as_view)
    redistribution_hook.install_redistribution(
        installed, _redistribution, _redistribution_of_arguments
    )
    for name, (row, strict) in BY_OVERLOAD.items() if settings.views else ():
        op = registry.overload(name)
        if op is not None:
            stock = registry.registration(op)
            rule = strategy_of(row, name, strict, stock, settings, _tag_traced)
            registry.install_strategy(installed, op, rule)
    for name, first in WHOLE_SLICES.items() if settings.views else ():
        op = registry.overload(name)
        if op is not None and registry.registration(op).strategy is not None:
            rule = slice_strategy(first, registry.registration(op))
            registry.install_strategy(installed, op, rule)
    if settings.views and settings.ops:
        others = propagation(registry.propagation())
        op_hooks.install_propagation(
            installed,
            movement_first(others, _tag_traced) if settings.movement else others,
            tuple({**SIGNATURES, **(MOVEMENTS if settings.movement else {})}),
            gated_handler,
            writing_handler,
            op_hooks.Writes(reach, _take_back, LIVE),
        )
        state_dicts.install_state(installed, state.METHODS, state.distribute, state.visualization)


def _tag_compiled_graphs(settings: Settings | None) -> None:
    """Keep the graphs that torch.compile caches on disk apart by version, settings and rank: what a
    rank sends and holds stands in its graph, and torch's keys do not tell ranks apart.
    """
    if settings is None:
        compiler.tag_compiled_graphs(None)
        return
    rank = process_groups.this_rank() if dist.is_initialized() else None
    compiler.tag_compiled_graphs(f"{_fingerprint()}:{settings.key}:{rank}:{prepared_key()}")


def _tag_traced() -> None:
    _tag_compiled_graphs(_settings)


@cache
def _fingerprint() -> str:
    """Of this package's code: another version may answer otherwise, and compiled graphs outlive the
    process.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
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


def _redistribution(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What stands in for torch's redistribute_local_tensor: a plan's steps where they are wanted,
    else torch's own.
    """

    def redistribute(
        local: torch.Tensor,
        current: tensor_specs.DTensorSpec,
        target: tensor_specs.DTensorSpec,
        *,
        async_op: bool = False,
        is_explicit: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        settings = _settings
        if dispatch_modes.is_tracing():
            _tag_compiled_graphs(settings)  # dynamo comes by here before a cache is asked
            current, target = symints.settled_spec(current), symints.settled_spec(target)
        wanted = settings is not None and (
            settings.redistribution or getattr(_in_view, "now", False)
        )
        shape = tuple(current.shape)
        if not wanted and settings is not None:
            if not symints.is_symbolic(shape):
                wanted = not is_torchs(
                    current, target
                )  # as views make them that torch would not have
            elif dispatch_modes.is_tracing():
                wanted = bool(
                    tensor_specs.split_factors(current) or tensor_specs.split_factors(target)
                )  # torch counts the rows of such shards one by one, which it cannot
        if (
            wanted
            and not local_tensors.is_wrapper(local)
            and (
                not symints.is_symbolic(shape)
                or (symints.has_shape_env(shape) and has_values(shape))
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
        return stock(local, current, target, async_op=async_op, is_explicit=is_explicit, **options)

    return redistribute


class _Care(NamedTuple):
    """What is to be done where the arguments of an op are redistributed: by plan; of a view, the
    specs before and after, to take note of the copy; whether keyword arguments are, too.
    """

    by_plan: bool
    copied: tuple[tensor_specs.DTensorSpec, tensor_specs.DTensorSpec] | None
    keywords: bool


def _care(op_info: Any, schema: op_schemas.OpSchema) -> _Care | None:
    keywords = bool(answers.keywords(schema))
    moves = keywords or dispatch.moves(op_info, schema)
    found = _Care(
        moves and (answers.is_by_plan(schema) or registry.name_of(schema.op) in BY_OVERLOAD),
        dispatch.viewed(op_info, schema),
        keywords,
    )
    return found if any(found) or answers.writes(schema) else None


def _redistribution_of_arguments(local_args: Callable[..., None]) -> Callable[..., None]:
    """The dispatcher's step that redistributes the arguments of an op, with a note of the ops whose
    rules are ours.
    """

    def redistribute_local_args(op_info: Any, schema: op_schemas.OpSchema, *options: Any) -> None:
        if answers.is_run_by_function(schema):
            return None  # which is given them as they are
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
                dispatch.redistribute_keywords(op_info, schema)
        finally:
            _in_view.now = outer
        if settings.ops and care.copied is not None:
            spec, spec_of_moved = care.copied
            note_copy(before[0], spec, spec_of_moved, op_info.local_args[0])
        if settings.ops and answers.writes(schema):
            _in_view.moved = dispatch.moved_to(op_info, schema, before)

    return redistribute_local_args


def _take_back(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Any:
    """After an op that wrote to copies of what it was given; torch's answer, for what now is so."""
    moved, _in_view.moved = _in_view.moved, None
    return answers.with_specs(found, take_back(op, args, kwargs, moved))

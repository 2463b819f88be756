"""Switching DTensor's view ops and redistribution to our rules, and back."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cute_sharding.dtensor.bookkeeping import versions
from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock
from cute_sharding.dtensor.bookkeeping.settings import Implicit, Settings, in_force, put_in_force
from cute_sharding.dtensor.bookkeeping.stats import count_left_to_torch, logger
from cute_sharding.dtensor.compiled.local_sizes import local_size_if_known
from cute_sharding.dtensor.compiled.strided import as_view
from cute_sharding.dtensor.compiled.symbols import equate, has_values
from cute_sharding.dtensor.memory import state
from cute_sharding.dtensor.memory.copies import LIVE, before_read, has_stale, note_copy
from cute_sharding.dtensor.memory.writes import before_program, reach, take_back
from cute_sharding.dtensor.movement import SPLITS, movement_first, slices_together
from cute_sharding.dtensor.ops import (
    check_smoothing,
    gated_handler,
    loss_handler,
    propagation,
    writing_handler,
)
from cute_sharding.dtensor.redistributing.groups import prepared_key
from cute_sharding.dtensor.redistributing.packing import OtherShape
from cute_sharding.dtensor.redistributing.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.redistributing.stock import is_torchs, is_torchs_alone
from cute_sharding.dtensor.torch_private import (
    answers,
    compiler,
    composites,
    dispatch,
    dispatch_modes,
    given_placements,
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
    used,
)
from cute_sharding.dtensor.torch_private.patch import Installed, require
from cute_sharding.dtensor.torch_private.read_hook import Reads
from cute_sharding.dtensor.view_propagation.slices import WHOLE_SLICES, slice_strategy
from cute_sharding.dtensor.view_propagation.view_strategy import ViewStrategy
from cute_sharding.movement import BY_OVERLOAD as MOVEMENTS
from cute_sharding.ops.table import BY_OVERLOAD as SIGNATURES
from cute_sharding.views import BY_OVERLOAD

_lock = fork_safe_lock()
_installed: Installed | None = None
# .by_plan: this thread is redistributing the arguments of an op that was answered here (a view, an
# op by signature, the gate); .moved: what the op that it runs writes to instead of them
_thread = threading.local()


def enable(
    *,
    implicit_redistribution: bool | Implicit = "replicate",
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
    movement: bool = False,
) -> None:
    """Propagate DTensor's view ops by layout algebra, from the next op on, in every thread.

    Args:
        implicit_redistribution: what a view does where no placements of the output make it free:
            redistribute its input as torch's rules for views that may communicate do, with what
            blocks the view replicated and the rest kept ("replicate", also True), or to the
            placements under which it is free and the fewest elements are received ("cheapest");
            or raise an error that names such placements ("error", also False), of strict views
            (``view`` and friends, hence also ``reshape``): others go on as under "replicate". The
            log says once of each place, at level INFO, what is redistributed.
        redistribution: let every redistribution of DTensor (``redistribute``, ``full_tensor``, and
            what ops do to their inputs) run by plan: each missing element moves once. Without it
            these run so: the inputs of ops that are answered here (views, and others)
            and what torch is known to move wrongly. All else is moved by torch.
        views: False leaves the view ops to torch, for ``redistribution`` alone. (In place,
            ``squeeze_``, ``t_``, ``transpose_`` and ``unsqueeze_`` keep functions of ours, as
            torch has none that is right.)
        ops: what views make, other ops are handed as their signatures say (cute_sharding/ops). With
            False, torch's rules answer for them; what these are not known to get right is
            redistributed first, to what torch's views would have made. Without ``views`` it does
            nothing.
        movement: slices, splits, cat, roll, flip, pad and unfold of a sharded dim move what is
            missing, in one exchange, or nothing, where some placements of the result are free; what
            torch gathers the dim for. What is written to a slice reaches what it is a slice of.

    Raises:
        ValueError: ``implicit_redistribution`` is none of those; or ``movement`` without ``views``
            and ``ops``.

    A torch newer than those that were checked gives one RuntimeWarning in a process; one that is
    older raises a RuntimeError.

    Calling it again changes the setting. If it fails, everything is as it was. One thing a thread
    cannot take from another, as torch keeps it by thread: after a change other threads may go on
    answering (rightly) calls that they have cached as the setting before had it. So change it
    where all ranks are, before their threads run programs.

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
    switch_to(Settings.of(**locals()))  # each argument is a setting


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
    implicit_redistribution: bool | Implicit = "replicate",
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
    movement: bool = False,
) -> Iterator[None]:
    """:func:`enable` inside the ``with`` block, and what was before after it. The setting is the
    process's: blocks of two threads that overlap, neither within the other, undo one another's.

    Raises:
        ValueError, RuntimeError: as :func:`enable`.

    >>> with enabled(redistribution=True):
    ...     settings().redistribution
    True
    >>> is_enabled()
    False
    """
    wanted = Settings.of(**locals())  # each argument is a setting
    with _lock:
        before = in_force()
        switch_to(wanted)
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
    return in_force() is not None


def settings() -> Settings | None:
    """What is switched on, as the arguments of :func:`enable`; None where nothing is.

    >>> with enabled():
    ...     settings().implicit_redistribution, settings().redistribution
    ('replicate', False)
    >>> settings() is None
    True
    """
    return in_force()


def parts_replaced() -> list[str]:
    """What of torch is replaced now, by name."""
    with _lock:
        return [] if _installed is None else _installed.names()


def switch_to(settings: Settings | None) -> None:
    """Switch on what these settings say, as :func:`settings` had them. If it fails, everything is
    as it was; off, where that fails too.
    """
    with _lock:
        if settings is not None:
            versions.check()
        before = in_force()
        if settings == before:
            return
        if settings is not None:
            require((*patches.TABLE, *used.TABLE))
        put_in_force(settings)
        try:
            _install(settings)
        except BaseException:
            try:
                put_in_force(before)
                _install(before)
            except BaseException:  # it could be, and no longer can: then off, which is whole
                put_in_force(None)
                _install(None)
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
    registry.clear_propagation_caches()
    compiler.forget_compiled_code()


def _fill(installed: Installed, settings: Settings) -> None:
    """Replace what these settings need of torch_private/patches.py."""
    tracing.Tracing(
        installed, local_size_if_known, equate, as_view, before_program, LIVE, _tag_traced
    )
    redistribution_hook.install_redistribution(
        installed, _redistribution, _redistribution_of_arguments
    )
    if settings.views:
        registry.install_strategies(installed, _strategies(settings))
        others = propagation(registry.propagation(), by_signatures=settings.ops)
        op_hooks.install_propagation(
            installed,
            movement_first(others, _tag_traced, is_on=settings.movement),
            tuple({**SIGNATURES, **(MOVEMENTS if settings.movement else {})}),
            partial(gated_handler, by_signatures=settings.ops),
            writing_handler,
            op_hooks.Writes(reach, _take_back, LIVE),
        )
        if settings.movement:
            composites.install_composites(installed, SPLITS, slices_together)
        Reads(installed, before_read, has_stale())
        given_placements.install_given_placements(installed, loss_handler)
        state_dicts.install_state(installed, state.METHODS, state.distribute, state.visualization)


def _strategies(settings: Settings) -> dict[Any, Callable[..., Any]]:
    """Of view ops, and of slices that take a whole dim."""
    found: dict[Any, Callable[..., Any]] = {}
    for name, (row, strict) in BY_OVERLOAD.items():
        op = registry.overload(name)
        if op is not None:
            stock = registry.registration(op)
            found[op] = ViewStrategy(row, name, strict, stock, settings, _tag_traced)
    for name, first in WHOLE_SLICES.items():
        op = registry.overload(name)
        if op is not None and registry.registration(op).strategy is not None:
            found[op] = slice_strategy(first, registry.registration(op))
    return found


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
    _tag_compiled_graphs(in_force())


@cache
def _fingerprint() -> str:
    """Of this package's code: another version may answer otherwise, and compiled graphs outlive the
    process.
    """
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _is_planned(
    local: torch.Tensor,
    current: tensor_specs.DTensorSpec,
    target: tensor_specs.DTensorSpec,
    settings: Settings,
) -> bool:
    """Whether a plan redistributes, and not torch. Alike on all ranks: it depends on the specs, the
    settings and the op alone.
    """
    if local_tensors.is_wrapper(local):
        return False
    if not tensor_specs.are_known((*current.placements, *target.placements)):
        return False
    shape = tuple(current.shape)
    is_symbolic = symints.is_symbolic(shape)
    if settings.redistribution or getattr(_thread, "by_plan", False):
        wanted = True
    elif not is_symbolic:
        # Placements that views make, and that torch would misread or move wrongly.
        wanted = not is_torchs(current, target)
    else:
        # torch counts the rows of strided shards one by one, which it cannot of symbols.
        strided = tensor_specs.split_factors(current) or tensor_specs.split_factors(target)
        ascend = process_groups.is_ascending(current.mesh)
        wanted = dispatch_modes.is_tracing() and (bool(strided) or not ascend)
    return wanted and (not is_symbolic or (symints.has_shape_env(shape) and has_values(shape)))


def _redistribution(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For torch's redistribute_local_tensor: a plan's steps where they are wanted, else torch's."""

    def redistribute(
        local_tensor: torch.Tensor,
        current_spec: tensor_specs.DTensorSpec,
        target_spec: tensor_specs.DTensorSpec,
        *,
        async_op: bool = False,
        is_explicit: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        local, current, target = local_tensor, current_spec, target_spec
        settings = in_force()
        how = {"async_op": async_op, "is_explicit": is_explicit}
        if settings is None:
            return stock(local, current, target, **how, **options)
        if dispatch_modes.is_tracing():
            _tag_compiled_graphs(settings)  # dynamo comes by here before a cache is asked
            current, target = symints.settled_spec(current), symints.settled_spec(target)
        if _is_planned(local, current, target, settings):
            # What a rule of ours asks for is an outcome of the op, and not counted again.
            counted = settings.redistribution or not getattr(_thread, "by_plan", False)
            try:
                return redistribute_local_tensor(local, current, target, counted=counted, **how)
            except OtherShape:
                if not is_torchs_alone(current, target):
                    raise
        if settings.redistribution:
            count_left_to_torch()
        return stock(local, current, target, **how, **options)

    return redistribute


class _Care(NamedTuple):
    """How an op's arguments are redistributed: by plan; of a view, the specs before and after, to
    note the copy; whether keyword arguments are, too.
    """

    by_plan: bool
    copied: tuple[tensor_specs.DTensorSpec, tensor_specs.DTensorSpec] | None
    has_more: bool


def _care(op_info: Any, schema: op_schemas.OpSchema) -> _Care | None:
    has_more, op = dispatch.has_more(schema), answers.op_of(schema)
    moves = has_more or dispatch.moves(op_info, schema)
    copied = dispatch.viewed(op_info, schema)
    found = _Care(
        moves and (answers.is_by_plan(schema) or registry.name_of(op) in BY_OVERLOAD),
        copied,
        has_more,
    )
    return found if any(found) or answers.writes(schema) else None


def _redistribution_of_arguments(local_args: Callable[..., None]) -> Callable[..., None]:
    """The dispatcher's step that redistributes an op's arguments, noting ops by rules of ours."""

    def redistribute_local_args(
        op_info: Any, suggested_input_schema: op_schemas.OpSchema, *args: Any, **options: Any
    ) -> None:
        schema = suggested_input_schema
        if answers.is_run_by_function(schema):
            return None  # which is given them as they are
        try:
            # Each view comes by here: what there is to care for is found once.
            care = schema._cute_sharding_care  # type: ignore[attr-defined]
        except AttributeError:
            care = schema._cute_sharding_care = _care(op_info, schema)  # type: ignore[attr-defined]
        settings = in_force()
        if care is None or settings is None or not settings.views:
            return local_args(op_info, schema, *args, **options)
        before = op_info.local_args
        outer, _thread.by_plan = getattr(_thread, "by_plan", False), care.by_plan
        try:
            local_args(op_info, schema, *args, **options)
            if care.has_more:
                dispatch.finish(op_info, schema)
        finally:
            _thread.by_plan = outer
        if care.copied is not None:
            spec, spec_of_moved = care.copied
            note_copy(before[0], spec, spec_of_moved, op_info.local_args[0])
        if answers.writes(schema):
            _thread.moved = dispatch.moved_to(op_info, schema, before)

    return redistribute_local_args


def _take_back(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Any:
    """After an op that wrote to copies of what it was given; torch's answer, for what now is so."""
    moved, _thread.moved = _thread.moved, None
    check_smoothing(op, args)
    return answers.with_specs(found, take_back(op, args, kwargs, moved))

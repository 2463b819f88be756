"""Switching DTensor's view ops and redistribution to our rules, and back."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cute_sharding.dtensor import compat, ledger, state, versions
from cute_sharding.dtensor.groups import prepared_key
from cute_sharding.dtensor.locks import fork_safe_lock
from cute_sharding.dtensor.ops import gated_handler, propagation, writing_handler
from cute_sharding.dtensor.placements import Cuts, cut_of, replaced, text
from cute_sharding.dtensor.propagate import Decision, ask, decide, refusals_counted
from cute_sharding.dtensor.reading import agree
from cute_sharding.dtensor.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.settings import Settings
from cute_sharding.dtensor.stats import count, count_left_to_torch, logger
from cute_sharding.dtensor.stock import is_torchs, moves_rightly
from cute_sharding.dtensor.strided import as_view
from cute_sharding.dtensor.symbols import equate, has_values, hinted, known, symbols_of, unknown
from cute_sharding.dtensor.writes import LIVE, note_copy, reach, take_back
from cute_sharding.layout import Size, Undecided
from cute_sharding.ops.table import BY_OVERLOAD as SIGNATURES
from cute_sharding.sharding.deal import local_size
from cute_sharding.views import BY_OVERLOAD, Row, View, carry

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
    """
    switch_to(Settings.of(views, implicit_redistribution, redistribution, ops))


def disable() -> None:
    """Go back to torch's own rules, from the next op on. Does nothing where they are in force."""
    switch_to(None)


@contextmanager
def enabled(
    *,
    implicit_redistribution: bool | str = False,
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
) -> Iterator[None]:
    """:func:`enable` inside the ``with`` block, and what was before after it."""
    with _lock:
        before = _settings
        switch_to(Settings.of(views, implicit_redistribution, redistribution, ops))
    try:
        yield
    finally:
        switch_to(before)


def is_enabled() -> bool:
    """Whether anything is switched on; :func:`settings` says what."""
    return _settings is not None


def settings() -> Settings | None:
    """What is switched on, as the arguments of :func:`enable`; None where nothing is."""
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
                compat.install_strategy(op, _strategy(row, name, strict, stock, settings))
        for name, first in WHOLE_SLICES.items() if settings.views else ():
            op = compat.overload(name)
            if op is not None and compat.registration(op).strategy is not None:
                stock = compat.registration(op)
                _stock.append(stock)
                compat.install_strategy(op, _slice_strategy(first, stock))
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
    specs before and after, to take note of the copy.
    """

    by_plan: bool
    copied: tuple[compat.DTensorSpec, compat.DTensorSpec] | None


def _care(op_info: Any, schema: compat.OpSchema) -> _Care | None:
    moves = compat.moves(op_info, schema)
    found = _Care(
        moves and (compat.is_by_plan(schema) or compat.name_of(schema.op) in BY_OVERLOAD),
        compat.viewed(op_info, schema),
    )
    return found if found.by_plan or found.copied is not None or compat.writes(schema) else None


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


def _reachable(settings: Settings, spec: compat.DTensorSpec, target: Cuts) -> bool:
    """Whether an explicit redistribution, as it runs under ``settings``, can be trusted to take
    ``spec`` to ``target``.
    """
    with symbols_of(tuple(spec.shape)):
        return settings.redistribution or moves_rightly(
            compat.with_shape(spec, hinted(known(tuple(spec.shape)))), hinted(target)
        )


def _says_what_it_means(
    view: View, spec: compat.DTensorSpec, decision: Decision, *, sized: bool
) -> bool:
    """Whether the decision holds however the placements are read (reading.py). torch marks the
    result, and a redistributed input, as its input was marked: to be read as a shard order, or not.
    """
    if not spec.use_strided_shard_as_shard_order:
        return True
    shapes: Any = (
        (view.input_shape, spec.placements),
        (view.input_shape, decision.source),
        (view.output_shape, decision.output),
    )
    if any(isinstance(n, Size) for shape, _ in shapes for n in shape):
        if all(_divides(shape, spec.mesh.shape, placements) for shape, placements in shapes):
            return True
        # Which readings differ is then a matter of numbers.
        shapes = [([int(unknown(n)) for n in shape], placements) for shape, placements in shapes]
    if all(agree(shape, spec, placements) for shape, placements in shapes):
        return True
    if sized:
        return False
    # Whole dims that keep their cuts, as in a permutation, hold in any reading.
    before, after = (
        [cut_of(p) for p in placements] for placements in (spec.placements, decision.output)
    )
    moved = {(a[0], b[0]) for a, b in zip(before, after) if a is not None and b is not None}
    same = all(
        a == b
        or (
            a is not None
            and b is not None
            and a[1] == b[1]
            and view.input_shape[a[0]] == view.output_shape[b[0]]
        )
        for a, b in zip(before, after)
    )
    return (
        decision.source == tuple(spec.placements)
        and same
        and len({a for a, _ in moved}) == len({b for _, b in moved}) == len(moved)
    )


def _divides(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[compat.Placement]
) -> bool:
    """Whether the mesh dims that shard a dim divide it together, so that all readings say
    the same.
    """
    parts = [1] * len(shape)
    for placement, n in zip(placements, mesh):
        cut = cut_of(placement)
        if cut is not None:
            parts[cut[0]] *= n
    return all(n % m == 0 for n, m in zip(shape, parts))


def _whole(
    view: View,
    spec: compat.DTensorSpec,
    mesh: tuple[int, ...],
    decision: Decision,
    name: str,
    *,
    may_redistribute: Callable[[], bool],
) -> Decision:
    """The decision with an input that is not sharded."""
    if not may_redistribute():
        raise RuntimeError(
            f"{name}: the placements {text(spec.placements)} of a tensor of shape "
            f"{tuple(spec.shape)} can be read left to right or as a shard order, and where sizes "
            "do not divide these "
            "differ. Redistribute it first, to placements without _StridedShard: "
            f".redistribute(placements={[compat.Replicate()] * len(mesh)!r}), with "
            "cute_sharding.enable(redistribution=True)."
        )
    source = tuple([p if cut_of(p) is None else compat.Replicate() for p in decision.source])
    return Decision(
        source, replaced(source, carry(view, (None,) * len(mesh), mesh).cuts), "redistribution"
    )


# Slices that a compiler writes for the `:` of `x[:, :, None]`, which eager programs never run:
# (overload, where its arguments dim, start, end, step begin).
WHOLE_SLICES = {"slice.Tensor": 1, "slice_backward.default": 2}


def _slice_strategy(
    first: int, stock: compat.Registration
) -> Callable[[compat.OpSchema], compat.OpStrategy]:
    """The strategy of a slice: one that takes a whole dim leaves its placements alone; torch
    gathers the dim where its size is symbolic. All others are torch's.
    """

    def strategy(schema: compat.OpSchema) -> compat.OpStrategy:
        given: Any = schema.args_schema[0]
        arguments: list[Any] = list(schema.args_schema[first:])
        _, start, end, step = arguments + [0, None, None, 1][len(arguments) :]
        whole = (
            (start is None or (type(start) is int and start == 0))
            and (end is None or (type(end) is int and end >= sys.maxsize))
            and type(step) is int
            and step == 1
        )
        if not whole:
            return stock.strategy(schema)  # type: ignore[misc]
        result = compat.OpStrategy([])
        for option in given.strategies:
            spec = option.output_spec
            result.strategies.append(
                compat.op_spec(
                    given, spec, spec.mesh, tuple(spec.placements), tuple(spec.placements)
                )
            )
        return result

    return strategy


def _strategy(
    row: Row, name: str, strict: bool, stock: compat.Registration, settings: Settings
) -> Callable[[compat.OpSchema], compat.OpStrategy]:
    """The sharding strategy of one aten overload."""

    def strategy(schema: compat.OpSchema) -> compat.OpStrategy:
        if compat.is_tracing():
            _tag_compiled_graphs(_settings)
        given: Any = schema.args_schema[0]
        shape, arguments = tuple(given.shape), schema.args_schema[1:]
        sized = (
            shape,
            arguments,
            tuple(schema.kwargs_schema.values()),
            *(compat.split_factors(option.output_spec) for option in given.strategies),
        )
        if not compat.is_symbolic(*sized):
            return decided(schema, given, shape, arguments, schema.kwargs_schema)
        if stock.strategy is not None and not compat.has_shape_env(*sized):
            count(name, "stock")
            logger.debug(
                "%s: shape %s has sizes of another kind than a compiler's: left to torch's own "
                "rule",
                name,
                shape,
            )
            return stock.strategy(schema)
        with symbols_of(*sized):
            return decided(
                schema,
                given,
                known(shape),
                known(arguments),
                {key: known(value) for key, value in schema.kwargs_schema.items()},
            )

    def decided(
        schema: compat.OpSchema,
        given: Any,
        shape: Sequence[int],
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> compat.OpStrategy:
        mesh = schema.get_mesh_from_args(validate=False)
        sizes = tuple(mesh.shape)
        if sizes == (1,):
            # On one device every placement is right, and torch uses just such a mesh as a stand-in:
            # for an op without a rule it traces the decomposition there, and takes what it learns
            # for true of the real mesh (_decompositions.py). So nothing may be answered that is
            # true of one device only.
            if stock.strategy is not None:
                count(name, "stock")
                return stock.strategy(schema)
            sizes = (2,)
        view = row.view(shape, *arguments, **options)
        result = compat.OpStrategy([])
        for option in given.strategies:
            spec = option.output_spec
            with refusals_counted(name):
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
                    stock=partial(stock_source, schema, spec, sizes),
                    diverged=lambda: ledger.diverged(mesh),
                    reachable=partial(_reachable, settings, spec),
                )
                if spec.use_strided_shard_as_shard_order:
                    decision = decision._replace(output=compat.settled(decision.output))
                if not _says_what_it_means(
                    view, spec, decision, sized=compat.takes_local_sizes(schema.op)
                ):
                    decision = _whole(
                        view,
                        spec,
                        sizes,
                        decision,
                        name,
                        may_redistribute=partial(may_redistribute, schema, spec, sizes),
                    )
            if decision.outcome != "redistribution" and any(
                cut_of(p) is not None for p in decision.output
            ):
                ledger.note(mesh, partial(stock_moves, schema, spec, sizes))
            count(name, decision.outcome)
            result.strategies.append(
                compat.op_spec(given, spec, mesh, decision.source, decision.output)
            )
        return result

    def stock_source(
        schema: compat.OpSchema, spec: compat.DTensorSpec, mesh: tuple[int, ...]
    ) -> tuple[compat.Placement, ...]:
        """The placements that torch's own rule wants of the input. Raises what the rule raises.
        (Its strategy would weigh what redistributing costs as well: seconds, on a mesh of three
        dims.)
        """
        if stock.strategy is None or row.pairs:
            return compat.stock_input_placements(stock, schema)
        rule = compat.torch_rule(
            row.rule(tuple(spec.shape), *schema.args_schema[1:], **schema.kwargs_schema)
        )
        return tuple(
            compat.stock_propagate(spec.placements, tuple(spec.shape), rule, mesh, strict)[0]
        )

    def stock_moves(
        schema: compat.OpSchema, spec: compat.DTensorSpec, mesh: tuple[int, ...]
    ) -> bool:
        """Whether torch would have redistributed the input. (Where it raises, no program that runs
        on torch's rules comes by here.) Of symbols it is not asked, for each answer would be a
        guard.
        """
        return compat.is_symbolic(tuple(spec.shape), schema.args_schema[1:]) or ask(
            partial(stock_source, schema, spec, mesh)
        )[0] not in (None, tuple(spec.placements))

    def may_redistribute(
        schema: compat.OpSchema, spec: compat.DTensorSpec, mesh: tuple[int, ...]
    ) -> bool:
        """Whether an input that can be read in two ways may be replicated: where views may
        communicate, or torch runs the view.
        """
        return (
            not strict
            or bool(settings.implicit_redistribution)
            or ask(partial(stock_source, schema, spec, mesh))[0] is not None
        )

    return strategy

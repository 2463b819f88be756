"""Switching DTensor's view ops and redistribution to our rules, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from cute_sharding._settings import TABLE
from cute_sharding.dtensor.bookkeeping import versions
from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock
from cute_sharding.dtensor.bookkeeping.settings import Implicit, Settings, in_force, put_in_force
from cute_sharding.dtensor.bookkeeping.stats import logger
from cute_sharding.dtensor.compiled.local_sizes import local_size_if_known
from cute_sharding.dtensor.compiled.strided import as_view
from cute_sharding.dtensor.compiled.symbols import equate
from cute_sharding.dtensor.decide import (
    gated_handler,
    loss_handler,
    on_one_mesh,
    propagation,
    redistribution,
    redistribution_of_arguments,
    writing_handler,
)
from cute_sharding.dtensor.extras import state
from cute_sharding.dtensor.extras.copies import LIVE, before_read, has_stale
from cute_sharding.dtensor.extras.mapped import with_global_shapes
from cute_sharding.dtensor.extras.writes import before_program, reach
from cute_sharding.dtensor.movement import SPLITS, movement_first, slices_together
from cute_sharding.dtensor.replaced import (
    compiler,
    composites,
    given_placements,
    op_hooks,
    patches,
    redistribution_hook,
    registry,
    state_dicts,
    tracing,
    used,
)
from cute_sharding.dtensor.replaced.patch import Installed, require
from cute_sharding.dtensor.replaced.read_hook import Reads
from cute_sharding.dtensor.run import graph_keys
from cute_sharding.movement import BY_OVERLOAD as MOVEMENTS
from cute_sharding.movement.signatures import SIGNATURES
from cute_sharding.redistribution.network import Network
from cute_sharding.views import BY_OVERLOAD as VIEWS

_lock = fork_safe_lock()
_installed: Installed | None = None


def enable(
    *,
    implicit_redistribution: bool | Implicit = "replicate",
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
    movement: bool = False,
    network: Network | str | None = None,
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
            what ops do to their inputs) run by plan: each missing element moves once. Without it so
            do the inputs of views and of ops that have a row, and what torch is known to move
            wrongly; all else is moved by torch.
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
        network: by what plans are chosen and shown, as a Network or text (docs/flags.md); by
            default NVLink within hosts of eight devices and InfiniBand between.

    Raises:
        ValueError, TypeError: one is none of those; or ``movement`` without ``views`` and ``ops``.

    A torch newer than those that were checked gives one RuntimeWarning in a process; one that is
    older raises a RuntimeError. Calling it again changes the setting. If it fails, everything is as
    it was. One thing a thread cannot take from another, as torch keeps it by thread: other threads
    may go on answering (rightly) calls that they have cached as the setting before had it. So
    change it where all ranks are, before their threads run programs.

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
    network: Network | str | None = None,
) -> Iterator[None]:
    """:func:`enable` inside the ``with`` block, and what was before after it. The setting is the
    process's: blocks of two threads that overlap, neither within the other, undo one another's.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`enable`.

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
            _check_network(settings.network)
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


def _check_network(chosen: Any) -> None:
    if isinstance(chosen, str):
        Network.parse(chosen)
    elif not isinstance(chosen, Network | None):
        raise TypeError(
            f"network={chosen!r} is a {type(chosen).__name__}: give a Network of "
            f"cute_sharding.redistribution, or text: {TABLE['network'].forms}"
        )


def _install(settings: Settings | None) -> None:
    """Put torch's own back, and then, unless ``settings`` is None, ours in its place."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None
    if settings is not None:
        _installed = Installed()  # at once: what fails half way is undone by the next call
        _fill(_installed, settings)
    graph_keys.tag(settings)
    registry.clear_propagation_caches()
    compiler.forget_compiled_code()


def _fill(installed: Installed, settings: Settings) -> None:
    """Replace what these settings need of replaced/patches.py."""
    tracing.Tracing(
        installed, local_size_if_known, equate, as_view, before_program, LIVE, graph_keys.tag_traced
    )
    redistribution_hook.install_redistribution(
        installed, redistribution, redistribution_of_arguments
    )
    if settings.views:
        stock = registry.propagation()
        op_hooks.install_propagation(
            installed,
            on_one_mesh(
                movement_first(propagation(stock, settings), is_on=settings.movement, stock=stock)
            ),
            tuple({**VIEWS, **SIGNATURES, **(MOVEMENTS if settings.movement else {})}),
            partial(gated_handler, by_signatures=settings.ops),
            writing_handler,
            reach,
            LIVE,
        )
        if settings.movement:
            composites.install_composites(installed, SPLITS, slices_together)
        Reads(installed, before_read, has_stale())
        given_placements.install_given_placements(installed, loss_handler, with_global_shapes)
        state_dicts.install_state(installed, state.METHODS, state.distribute, state.visualization)

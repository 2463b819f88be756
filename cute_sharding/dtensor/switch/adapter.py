"""Switches DTensor's view ops and redistribution to our rules, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cute_sharding._settings import TABLE
from cute_sharding.dtensor.bookkeeping import versions
from cute_sharding.dtensor.bookkeeping.locks import fork_safe_lock
from cute_sharding.dtensor.bookkeeping.settings import Settings, in_force, put_in_force
from cute_sharding.dtensor.bookkeeping.stats import logger
from cute_sharding.dtensor.compiled.symbols import equate, local_size_if_known
from cute_sharding.dtensor.decide import (
    gated_handler,
    loss_handler,
    propagation,
    redistribute,
    redistribution_of_arguments,
    slices_together,
    writing_handler,
)
from cute_sharding.dtensor.door.composed import sharded_again
from cute_sharding.dtensor.door.held import local_shape
from cute_sharding.dtensor.extras import state, wrappers
from cute_sharding.dtensor.extras.mapped import (
    check_locals,
    distributed,
    gather_to_distribute,
    lenient_local_map,
)
from cute_sharding.dtensor.fixes.filled import handlers_in_nodes
from cute_sharding.dtensor.fixes.in_place import views_in_place
from cute_sharding.dtensor.programs.traced import planned_graph
from cute_sharding.dtensor.replaced import (
    compiler,
    composites,
    forward_mode,
    fully_sharded,
    given_placements,
    indices,
    mixed_lists,
    op_schemas,
    patches,
    redistribution_hook,
    state_dicts,
    used,
)
from cute_sharding.dtensor.replaced.patch import Installed, require
from cute_sharding.dtensor.replaced.read_hook import WatchedReads
from cute_sharding.dtensor.run import in_graphs
from cute_sharding.dtensor.run.op_plan import answered
from cute_sharding.dtensor.run.ops import LIVE, before_program, check_read, has_stale, reach
from cute_sharding.exchange.network import Network
from cute_sharding.relations.strided import STRIDED
from cute_sharding.relations.table import OF_TORCH
from cute_sharding.relations.table.windows import BY_SCALES

_lock = fork_safe_lock()
_installed: Installed | None = None


def enable(
    *,
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
    movement: bool = False,
    network: Network | str | None = None,
    implicit_redistribution: Any = None,
) -> None:
    """Switch the package on, from the next op on, in every thread.

    Args:
        redistribution: plan every redistribution (``redistribute``, ``full_tensor``, and those of
            the operands of ops), so that each missing element moves once. With False, the package
            plans only redistributions of the inputs of views, of the operands of ops with a
            signature, and of placements that PyTorch redistributes wrongly.
        views: with False, PyTorch runs view ops. Use False to switch on ``redistribution`` alone.
        ops: use signatures to choose the placements of ops that are not views (docs/ops.md). With
            False, PyTorch's rules choose, and a fallback first redistributes the operands if a rule
            could be wrong. Without ``views``, this argument has no effect.
        movement: for slices, splits, cat, roll, flip, pad and unfold of a sharded dim, send a
            device only the elements that it lacks, in one exchange at most. PyTorch gathers the
            dim. Writes to a slice reach the sliced tensor.
        network: the network by which plans are chosen and shown, as a Network or text
            (docs/flags.md). By default, NVLink within hosts of eight devices and InfiniBand between
            hosts.
        implicit_redistribution: has no effect, warns, and will be removed in version 0.4.

    Raises:
        ValueError, TypeError: an argument has an unknown value, or ``movement`` is on without
            ``views`` and ``ops``.
        RuntimeError: this PyTorch is older than the oldest supported release.

    If this PyTorch is newer than the newest tested release, the first call warns. A second call
    changes the settings. If a call fails, the settings stay as they were.

    In each thread, PyTorch caches the placements of some calls. So after a change of the settings,
    other threads may use old placements. Change settings before other threads run ops.

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
    """Switch the package off, so that PyTorch's rules apply from the next op on.

    >>> enable()
    >>> disable()
    >>> is_enabled()
    False
    """
    switch_to(None)


@contextmanager
def enabled(
    *,
    redistribution: bool = False,
    views: bool = True,
    ops: bool = True,
    movement: bool = False,
    network: Network | str | None = None,
    implicit_redistribution: Any = None,
) -> Iterator[None]:
    """:func:`enable` inside the ``with`` block, and the settings before it afterwards.

    Settings belong to the process, not to a thread. If the blocks of two threads overlap, the end
    of one block changes the settings of the other.

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
    """The settings in force, as the arguments of :func:`enable`; None if the package is off.

    >>> with enabled():
    ...     settings().views, settings().redistribution
    (True, False)
    >>> settings() is None
    True
    """
    return in_force()


def objects_replaced() -> dict[str, int]:
    """The objects of torch that are replaced now, with the number of entries of each."""
    with _lock:
        return {} if _installed is None else _installed.objects()


def switch_to(settings: Settings | None) -> None:
    """Put these settings in force; None switches off. If that fails, everything is as it was; or
    off, if that fails too.
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
            except BaseException:  # no longer possible: switch off, which always is
                put_in_force(None)
                _install(None)
            raise
    logger.debug("layout algebra: %s", "off" if settings is None else settings)


def _check_network(chosen: Any) -> None:
    if isinstance(chosen, str):
        Network.parse(chosen)
    elif not isinstance(chosen, Network | None):
        raise TypeError(
            f"network={chosen!r} is a {type(chosen).__name__}, not a network: pass a "
            f"cute_sharding.exchange.Network, or text of the form {TABLE['network'].forms}"
        )


def _install(settings: Settings | None) -> None:
    """Put torch's own back, and then, unless ``settings`` is None, replace it by ours."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None
    if settings is not None:
        _installed = Installed()  # set now: if _fill fails half way, the next call undoes it
        _fill(_installed, settings)  # which tags graphs, if Inductor is imported
    else:
        in_graphs.tag(None)
    op_schemas.clear_propagation_caches()
    compiler.forget_compiled_code()


def _fill(installed: Installed, settings: Settings) -> None:
    """Install the rows of replaced/patches.py that these settings need."""
    compiler.Tracing(
        installed,
        local_size_if_known,
        equate,
        before_program,
        LIVE,
        in_graphs.tag_traced,
        planned_graph,
    )
    given_placements.install_distribution(
        installed, gather_to_distribute, distributed, check_locals
    )
    fully_sharded.install_composition(installed, sharded_again, local_shape)
    state_dicts.install_state(installed, state.METHODS, state.distribute)
    redistribution_hook.install_redistribution(installed, redistribute, redistribution_of_arguments)
    if settings.views:
        op_schemas.install_propagation(
            installed,
            propagation(op_schemas.propagation(), settings),
            gated_handler,
            writing_handler,
            {**handlers_in_nodes(), **views_in_place()},
            reach,
            LIVE,
            answered,
        )
        makers = [name for name, row in OF_TORCH.items() if row.makes_constants]
        composites.install_makers(installed, makers)
        composites.install_strided(installed, STRIDED)
        composites.install_interpolations(installed, BY_SCALES)
        indices.install_indices(installed)
        mixed_lists.install_mixed_lists(installed)
        forward_mode.install_forward_mode(installed)
        if settings.movement:
            taken_apart = [name for name, row in OF_TORCH.items() if row.made_of]
            composites.install_composites(installed, taken_apart, slices_together)
        WatchedReads(installed, check_read, has_stale())
        given_placements.install_given_placements(installed, loss_handler, lenient_local_map)
        for row, wrap in wrappers.METHODS.items():
            installed.replace(row, wrap)

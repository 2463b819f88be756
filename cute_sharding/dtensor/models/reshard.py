"""``reshard`` and ``plan_reshard``: a model, an optimizer, a state dict, from any meshes to any
others; and the plans that run, as often as is wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding._words import counted
from cute_sharding.dtensor.bookkeeping.stats import as_text
from cute_sharding.dtensor.models.nests import (
    LeafPlace,
    Nest,
    State,
    check_movable,
    memory_of,
    put_in_places,
)
from cute_sharding.dtensor.models.since import Update
from cute_sharding.dtensor.models.targets import Targets, WantedOfAll
from cute_sharding.dtensor.replaced import communication, compiler, dispatch_modes, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial
from cute_sharding.dtensor.run.across_meshes import as_sent, placed_ends, plan_between
from cute_sharding.dtensor.run.groups import means
from cute_sharding.dtensor.run.packing import in_shape, lay_out
from cute_sharding.dtensor.run.runner import Land, PlanRunner, device_of
from cute_sharding.dtensor.run.specs import Spec, dtype_of
from cute_sharding.dtensor.run.this_process import OfThisProcess
from cute_sharding.exchange import Network
from cute_sharding.models import PlacedTensor, ReshardPlan, plan_models
from cute_sharding.models.plan import named_ways

T = TypeVar("T")


@compiler.outside_graphs
def reshard(
    state: T,
    placements: WantedOfAll,
    mesh: DeviceMesh | None = None,
    *,
    memory_limit: int | None = None,
    progress: bool = False,
    dtype: torch.dtype | None = None,
) -> T:
    """Move the DTensors of ``state`` to other placements, on any mesh: many tensors in few
    exchanges.

    Every rank receives exactly once each element that it needs and does not hold, in one message
    from each peer for all tensors that move together. Each ``Partial`` is reduced first. If
    ``state`` has a tensor in several places, the tensor moves once, and stays one tensor. Call it
    on all ranks of all meshes with the same names and arguments. A rank outside of all meshes gets
    DTensors without data.

    Args:
        state: a module, an optimizer, or nested dicts, lists and tuples of modules, optimizers and
            tensors. It is changed in place. A parameter stays the same object, so an optimizer of
            the parameter remains valid, and the optimizer's state of the parameter moves too. Other
            DTensors are replaced. Plain tensors and other objects stay.
        placements: a function of name and DTensor; a dict from names, or patterns of names (as in
            fnmatch; the first that fits), to placements; a nested structure of the same form as
            ``state``; or placements for all tensors. A tensor without placements, or with None,
            stays. If you give a DTensor instead of placements, its mesh and dtype apply too.
        mesh: the target mesh, of the same device type; by default the mesh of each tensor.
        memory_limit: the most bytes of sources, targets and buffers that a device may hold. With a
            limit, the tensors move in more exchanges, and each source is freed when its target is
            complete. By default, the tensors of one exchange have an eighth of the bytes that a
            device sends and receives, at least 64 MiB and at most 1 GiB.
        progress: show a bar of tensors, on the first rank, by tqdm.
        dtype: the new dtype of floating point tensors (except an optimizer's state). A tensor is
            sent in the smaller of the two dtypes.

    Returns:
        ``state``; if it is a tensor or a tuple, a new one.

    Raises:
        ValueError, TypeError: the arguments do not fit together or the state, a tensor has a
            gradient, or no plan keeps within ``memory_limit``. No tensor has moved.
        RuntimeError: a local tensor does not have the shape that its placements give, and no tensor
            has moved; or the move failed. The attributes ``moved`` and ``left`` of the error name
            the tensors that have moved completely, and those that are unchanged.
        ImportError: ``progress`` is True, and tqdm is not installed.

    The method is in docs/resharding.md.

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> store = FakeStore()  # this process is rank 0 of four, of which the others are made up
    >>> torch.distributed.init_process_group("fake", rank=0, world_size=4, store=store)
    >>> line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    >>> weights = {
    ...     f"layers.{i}.{name}": distribute_tensor(torch.ones(8, 12), line, [Shard(0)])
    ...     for i in range(3)
    ...     for name in ("wq", "wo")
    ... }
    >>> moved = reshard(weights, {"*.wq": "S(0), R", "*.wo": "R, S(1)"}, square)
    >>> [tuple(moved[f"layers.0.{name}"].to_local().shape) for name in ("wq", "wo")]
    [(4, 12), (8, 6)]
    >>> torch.distributed.destroy_process_group()
    """
    bar_of: Any = tqdm_of("reshard") if progress else None
    whole = State(state)
    plan = planned(whole, Targets(placements, mesh, dtype), memory_limit)
    is_first = bar_of is not None and plan.ranks[:1] == (communication.this_rank(),)
    if not is_first:
        result: T = plan.run_with(whole)
        return result
    moving = sum(not tensor.stays for tensor in plan.tensors)
    with bar_of(total=moving, unit="tensor", desc="reshard") as bar:
        result = plan.run_with(whole, bar.update)
    return result


def tqdm_of(function: str) -> Any:
    """The class of bars.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        return importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise ImportError(
            f"{function}(progress=True) needs tqdm, which cannot be imported ({error}): run pip "
            "install tqdm, or leave out progress=True",
            name="tqdm",
        ) from error


@compiler.outside_graphs
def plan_reshard(
    source: Nest | Mapping[str, Spec],
    target: WantedOfAll | Nest | Mapping[str, Spec],
    mesh: DeviceMesh | None = None,
    *,
    memory_limit: int | None = None,
    dtype: torch.dtype | None = None,
    network: Network | None = None,
) -> ReshardPlan:
    """Plan how the tensors of ``source`` move to the meshes and placements of ``target``: the
    exchanges, and the bytes that ranks receive and hold. A plan between DTensors can run any number
    of times.

    Args:
        source: a state, as for :func:`reshard`. Its DTensors may be on the meta device. Or a dict
            of :class:`cute_sharding.Spec` by name, whose meshes need not exist: such a plan cannot
            run.
        target: as ``placements`` of :func:`reshard`; or a state or dict of the same form, whose
            tensors give mesh, placements and dtype.
        mesh, memory_limit, dtype: as for :func:`reshard`.
        network: the links that give the times of the plan.

    Returns:
        The plan: ``.packed``, ``.collectives``, ``.received_bytes`` (of the busiest rank),
            ``.lower_bound``, ``.received_by_link``, ``.peak_bytes``, ``.coverage``, ``.seconds``,
            ``str()``, ``.to_dict()``. A plan between DTensors also has ``.run(state)``,
            ``.send(state)`` for ranks that only have the source, and ``.receive()`` for ranks that
            only need the target. These plan nothing, and send only elements. With ``into=`` they
            write to existing tensors, and with ``since=`` they send only changed elements. On the
            CPU, without a limit, the plan keeps its buffers until ``.free()``.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`reshard`.

    The method is in docs/resharding.md.

    >>> from cute_sharding import Spec
    >>> weights = {f"layers.{i}.weight": Spec((1024, 512), (8,), "S(0)") for i in range(4)}
    >>> columns = {name: Spec((1024, 512), (2, 2), "S(1), R") for name in weights}
    >>> plan = plan_reshard(weights, columns)
    >>> plan.collectives, plan.received_bytes == plan.lower_bound, plan.coverage.is_whole
    (1, True, True)
    """
    if _are_specs(source):
        if not (_are_specs(target) and source.keys() == target.keys()):
            raise ValueError(
                "source is a dict of Specs, but target is not a dict of Specs with the same "
                "names: pass one Spec in target for each name in source"
            )
        pairs = [(name, spec.placed(), target[name].placed()) for name, spec in source.items()]
        return plan_models(pairs, memory_limit, network)
    return planned(State(source), Targets(target, mesh, dtype), memory_limit, network)


def _are_specs(state: Any) -> TypeGuard[Mapping[str, Spec]]:
    is_dict = isinstance(state, Mapping) and bool(state)
    return is_dict and all(isinstance(each, Spec) for each in state.values())


class Moving(NamedTuple):
    """One tensor of a state.

    Attributes:
        names: of all the places where it stands.
        current, target: how it lies before and after, in torch's words.
    """

    names: tuple[str, ...]
    current: DTensorSpec
    target: DTensorSpec


def planned(
    state: State, targets: Targets, memory_limit: int | None, network: Network | None = None
) -> RunnablePlan:
    """The plan for the tensors of a state."""
    moving = _each_once(state.places, targets)
    targets.check_all_used()
    this = communication.this_rank()
    ends = [(each.names[0], *_ends(each, this)) for each in moving]
    # Of the same meaning, and yet another mesh or other placements.
    relabelled = {names[0] for names, current, target in moving if current != target}
    return RunnablePlan(named_ways(ends, relabelled), memory_limit, network, tuple(moving))


def _ends(moving: Moving, rank: int) -> tuple[PlacedTensor, PlacedTensor]:
    """How a tensor lies before and after.

    Raises:
        ValueError: it cannot go from the one mesh to the other; the error names the tensor.
    """
    try:
        return placed_ends(moving.current, moving.target, rank, replicas=True)
    except ValueError as error:
        raise ValueError(f"{moving.names[0]!r} cannot be moved: {error}") from error


def _each_once(places: Sequence[LeafPlace], targets: Targets) -> list[Moving]:
    """Each tensor once: one that stands in several places, or that is all of the memory of another,
    where all ranks know that.

    Raises:
        ValueError: a tensor is to lie in two ways.
    """
    found: dict[Any, Moving] = {}
    keys: dict[int, Any] = {}
    for place in places:
        current, target = place.tensor._spec, targets.of(place)
        is_known = {*_ranks(target)} <= {*_ranks(current)}
        mine = id(place.tensor)
        if mine not in keys:
            keys[mine] = (memory_of(place.tensor), target) if is_known else mine
        one = found.get(keys[mine], Moving((), current, target))
        if one.target != target:
            raise ValueError(
                f"{one.names[0]} and {place.name} are the same tensor, but have different "
                "target placements: give the same placements for each name"
            )
        found[keys[mine]] = one._replace(names=(*one.names, place.name))
    return list(found.values())


def _ranks(spec: DTensorSpec) -> list[int]:
    return [rank for ranks in communication.rank_lists(spec.mesh) for rank in ranks]


# -- plans that run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunnablePlan(OfThisProcess, ReshardPlan):
    """A plan for tensors on DeviceMeshes, which runs on their ranks.

    Attributes:
        moving: the same tensors, as the state has them.
    """

    moving: tuple[Moving, ...] = ()

    @property
    def _meshes(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return [x.current.mesh for x in self.moving], [x.target.mesh for x in self.moving]

    @property
    def _names(self) -> tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]:
        return ([each.names for each in self.moving],) * 2

    @cached_property
    def _runner(self) -> PlanRunner:
        return PlanRunner(
            self,
            [*zip(*self._meshes)],
            refuse=self._refuse_others,
            shares=True,
            keeps=self.memory_limit is None,
        )

    def _refuse_others(self, number: int) -> NoReturn:
        """Raises:
        RuntimeError: messages of that bucket are of other tensors.
        """
        members = self.packed[number].members
        raise RuntimeError(
            f"the sender on mesh {self.moving[members[0]].current.mesh} and this rank have "
            f"different plans for {counted(len(members), 'tensor')}: the shapes, dtypes, "
            "placements or memory_limit differ. Pass the same tensors, placements and memory_limit "
            "on all ranks, and first redistribute results of ops to explicit placements"
        )

    def run(self, state: Any, *, into: Any = None, since: Any = None) -> Any:
        """Move the tensors of a state that lies as the plan's source does. Modules, optimizers,
        dicts and lists are changed in place, and returned.

        To be called by all ranks of all the meshes; a rank of none sends and receives nothing.

        Args:
            into: a state of the same names that lies as the plan's target does, as a run has given
                it: its tensors are written to in their memory, and it is returned. ``state`` stays
                as it is; no tensor of it is in that memory, but where nothing of it changes.
            since: a copy of the state of which ``into`` was given: of what is as it was there, bit
                by bit, nothing is sent. On all ranks or on none.

        Raises:
            ValueError: the states are others, or have gradients; nothing has moved.
            ReshardError: something has failed; each tensor is as it was or wholly moved. Of
                ``into`` a tensor that has not moved may be written in part.
        """
        if into is not None:
            then = None if since is None else State(since)
            self._write(State(state), State(into), then, is_update=since is not None)
            return into
        if since is not None:
            raise ValueError(
                "run(since=...) sends only changed elements, and needs into=: pass the result of "
                "the earlier run as into="
            )
        return self.run_with(State(state))

    def send(self, state: Any, *, since: Any = None) -> None:
        """The part of a rank that only has: the state stays as it is. ``since``: as :meth:`run`
        has it; then all that want call ``receive(since=...)``.

        Raises:
            ValueError: this rank is on a mesh that tensors go to, or the states are others.
        """
        _check_ranks_are_real()
        self._check_side("send", is_target=True)
        then = None if since is None else State(since)
        self._write(State(state), None, then, is_update=since is not None)

    def receive(self, *, into: Any = None, since: Any = None) -> Any:
        """The part of a rank that only wants.

        Args:
            into: a state that lies as the plan's target does: its tensors are written to, in their
                memory.
            since: the same, as a run has given it, where the others call ``send(since=...)``: what
                has changed since then is written to it.

        Returns:
            Each DTensor by its names; or what was given.

        Raises:
            ValueError: this rank is on a mesh that tensors come from, or the state is another.
        """
        _check_ranks_are_real()
        self._check_side("receive", is_target=False)
        held = into if since is None else since
        if held is not None:
            self._write(None, State(held), None, is_update=since is not None)
            return held
        result: dict[str, DTensor] = {}

        def arrived(i: int, local: torch.Tensor) -> None:
            local = self._laid_out(i, local)
            made = tensor_specs.dtensor_of(local, self.moving[i].target, requires_grad=False)
            result.update(dict.fromkeys(self.moving[i].names, made))

        self._runner.move(lambda i: self._as_sent(i, None), {}, arrived)
        return result

    def free(self) -> None:
        """Let go of the memory for messages that runs have left for the next: on the CPU, where
        there is no ``memory_limit``. It is counted in ``peak_bytes``.
        """
        self._runner.free()

    def run_with(self, state: State, progress: Callable[[], Any] = lambda: None) -> Any:
        """:meth:`run`; ``progress`` is called after each tensor."""
        _check_ranks_are_real()
        groups = self._groups(state)
        given = self._given(groups)
        moving = zip(self.tensors, groups)
        check_movable(place for tensor, some in moving if not tensor.stays for place in some)
        state.places.clear()
        moved: set[int] = set()

        def arrived(i: int, local: torch.Tensor) -> None:
            put_in_places(groups[i], self._laid_out(i, local), self.moving[i].target)
            groups[i] = []  # and the old one is let go
            moved.add(i)
            progress()

        try:
            with self._said(("reshard", "moved", "Unchanged"), self._here, moved):
                self._runner.move(lambda i: self._as_sent(i, given.pop(i, None)), {}, arrived)
        finally:
            result = state.result
        return result

    def _write(
        self, state: State | None, into: State | None, since: State | None, *, is_update: bool
    ) -> None:
        """Write what the tensors of ``state`` are, or what of them differs from those of ``since``,
        to those of ``into``. None: this rank has no such side.
        """
        _check_ranks_are_real()
        groups = [] if state is None else self._groups(state)
        before = {} if since is None else self._given(self._groups(since))
        given, onto = self._given(groups), {} if into is None else self._onto(into)
        self._check_copied(given, before)
        self._check_apart(given, onto, self._pending)
        first = {i: some[0] for i, some in onto.items()}
        moved: set[int] = set()

        def arrived(i: int, local: torch.Tensor) -> None:
            for x in onto.get(i, ())[1:]:
                x.copy_(local)
            moved.add(i)

        def update(number: int) -> Land:
            those = self.packed[number].members
            now = [[self._as_sent(i, given.get(i))] for i in those]
            # What comes of what is pending is sent whole: a sum may not give the same bits twice.
            then = [None if i in self._pending else before.get(i) for i in those]
            sent = [None if x is None else [self._as_sent(i, x)] for i, x in zip(those, then)]
            return Update(self._runner, number, now, sent, first).land

        how = "reshard", "moved", "Unchanged or partly written"
        with torch.no_grad(), self._said(how, self._here, moved):
            for i, places in enumerate(groups):
                for x in onto.get(i, ()) if self.tensors[i].stays else ():
                    x.copy_(places[0].tensor._local_tensor)
            if is_update:
                self._runner.run(update, arrived)
            else:
                self._runner.move(lambda i: self._as_sent(i, given.get(i)), first, arrived)

    def _as_sent(self, i: int, local: torch.Tensor | None) -> torch.Tensor:
        """What this rank sends of a tensor; None: it has none."""
        spec, way = self.moving[i].current, self.tensors[i].way
        if local is None:
            device = device_of(self.moving[i].target.mesh)
            return torch.empty(0, dtype=dtype_of(way.source.dtype), device=device)
        if i not in self._pending:
            return communication.wait_for(local).resolve_conj().resolve_neg()
        # By the process groups at hand.
        plan = plan_between(spec.mesh, way.source, way.target, means(spec.mesh))
        return as_sent(local, spec, plan)

    def _laid_out(self, i: int, local: torch.Tensor) -> torch.Tensor:
        """A result as its spec says."""
        return lay_out(local, self.moving[i].target.tensor_meta)

    @cached_property
    def _pending(self) -> frozenset[int]:
        """The tensors of which something is pending."""
        every = [each.current.placements for each in self.moving]
        return frozenset([i for i, some in enumerate(every) if any(map(_is_pending, some))])

    @property
    def _here(self) -> list[int]:
        """The tensors that move, on the meshes of this rank."""
        rank = communication.this_rank()
        return [i for each in self.packed if rank in each.bundle for i in each.members]

    def _groups(self, state: State, *, after: bool = False) -> list[list[LeafPlace]]:
        """The places of each tensor; ``after``: of a state that lies as the target does.

        Raises:
            ValueError: the state is not the one that was planned.
        """
        by_name = {place.name: place for place in state.places}
        known = dict.fromkeys(name for each in self.moving for name in each.names)
        missing = [name for name in known if name not in by_name]
        if missing or len(state.places) != sum(len(each.names) for each in self.moving):
            more = [name for name in by_name if name not in known]
            raise ValueError(
                f"the state differs from the planned state. Missing names: {as_text(missing)}. "
                f"Additional names: {as_text(more)}. Make a new plan"
            )
        for names, current, target in self.moving:
            planned = target if after else current
            for name in names:
                now = by_name[name].tensor._spec
                if now != planned:
                    raise ValueError(
                        f"{name} is {now} with strides {tuple(now.stride)}, but was {planned} "
                        f"with strides {tuple(planned.stride)} when the plan was made: make a new "
                        "plan"
                    )
        return [[by_name[name] for name in each.names] for each in self.moving]

    def _given(self, groups: Sequence[Sequence[LeafPlace]]) -> dict[int, torch.Tensor]:
        """What this rank has of each tensor that moves.

        Raises:
            OtherShape: a local tensor is not of its shape.
        """
        found = {}
        for i, places in enumerate(groups):
            if not self.tensors[i].stays:
                local, shape = places[0].tensor._local_tensor, self._shapes[0][i]
                if shape is not None:
                    found[i] = in_shape(local, shape, places[0].name)
        return found

    @cached_property
    def _shapes(self) -> tuple[list[Any], list[Any]]:
        """The local shapes of each tensor here, before and after; None: it is not on the mesh."""
        rank = communication.this_rank()
        known = {
            placed: placed.local_shape(rank)
            for way in self.ways
            for placed in (way.source.placed, way.target.placed)
        }
        ways = [way for _, way, _ in self.tensors]
        return (
            [known[way.source.placed] for way in ways],
            [known[way.target.placed] for way in ways],
        )

    def _onto(self, into: State) -> dict[int, list[torch.Tensor]]:
        """The memory of each tensor that is written to; of one that stands in several places, of
        all of them.

        Raises:
            OtherShape: a local tensor is not of its shape.
        """
        found = {}
        for i, places in enumerate(self._groups(into, after=True)):
            shape = self._shapes[1][i]
            if shape is not None:
                every = {id(place.tensor): place for place in places}.values()
                found[i] = [in_shape(p.tensor._local_tensor, shape, p.name) for p in every]
        return found

    def _check_copied(
        self, given: Mapping[int, torch.Tensor], before: Mapping[int, torch.Tensor]
    ) -> None:
        """Raises:
        ValueError: a tensor and what it was are in one memory, where nothing ever differs.
        """
        for i, x in before.items():
            if x.numel() and x.data_ptr() == given[i].data_ptr():
                raise ValueError(
                    f"the tensor {self.moving[i].names[0]} in since= shares memory with the "
                    "state, so the run cannot find out which elements changed. Keep a copy of each "
                    "tensor, such as x.clone(), and pass the copies as since="
                )


def _is_pending(placement: Any) -> bool:
    return isinstance(placement, Partial)


def _check_ranks_are_real() -> None:
    """Raises:
    NotImplementedError: several ranks are in this process, or a graph is made.
    """
    if dispatch_modes.local_tensor_mode() is not None or dispatch_modes.is_tracing():
        raise NotImplementedError(
            "reshard cannot run under LocalTensorMode or in a compiled program: call reshard on "
            "real ranks, outside of compiled programs"
        )

"""A plan that runs: on the tensors of a state, or only out of one, or only into one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.stats import Kind, Moved, Received, as_text, count_moves
from cute_sharding.dtensor.models.buffers import KeptMemory
from cute_sharding.dtensor.models.memory import give_back
from cute_sharding.dtensor.models.moving import Flight, LocalBucket, Specs
from cute_sharding.dtensor.models.nests import LeafPlace, State, check_movable, put_in_places
from cute_sharding.dtensor.models.since import Update
from cute_sharding.dtensor.replaced import communication, dispatch_modes, tensor_specs
from cute_sharding.dtensor.run.packing import in_flight, in_shape, lie_alike, meetings, own_view
from cute_sharding.dtensor.run.specs import OfThisProcess
from cute_sharding.exchange.bundle import own_part, size_of
from cute_sharding.models import ReshardPlan


class ReshardError(RuntimeError):
    """Not all tensors have moved.

    Attributes:
        moved: the names of those that have, wholly.
        left: the names of those that are as they were.
    """

    def __init__(self, message: str, moved: Sequence[str], left: Sequence[str]) -> None:
        super().__init__(message)
        self.moved, self.left = tuple(moved), tuple(left)


class _Shapes(NamedTuple):
    """Of what a rank has; None: it is not on the mesh."""

    source: tuple[int, ...] | None
    target: tuple[int, ...] | None


@dataclass(frozen=True)
class RunnablePlan(OfThisProcess, ReshardPlan):
    """A plan for tensors on DeviceMeshes, which runs on their ranks.

    Attributes:
        names: of each tensor, in all the places where it stands.
        specs: of each tensor, before and after.
    """

    names: tuple[tuple[str, ...], ...] = ()
    specs: tuple[Specs, ...] = ()

    @property
    def _meshes(self) -> Iterator[DeviceMesh]:
        """The meshes of all tensors."""
        return (spec.mesh for specs in self.specs for spec in specs)

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
        self._check_side("send", "target", [specs.target.mesh for specs in self.specs])
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
        self._check_side("receive", "source", [specs.current.mesh for specs in self.specs])
        held = into if since is None else since
        if held is not None:
            self._write(None, State(held), None, is_update=since is not None)
            return held
        result: dict[str, DTensor] = {}

        def arrived(i: int, local: torch.Tensor) -> None:
            made = tensor_specs.dtensor_of(local, self.specs[i].target, requires_grad=False)
            result.update(dict.fromkeys(self.names[i], made))

        self._move(self._sending(lambda i: None, {}), arrived)
        return result

    def free(self) -> None:
        """Let go of the memory for messages that runs have left for the next: on the CPU, where
        there is no ``memory_limit``. It is counted in ``peak_bytes``.
        """
        self._kept.let_go()

    def run_with(self, state: State, progress: Callable[[], Any] = lambda: None) -> Any:
        """:meth:`run`; ``progress`` is called after each tensor."""
        _check_ranks_are_real()
        groups = self._groups(state)
        given = self._given(groups)
        check_movable(place for i in given for place in groups[i])
        state.places.clear()
        moved: set[int] = set()

        def arrived(i: int, local: torch.Tensor) -> None:
            put_in_places(groups[i], local, self.specs[i].target)
            groups[i] = []  # and the old one is let go
            moved.add(i)
            progress()

        try:
            with self._said(moved, "Unchanged"):
                self._move(self._sending(given.pop, {}), arrived)
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
        _check_apart(given, before, self.names)
        self._check_into(given, onto)
        first = {i: some[0] for i, some in onto.items()}
        moved: set[int] = set()

        def arrived(i: int, local: torch.Tensor) -> None:
            for x in onto.get(i, ())[1:]:
                x.copy_(local)
            moved.add(i)

        def update(bucket: LocalBucket) -> Update:
            return Update(
                bucket, _locals_of(bucket, given.get), _locals_of(bucket, before.get), first
            )

        with torch.no_grad(), self._said(moved, "Unchanged or partly written"):
            for i, places in enumerate(groups):
                for x in onto.get(i, ()) if self.tensors[i].stays else ():
                    x.copy_(places[0].tensor._local_tensor)
            self._move(update if is_update else self._sending(given.get, first), arrived)

    @contextmanager
    def _said(self, moved: Collection[int], rest: str) -> Iterator[None]:
        """What fails is said by the tensors that have moved, and by the ``rest``."""
        try:
            yield
        except Exception as error:
            some, left = self._moved_and_left(moved)
            raise ReshardError(
                f"reshard failed with {type(error).__name__}: {error}. Completely moved tensors: "
                f"{as_text(some)}. {rest} tensors: {as_text(left)}",
                some,
                left,
            ) from error

    @cached_property
    def _buckets(self) -> list[LocalBucket]:
        return [
            LocalBucket(
                each,
                tuple([self.tensors[i].way for i in each.members]),
                tuple([self.specs[i] for i in each.members]),
                number,
            )
            for number, each in enumerate(self.packed)
        ]

    def _sending(
        self, give: Callable[[int], torch.Tensor | None], into: Mapping[int, torch.Tensor]
    ) -> Callable[[LocalBucket], Flight]:
        """How a bucket of what is given is sent."""

        def start(bucket: LocalBucket) -> Flight:
            keeps = self.memory_limit is None and bucket.device.type == "cpu"
            return bucket.send(_locals_of(bucket, give), into, self._kept if keeps else None)

        return start

    @cached_property
    def _kept(self) -> KeptMemory:
        """Memory for messages, from bucket to bucket and from run to run."""
        return KeptMemory(max([b.buffer_bytes for b in self._buckets if b.is_mine], default=0))

    def _move(
        self,
        start: Callable[[LocalBucket], Flight | Update],
        arrived: Callable[[int, torch.Tensor], None],
    ) -> None:
        def land(bucket: LocalBucket, flight: Flight | Update) -> None:
            flight.land(arrived)
            if self.memory_limit is not None:
                give_back()

        with torch.no_grad():
            for bucket in self._buckets:
                if not bucket.is_mine:
                    bucket.pass_by(arrived)
            mine = [bucket for bucket in self._buckets if bucket.is_mine]
            in_flight(mine, start, land, lambda bucket: bucket.packed.follows_at_once)
        if communication.this_rank() in self.ranks:
            count_moves(Kind(partial(_moved_by, self)))

    def _groups(self, state: State, *, after: bool = False) -> list[list[LeafPlace]]:
        """The places of each tensor; ``after``: of a state that lies as the target does.

        Raises:
            ValueError: the state is not the one that was planned.
        """
        by_name = {place.name: place for place in state.places}
        missing = [name for names in self.names for name in names if name not in by_name]
        if missing or len(state.places) != sum(map(len, self.names)):
            known = {name for names in self.names for name in names}
            more = [name for name in by_name if name not in known]
            raise ValueError(
                f"the state differs from the planned state. Missing names: {as_text(missing)}. "
                f"Additional names: {as_text(more)}. Make a new plan"
            )
        for names, specs in zip(self.names, self.specs):
            planned = specs.target if after else specs.current
            for name in names:
                now = by_name[name].tensor._spec
                if now != planned:
                    raise ValueError(
                        f"{name} is {now} with strides {tuple(now.stride)}, but was {planned} "
                        f"with strides {tuple(planned.stride)} when the plan was made: make a new "
                        "plan"
                    )
        return [[by_name[name] for name in names] for names in self.names]

    def _given(self, groups: Sequence[Sequence[LeafPlace]]) -> dict[int, torch.Tensor]:
        """What this rank has of each tensor that moves.

        Raises:
            OtherShape: a local tensor is not of its shape.
        """
        found = {}
        for i, places in enumerate(groups):
            if not self.tensors[i].stays:
                local, shape = places[0].tensor._local_tensor, self._shapes[i].source
                found[i] = local if shape is None else in_shape(local, shape, places[0].name)
        return found

    @cached_property
    def _shapes(self) -> list[_Shapes]:
        """Of each tensor here, before and after."""
        rank = communication.this_rank()
        known = {
            way: _Shapes(way.source.placed.local_shape(rank), way.target.placed.local_shape(rank))
            for way in self.ways
        }
        return [known[way] for _, way, _ in self.tensors]

    def _onto(self, into: State) -> dict[int, list[torch.Tensor]]:
        """The memory of each tensor that is written to; of one that stands in several places, of
        all of them.

        Raises:
            OtherShape: a local tensor is not of its shape.
        """
        found = {}
        for i, places in enumerate(self._groups(into, after=True)):
            shape = self._shapes[i].target
            if shape is not None:
                every = {id(place.tensor): place for place in places}.values()
                found[i] = [in_shape(p.tensor._local_tensor, shape, p.name) for p in every]
        return found

    def _check_into(
        self, given: Mapping[int, torch.Tensor], onto: Mapping[int, list[torch.Tensor]]
    ) -> None:
        """Raises:
        ValueError: a tensor that moves is written over before it is sent, for all that is known.
        """
        for i, k, x in meetings(given, onto):
            if i != k or not self._is_kept(i, given[i], x):
                raise ValueError(
                    f"the target tensor {self.names[k][0]} shares memory with the source tensor "
                    f"{self.names[i][0]}: give into= tensors with memory of their own"
                )

    def _is_kept(self, i: int, given: torch.Tensor, onto: torch.Tensor) -> bool:
        """Whether what is written is what is there; or made of it before."""
        if self.tensors[i].way.plan.steps:
            return True
        at = {
            k: (bucket, n) for bucket in self._buckets for n, k in enumerate(bucket.packed.members)
        }
        bucket, n = at[i]
        return lie_alike(own_view(bucket.part.parts[n], 0, [given]), onto)

    def _moved_and_left(self, moved: Collection[int]) -> tuple[list[str], list[str]]:
        rank = communication.this_rank()
        moving = [i for each in self.packed if rank in each.bundle for i in each.members]
        some = [name for i in moving if i in moved for name in self.names[i]]
        return some, [name for i in moving if i not in moved for name in self.names[i]]

    def _check_side(self, what: str, other: str, meshes: Sequence[DeviceMesh]) -> None:
        _check_ranks_are_real()
        rank = communication.this_rank()
        if any(mesh._is_current_rank_part_of_mesh() for mesh in meshes):
            raise ValueError(
                f"{what} cannot run on rank {rank}, because rank {rank} is on a {other} mesh of "
                f"the plan. Call run(state) on rank {rank}"
            )


def _check_ranks_are_real() -> None:
    """Raises:
    NotImplementedError: several ranks are in this process, or a graph is made.
    """
    if dispatch_modes.local_tensor_mode() is not None or dispatch_modes.is_tracing():
        raise NotImplementedError(
            "reshard cannot run under LocalTensorMode or in a compiled program: call reshard on "
            "real ranks, outside of compiled programs"
        )


def _locals_of(
    bucket: LocalBucket, give: Callable[[int], torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """What this rank has of the tensors of a bucket."""
    return [give(i) for i in bucket.packed.members]


def _check_apart(
    given: Mapping[int, torch.Tensor],
    before: Mapping[int, torch.Tensor],
    names: Sequence[Sequence[str]],
) -> None:
    """Raises:
    ValueError: a tensor and what it was are in one memory, where nothing ever differs.
    """
    for i, x in before.items():
        if x.numel() and x.data_ptr() == given[i].data_ptr():
            raise ValueError(
                f"the tensor {names[i][0]} in since= shares memory with the state, so the run "
                "cannot find out which elements changed. Keep a copy of each tensor, such as "
                "x.clone(), and pass the copies as since="
            )


def _moved_by(plan: RunnablePlan) -> Moved:
    """What a plan moves when it runs, for :func:`cute_sharding.stats`."""
    ways = {way: len(names) for way, names in plan.ways.items()}
    busiest = max(
        [
            sum(size_of(own_part(way.plan.exchange, r).taken) * n for way, n in ways.items())
            for r in plan.looked_at
        ],
        default=0,
    )
    by_all = sum(way.plan.exchange.received_by_all * n for way, n in ways.items())
    return Moved(
        plan=sum(not tensor.stays for tensor in plan.tensors),
        collectives=plan.collectives,
        received=Received(busiest, by_all),
    )

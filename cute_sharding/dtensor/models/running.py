"""A plan that runs: on the tensors of a state, or only out of one, or only into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.names import listed
from cute_sharding.dtensor.bookkeeping.stats import Moved, Received, count_moves
from cute_sharding.dtensor.models.moving import Bucket, Flight, Specs, checked
from cute_sharding.dtensor.models.nests import Place, State, put
from cute_sharding.dtensor.replaced import dispatch_modes, process_groups, tensor_specs
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


@dataclass(frozen=True)
class RunnablePlan(ReshardPlan):
    """A plan for tensors on DeviceMeshes, which runs on their ranks.

    Attributes:
        names: of each tensor, in all the places where it stands.
        specs: of each tensor, before and after.
    """

    names: tuple[tuple[str, ...], ...] = ()
    specs: tuple[Specs, ...] = ()

    def run(self, state: Any) -> Any:
        """Move the tensors of a state that lies as the plan's source does. Modules, optimizers,
        dicts and lists are changed in place, and returned.

        To be called by all ranks of all the meshes; a rank of none sends and receives nothing.

        Raises:
            ValueError: the state is another, or has gradients; nothing has moved.
            ReshardError: something has failed; each tensor is as it was or wholly moved.
        """
        return self.run_with(State(state))

    def send(self, state: Any) -> None:
        """The part of a rank that only has: the state stays as it is.

        Raises:
            ValueError: this rank is on a mesh that tensors go to, or the state is another.
        """
        self._check_side("send", "wants", [specs.target.mesh for specs in self.specs])
        given = self._given(self._groups(State(state)))
        self._move(given.get, lambda i, local: None)

    def receive(self) -> dict[str, DTensor]:
        """The part of a rank that only wants.

        Returns:
            Each DTensor by its names.

        Raises:
            ValueError: this rank is on a mesh that tensors come from.
        """
        self._check_side("receive", "has", [specs.current.mesh for specs in self.specs])
        result: dict[str, DTensor] = {}

        def arrived(i: int, local: torch.Tensor) -> None:
            made = tensor_specs.made(local, self.specs[i].target, requires_grad=False)
            result.update(dict.fromkeys(self.names[i], made))

        self._move(lambda i: None, arrived)
        return result

    def run_with(self, state: State, progress: Callable[[], Any] = lambda: None) -> Any:
        """:meth:`run`; ``progress`` is called after each tensor."""
        groups = self._groups(state)
        given = self._given(groups)
        state.places.clear()
        moved: set[int] = set()

        def give(i: int) -> torch.Tensor | None:
            return given.pop(i)

        def arrived(i: int, local: torch.Tensor) -> None:
            put(groups[i], local, self.specs[i].target)
            groups[i] = []  # and the old one is let go
            moved.add(i)
            progress()

        try:
            self._move(give, arrived)
        except Exception as error:
            some, left = self._moved_and_left(moved)
            raise ReshardError(
                f"reshard failed: {type(error).__name__}: {error}. Wholly moved: {listed(some)}. "
                f"As they were: {listed(left)}",
                some,
                left,
            ) from error
        finally:
            result = state.result
        return result

    @cached_property
    def _buckets(self) -> list[Bucket]:
        return [
            Bucket(
                each,
                tuple([self.tensors[i].way for i in each.members]),
                tuple([self.specs[i] for i in each.members]),
                number,
            )
            for number, each in enumerate(self.packed)
        ]

    def _move(
        self,
        give: Callable[[int], torch.Tensor | None],
        arrived: Callable[[int, torch.Tensor], None],
    ) -> None:
        if dispatch_modes.local_tensor_mode() is not None or dispatch_modes.is_tracing():
            raise NotImplementedError(
                "reshard under LocalTensorMode or in a graph: call it on real ranks, between graphs"
            )
        flying: Flight | None = None
        with torch.no_grad():
            for bucket in self._buckets:
                if not bucket.is_mine:
                    bucket.pass_by(arrived)
                    continue
                if flying is not None and not bucket.packed.follows_at_once:
                    flying.land(arrived)
                    flying = None
                following = bucket.send([give(i) for i in bucket.packed.members])
                if flying is not None:
                    flying.land(arrived)
                flying = following
            if flying is not None:
                flying.land(arrived)
        if process_groups.this_rank() in self.ranks:
            count_moves(_Counted(self))

    def _groups(self, state: State) -> list[list[Place]]:
        """The places of each tensor.

        Raises:
            ValueError: the state is not the one that was planned.
        """
        by_name = {place.name: place for place in state.places}
        missing = [name for names in self.names for name in names if name not in by_name]
        if missing or len(state.places) != sum(map(len, self.names)):
            known = {name for names in self.names for name in names}
            more = [name for name in by_name if name not in known]
            raise ValueError(
                f"the state is not the one that was planned: it lacks {listed(missing)}, and has "
                f"{listed(more)} beside. Plan again"
            )
        for names, specs in zip(self.names, self.specs):
            for name in names:
                if by_name[name].tensor._spec != specs.current:
                    raise ValueError(
                        f"{name} is {by_name[name].tensor._spec}, and was {specs.current} when "
                        "this was planned: plan again"
                    )
        return [[by_name[name] for name in names] for names in self.names]

    def _given(self, groups: Sequence[Sequence[Place]]) -> dict[int, torch.Tensor]:
        """What this rank has of each tensor that moves.

        Raises:
            ValueError: a tensor has a gradient, or is to have one.
            OtherShape: a local tensor is not of its shape.
        """
        found = {}
        for i, places in enumerate(groups):
            (_, way, stays), tensor = self.tensors[i], places[0].tensor
            if stays:
                continue
            if tensor.grad_fn is not None or tensor.grad is not None:
                raise ValueError(
                    f"{places[0].name} has a gradient, or is part of what one is computed of: "
                    "reshard moves tensors alone. Call optimizer.zero_grad() before, and "
                    "cute_sharding.redistribute for what has a grad_fn"
                )
            found[i] = checked(tensor._local_tensor, way, places[0].name)
        return found

    def _moved_and_left(self, moved: set[int]) -> tuple[list[str], list[str]]:
        rank = process_groups.this_rank()
        moving = [i for each in self.packed if rank in each.bundle for i in each.members]
        some = [name for i in moving if i in moved for name in self.names[i]]
        return some, [name for i in moving if i not in moved for name in self.names[i]]

    def _check_side(self, what: str, does: str, meshes: Sequence[DeviceMesh]) -> None:
        if any(mesh._is_current_rank_part_of_mesh() for mesh in meshes):
            raise ValueError(
                f"{what}: rank {process_groups.this_rank()} {does} some of the tensors as well: "
                "call run(state) there"
            )


class _Counted:
    """A plan that has run, for :func:`cute_sharding.stats`."""

    def __init__(self, plan: RunnablePlan) -> None:
        self._plan = plan

    @property
    def question(self) -> None:
        """torch has no such redistribution."""
        return None

    @cached_property
    def moved(self) -> Moved:
        ways = {way: len(names) for way, names in self._plan.ways.items()}
        busiest = max(
            [
                sum(size_of(own_part(way.plan.exchange, r).taken) * n for way, n in ways.items())
                for r in self._plan.looked_at
            ],
            default=0,
        )
        by_all = sum(way.plan.exchange.received_by_all * n for way, n in ways.items())
        return Moved(
            plan=sum(not tensor.stays for tensor in self._plan.tensors),
            collectives=self._plan.collectives,
            received=Received(busiest, by_all),
        )

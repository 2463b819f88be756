"""``plan_reshard``: plans for the DTensors of a state, which run as often as is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.stats import Moved, Received, count_moves
from cute_sharding.dtensor.models.moving import Bucket, Flight, Specs, checked
from cute_sharding.dtensor.models.nests import Place, State, memory_of, put
from cute_sharding.dtensor.models.targets import Targets
from cute_sharding.dtensor.replaced import compiler, dispatch_modes, process_groups, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial, Replicate
from cute_sharding.dtensor.run.across_meshes import chains_for_all, pending_sums
from cute_sharding.dtensor.run.several_meshes import meshes_of
from cute_sharding.exchange import Placed
from cute_sharding.exchange.bundle import own_part, size_of
from cute_sharding.models import ReshardPlan, Spec, plan_models
from cute_sharding.redistribution import Network

# So many names are written out in an error.
NAMES_SHOWN = 8


class ReshardError(RuntimeError):
    """Not all tensors have moved.

    Attributes:
        moved: the names of those that have, wholly.
        left: the names of those that are as they were.
    """

    def __init__(self, message: str, moved: Sequence[str], left: Sequence[str]) -> None:
        super().__init__(message)
        self.moved, self.left = tuple(moved), tuple(left)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMES_SHOWN]))
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{shown}{more}" or "none"


class Group(NamedTuple):
    """One tensor, in all the places where it stands."""

    places: list[Place]
    specs: Specs


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
                f"reshard failed: {type(error).__name__}: {error}. Wholly moved: {_names(some)}. "
                f"As they were: {_names(left)}",
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
                f"the state is not the one that was planned: it lacks {_names(missing)}, and has "
                f"{_names(more)} beside. Plan again"
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


@compiler.outside_graphs
def plan_reshard(
    source: Any,
    target: Any,
    mesh: DeviceMesh | None = None,
    *,
    memory_limit: int | None = None,
    dtype: torch.dtype | None = None,
    network: Network | None = None,
) -> ReshardPlan:
    """How the tensors of ``source`` get to where ``target`` says: in which exchanges, with what
    received and held; and, between DTensors, a plan that runs as often as is wanted.

    Args:
        source: a state as :func:`reshard` takes it. Only how its DTensors lie is looked at, so they
            may be on meta. Or a dict of :class:`cute_sharding.models.Spec` by name, for meshes that
            are not there: such a plan is only shown.
        target: as ``placements`` of :func:`reshard`; or a state or dict of the same form, whose
            tensors say mesh, placements and dtype.
        mesh, memory_limit, dtype: as :func:`reshard` has them.
        network: the links, by which the plan is timed.

    Returns:
        The plan: ``.packed``, ``.collectives``, ``.received_bytes`` (of the busiest rank),
            ``.lower_bound``, ``.received_by_link``, ``.peak_bytes``, ``.coverage``, ``.seconds``,
            ``str()``, ``.to_dict()``. Between DTensors also ``.run(state)``, and for ranks that
            only have or only want ``.send(state)`` and ``.receive()``: no planning, and nothing is
            sent but elements.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`reshard`.

    The method is in docs/models.md.

    >>> from cute_sharding.models import Spec
    >>> weights = {f"layers.{i}.weight": Spec.of((1024, 512), (8,), "S(0)") for i in range(4)}
    >>> columns = {name: Spec.of((1024, 512), (2, 2), "S(1), R") for name in weights}
    >>> plan = plan_reshard(weights, columns)
    >>> plan.collectives, plan.received_bytes == plan.lower_bound, plan.coverage.is_whole
    (1, True, True)
    """
    if isinstance(source, Mapping) and source and all(isinstance(x, Spec) for x in source.values()):
        if not (isinstance(target, Mapping) and source.keys() == target.keys()):
            raise ValueError("target: give a Spec for each name of source, and for no other")
        pairs = [(name, spec, target[name]) for name, spec in source.items()]
        return plan_models(pairs, memory_limit, network)
    return planned(State(source), Targets(target, mesh, dtype), memory_limit, network)


def planned(
    state: State, targets: Targets, memory_limit: int | None, network: Network | None = None
) -> RunnablePlan:
    """The plan for the tensors of a state."""
    groups = _grouped(state.places, targets)
    targets.check_all_used()
    named = [
        (group.places[0].name, *_spec_pair(group.specs.current, group.specs.target))
        for group in groups
    ]
    # Of the same meaning, and yet another mesh or other placements.
    relabelled = {
        group.places[0].name for group in groups if group.specs.current != group.specs.target
    }
    plan = plan_models(named, memory_limit, network, relabelled)
    return RunnablePlan(
        plan.tensors,
        plan.packed,
        memory_limit,
        network,
        tuple([tuple([place.name for place in group.places]) for group in groups]),
        tuple([group.specs for group in groups]),
    )


def _grouped(places: Sequence[Place], targets: Targets) -> list[Group]:
    """Each tensor once: one that stands in several places, or that is all of the memory of another,
    where all ranks know that.

    Raises:
        ValueError: a tensor is to lie in two ways.
    """
    found: dict[Any, Group] = {}
    keys: dict[int, Any] = {}
    for place in places:
        current, target = place.tensor._spec, targets.of(place)
        is_known = {*_ranks(target)} <= {*_ranks(current)}
        mine = id(place.tensor)
        if mine not in keys:
            keys[mine] = (memory_of(place.tensor), target) if is_known else mine
        group = found.setdefault(keys[mine], Group([], Specs(current, target)))
        if group.specs.target != target:
            raise ValueError(
                f"{group.places[0].name} and {place.name} are one tensor, and are to lie in two "
                "ways: give them the same placements"
            )
        group.places.append(place)
    return list(found.values())


def _ranks(spec: DTensorSpec) -> list[int]:
    return [rank for ranks in process_groups.rank_lists(spec.mesh) for rank in ranks]


def _spec_pair(current: DTensorSpec, target: DTensorSpec) -> tuple[Spec, Spec]:
    """How a tensor lies before and after, in words of the algebra."""
    if current == target:  # which may have something pending, and stays
        target = current
        finished = tensor_specs.with_placements(
            current, [Replicate() if isinstance(p, Partial) else p for p in current.placements]
        )
        meshes = meshes_of(current.mesh, current.mesh, process_groups.this_rank())
        spec = Spec(
            Placed(tuple(current.shape), meshes.source, chains_for_all(finished)), _name(current)
        )
        return spec, spec
    meshes = meshes_of(current.mesh, target.mesh, process_groups.this_rank())
    tensor_specs.check_no_mixed_partials(tuple(current.placements))
    shape = tuple(current.shape)
    foreign = [isinstance(p, Partial) and type(p) is not Partial for p in current.placements]
    if any(foreign):  # reduced by their own methods, before all else
        placements = [Replicate() if f else p for f, p in zip(foreign, current.placements)]
        current = tensor_specs.with_placements(current, placements)
    before = Placed(shape, meshes.source, chains_for_all(current))
    after = Placed(shape, meshes.target, meshes.chains(chains_for_all(target)))
    return Spec(before, _name(current), pending_sums(current)), Spec(after, _name(target))


def _name(spec: DTensorSpec) -> str:
    meta: Any = spec.tensor_meta
    return str(meta.dtype).removeprefix("torch.")

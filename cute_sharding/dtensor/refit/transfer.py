"""``plan_load``: a trainer's weights brought into an engine's tensors, as the engine's own loader
would load whole ones.

Each rank of the engine runs its loader once, on tensors without data, and what it writes is
recorded (``record.py``). Ranks then tell one another what they have and what they need, as plain
data, and each plans from the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.bookkeeping.stats import as_text
from cute_sharding.dtensor.models.since import Update
from cute_sharding.dtensor.refit.calls import seen_by
from cute_sharding.dtensor.refit.record import (
    MemoryRecording,
    at_meta_only,
    without_value,
)
from cute_sharding.dtensor.refit.steps import LoaderStep, OfCall, Results, of_calls, steps_of
from cute_sharding.dtensor.refit.trace import MOVES, GivenTensors
from cute_sharding.dtensor.refit.weights import (
    Weight,
    WeightPlacement,
    described,
    joined_weights,
    lies,
    listed,
    local_part,
)
from cute_sharding.dtensor.replaced import communication, dispatch_modes
from cute_sharding.dtensor.run.packing import in_shape
from cute_sharding.dtensor.run.ranks import Ranks
from cute_sharding.dtensor.run.runner import Land, PlanRunner
from cute_sharding.dtensor.run.specs import dtype_of, name_of
from cute_sharding.dtensor.run.this_process import OfThisProcess, ReshardError
from cute_sharding.models import PlacedTensor
from cute_sharding.models.buckets import Load, buckets
from cute_sharding.models.transfer import (
    AgreedBundle,
    Form,
    JoinedNeeds,
    Made,
    Need,
    Transfer,
    join_needs,
)
from cute_sharding.relations import NotOnlyMoved
from cute_sharding.relations.relation import Piece

# The engine's own code, which is called with whole tensors by name.
Loader: TypeAlias = "Callable[[Mapping[str, torch.Tensor]], Any]"

_LOADER = "the loader"


@dataclass(frozen=True, eq=False)
class TransferPlan(OfThisProcess, Transfer):
    """A planned load, which may be run any number of times.

    Attributes:
        unwritten: how many elements of an engine's tensor of this rank the loader does not write,
            by name, where there are some. They keep what they hold.
        steps: what the loader of this rank computes, called again when its weights are there.
        computed: by name of an engine's tensor, the elements that the steps give.
        computes: whether some rank has steps.
        unfinished: this rank, if its last run failed.

    A plan also has ``unread`` (elements of weights that no rank reads), ``received_bytes`` and
    ``sent_bytes`` (of this rank), ``received_by(rank)``, ``parts(rank)`` and ``to_dict()``.

    >>> import torch
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    >>> engine = {"rows": torch.zeros(3, 2), "cache": torch.zeros(5)}
    >>> weights = {"w": torch.ones(4, 2)}
    >>> plan = plan_load(lambda w: engine["rows"].copy_(w["w"][1:]), engine, weights)
    >>> isinstance(plan, TransferPlan), plan.unwritten, plan.unread, plan.received_bytes
    (True, {'cache': 5}, {'w': 2}, 0)
    >>> torch.distributed.destroy_process_group()
    """

    group: Any = None
    rank: int = 0
    source: Mapping[str, WeightPlacement] = field(default_factory=dict)
    into: Mapping[str, torch.Tensor] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)
    steps: tuple[LoaderStep, ...] = ()
    computed: Mapping[str, tuple[OfCall, ...]] = field(default_factory=dict)
    computes: bool = False
    unfinished: set[int] = field(default_factory=set, repr=False)

    def run(
        self,
        source: Mapping[str, Weight] | None = None,
        *,
        into: Mapping[str, torch.Tensor] | None = None,
        since: Mapping[str, Weight] | bool = False,
    ) -> None:
        """Bring the weights into the engine's tensors. Call it on every rank of the group.

        Args:
            source: this rank's weights, by name, which lie as they did when it was planned.
            into: tensors to write to, by name, with the shapes and dtypes of those of the plan,
                which are the default.
            since: copies of the weights of the run before, which the engine's tensors hold still:
                of what is as it was there, bit by bit, nothing is sent. True on a rank that has no
                weights to give. On all ranks or on none.

        Raises:
            ValueError: a tensor is missing, or is another than planned.
            ReshardError: the run failed. ``moved`` of the error names the tensors that are
                completely written, and ``left`` names all others.
        """
        ranks, is_update = Ranks(self.group, "plan.run"), since is not False
        with communication.numbered_as(self.rank):
            found, updates = ranks.on_each(
                "plan.run", lambda: self._checked(source or {}, into, since), lambda _: is_update
            )
        if len({*updates.values()}) > 1:
            raise ValueError(
                f"run(since=...) was called on the ranks {_true(updates, True)} and not on the "
                f"ranks {_true(updates, False)}: pass since= on all ranks or on none"
            )
        operands, before, onto = found
        with torch.no_grad(), communication.numbered_as(self.rank):
            moved = {self.numbers[name]: x for name, x in onto.items() if name in self.numbers}
            written: set[str] = set()
            with self._said_by_name(onto, written):
                brought = self._write(operands, moved, written, before)
                if self.computes:
                    ranks.on_each(
                        "plan.run", lambda: self._compute(brought, onto, written), lambda _: None
                    )
            self.unfinished.clear()

    def _checked(
        self,
        source: Mapping[str, Weight],
        into: Mapping[str, torch.Tensor] | None,
        since: Mapping[str, Weight] | bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, dict[str, torch.Tensor]]:
        """What :meth:`run` moves, the same as it was the run before, and what it writes to."""
        is_unfinished = bool(self.unfinished)
        self.unfinished.add(self.rank)
        if since is not False and is_unfinished:
            raise ValueError(
                "the run before failed, so the engine's tensors are not what since= says: run "
                "without since= once"
            )
        if since is not False and self.computes:
            raise ValueError(
                "run(since=...) sends only changed elements, but the loader computes from "
                "whole weights, which are not kept: run without since="
            )
        before = {} if isinstance(since, bool) else since
        operands = self._given(source)
        onto = self._onto(self.into if into is None else into)
        self._check_apart(
            {k: x for k, x in enumerate(operands) if x.numel()},
            {self.numbers[name]: [x] for name, x in onto.items() if name in self.numbers},
        )
        return operands, None if since is False else self._given(before), onto

    @contextmanager
    def _said_by_name(self, onto: Iterable[str], written: Collection[str]) -> Iterator[None]:
        """What fails is said by the names of the tensors that are written, and of the others."""
        try:
            yield
        except Exception as error:
            done = [name for name in onto if name in written]
            left = [name for name in onto if name not in written]
            raise ReshardError(
                f"the load failed with {type(error).__name__}: {error}. Completely written "
                f"tensors: {as_text(done)}. Unchanged or partly written tensors: {as_text(left)}",
                done,
                left,
            ) from error

    def send(
        self, source: Mapping[str, Weight], *, since: Mapping[str, Weight] | bool = False
    ) -> None:
        """:meth:`run` on a rank that has only weights to give."""
        self.run(source, since=since)

    def receive(
        self, *, into: Mapping[str, torch.Tensor] | None = None, since: bool = False
    ) -> None:
        """:meth:`run` on a rank that has no weights to give."""
        self.run(into=into, since=since)

    def _given(self, source: Mapping[str, Weight]) -> list[torch.Tensor]:
        """What this rank has of each weight, contiguous; no elements where it has none."""
        device, nothing = self._device, torch.empty(0, device=self._device)
        found = []
        for operand in self.operands:
            tensor, planned = source.get(operand.name), self.source.get(operand.name)
            if planned is None:
                found.append(nothing)
                continue
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"the weights have no tensor {operand.name!r}, but the load was planned with "
                    f"{operand.name!r} on this rank: add the tensor, or plan the load again"
                )
            now = lies(operand.name, tensor)
            if now != planned:
                raise ValueError(
                    f"{operand.name!r} is {now}, but the load was planned for {planned}: plan the "
                    "load again, or redistribute the tensor"
                )
            local = communication.wait_for(local_part(tensor)).detach()
            local = local.resolve_conj().resolve_neg()
            shape = operand.placed.shape_on(self.rank)
            found.append(in_shape(local, shape, operand.name).contiguous().to(device))
        return found

    def _onto(self, into: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to write to."""
        found = {}
        for name, lies_as in self.written.items():
            tensor = into.get(name)
            if tensor is None:
                raise ValueError(
                    f"into has no tensor {name!r}, but the load was planned with {name!r}: add the "
                    "tensor, or plan the load again"
                )
            now = tuple(tensor.shape), name_of(tensor.dtype)
            if now != lies_as:
                raise ValueError(
                    f"{name!r} of into has shape {now[0]} and dtype {now[1]}, but the load was "
                    f"planned for shape {lies_as[0]} and dtype {lies_as[1]}: plan the load again"
                )
            if tensor.is_meta:
                raise ValueError(
                    f"{name!r} of into is on the meta device, so nothing can be written to it: "
                    "give into= tensors with memory"
                )
            is_frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
            if is_frozen or any(
                step == 0 < n - 1 for n, step in zip(tensor.shape, tensor.stride())
            ):
                why = "was made in inference mode" if is_frozen else "is expanded"
                raise ValueError(
                    f"{name!r} of into {why}, so nothing can be written to it: give into= tensors "
                    "that can be written in place"
                )
            found[name] = tensor.detach()
        return found

    @cached_property
    def written(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and dtype of each tensor of this rank that the loader writes to, by name."""
        names = [name for name in self.into if name in self.numbers or name in self.computed]
        tensors = {name: self.into[name] for name in names}
        return {name: (tuple(x.shape), name_of(x.dtype)) for name, x in tensors.items()}

    def _compute(
        self,
        brought: Mapping[str, torch.Tensor],
        onto: Mapping[str, torch.Tensor],
        written: set[str],
    ) -> None:
        """What the loader computes, of what was brought for it, written to the engine's tensors."""
        results = Results(self._device)
        for step in self.steps:
            results.run(step, brought)
        for name, some in self.computed.items():
            results.write(some, onto[name])
            written.add(name)

    def _write(
        self,
        operands: Sequence[torch.Tensor],
        onto: dict[int, torch.Tensor],
        written: set[str],
        before: Sequence[torch.Tensor] | None,
    ) -> dict[str, torch.Tensor]:
        """Bring what is moved, or what of it differs from ``before``; what was brought for steps,
        by name.
        """
        names = {k: name for name, k in self.numbers.items()}
        brought: dict[str, torch.Tensor] = {}
        direct = {k: x for k, x in onto.items() if x.is_contiguous()}
        strided = {k: x for k, x in onto.items() if k not in direct}
        copies = {k: x.contiguous() for k, x in strided.items()}

        def arrived(k: int, local: torch.Tensor) -> None:
            if k in strided:
                strided[k].copy_(local)
            if k in onto and names[k] not in self.computed:
                written.add(names[k])
            elif k in names and k not in onto:
                brought[names[k]] = local

        if before is None:
            self._runner.move(operands.__getitem__, {**direct, **copies}, arrived)
            return brought

        def update(number: int) -> Land:
            read = [member.operands for member in self._runner.members(number)]
            now, then = ([[side[k] for k in some] for some in read] for side in (operands, before))
            return Update(self._runner, number, now, then, {**direct, **copies}).land

        self._runner.run(update, arrived)
        return brought

    # -- how much ----------------------------------------------------------------------------------

    @property
    def received_bytes(self) -> int:
        """What this rank receives."""
        return sum(member.item.moved(self.rank)[1] for member in self.members)

    @property
    def sent_bytes(self) -> int:
        """What this rank sends."""
        return sum(member.item.moved(self.rank)[0] for member in self.members)

    def __str__(self) -> str:
        lines = super().__str__().splitlines()
        for step in self.steps:
            lines.insert(-1, f"  then computed on this rank: {step.call.op}, {step.call.line}")
        if self.unwritten:
            names = ", ".join([*self.unwritten][:4]) + (" ..." if len(self.unwritten) > 4 else "")
            lines.insert(-1, f"  not written on this rank: {names}")
        mine = f"this rank receives {self.received_bytes:,} bytes and sends {self.sent_bytes:,}"
        return "\n".join([*lines[:-1], f"{lines[-1]}, {mine}"])

    # -- as it runs --------------------------------------------------------------------------------

    @cached_property
    def _device(self) -> torch.device:
        for tensor in self.into.values():
            if not tensor.is_meta:
                return tensor.device
        if communication.backend_name(self.group, "cpu") is not None:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @cached_property
    def _runner(self) -> PlanRunner:
        kind = _Kind(self._device.type)
        return PlanRunner(self, [(kind, kind)] * len(self.members), group=self.group)

    @property
    def _meshes(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return (), ()

    @property
    def _names(self) -> tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]:
        return [[x.name] for x in self.operands], [[x.name] for x in self.results]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a planned load cannot be pickled, because the plan has the tensors and the process "
            "group of one process. Make the plan on each rank, or pickle plan.to_dict()"
        )


def _true(said: Mapping[int, bool], value: bool) -> str:
    """The ranks that say so."""
    return listed([rank for rank, each in said.items() if each is value])


class _Kind(NamedTuple):
    """What says a kind of device in place of a mesh."""

    device_type: str


# -- what is needed --------------------------------------------------------------------------------


class _Recorded(NamedTuple):
    """What a rank's loader does: what it makes, what it leaves, and what it computes."""

    need: Need = Need((), ())
    unwritten: Mapping[str, int] = MappingProxyType({})
    steps: tuple[LoaderStep, ...] = ()
    computed: Mapping[str, tuple[OfCall, ...]] = MappingProxyType({})


def record_load(
    load: Loader,
    into: Mapping[str, torch.Tensor],
    sources: Sequence[PlacedTensor],
    *,
    computes: bool = False,
) -> _Recorded:
    """What a loader makes of whole tensors.

    Raises:
        NotOnlyMoved: it writes what it computes, and may not, or cannot be called again; or it
            reads values.
    """
    given = {x.name: (x.placed.shape, dtype_of(x.dtype)) for x in sources}
    with dispatch_modes.no_modes(), torch.no_grad(), at_meta_only(_LOADER, MOVES):
        recording = MemoryRecording(given, into, _LOADER)
        with seen_by(recording):
            load(GivenTensors(zip(given, recording.given), of=_LOADER))
        stays = recording.stays()
        if stays:
            raise NotOnlyMoved(
                f"{_LOADER} keeps elements of {stays} in a tensor of its own, which is still there "
                "at its end, but only those of into are written: add the tensor to into"
            )
        made, unwritten = {}, {}
        computed: dict[str, tuple[OfCall, ...]] = {}
        for name, tensor in into.items():
            pieces = recording.written(tensor)
            left = tensor.numel() - sum(each.size for each in pieces)
            lacking = recording.lacks(tensor)
            if lacking:
                said = without_value(lacking, tensor.shape)
                raise NotOnlyMoved(f"{_LOADER} writes to {name!r} what has no value: {said}")
            if left:
                unwritten[name] = left
            _check_moved(recording, name, pieces, computes)
            moved, of_steps = of_calls(recording, pieces)
            if moved:
                made[name] = _result(recording, tuple(tensor.shape), tensor.dtype, moved)
            if of_steps:
                computed[name] = tuple(of_steps)
        steps, brought = steps_of(recording, [each for some in computed.values() for each in some])
        for name, (taken, moved) in brought.items():
            made[name] = _result(recording, taken.shape, taken.dtype, moved)
    return _Recorded(_need(made), unwritten, tuple(steps), computed)


class _Result(NamedTuple):
    """One tensor of the engine: its pieces from weights, and constants."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    constants: tuple[Any, ...]


def _check_moved(
    recording: MemoryRecording, name: str, pieces: Sequence[Piece], computes: bool
) -> None:
    wrong = recording.operands.not_moved(pieces, computes=computes, retypes=True)
    if wrong is not None:
        raise NotOnlyMoved(
            f"{_LOADER} writes to {name!r} what is no element of the weights ({wrong.sources}): "
            f"{wrong.why}. A load moves elements ({MOVES}), and with computes=True calls ops again "
            "after the weights have arrived, but not those that draw random numbers, read what the "
            "engine held before, or stand in autocast. Or write the weights as they are, and "
            "compute after plan.run"
        )


def _result(
    recording: MemoryRecording, shape: tuple[int, ...], dtype: torch.dtype, pieces: Sequence[Piece]
) -> _Result:
    return _Result(shape, name_of(dtype), *recording.operands.of_sources(pieces))


def _need(made: Mapping[str, _Result]) -> Need:
    """Results in groups that share operands, by their forms."""
    group_of: dict[int, int] = {}
    groups: dict[int, list[str]] = {}
    for name, one in made.items():
        read = {each.source for each in one.pieces if each.source >= 0}
        met = sorted({group_of[k] for k in read if k in group_of})
        first, *others = met or [len(groups) + len(group_of)]
        for other in others:
            groups[first] += groups.pop(other)
            group_of.update({k: first for k, g in group_of.items() if g == other})
        groups.setdefault(first, []).append(name)
        group_of.update(dict.fromkeys(read, first))
    forms: dict[Form, int] = {}
    found = []
    for names in groups.values():
        some = [made[name] for name in names]
        operands = {k: i for i, k in enumerate(_operands(some))}
        constants: list[Any] = []
        pieces = []
        for target, one in enumerate(some):
            before = len(constants)
            constants += one.constants
            for each in one.pieces:
                number = operands[each.source] if each.source >= 0 else each.source - before
                pieces.append(each._replace(source=number, target=target))
        shapes, dtypes = tuple([x.shape for x in some]), tuple([x.dtype for x in some])
        form = Form(shapes, dtypes, tuple(pieces), tuple(constants))
        found.append(Made(tuple(names), forms.setdefault(form, len(forms)), tuple(operands)))
    return Need(tuple(forms), tuple(found))


def _operands(some: Iterable[_Result]) -> list[int]:
    return [*dict.fromkeys(each.source for x in some for each in x.pieces if each.source >= 0)]


# -- plan ------------------------------------------------------------------------------------------


def plan_load(
    load: Loader | None = None,
    into: Mapping[str, torch.Tensor] | torch.nn.Module | None = None,
    source: Mapping[str, Weight] | None = None,
    *,
    group: Any | None = None,
    memory_limit: int | None = None,
    computes: bool = False,
) -> TransferPlan:
    """Plan to load a trainer's weights into an engine, directly from shards to its tensors.

    Each rank of the engine calls it with its own loader, which is run once, on whole tensors
    without data. What the loader writes to the engine's tensors is recorded, and not carried out.

    Args:
        load: the engine's code, which takes a dict of whole tensors by name and writes them, or
            parts of them, to the engine's tensors. None on a rank that only has weights to give.
        into: the engine's tensors of this rank, by name, or a module whose parameters and buffers
            they are. None on a rank that only has weights to give.
        source: the weights of this rank, by name: DTensors, on any mesh or slice of one; plain
            tensors, which are whole; or specs. None on a rank that has no weights to give. Tensors
            of one name on several slices of a mesh are replicas.
        group: a process group with all ranks of the trainer and of the engine; by default all.
        memory_limit: the most bytes of buffers that a rank may hold. With a limit, weights move in
            more exchanges.
        computes: whether the loader may compute what it writes, as scales or quantized weights.
            Its ops are then called again at each run, on each rank of the engine, when the weights
            that they take have arrived: whole, if an op takes whole ones.

    Returns:
        The plan: ``.run(source)``, ``str()``, ``.unwritten``, ``.unread``, ``.received_bytes``.

    Raises:
        cute_sharding.relations.NotOnlyMoved: the loader writes values that it computes, without
            ``computes``; or reads values. The error names the tensor, the op and the line. Other
            ranks raise a RuntimeError that says so.
        ValueError, TypeError: the arguments do not fit together; raised on all ranks.

    The method is in docs/engines.md.

    >>> import torch
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    >>> weights = {"q": torch.ones(4, 6), "k": torch.zeros(2, 6)}
    >>> engine = {"qk": torch.empty(6, 6)}
    >>> def load(w):
    ...     engine["qk"][:4], engine["qk"][4:] = w["q"], w["k"]
    >>> plan = plan_load(load, engine, weights)
    >>> plan.run(weights)
    >>> engine["qk"].sum(1).tolist()
    [6.0, 6.0, 6.0, 6.0, 0.0, 0.0]
    >>> torch.distributed.destroy_process_group()
    """
    ranks = Ranks(group, "plan_load")
    with communication.numbered_as(ranks.this):
        return _planned(ranks, load, into, source, memory_limit, computes)


def _planned(
    ranks: Ranks,
    load: Loader | None,
    into: Mapping[str, torch.Tensor] | torch.nn.Module | None,
    source: Mapping[str, Weight] | None,
    memory_limit: int | None,
    computes: bool,
) -> TransferPlan:
    what = "plan_load"
    _, limits = ranks.on_each(what, lambda: memory_limit, lambda limit: limit)
    if len({*limits.values()}) > 1:
        raise ValueError(
            f"memory_limit of plan_load differs between ranks: {limits}. Pass the same on all ranks"
        )
    mine, said = ranks.in_common(what, lambda: described(source, ranks.this))
    operands, _ = ranks.on_each(what, lambda: joined_weights(said), lambda _: None)
    tensors, _ = ranks.on_each(what, lambda: _tensors(load, into), lambda _: None)

    def record() -> _Recorded:
        if load is None:
            return _Recorded()
        with _in_place(into, tensors):
            return record_load(load, tensors, operands, computes=computes)

    recorded, _ = ranks.on_each(what, record, lambda _: None)
    need, needs = ranks.in_common(what, lambda: recorded.need)
    joined = join_needs(operands, needs)
    numbers = next(numbers for (_, x), numbers in zip(needs, joined.of_need) if x == need)
    plan = TransferPlan(
        tuple(operands),
        joined.results,
        joined.members,
        (),
        memory_limit,
        ranks.group,
        ranks.this,
        mine,
        tensors,
        numbers,
        *recorded[1:],
        ranks.greatest([len(recorded.steps)]) != [0],
    )
    return replace(plan, together=_packed(plan, joined, ranks, memory_limit))


def _named(into: Mapping[str, torch.Tensor] | torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """The engine's tensors, by name."""
    if not isinstance(into, torch.nn.Module):
        return dict(into or {})
    return {
        **dict(into.named_parameters(remove_duplicate=False)),
        **dict(into.named_buffers(remove_duplicate=False)),
    }


def _tensors(
    load: Loader | None, into: Mapping[str, torch.Tensor] | torch.nn.Module | None
) -> dict[str, torch.Tensor]:
    """The engine's tensors, by name.

    Raises:
        TypeError: there is no loader for them, or they are DTensors.
        ValueError: two share memory, which torch does not know.
    """
    named = _named(into)
    if (load is None) != (into is None):
        raise TypeError(
            "plan_load needs both load (the engine's loader) and into (the engine's tensors), or "
            "neither on a rank that only has weights to give: pass the missing one"
        )
    for name, tensor in named.items():
        if isinstance(tensor, DTensor) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name!r} of into is a {type(tensor).__name__}: give the plain tensors of this "
                "rank, such as tensor.to_local()"
            )
    memories = {id(x.untyped_storage()): (name, x) for name, x in named.items() if not x.is_meta}
    spans = sorted(
        (str(x.device), x.untyped_storage().data_ptr(), x.untyped_storage().nbytes(), name)
        for name, x in memories.values()
    )
    for (device, first, size, name), (at, second, _, other) in pairwise(spans):
        if device == at and first + size > second:
            raise ValueError(
                f"{name!r} and {other!r} of into share memory, but no storage of torch: make one a "
                "view of the other, with torch"
            )
    return named


@contextmanager
def _in_place(into: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The engine's tensors stay inside, with their memory and shapes; others are put back.

    Raises:
        NotOnlyMoved: the loader has put others in their place.
    """
    before = {name: x.detach() for name, x in tensors.items()}
    try:
        yield
    finally:
        is_module = isinstance(into, torch.nn.Module)
        found = _named(into) if is_module else tensors
        other = [name for name, x in tensors.items() if found.get(name) is not x]
        new = [name for name in found if name not in tensors]
        for name in other:
            module, _, attribute = name.rpartition(".")
            setattr(into.get_submodule(module), attribute, tensors[name])
        for name in new:
            module, _, attribute = name.rpartition(".")
            delattr(into.get_submodule(module), attribute)
        for name, x in tensors.items():
            if not _lies_as(x, before[name]):
                x.data = before[name]
                other.append(name)
    if other or new:
        raise NotOnlyMoved(
            f"{_LOADER} gives the engine another tensor, memory or shape as {(other + new)[0]!r}, "
            "but only values of those that are there are written. Write to the tensor as it is: "
            "param.data.copy_(weight)"
        )


def _lies_as(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of one memory."""
    return (
        x.untyped_storage() is y.untyped_storage()
        and (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        and x.storage_offset() == y.storage_offset()
    )


def _packed(
    plan: TransferPlan, joined: JoinedNeeds, ranks: Ranks, memory_limit: int | None
) -> tuple[Any, ...]:
    """Which members go together, by what the busiest ranks send and receive of each."""
    mine = [member.item.moved(ranks.this) for member in joined.members]
    most = ranks.greatest([n for both in mine for n in both])
    pairs = [*zip(most[::2], most[1::2])]
    loads = [(Load(sent=out, received=got, moved=out + got),) for out, got in pairs]
    held_are = "buffers, even if only the tensors of one exchange move at a time"
    found = buckets(loads, memory_limit, held_are=held_are)
    items = [member.item for member in joined.members]
    return tuple(
        [
            each._replace(
                bundle=AgreedBundle(
                    tuple([items[i] for i in each.members]),
                    most=sum(sum(pairs[i]) for i in each.members),
                )
            )
            for each in found
        ]
    )

"""A load that runs: part by part read, exchanged and written to where it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.bookkeeping.stats import as_text
from cute_sharding.dtensor.checkpoints.ranks import Ranks
from cute_sharding.dtensor.checkpoints.wanted import Wanted
from cute_sharding.dtensor.models.moving import device_of
from cute_sharding.dtensor.refit.running import Running
from cute_sharding.dtensor.replaced import communication
from cute_sharding.models.load import LoadPart, LoadPlan
from cute_sharding.models.stored import Read

# Reads into what is given for each, or into a new tensor, where that is None.
Reader = Callable[
    [Sequence[Read], Sequence["torch.Tensor | None"], torch.device], list[torch.Tensor]
]


class DeviceKind(NamedTuple):
    """A kind of devices, in the place of a mesh."""

    device_type: str

    def size(self) -> int:
        """No mesh is asked for."""
        return 0


class LoadTarget:
    """A local tensor that is loaded into, part by part: in its own memory where that is contiguous
    and of the device that exchanges, else at the end.
    """

    def __init__(self, local: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
        self._local, self._shape, self._device = local, shape, device
        self._buffer: torch.Tensor | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """What is written to."""
        if self._buffer is None:
            local = self._local
            if local.is_contiguous() and local.device == self._device:
                self._buffer = local.view(self._shape)
            else:
                self._buffer = torch.empty(self._shape, dtype=local.dtype, device=self._device)
        return self._buffer

    def finish(self) -> None:
        """All parts are there."""
        buffer, self._buffer = self.buffer, None
        if buffer.data_ptr() != self._local.data_ptr():
            self._local.copy_(buffer.view(self._local.shape))


class Loading:
    """A plan that runs on this rank.

    Attributes:
        received_bytes: what this rank was sent.
        collectives: how many exchanges there were.
    """

    def __init__(self, plan: LoadPlan, wanted: Wanted, ranks: Ranks, read: Reader) -> None:
        self._plan, self._wanted, self._ranks, self._read = plan, wanted, ranks, read
        self._kind = _kind(wanted, ranks)
        self._device = device_of(self._kind)
        self._targets: dict[int, LoadTarget] = {}
        self.received_bytes = self.collectives = 0

    def run(self, tensors: Mapping[str, torch.Tensor], arrived: Callable[[int], Any]) -> None:
        """Load into those tensors, by name. ``arrived`` is told how many more are wholly there.

        Raises:
            RuntimeError: something has failed.
        """
        for name, number in self._wanted.mine.items():
            shape = self._plan.results[number].placed.local_shape(self._ranks.this)
            assert shape is not None
            self._targets[number] = LoadTarget(_local(tensors[name]), shape, self._device)
        finished: set[int] = set()
        begun: set[int] = set()
        try:
            for k, done in enumerate(self._plan.finished):
                begun |= self._plan.begun(k)
                self._run_parts(self._plan.part(k), self._plan.kept(k, self._ranks.this))
                for number in done:
                    if number in self._targets:
                        self._targets.pop(number).finish()
                finished.update(done)
                arrived(len(done))
        except Exception as error:
            whole, left, partly = self._names(finished, begun)
            raise RuntimeError(
                f"load_checkpoint failed with {type(error).__name__}: {error}. Completely loaded "
                f"tensors: {whole}. Unchanged tensors: {left}. Possibly changed tensors: {partly}"
            ) from error

    def _names(self, finished: set[int], begun: set[int]) -> tuple[str, ...]:
        """Of tensors that are wholly loaded, of those that are as they were, and of the others."""
        names = [each.name for each in self._plan.results]
        some = [
            [name for k, name in enumerate(names) if (k in finished, k in begun) == which]
            for which in ((True, True), (False, False), (False, True))
        ]
        return tuple([as_text(list(dict.fromkeys(each))) for each in some])

    def _run_parts(self, part: LoadPart, kept: LoadPart) -> None:
        """Read what is exchanged, and what this rank keeps, which may go where it belongs at once;
        and exchange.
        """
        this = self._ranks.this
        moving, staying = [_PartStep.of(each, this, self._onto(each)) for each in (part, kept)]
        reads, into = [*moving.reads, *staying.reads], [*moving.into, *staying.into]
        found, _ = self._ranks.on_each(
            "reading", lambda: self._read(reads, into, self._device), lambda _: None
        )
        if part.results:
            self._exchange(part, moving, found[: len(moving.reads)])
        if kept.copies(this) > len(staying.in_place):
            self._exchange(kept, staying, found[len(moving.reads) :])

    def _onto(self, part: LoadPart) -> list[torch.Tensor | None]:
        targets = [self._targets.get(number) for number in part.results]
        return [None if each is None else each.buffer for each in targets]

    def _exchange(self, part: LoadPart, step: _PartStep, read: Sequence[torch.Tensor]) -> None:
        refit = part.refit
        operands = [self._none(operand.dtype) for operand in refit.operands]
        for k, some in zip(step.numbers, read):
            operands[k] = some
        dtypes = [self._wanted.dtypes[k] for k in part.results]
        running = Running(refit, [self._kind], dtypes, self._ranks.group)
        running.run(running.given(operands), step.onto)
        self.received_bytes += refit.received_by(self._ranks.this)
        self.collectives += refit.collectives

    def _none(self, dtype: str) -> torch.Tensor:
        return torch.empty(0, dtype=getattr(torch, dtype), device=self._device)


class _PartStep(NamedTuple):
    """What this rank does in a part.

    Attributes:
        numbers, reads: what it reads of those that are read in the part.
        into: where each of them belongs, if that is one run of a target.
        onto: the results that this rank has some of.
        in_place: as :meth:`Part.in_place`.
    """

    numbers: list[int]
    reads: list[Read]
    into: list[torch.Tensor | None]
    onto: list[torch.Tensor | None]
    in_place: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, part: LoadPart, rank: int, onto: list[torch.Tensor | None]) -> _PartStep:
        """That of a rank."""
        in_place = part.in_place(rank)
        mine = [k for k, each in enumerate(part.reads) if each.reader == rank]
        reads = [part.reads[k] for k in mine]
        into = [_run(read, onto, in_place.get(k)) for k, read in zip(mine, reads)]
        return cls(mine, reads, into, onto, in_place)


def _run(
    read: Read, onto: Sequence[torch.Tensor | None], place: tuple[int, int] | None
) -> torch.Tensor | None:
    """Where all that is read belongs, if that is one run of a target."""
    if place is None:
        return None
    target = onto[place[0]]
    assert target is not None  # a result of this rank
    return target.view(-1).narrow(0, place[1], sum(read.sizes))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return communication.wait_for(getattr(tensor, "_local_tensor", tensor)).detach()


def _kind(wanted: Wanted, ranks: Ranks) -> Any:
    """The kind of devices that exchanges: that of the tensors, rather one that is not the CPU."""
    kinds = sorted(wanted.devices, key=lambda kind: (kind == "cpu", kind)) or ["cpu"]
    for kind in kinds:
        if communication.backend_name(ranks.group, kind) is not None:
            return DeviceKind(kind)
    raise ValueError(
        f"the process group of load_checkpoint has no backend for {' or '.join(kinds)} tensors: "
        "create the group with such a backend, for example by "
        "init_process_group(backend='cpu:gloo,cuda:nccl')"
    )

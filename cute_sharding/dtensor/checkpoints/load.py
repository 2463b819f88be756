"""``load_checkpoint``: a checkpoint of any mesh into the tensors of a program, on any other. It is
read, exchanged and written to where it is wanted, part by part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_sharding.dtensor.bookkeeping.stats import as_text
from cute_sharding.dtensor.checkpoints.leaves import Leaf, Leaves
from cute_sharding.dtensor.checkpoints.wanted import (
    Entries,
    Mine,
    Wanted,
    checked_names,
    given_by,
    want_of,
    wanted_by_all,
)
from cute_sharding.dtensor.models.nests import memory_of
from cute_sharding.dtensor.models.reshard import tqdm_of
from cute_sharding.dtensor.refit.trace import Generator, Traced
from cute_sharding.dtensor.replaced import (
    communication,
    compiler,
    dispatch_modes,
)
from cute_sharding.dtensor.run.ranks import Ranks
from cute_sharding.dtensor.run.runner import PlanRunner, device_of
from cute_sharding.dtensor.run.specs import dtype_of
from cute_sharding.exchange.placed import ranks_text
from cute_sharding.models.buckets import LEAST
from cute_sharding.models.load import LoadPart, LoadPlan
from cute_sharding.models.stored import Read
from cute_sharding.relations import Relation
from cute_sharding.relations.relation import Piece

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.checkpoint.storage import StorageReader

    from cute_sharding.dtensor.checkpoints.sources import Source


class Loaded(NamedTuple):
    """The result of :func:`load_checkpoint`.

    Attributes:
        missing_keys: names of the state that the checkpoint does not have; these tensors are
            unchanged.
        unexpected_keys: names of the checkpoint that no rank's state has.
        read_bytes, received_bytes: the bytes that this rank has read from storage, and received
            from other ranks.
        collectives: the number of exchanges.

    >>> Loaded((), ("step",), 4096, 1024, 1).unexpected_keys
    ('step',)
    """

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    read_bytes: int
    received_bytes: int
    collectives: int


@compiler.outside_graphs
def load_checkpoint(
    state: Stateful | Mapping[str, Any] | list[Any],
    checkpoint: str | os.PathLike[str] | StorageReader,
    *,
    refit: Generator | None = None,
    strict: bool = True,
    memory_limit: int | None = None,
    progress: bool = False,
    group: ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint into the tensors of ``state``, in place. The meshes and placements of the
    checkpoint and of the state may differ.

    Exactly one rank reads each chunk that some rank needs, and all ranks read about the same number
    of bytes. An exchange for many tensors sends the elements to the ranks that need them, each
    element once. Call it on all ranks of ``group``. The ranks may have different states, for
    example in pipeline stages.

    Args:
        state: a module, or another object with ``state_dict`` and ``load_state_dict``; or nested
            dicts and lists of such objects, tensors and other objects, as for
            torch.distributed.checkpoint.
        checkpoint: the path of a checkpoint of torch.distributed.checkpoint, or a ``StorageReader``
            of one; or the path of a state dict of full tensors that ``torch.save`` has written,
            which only the first rank needs and reads.
        refit: a generator, as for :func:`plan_refit`: ordinary torch code, which takes the whole
            tensors of the checkpoint by name, and returns those of ``state``.
        strict: raise an error, before anything is read, for names that only the state or only the
            checkpoint has.
        memory_limit: the most bytes that a rank may hold in addition to ``state`` and to mapped
            files. With a limit, the checkpoint is loaded in more parts. By default, a part has an
            eighth of the bytes that a rank reads, sends and receives, at least 64 MiB and at most 1
            GiB.
        progress: show a bar of tensors, on the first rank, by tqdm.
        group: the process group of the ranks that load; by default all ranks.

    Returns:
        ``.missing_keys`` and ``.unexpected_keys`` as ``load_state_dict`` returns them, and the
            bytes that this rank read and received.

    Raises:
        ValueError, TypeError: names or shapes differ, or the arguments do not fit together. Nothing
            has been read.
        RuntimeError: reading or sending failed on some rank; all ranks raise this error. It names
            the loaded tensors, and the unchanged tensors.

    The method is in docs/resharding.md ("Checkpoints").

    >>> import tempfile, torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> state = {"w": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])}
    >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
    ...     torch.save({"w": torch.ones(4, 2), "epoch": 3}, file.name)
    ...     load_checkpoint(state, file.name, strict=False).unexpected_keys
    ('epoch',)
    >>> float(state["w"].to_local().sum())
    8.0
    >>> dist.destroy_process_group()
    """
    # torch.distributed.checkpoint is imported where a checkpoint is.
    from cute_sharding.dtensor.checkpoints.sources import opened, source_of

    if dispatch_modes.local_tensor_mode() is not None or dispatch_modes.is_tracing():
        raise NotImplementedError(
            "load_checkpoint cannot run under LocalTensorMode or in a compiled program: call "
            "load_checkpoint on real ranks, outside of compiled programs"
        )
    bar_of: Any = tqdm_of("load_checkpoint") if progress else None
    ranks = Ranks(group, "load_checkpoint")
    told = ranks.of_first("opening the checkpoint", lambda: opened(checkpoint))
    source = source_of(checkpoint, told, ranks.is_first)
    with torch.no_grad():
        here, digests = ranks.on_each(
            "looking at the state",
            lambda: Here.of(state, source.tensors, refit),
            lambda here: (here.mine.digest, here.digest(refit is not None, strict, memory_limit)),
        )
        _check_alike({rank: alike for rank, (_, alike) in digests.items()})
        wanted = wanted_by_all(ranks, here.mine, {r: digest for r, (digest, _) in digests.items()})
        names = checked_names(wanted, here.given, source.tensors, source.objects, strict)
        plan = _plan(here.given, wanted, ranks.all, source, memory_limit)
        loading = Loading(plan, wanted, ranks, source)
        bar = bar_of(total=len(plan.results), unit="tensor") if bar_of else None
        with bar if bar is not None and ranks.is_first else nullcontext():
            loading.run(here.tensors, bar.update if bar is not None else lambda n: None)
        objects = sorted(wanted.objects & source.objects)
        if objects:
            here.put(ranks.of_first("reading objects", lambda: source.values(objects)))
    here.leaves.finish()
    read = plan.read_by[ranks.this]
    return Loaded(*names, read, loading.received_bytes, loading.collectives)


class Here(NamedTuple):
    """What this rank knows by itself.

    Attributes:
        leaves: of the state.
        tensors: of it, by name; one of those that are the same tensor.
        mine: what it wants.
        given: what the checkpoint gives.
    """

    leaves: Leaves
    tensors: dict[str, torch.Tensor]
    mine: Mine
    given: Traced

    @classmethod
    def of(cls, state: Any, tensors: Entries, refit: Generator | None) -> Here:
        """Of a state, and the tensors that a checkpoint has."""
        given, leaves = given_by(tensors, refit), Leaves(state)
        once: dict[Any, Leaf] = {}
        for leaf in leaves.all:
            key = memory_of(leaf.value) if leaf.is_tensor else leaf.name
            if key not in once or (leaf.name in given.names and once[key].name not in given.names):
                once[key] = leaf
        some = [leaf for leaf in once.values() if leaf.is_tensor]
        mine = Mine(
            tuple([want for want in map(want_of, some) if want is not None]),
            frozenset([leaf.name for leaf in leaves.all if not leaf.is_tensor]),
            frozenset([leaf.name for leaf in leaves.all]),
        )
        return cls(leaves, {leaf.name: leaf.value for leaf in some}, mine, given)

    def digest(self, refits: bool, strict: bool, memory_limit: int | None) -> bytes:
        """The same where all ranks load alike. What a checkpoint gives without a refit all have
        been told.
        """
        alike = self.given if refits else None, strict, memory_limit
        return sha256(repr(alike).encode()).digest()

    def put(self, values: Mapping[str, Any]) -> None:
        """Objects, to where others stand."""
        for leaf in self.leaves.all:
            if leaf.name in values and not leaf.is_tensor:
                leaf.put(values[leaf.name])


def _check_alike(digests: Mapping[int, bytes]) -> None:
    first, *others = digests
    differ = [rank for rank in others if digests[rank] != digests[first]]
    if differ:
        raise ValueError(
            f"the refit, strict or memory_limit of load_checkpoint on ranks {ranks_text(differ)} "
            f"differs from rank {first}: pass the same values on all ranks"
        )


def _plan(
    given: Traced,
    wanted: Wanted,
    ranks: Sequence[int],
    source: Source,
    memory_limit: int | None,
) -> LoadPlan:
    """Who reads what, of what the checkpoint gives and the ranks want. A chunk that may be cut is
    cut so that it fits twice, with what is cast and sent of it.
    """
    outputs, names = {name: k for k, name in enumerate(given.names)}, list(source.tensors)
    numbers: dict[int, int] = {}
    copies: dict[int, int] = {}
    pieces: list[Piece] = []
    for k, each in enumerate(wanted.results):
        for one in given.relation.by_target.get(outputs.get(each.name, -1), ()):
            number = one.source
            if number >= 0:
                number = numbers.setdefault(one.source, len(numbers))
                copies[number] = copies.get(number, 0) + each.placed.copies
            pieces.append(one._replace(source=number, target=k))
    limit = LEAST if memory_limit is None else memory_limit
    kept = [
        source.stored(names[of], limit // (2 * (2 + copies[number])))
        for of, number in numbers.items()
    ]
    relation = Relation(
        tuple([each.shape for each in kept]),
        tuple([each.placed.shape for each in wanted.results]),
        tuple(pieces),
        given.relation.constants,
    )
    return LoadPlan(tuple(kept), relation, wanted.results, tuple(ranks), memory_limit)


# -- as it runs ------------------------------------------------------------------------------------


class DeviceKind(NamedTuple):
    """A kind of devices, in the place of a mesh."""

    device_type: str


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

    def __init__(self, plan: LoadPlan, wanted: Wanted, ranks: Ranks, source: Source) -> None:
        self._plan, self._wanted, self._ranks, self._source = plan, wanted, ranks, source
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
            shape = self._plan.results[number].placed.shape_on(self._ranks.this)
            self._targets[number] = LoadTarget(_local(tensors[name]), shape, self._device)
        finished: set[int] = set()
        begun: set[int] = set()
        try:
            for k, done in enumerate(self._plan.finished):
                begun |= self._plan.begun(k)
                self._run_part(k)
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

    def _run_part(self, number: int) -> None:
        """Read what is exchanged, and what this rank keeps, which may go where it belongs at once;
        and exchange.
        """
        this, reader = self._ranks.this, self._source.read
        moving = self._reading(self._plan.part(number))
        staying = self._reading(self._plan.kept(number, this))
        reads, into = [*moving.reads, *staying.reads], [*moving.into, *staying.into]
        found, _ = self._ranks.on_each(
            "reading", lambda: reader(reads, into, self._device), lambda _: None
        )
        if moving.part.results:
            self._exchange(moving, found[: len(moving.reads)])
        if staying.part.copies(this) > sum(x is not None for x in staying.into):
            self._exchange(staying, found[len(moving.reads) :])

    def _reading(self, part: LoadPart) -> _PartRead:
        """What this rank reads in a part."""
        targets = {k: self._targets.get(number) for k, number in enumerate(part.results)}
        onto = {k: target.buffer for k, target in targets.items() if target is not None}
        in_place = part.in_place(self._ranks.this)
        numbers = [k for k, each in enumerate(part.reads) if each.reader == self._ranks.this]
        into: list[torch.Tensor | None] = []
        for k in numbers:
            result, start = in_place.get(k, (-1, 0))
            size = sum(part.reads[k].sizes)
            into.append(onto[result].view(-1).narrow(0, start, size) if k in in_place else None)
        return _PartRead(part, numbers, into, onto)

    def _exchange(self, reading: _PartRead, read: Sequence[torch.Tensor]) -> None:
        refit = reading.part.refit
        operands = [
            torch.empty(0, dtype=dtype_of(each.dtype), device=self._device)
            for each in refit.operands
        ]
        for k, some in zip(reading.numbers, read):
            operands[k] = some
        runner = PlanRunner(refit, [(self._kind,) * 2] * len(refit.members), self._ranks.group)
        runner.move(operands.__getitem__, reading.onto, lambda result, local: None)
        self.received_bytes += refit.received_by(self._ranks.this)
        self.collectives += refit.collectives


class _PartRead(NamedTuple):
    """What this rank reads in a part.

    Attributes:
        numbers: of its reads among those of the part.
        into: where each of them belongs, if that is one run of a result.
        onto: the results that this rank has some of, by their numbers in the part.
    """

    part: LoadPart
    numbers: list[int]
    into: list[torch.Tensor | None]
    onto: dict[int, torch.Tensor]

    @property
    def reads(self) -> list[Read]:
        """What it reads."""
        return [self.part.reads[k] for k in self.numbers]


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

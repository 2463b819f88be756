"""``load_checkpoint``: a checkpoint of any mesh into the tensors of a program, on any other."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_sharding.dtensor.checkpoints.leaves import Leaf, Leaves
from cute_sharding.dtensor.checkpoints.ranks import Ranks
from cute_sharding.dtensor.checkpoints.running import Loading
from cute_sharding.dtensor.checkpoints.said import Entry, Said, checked_names, said_by
from cute_sharding.dtensor.checkpoints.wanted import Mine, Wanted, want_of, wanted_by_all
from cute_sharding.dtensor.models.nests import memory_of
from cute_sharding.dtensor.models.reshard import tqdm_of
from cute_sharding.dtensor.refit.trace import Generator
from cute_sharding.dtensor.replaced import compiler, dispatch_modes
from cute_sharding.exchange.placed import ranks_text
from cute_sharding.models.buckets import LEAST
from cute_sharding.models.load import LoadPlan
from cute_sharding.models.stored import Stored
from cute_sharding.relations import Relation
from cute_sharding.relations.relation import Piece

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.checkpoint.storage import StorageReader


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

    The method is in docs/checkpoints.md.

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
    ranks = Ranks(group)
    told = ranks.of_first("opening the checkpoint", lambda: opened(checkpoint))
    source = source_of(checkpoint, told, ranks.all[0], ranks.is_first)
    with torch.no_grad():
        here, digests = ranks.on_each(
            "looking at the state",
            lambda: Here.of(state, source.tensors, source.objects, refit),
            lambda here: (here.mine.digest, here.digest(refit is not None, strict, memory_limit)),
        )
        _check_alike({rank: alike for rank, (_, alike) in digests.items()})
        wanted = wanted_by_all(ranks, here.mine, {r: digest for r, (digest, _) in digests.items()})
        names = checked_names(wanted, here.said, source.objects, strict)
        plan = _plan(here.said, wanted, ranks.all, source.stored, memory_limit)
        loading = Loading(plan, wanted, ranks, source.read)
        bar = bar_of(total=len(plan.results), unit="tensor") if bar_of else None
        with bar if bar is not None and ranks.is_first else nullcontext():
            loading.run(here.tensors, bar.update if bar is not None else lambda n: None)
        objects = sorted(wanted.objects & source.objects)
        if objects:
            values = ranks.of_first("reading objects", lambda: source.values(objects))
            here.put(values)
    here.leaves.finish()
    read = plan.read_by[ranks.this]
    return Loaded(*names, read, loading.received_bytes, loading.collectives)


class Here(NamedTuple):
    """What this rank knows by itself.

    Attributes:
        leaves: of the state.
        tensors: of it, by name; one of those that are the same tensor.
        mine: what it wants.
        said: what the checkpoint gives.
    """

    leaves: Leaves
    tensors: dict[str, torch.Tensor]
    mine: Mine
    said: Said

    @classmethod
    def of(
        cls,
        state: Any,
        tensors: Mapping[str, Entry],
        objects: Collection[str],
        refit: Generator | None,
    ) -> Here:
        """Of a state, and what a checkpoint has."""
        said, leaves = said_by(tensors, refit), Leaves(state)
        once: dict[Any, Leaf] = {}
        for leaf in leaves.all:
            key = memory_of(leaf.value) if leaf.is_tensor else leaf.name
            if key not in once or (leaf.name in said.names and once[key].name not in said.names):
                once[key] = leaf
        some = [leaf for leaf in once.values() if leaf.is_tensor]
        mine = Mine(
            tuple([want for want in map(want_of, some) if want is not None]),
            frozenset([leaf.name for leaf in leaves.all if not leaf.is_tensor]),
            frozenset([leaf.name for leaf in leaves.all]),
        )
        return cls(leaves, {leaf.name: leaf.value for leaf in some}, mine, said)

    def digest(self, refits: bool, strict: bool, memory_limit: int | None) -> bytes:
        """The same where all ranks load alike. What a checkpoint gives without a refit all have
        been told.
        """
        alike = self.said if refits else None, strict, memory_limit
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
    said: Said,
    wanted: Wanted,
    ranks: Sequence[int],
    stored: Callable[[str, int], Stored],
    memory_limit: int | None,
) -> LoadPlan:
    """Who reads what, of what the checkpoint gives and the ranks want. A chunk that may be cut is
    cut so that it fits twice, with what is cast and sent of it.
    """
    outputs = {name: k for k, name in enumerate(said.names)}
    there = [(k, each) for k, each in enumerate(wanted.results)]
    by_output: dict[int, list[Piece]] = {}
    for one in said.relation.pieces:
        by_output.setdefault(one.target, []).append(one)
    numbers: dict[int, int] = {}
    copies: dict[int, int] = {}
    pieces = []
    for k, each in there:
        for one in by_output.get(outputs.get(each.name, -1), ()):
            number = one.source
            if number >= 0:
                number = numbers.setdefault(one.source, len(numbers))
                copies[number] = copies.get(number, 0) + each.placed.copies
            pieces.append(one._replace(source=number, target=k))
    limit = LEAST if memory_limit is None else memory_limit
    kept = [
        stored(said.sources[source], limit // (2 * (2 + copies[number])))
        for source, number in numbers.items()
    ]
    relation = Relation(
        tuple([each.shape for each in kept]),
        tuple([each.placed.shape for each in wanted.results]),
        tuple(pieces),
        said.relation.constants,
    )
    return LoadPlan(tuple(kept), relation, wanted.results, tuple(ranks), memory_limit)

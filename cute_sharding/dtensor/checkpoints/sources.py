"""What a checkpoint has, and reading it: torch.distributed.checkpoint's, by any storage reader; and
a file of torch.save.

The first rank looks, and all are told. Imported by the first load: torch's checkpoints are not
imported without one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.checkpoints.leaves import Leaves
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.run.specs import name_of
from cute_sharding.models.stored import Chunk, Read, Stored, in_chunks


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def stored(self, name: str, chunks: Sequence[Chunk], reader: int | None = None) -> Stored:
        """The tensor as it is stored."""
        return Stored(name, self.shape, name_of(self.dtype), tuple(chunks), reader)


def opened(checkpoint: Any) -> Any:
    """What the first rank is to tell the others of a checkpoint: metadata, or the tensors of a
    file.

    Raises:
        TypeError: it is no checkpoint.
        OSError, RuntimeError: it cannot be read.
    """
    if isinstance(checkpoint, StorageReader):
        return checkpoint.read_metadata()
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise TypeError(
            f"load_checkpoint cannot read a checkpoint of type {type(checkpoint).__name__}: pass "
            "the path of a checkpoint, the path of a file of torch.save, or a "
            "torch.distributed.checkpoint.StorageReader"
        )
    if os.path.isdir(checkpoint):
        return FileSystemReader(checkpoint).read_metadata()
    return Saved(checkpoint)


def source_of(checkpoint: Any, told: Any, is_first: bool) -> Source:
    """A checkpoint, of which the first rank has told that."""
    if isinstance(told, Saved):
        return told
    is_path = not isinstance(checkpoint, StorageReader)
    return Distributed(FileSystemReader(checkpoint) if is_path else checkpoint, told, is_first)


# -- torch.distributed.checkpoint ------------------------------------------------------------------


class Distributed:
    """A checkpoint of torch.distributed.checkpoint.

    Attributes:
        tensors, objects: what it has, by name.
    """

    def __init__(self, reader: StorageReader, metadata: Metadata, is_first: bool) -> None:
        reader.set_up_storage_reader(metadata, is_first)
        self._reader = reader
        self._metadata = metadata.state_dict_metadata
        self.tensors = {
            name: Entry(tuple(each.size), each.properties.dtype)
            for name, each in self._metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        self.objects = frozenset(self._metadata.keys() - self.tensors.keys())

    def stored(self, name: str, most: int) -> Stored:
        """A tensor in the chunks that storage has, which cannot be read in part."""
        found = self._metadata[name]
        assert isinstance(found, TensorStorageMetadata)
        chunks = [Chunk(tuple(each.offsets), tuple(each.sizes)) for each in found.chunks]
        return self.tensors[name].stored(name, chunks)

    def read(
        self, those: Sequence[Read], into: Sequence[torch.Tensor | None], device: torch.device
    ) -> list[torch.Tensor]:
        """Of each of some tensors the chunks, flat and one behind the other: in what is given for
        it, or a new tensor.
        """
        planner, found = _Into(), []
        for some, given in zip(those, into):
            dtype = self.tensors[some.of.name].dtype
            flat = given
            if flat is None:
                flat = torch.empty(sum(some.sizes), dtype=dtype, device=device)
            for i, part in zip(some.chunks, flat.split(some.sizes)):
                chunk = some.of.chunks[i]
                planner.tensors[MetadataIndex(some.of.name, chunk.offset)] = part.view(chunk.size)
            found.append(flat)
        self._run(planner)
        return found

    def values(self, names: Collection[str]) -> dict[str, Any]:
        """Objects, of what ``torch.load`` takes to be safe; on the first rank."""
        planner = _Into()
        planner.objects = {MetadataIndex(name): None for name in names}
        self._run(planner)
        return {index.fqn: value for index, value in planner.objects.items()}

    def _run(self, planner: _Into) -> None:
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = self._reader.prepare_global_plan([plan])
        if plan.items:
            self._reader.read_data(plan, planner).wait()


class _Into(LoadPlanner):
    """Reads whole chunks into tensors, and objects.

    Attributes:
        tensors: what is read into.
        objects: what is read.
    """

    def __init__(self) -> None:
        self.tensors: dict[MetadataIndex, torch.Tensor] = {}
        self.objects: dict[MetadataIndex, Any] = {}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: it knows what to read."""

    def create_local_plan(self) -> LoadPlan:
        """All of it."""
        items = [
            *(_item(LoadItemType.TENSOR, index, x.shape) for index, x in self.tensors.items()),
            *(_item(LoadItemType.BYTE_IO, index, torch.Size([0])) for index in self.objects),
        ]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As they are: ranks read what they were told to."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """An object was read."""
        self.objects[read_item.storage_index] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where a chunk is to go."""
        return self.tensors[read_item.storage_index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is there."""


def _item(kind: LoadItemType, index: MetadataIndex, size: torch.Size) -> ReadItem:
    zeros = torch.Size([0] * len(size))
    return ReadItem(kind, index, zeros, index, zeros, size)


# -- torch.save ------------------------------------------------------------------------------------


class Saved:
    """A state dict of full tensors, in a file of torch.save that the first rank has. The others are
    told names, shapes and dtypes: the values stay with it.

    Attributes:
        tensors, objects: what it has, by name.

    Raises:
        TypeError: it has something else than whole tensors.
    """

    def __init__(self, path: Any) -> None:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        leaves, self._first = Leaves(state).all, communication.this_rank()
        for leaf in leaves:
            if isinstance(leaf.value, DTensor):
                raise TypeError(
                    f"{os.fspath(path)} has only one rank's part of {leaf.name!r}, which is a "
                    "DTensor. Save full tensors with torch.save, or save DTensors with "
                    "torch.distributed.checkpoint.save"
                )
        self._values = {leaf.name: leaf.value for leaf in leaves}
        self.tensors = {
            leaf.name: Entry(tuple(leaf.value.shape), leaf.value.dtype)
            for leaf in leaves
            if leaf.is_tensor
        }
        self.objects = frozenset(self._values.keys() - self.tensors.keys())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_values": {}}

    def stored(self, name: str, most: int) -> Stored:
        """A tensor in chunks of ``most`` bytes, which the first rank reads."""
        entry = self.tensors[name]
        chunks = in_chunks(entry.shape, max(most // entry.dtype.itemsize, 1))
        return entry.stored(name, chunks, self._first)

    def read(
        self, those: Sequence[Read], into: Sequence[torch.Tensor | None], device: torch.device
    ) -> list[torch.Tensor]:
        """As a :class:`Distributed` reads; as the file has them, where it has them so."""
        return [
            self._read(some).to(device) if given is None else given.copy_(self._read(some))
            for some, given in zip(those, into)
        ]

    def _read(self, some: Read) -> torch.Tensor:
        tensor, (first, *_) = self._values[some.of.name], some.chunks
        is_one_run = some.chunks == tuple(range(first, first + len(some.chunks)))
        if is_one_run and tensor.is_contiguous():
            start = next(some.of.pieces(some.chunks[:1])).y
            found: torch.Tensor = tensor.reshape(-1)[start : start + sum(some.sizes)]
            return found
        return torch.cat([tensor[some.of.chunks[i].slices].reshape(-1) for i in some.chunks])

    def values(self, names: Collection[str]) -> dict[str, Any]:
        """Objects; on the first rank."""
        return {name: self._values[name] for name in names}


Source: TypeAlias = "Distributed | Saved"

"""Checkpoints of tensors of which a rank holds rows that are not side by side."""

from __future__ import annotations

from pathlib import Path

from upstream.edits import Hook
from upstream.stack import Patch
from upstream.wrap import formatted

HERE = Path(__file__).parent
UTILS = "torch/distributed/tensor/_utils.py"
API = "torch/distributed/tensor/_api.py"
PLANNER = "torch/distributed/checkpoint/planner_helpers.py"
TEST = "test/distributed/checkpoint/test_strided_checkpoint.py"

MESSAGE = """[DTensor][DCP] Save each run of consecutive rows of a strided shard as a chunk

A checkpoint describes the local tensor of a DTensor by one chunk, an offset and
sizes. With a _StridedShard, the rows of a rank may not be consecutive. Example,
8 rows on 2 ranks:

  [_StridedShard(0, split_factor=2)]   # rank 0 has rows 0, 1, 4, 5
  # today: the chunk of rank 0 is rows 0 to 3

save then raises an error for overlapping chunks, and load writes wrong rows into
the DTensor, without an error.

With the patch, such a tensor is a list of chunks, one for each run of
consecutive rows. Planners treat the list like the chunks of a tensor with
several local shards. Tensors without _StridedShard, and tensors whose rows are
consecutive (FSDP with TP), are saved as before.

Files: the patched code reads old files. The old code reads new files, if each
rank loads consecutive rows.

Cost: 89 lines added, 33 removed.

Test plan (fails without the patch):
  python test/distributed/checkpoint/test_strided_checkpoint.py
"""


def test() -> str:
    """Its test."""
    return formatted((HERE / "test_strided_checkpoint.py.in").read_text())


HOOKS: tuple[Hook, ...] = (
    Hook(
        UTILS,
        "import logging\nimport threading\n",
        "import itertools\nimport logging\nimport threading\n",
    ),
    Hook(
        UTILS,
        "compute_global_tensor_info = torch",
        '''def compute_local_chunks(
    global_shape: ShapeType, mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """
    Compute the chunks of consecutive rows that the local tensor of the current rank is
    made of: the offsets of each in the global tensor, those in the local tensor, and
    its sizes. With _StridedShard there may be several, else there is one.

    Example:
    8 rows, _StridedShard(0, split_factor=2) on 2 ranks
        rank 0: [((0,), (0,), (2,)), ((4,), (2,), (2,))]
        rank 1: [((2,), (0,), (2,)), ((6,), (2,), (2,))]
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None or not any(isinstance(p, _StridedShard) for p in placements):
        local_shape, global_offset = compute_local_shape_and_global_offset(
            global_shape, mesh, placements
        )
        return [(global_offset, (0,) * len(local_shape), local_shape)]
    runs_of_dims = []
    for dim, size in enumerate(global_shape):
        local_size, rows = size, torch.arange(max(size, 1))
        for mesh_dim, placement in enumerate(placements):
            if _is_shard_like(placement) and placement.dim == dim:
                local_size, rows = _get_shard_size_and_offsets(
                    local_size,
                    mesh.size(mesh_dim),
                    coordinate[mesh_dim],
                    placement,
                    rows,
                    size,
                    skip_offset=False,
                )
        starts = [0, *(torch.where(rows[:local_size].diff() != 1)[0] + 1).tolist()]
        stops = [*starts[1:], local_size]
        runs_of_dims.append(
            [(int(rows[i]), i, stop - i) for i, stop in zip(starts, stops)]
        )
    return [
        (
            tuple(row for row, _, _ in runs),
            tuple(i for _, i, _ in runs),
            tuple(length for _, _, length in runs),
        )
        for runs in itertools.product(*runs_of_dims)
    ]


compute_global_tensor_info = torch''',
    ),
    Hook(
        PLANNER,
        "from torch.distributed.tensor._utils import compute_local_shape_and_global_offset\n",
        "from torch.distributed.tensor._utils import compute_local_chunks\n",
    ),
    Hook(
        PLANNER,
        """def _create_write_items_for_dtensor(fqn: str, tensor: DTensor) -> WriteItem:
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    sizes, offsets = torch.Size(sizes), torch.Size(offsets)

    return WriteItem(
        index=MetadataIndex(fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(
                offsets=offsets,
                sizes=sizes,
            ),
            properties=TensorProperties.create_from_tensor(tensor.to_local()),
            size=tensor.size(),
        ),
    )
""",
        """def _create_write_items_for_dtensor(fqn: str, tensor: DTensor) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(tensor.to_local()),
                size=tensor.size(),
            ),
        )
        for chunk in _create_chunks_from_dtensor(tensor)
    ]
""",
    ),
    Hook(
        PLANNER,
        "requests.append(_create_write_items_for_dtensor(fqn, obj))",
        "requests.extend(_create_write_items_for_dtensor(fqn, obj))",
    ),
    Hook(
        PLANNER,
        """def _create_chunk_from_dtensor(tensor: DTensor) -> ChunkStorageMetadata:
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    sizes, offsets = torch.Size(sizes), torch.Size(offsets)
    return ChunkStorageMetadata(
        offsets=offsets,
        sizes=sizes,
    )
""",
        """def _create_chunks_from_dtensor(tensor: DTensor) -> list[ChunkStorageMetadata]:
    return [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        for offsets, _, sizes in compute_local_chunks(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    ]
""",
    ),
    Hook(
        API,
        "    compute_global_tensor_info,\n",
        "    compute_global_tensor_info,\n    compute_local_chunks,\n",
    ),
    Hook(
        API,
        "            return [_create_write_items_for_dtensor(fqn, object)]\n",
        "            return _create_write_items_for_dtensor(fqn, object)\n",
    ),
    Hook(
        API,
        """        has one element.

        This dunder""",
        """        has one element. A _StridedShard has one for each run of consecutive rows.

        This dunder""",
    ),
    Hook(
        API,
        """            _create_chunk_from_dtensor,
        )
""",
        """            _create_chunks_from_dtensor,
        )
""",
    ),
    Hook(
        API,
        "            return [_create_chunk_from_dtensor(self)]\n",
        "            return _create_chunks_from_dtensor(self)\n",
    ),
    Hook(
        API,
        """        elif isinstance(self._local_tensor, torch.Tensor):
            return self.to_local()
""",
        """        elif isinstance(self._local_tensor, torch.Tensor):
            chunks = compute_local_chunks(
                self.shape, self.device_mesh, self.placements
            )
            shard = self.to_local()
            if len(chunks) == 1:
                return shard
            for offsets, local_offsets, sizes in chunks:
                if torch.Size(offsets) == index.offset:
                    for dim, (start, size) in enumerate(zip(local_offsets, sizes)):
                        shard = shard.narrow(dim, start, size)
                    return shard
            raise ValueError(
                f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}'"
            )
""",
    ),
)

PATCH = Patch(name="strided-checkpoints", message=MESSAGE, files={TEST: test}, hooks=HOOKS)

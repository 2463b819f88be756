"""Placements and specs (torch/distributed/tensor/placement_types.py, _dtensor_spec.py): the
classes, and the order in which a spec's placements shard.

Specs are read and made here, never changed: torch shares them between tensors and caches. Only
:func:`become` gives a tensor another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
from torch.distributed.tensor._utils import assert_no_mixed_partial_types as check_no_mixed_partials
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _MaskPartial,
    _StridedShard,
)

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced.dispatch_modes import no_modes
from cute_sharding.dtensor.replaced.symints import (
    are_without_factors,
    split_factor_of,
    split_factors,
)
from cute_sharding.layout.layout import row_major

__all__ = [
    "DTensorSpec",
    "MaskPartial",
    "NormPartial",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "TensorMeta",
    "are_known",
    "as_replica",
    "become",
    "check_no_mixed_partials",
    "cut_of",
    "decoded_order",
    "dtype_of_powers",
    "is_by_elements",
    "is_dtensor",
    "is_last",
    "is_masked",
    "is_of_torchs_own",
    "like",
    "may_be_uneven",
    "mesh_dim_text",
    "mesh_text",
    "picked_rows",
    "placed_as",
    "powers",
    "root",
    "says_an_order",
    "shard_order",
    "split_factors",
    "unbound_spec",
    "with_shape",
]

StridedShard = _StridedShard


MaskPartial = _MaskPartial


class _Applied(MaskBuffer):
    """The buffer of a placement whose mask the op itself has applied: nothing is left to do. There
    is one, so that equal placements compare equal; a copy is the same one.
    """

    def materialize_mask(self, mask: torch.Tensor) -> None:
        raise RuntimeError(
            "a tensor cannot become pending as rows that an index picked: only an index gives such "
            "contributions. Redistribute those rows to Replicate first"
        )

    def apply_mask(self, tensor: torch.Tensor) -> None:
        pass

    def release_mask(self) -> None:
        pass

    def __reduce__(self) -> str:
        return "_APPLIED"

    def __copy__(self) -> _Applied:
        return self

    def __deepcopy__(self, memo: Any) -> _Applied:
        return self


# torch reads ``data`` before it calls a method, and refuses None.
_APPLIED = _Applied(torch.zeros(0, dtype=torch.bool), 1)


def picked_rows(op: str, shape: Sequence[int], dim: int) -> MaskPartial:
    """The placement of rows that an index picks of a sharded ``dim``, on a device that gives zeros
    for the rows of others: torch's own, so that each op after it does what it does on torch alone:
    it reduces. A Partial would stay pending in sums and products, and each reader of these would
    reduce it again.
    """
    return MaskPartial(op, _APPLIED, torch.Size(shape), dim)


def is_masked(placement: Placement) -> bool:
    """Whether the placement is one of :func:`picked_rows`."""
    return type(placement) is MaskPartial and placement.mask_buffer is _APPLIED


def is_of_torchs_own(placement: Placement) -> bool:
    """Whether a pending reduction needs no method of the placement: what devices have is added up
    (or reduced in another of torch's own ways) as it is.
    """
    return type(placement) is Partial or is_masked(placement)


# The kinds of placement whose effect on a tensor is known. A new kind that is a (dim, split factor)
# too has to be added here; in cut_of and wherever this file names StridedShard; in placement_of
# (run/placements.py), the inverse of cut_of; and wherever the adapter has `(Shard, StridedShard)`
# (grep finds a dozen). Until then are_known is False for it, and its callers leave it to torch.
# Pictures go by the names of classes (drawing/inputs.py), as they must not import torch.
_KINDS = (Shard, StridedShard, Replicate, Partial)
_KINDS_ALONE = frozenset(_KINDS)


def are_known(placements: Sequence[Placement]) -> bool:
    """Whether :func:`cut_of` knows all of them. Tensors with others are left to torch."""
    # isinstance of torch's placements is Python code
    return _KINDS_ALONE.issuperset(map(type, placements)) or all(
        isinstance(p, _KINDS) for p in placements
    )


def is_by_elements(placement: Placement) -> bool:
    """Whether the pending value is reduced element by element, so that it may be sliced before:
    true for torch's own kinds, not for those of other packages. A mask has the layout of the
    elements, and is not sliced with them.
    """
    return type(placement) in (Partial, NormPartial) or is_masked(placement)


def powers(norm: NormPartial, tensor: torch.Tensor) -> torch.Tensor:
    """What is added up, of what devices have of a norm: in 32 bits, where they have it in 16. (The
    square of 300 is no number of 16 bits.)
    """
    return tensor.to(dtype_of_powers(tensor.dtype)) ** norm.norm_type


def dtype_of_powers(dtype: torch.dtype) -> torch.dtype:
    """That of :func:`powers`, of norms of this dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def root(norm: NormPartial, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm, of the sum of its powers."""
    return (tensor ** (1 / norm.norm_type)).to(dtype)


def cut_of(placement: Placement) -> tuple[int, Any] | None:
    """The cut of a placement: (tensor dim, split factor, which may be a SymInt); None if it cuts
    nothing. The only place that says so.

    Raises:
        RuntimeError: an unknown kind of placement: it is not taken for Replicate.
    """
    if type(placement) is Shard:  # isinstance takes longer, and subclasses are rare
        return placement.dim, 1
    if type(placement) is Replicate:
        return None
    if isinstance(placement, StridedShard):  # tested first, as some releases make it a Shard
        return placement.dim, split_factor_of(placement)
    if isinstance(placement, Shard):
        return placement.dim, 1
    if isinstance(placement, (Replicate, Partial)):
        return None
    raise RuntimeError(
        f"cute_sharding does not know the class {type(placement).__name__} of the placement "
        f"{placement!r}: create the DTensor with Shard, Replicate or Partial"
    )


def mesh_dim_text(m: int, names: Sequence[str] | None) -> str:
    """A mesh dim as messages about programs write it: by its number, and its name if it has one."""
    return f"mesh dim {m}" + (f" ({names[m]!r})" if names else "")


def mesh_text(mesh: Sequence[int], names: Sequence[str] | None) -> str:
    """A mesh as messages write it: the sizes, with the mesh dims' names if they have names."""
    sizes = [f"{name}={n}" for name, n in zip(names, mesh)] if names else map(str, mesh)
    return f"({', '.join(sizes)})"


def placed_as(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    """``spec`` with other placements. If some are still strided, they are read in the same way as
    before: as an order of shards or not.
    """
    strided = any(isinstance(p, StridedShard) for p in placements)
    return DTensorSpec(
        spec.mesh,
        placements,
        spec.tensor_meta,
        use_strided_shard_as_shard_order=spec.use_strided_shard_as_shard_order if strided else None,
    )


def with_shape(spec: DTensorSpec, shape: Sequence[int]) -> DTensorSpec:
    """The spec of a tensor with another shape, and contiguous strides."""
    dtype = spec.tensor_meta.dtype if spec.tensor_meta is not None else torch.float32
    meta = TensorMeta(torch.Size(shape), row_major(tuple(shape)), dtype)
    return with_placements(spec, spec.placements, meta)


def says_an_order(spec: DTensorSpec) -> bool:
    """Whether a spec names an order in which its mesh dims shard, other than left to right."""
    return bool(
        not spec.use_strided_shard_as_shard_order
        and spec.shard_order is not None
        and not DTensorSpec.is_default_device_order(spec.shard_order)
    )


# (mesh dim, placement) pairs in the order in which they shard: with plain shards, but for strided
# ones that are sharded again last (is_last).
Order: TypeAlias = tuple[tuple[int, Placement], ...]


def is_last(placement: Placement) -> bool:
    """Whether the mesh dim shards what all others left, as FSDP shards the local tensors of tensor
    parallelism. torch writes that as a split factor, the number of shards that the mesh dims to the
    right have made. Left to right the split factor gives the same rows only if these shards are
    plain. Of strided ones no placement gives the rows, so the package writes such a shard with a
    split factor below 0 (:mod:`..door.composed`): nothing else has one, rules that keep a
    placement keep it, and torch refuses to split or gather by it.
    """
    if not isinstance(placement, StridedShard):
        return False
    factor = split_factor_of(placement)
    return type(factor) is int and factor < 0


def shard_order(spec: DTensorSpec) -> Order | None:
    """The order that ``spec`` names or that is decoded from it; None for left to right."""
    if spec.use_strided_shard_as_shard_order or any(map(is_last, spec.placements)):
        return decoded_order(tuple(spec.placements), spec.mesh.shape)
    if not says_an_order(spec):
        return None
    order = spec.shard_order
    if any(isinstance(p, StridedShard) for p in spec.placements):
        raise NotImplementedError(
            f"the placements {spec.placements} encode an order of the mesh dims by _StridedShard, "
            f"but the DTensorSpec also has the shard order {order}: give only one of the two "
            "orders"
        )
    return _pairs(spec.placements, order)


class _Sizes(tuple[int, ...]):
    """The sizes of a mesh, with the method of a mesh that decoding an order needs."""

    def size(self, mesh_dim: int) -> int:
        return self[mesh_dim]


def decoded_order(placements: tuple[Placement, ...], mesh: Sequence[int]) -> Order | None:
    """The order that the _StridedShard placements of a spec that a program made encode: that of
    :func:`is_last`, and otherwise the one that torch decodes from the split factors. None for left
    to right: without such placements, or if no order has these split factors. Symbols encode none:
    only views make them.
    """
    if are_without_factors(placements) or any(
        isinstance(p, StridedShard) and type(split_factor_of(p)) is not int for p in placements
    ):
        return None
    return _decoded(placements, _Sizes(mesh))


@remembered
def _decoded(placements: tuple[Placement, ...], mesh: Any) -> Order | None:
    every: Any = placements
    last = {m: Shard(p.dim) for m, p in enumerate(every) if is_last(p)}
    if last:
        others = tuple([Replicate() if m in last else p for m, p in enumerate(placements)])
        before = _decoded(others, mesh) or enumerate(others)
        return (*[(m, p) for m, p in before if m not in last], *last.items())
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh)
    return None if order is None else _pairs(placements, order)


def _pairs(placements: Sequence[Placement], order: Sequence[Any]) -> Order:
    cutting = [(m, Shard(entry.tensor_dim)) for entry in order for m in entry.mesh_dims]
    dims = {m for m, _ in cutting}
    return (*[(m, p) for m, p in enumerate(placements) if m not in dims], *cutting)


def unbound_spec(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    rank: int = 0,
    ranks: Sequence[int] | None = None,
) -> DTensorSpec:
    """The spec of a tensor that a user makes, on a mesh of these sizes as the rank ``rank`` of it
    sees it; ``ranks`` are the mesh's, by default 0, 1, and so on. It needs no process group, and
    makes none.
    """
    with no_modes():
        all_ranks = torch.arange(prod(mesh)) if ranks is None else torch.tensor([*ranks])
        devices = DeviceMesh("cpu", all_ranks.reshape(tuple(mesh)), _init_backend=False, _rank=rank)
    return DTensorSpec(
        devices,
        tuple(placements),
        TensorMeta(torch.Size(shape), row_major(tuple(shape)), torch.float32),
    )


def is_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor)


def as_replica(tensor: torch.Tensor, mesh: Any) -> DTensor:
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(tensor, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta), requires_grad=False)


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with the spec of ``tensor`` and another local tensor."""
    return DTensor(local, tensor._spec, requires_grad=False)


def with_placements(
    spec: DTensorSpec, placements: Sequence[Placement], meta: TensorMeta | None = None
) -> DTensorSpec:
    """The spec with other placements on pending mesh dims, and the same order of shards; with
    ``meta``, of a tensor with this TensorMeta.
    """
    order: Any = None if spec.use_strided_shard_as_shard_order else spec.shard_order
    return DTensorSpec(
        spec.mesh,
        tuple(placements),
        meta or spec.tensor_meta,
        order,
        spec.use_strided_shard_as_shard_order,
    )


def dtensor_of(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> DTensor:
    """The DTensor with that local tensor."""
    return DTensor(local, spec, requires_grad=requires_grad)


def become(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Turn a leaf into the DTensor with that local tensor and spec, and keep its identity: everyone
    who holds it, such as a module and its optimizer, then holds the new one. Earlier results
    computed from it have no gradient any more; torch raises when one is asked for.

    Raises:
        RuntimeError: the dtype differs, and something has a weak reference to the tensor, so that
            torch cannot swap it.
    """
    if spec.tensor_meta is None or spec.tensor_meta.dtype != tensor.dtype:
        other: torch.Tensor = dtensor_of(local, spec, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            other = torch.nn.Parameter(other, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, other)
        return
    tensor._local_tensor, tensor._spec = local, spec
    torch.autograd.graph.increment_version(tensor)


def may_be_uneven(spec: DTensorSpec) -> bool:
    """Whether ranks may hold different numbers of rows."""
    if not are_known(spec.placements):
        return False
    parts = [1] * len(spec.shape)
    for placement, n in zip(spec.placements, spec.mesh.shape):
        cut = cut_of(placement)
        if cut is not None:
            parts[cut[0]] *= n * (cut[1] if type(cut[1]) is int and cut[1] > 0 else 1)
    return any(
        n > 1 and (isinstance(size, torch.SymInt) or size % n != 0)
        for size, n in zip(spec.shape, parts)
    )

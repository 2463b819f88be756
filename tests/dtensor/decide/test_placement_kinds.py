"""What a placement does to a tensor is said in one place, also of kinds that nobody knows: those
are refused or left to torch, and never taken for a replica.
"""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from op_programs import assert_close
from simulation import distribute, mesh_of, number, plain, ranks_of
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement, _MaskPartial, _StridedShard

import cute_sharding
from benchmarks.received import Received
from cute_sharding.dtensor.compiled.symbols import local_size_if_known
from cute_sharding.dtensor.door.cuts import parts_of, some_device_is_empty
from cute_sharding.dtensor.replaced import tensor_specs
from cute_sharding.dtensor.replaced.compiler import Tracing
from cute_sharding.dtensor.run import placements


@dataclass(frozen=True)
class Odd(Placement):
    """A kind of placement that some other package has made."""


COORDINATES = [*product(range(2), repeat=2)]
REFUSED = "does not know the class Odd"


def odd(shape=(8, 6)):
    mesh = mesh_of((2,))
    meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
    return DTensor(torch.ones(shape), DTensorSpec(mesh, (Odd(),), meta), requires_grad=False)


@pytest.mark.parametrize(
    "placement, cut",
    [
        (Shard(1), (1, 1)),
        (_StridedShard(0, split_factor=3), (0, 3)),
        (Replicate(), None),
        (Partial(), None),
        (_MaskPartial(offset_shape=torch.Size((3,)), offset_dim=0), None),
    ],
    ids=str,
)
def test_kinds_that_are_known(placement, cut):
    assert tensor_specs.cut_of(placement) == placements.cut_of(placement) == cut
    assert tensor_specs.are_known([placement])
    if not isinstance(placement, Partial):
        assert placements.placement_of(cut) == placement


def test_every_reader_has_one_answer_for_a_kind_that_is_not():
    assert not tensor_specs.are_known([Shard(0), Odd()])
    for read in (tensor_specs.cut_of, placements.cut_of, lambda p: parts_of([p])):
        with pytest.raises(RuntimeError, match=REFUSED):
            read(Odd())
    assert not some_device_is_empty(odd((0, 6))._spec)  # nobody knows
    tracing = SimpleNamespace(_local_size=local_size_if_known)
    assert Tracing._local_shape(tracing, (8, 6), mesh_of((2,)), (Odd(),)) is None
    assert Tracing._local_shape(tracing, (8, 6), mesh_of((2,)), (Shard(0),)) == (4, 6)


def test_its_views_are_refused_and_its_redistribution_is_torchs(monkeypatch):
    """The advice in the error can be followed as far as torch can."""
    asked = []

    def no_steps(current, target, *rest):
        asked.append((current.placements, target.placements))
        return []

    monkeypatch.setattr(_redistribute, "_gen_transform_infos", no_steps)
    with cute_sharding.enabled(redistribution=True):
        with pytest.raises(RuntimeError, match=REFUSED):
            odd().view(48)
        odd().redistribute(placements=[Replicate()])
        assert asked == [((Odd(),), (Replicate(),))]
        assert cute_sharding.stats()["redistribute"]["stock"] == 1


class Rounded(Partial):
    """A sum that some other package finishes by all elements that a device has of it."""

    def _reduce_value(self, tensor, mesh, mesh_dim):
        return super()._reduce_value(tensor, mesh, mesh_dim) / tensor.shape[0]


@pytest.mark.parametrize(
    ("kind", "finished", "rows"),
    [(_NormPartial(2), lambda parts: (parts**2).sum(0).sqrt(), 3), (Rounded(), None, 5)],
    ids=["norm", "another package's"],
)
def test_what_is_pending_by_elements_is_cut_first(kind, finished, rows):
    """Less is reduced then. What nobody knows is reduced as it lies."""
    parts = torch.arange(10.0).reshape(2, 5) + 1
    whole = parts.sum(0) / 5 if finished is None else finished(parts)
    with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True):
        mesh = mesh_of((2, 2))
        locals_ = LocalTensor({rank: parts[rank % 2].clone() for rank in range(4)})
        x = DTensor.from_local(
            locals_, mesh, [Replicate(), kind], run_check=False, shape=(5,), stride=(1,)
        )
        with Received() as received:
            result = x.redistribute(placements=[Shard(0), Replicate()])
        for rank, local in result._local_tensor._local_tensors.items():
            assert torch.allclose(local, whole[:3] if rank < 2 else whole[3:])
        assert received.by_rank[0] == rows


@pytest.mark.parametrize("shape", [(4, 6), (5, 3)], ids=str)
def test_norms_go_to_all_placements(shape):
    """Devices that reduce together have the same rows while they do."""
    parts = torch.arange(4.0 * shape[0] * shape[1]).reshape(2, 2, *shape) + 1
    norm, cuts = _NormPartial(2), (Replicate(), Shard(0), Shard(1))
    with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True):
        mesh = mesh_of((2, 2))
        for before in product((norm, *cuts), repeat=2):
            pending = [m for m, p in enumerate(before) if p is norm]
            if not pending:
                continue
            terms = [
                parts[a if 0 in pending else 0, b if 1 in pending else 0] for a, b in COORDINATES
            ]
            kept = [Replicate() if p is norm else p for p in before]
            held = {
                rank: distribute(term, (2, 2), kept)._local_tensor._local_tensors[rank]
                for rank, term in enumerate(terms)
            }
            x = DTensor.from_local(
                LocalTensor(held), mesh, before, run_check=False, shape=shape, stride=(shape[1], 1)
            )
            index = tuple(slice(None) if m in pending else slice(1) for m in range(2))
            whole = (parts[index] ** 2).sum((0, 1)).sqrt()
            for after in product(cuts, repeat=2):
                wanted = distribute(whole, (2, 2), after)._local_tensor._local_tensors
                found = x.redistribute(placements=after)._local_tensor._local_tensors
                for rank in range(4):
                    assert torch.allclose(found[rank], wanted[rank]), (before, after, rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [1, 2, 3.5])
def test_norms_over_several_mesh_dims_are_one_reduction(order, dtype):
    """Of powers in 32 bits: those of 16 would be no numbers."""
    with ranks_of((2, 3)), cute_sharding.enabled(redistribution=True), Received() as received:
        with plain():
            values = (number((3, 7)) * 40 + 300).to(dtype)
            wanted = torch.linalg.vector_norm(values.double(), order, 1)
        x = distribute(values, (2, 3), [Shard(1), Shard(1)])
        norm = torch.linalg.vector_norm(x, order, 1)
        assert norm.placements == (_NormPartial(order),) * 2
        received.collectives.clear()
        found = norm.redistribute(placements=[Replicate()] * 2)
        assert sum(received.collectives.values()) == 1
        for local in found.to_local()._local_tensors.values():
            with plain():
                assert torch.allclose(local.double(), wanted, rtol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("mesh", "cuts"),
    [
        ((2, 2), [Shard(1), Shard(0)]),
        ((4,), [Shard(1)]),
        ((4,), [_StridedShard(1, split_factor=2)]),
    ],
    ids=str,
)
def test_signatures_answer_once_norms_are_finished(mesh, cuts):
    """The kernel of weight norms divides by 0 on a device without rows, which ends the process, and
    torch has no rule for its gradient: neither is left to torch as one of the operands is pending.
    """

    def normalized(v, by):
        norm = torch.norm_except_dim(v, 2, 0)
        (gradient,) = torch.autograd.grad((torch._weight_norm(v, norm, 0) * by).sum(), v)
        return gradient, norm

    with plain():
        values = (number((5, 6)) + 1).requires_grad_(), number((5, 6))
        expected = normalized(*values)
    with ranks_of(mesh), cute_sharding.enabled():
        v, by = (distribute(x.detach(), mesh, cuts) for x in values)
        found = normalized(v.requires_grad_(), by)
        assert type(cuts[0]) is not Shard or isinstance(found[1].placements[0], _NormPartial)
        for result, wanted in zip(found, expected):
            assert_close(result.detach(), wanted.detach(), cuts)

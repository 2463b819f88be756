"""Redistribution by plan, on every rank: from any placements to any others, each missing element
moves once, and gradients go back the same way.
"""

import random
from math import prod

import pytest
import torch
from drawing import REDUCE, contributions, draw_placements, draw_shape, reduced
from enumeration import signature
from simulation import (
    assert_holds,
    cuts_of,
    distribute,
    is_partial,
    locals_of,
    mesh_of,
    most_received,
    number,
    of_wrong_shape,
    plain,
    ranks_of,
    watched_wire,
)
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _redistribute,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import cute_sharding
from cute_sharding.dtensor.replaced import tensor_specs
from cute_sharding.dtensor.run.packing import from_wire, to_wire

MESHES = [(2,), (3,), (4,), (8,), (1, 2), (2, 2), (2, 3), (4, 2), (2, 2, 2)]


def moved(full, mesh, before, after, **options):
    return distribute(full, mesh, before, **options).redistribute(placements=after)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_missing_element_moves_once(mesh, monkeypatch):
    """At most one collective, none where nothing is missing, and no rank is sent more than what it
    needs and does not hold.
    """
    rng = random.Random(f"moved {mesh}")
    idle = 0
    with (
        ranks_of(mesh),
        cute_sharding.enabled(redistribution=True),
        watched_wire(monkeypatch) as wire,
    ):
        for _ in range(120):
            shape = draw_shape(rng)
            before, after = draw_placements(rng, mesh, shape), draw_placements(rng, mesh, shape)
            full = number(shape)
            with CommDebugMode() as communication:
                result = moved(full, mesh, before, after)
            assert list(result.placements) == after
            assert_holds(result, full)
            assert all(
                part.is_contiguous() for part in result._local_tensor._local_tensors.values()
            )
            held, wanted = (
                signature(shape, mesh, cuts_of(placements)) for placements in (before, after)
            )
            missing = max((b & ~a).bit_count() for a, b in zip(held, wanted))
            assert most_received(wire) == missing, (shape, before, after)
            assert communication.get_total_counts() == (missing > 0), (
                shape,
                before,
                after,
                communication.get_comm_counts(),
            )
            wire.clear()
            idle += not missing
    assert 12 <= idle <= 90


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("op", REDUCE)
def test_pending_reductions_are_done_on_the_way(op, mesh):
    """In at most two collectives; those that the target keeps pending stay so, and each device's
    contribution moves as it is.
    """
    rng = random.Random(f"{op} {mesh}")
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        for _ in range(30):
            shape = draw_shape(rng)
            # Averages and sums may be pending together.
            before = draw_placements(rng, mesh, shape, pending=op, chance=0.5)
            if op == "avg":
                before = [
                    Partial("sum") if is_partial(p) and rng.random() < 0.3 else p for p in before
                ]
            after = [
                b if is_partial(b) and rng.random() < 0.2 else a
                for b, a in zip(before, draw_placements(rng, mesh, shape))
            ]
            given = contributions(
                rng,
                shape,
                mesh,
                before,
                torch.int64 if op in ("band", "bor", "bxor") else torch.float64,
            )
            with CommDebugMode() as communication:
                result = moved(given, mesh, before, after)
            assert list(result.placements) == after
            assert_holds(result, reduced(given, mesh, before, after))
            assert all(
                part.is_contiguous() for part in result._local_tensor._local_tensors.values()
            )
            reduces = any(is_partial(b) and not is_partial(a) for b, a in zip(before, after))
            most = 0 if not prod(shape) or before == after else 1 + reduces
            assert communication.get_total_counts() <= most, (
                shape,
                before,
                after,
                communication.get_comm_counts(),
            )


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_go_back(mesh):
    """Wherever the gradient is, and if it is a pending sum itself, it comes as the input is. That
    of a pending reduction is whole on each device.
    """
    rng = random.Random(f"gradients {mesh}")
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        for _ in range(30):
            shape = draw_shape(rng)
            before, given = (
                draw_placements(rng, mesh, shape, pending="sum", chance=0.2) for _ in range(2)
            )
            tensor = distribute(number(shape).double(), mesh, before, requires_grad=True)
            gradient = contributions(rng, shape, mesh, given)
            tensor.redistribute(placements=draw_placements(rng, mesh, shape)).backward(
                distribute(gradient, mesh, given)
            )
            assert list(tensor.grad.placements) == [
                Replicate() if is_partial(b) and not is_partial(g) else b
                for b, g in zip(before, given)
            ]
            assert_holds(tensor.grad, reduced(gradient, mesh, given, tensor.grad.placements))


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_torch_says_the_same_where_it_is_right(mesh):
    """Sizes that divide, no _StridedShard: the same placements, values and gradients, to
    the bit.
    """
    rng = random.Random(f"stock {mesh}")
    for _ in range(20):
        shape = rng.choice([(4, 8), (8,), (4, 4, 4)])
        before = draw_placements(rng, mesh, shape, strided=False, pending="sum", chance=0.3)
        after = draw_placements(rng, mesh, shape, strided=False)
        given, gradient = (
            contributions(rng, shape, mesh, before),
            contributions(rng, shape, mesh, after),
        )

        def run():
            with ranks_of(mesh):
                tensor = distribute(given, mesh, before, requires_grad=True)
                result = tensor.redistribute(placements=after)
                result.backward(distribute(gradient, mesh, after))
                return result.detach(), tensor.grad

        stock = run()
        with cute_sharding.enabled(redistribution=True):
            ours = run()
        for one, other in zip(stock, ours):
            assert one.placements == other.placements
            assert all(
                torch.equal(part, other._local_tensor._local_tensors[rank])
                for rank, part in one._local_tensor._local_tensors.items()
            )


def test_gradients_of_gradients():
    mesh, shape, before, after = (
        (2, 2),
        (5, 7),
        [Shard(0), _StridedShard(0, split_factor=2)],
        [Shard(1), Replicate()],
    )
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        tensor = distribute(number(shape), mesh, before, requires_grad=True)
        weight = distribute(number(shape) + 1, mesh, after, requires_grad=True)
        [gradient] = torch.autograd.grad(
            tensor.redistribute(placements=after), tensor, weight, create_graph=True
        )
        assert_holds(gradient, number(shape) + 1)
        gradient.backward(distribute(number(shape) + 2, mesh, before))
        assert_holds(weight.grad, number(shape) + 2)


# -- dtypes and options ----------------------------------------------------------------------------


MOVES = {
    "gather": ((8, 4), [Shard(0)], [Replicate()]),
    "uneven gather": ((7, 3), [Shard(0)], [Replicate()]),
    "exchange": ((7, 5), [_StridedShard(0, split_factor=2)], [Shard(1)]),
    "slice": ((8, 4), [Replicate()], [Shard(1)]),
}
of_each_kind = pytest.mark.parametrize("shape, before, after", MOVES.values(), ids=MOVES)
DTYPES = [
    "bool",
    "uint8",
    "int16",
    "int64",
    "float8_e4m3fn",
    "float16",
    "bfloat16",
    "float64",
    "complex64",
    "complex128",
]


@of_each_kind
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=DTYPES)
def test_every_dtype_travels(dtype, shape, before, after):
    full = (number(shape) % 5).to(dtype)
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True):
        result = moved(full, (4,), before, after)
        assert result.dtype == dtype
        for rank, part in locals_of(full, (4,), cuts_of(after)).items():
            # Not every dtype can be compared, and bytes can.
            assert torch.equal(
                result._local_tensor._local_tensors[rank].view(torch.uint8), part.view(torch.uint8)
            )


@of_each_kind
def test_conjugates_travel(shape, before, after):
    with plain():
        full = torch.complex(number(shape), number(shape) + 1)
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True):
        assert_holds(
            distribute(full, (4,), before).conj().redistribute(placements=after), full.conj()
        )


def test_the_dtype_on_the_wire(monkeypatch):
    """forward_dtype is what travels and what comes out; backward_dtype is what the gradient travels
    in, and it comes back in the input's own.
    """
    shape = (6, 10)
    with (
        ranks_of((4,)),
        cute_sharding.enabled(redistribution=True),
        watched_wire(monkeypatch) as wire,
    ):
        tensor = distribute(number(shape), (4,), [Shard(0)], requires_grad=True)
        result = tensor.redistribute(
            placements=[Shard(1)], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
        )
        assert result.dtype == torch.bfloat16
        assert_holds(result, number(shape).bfloat16())
        result.backward(distribute(number(shape).bfloat16(), (4,), [Shard(1)]))
        assert tensor.grad.dtype == torch.float32
        assert_holds(tensor.grad, number(shape))
        assert [dtype for dtype, _ in wire] == [torch.bfloat16, torch.float64]


@of_each_kind
def test_asynchronous(shape, before, after):
    with ranks_of((4,)), cute_sharding.enabled(redistribution=True):
        tensor = distribute(number(shape), (4,), before, requires_grad=True)
        result = tensor.redistribute(placements=after, async_op=True)
        assert_holds(result * 2, number(shape) * 2)
        result.backward(distribute(number(shape) + 1, (4,), after))
        assert_holds(tensor.grad, number(shape) + 1)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_full_tensor(mesh):
    rng = random.Random(f"full {mesh}")
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        for _ in range(12):
            shape = draw_shape(rng)
            placements = draw_placements(rng, mesh, shape, pending="sum", chance=0.2)
            given = contributions(rng, shape, mesh, placements)
            tensor = distribute(given, mesh, placements, requires_grad=True)
            full = tensor.full_tensor()
            assert torch.equal(
                full.reconcile().detach(),
                reduced(given, mesh, placements, [Replicate()] * len(mesh))[0],
            ), (shape, placements)
            gradient = number(shape).double() + 0.5
            full.backward(LocalTensor(dict.fromkeys(range(prod(mesh)), gradient)))
            assert_holds(tensor.grad, gradient)


def test_from_a_local_tensor_that_is_not_contiguous():
    full = number((6, 7))
    with ranks_of((3,)), cute_sharding.enabled(redistribution=True):
        columns = LocalTensor(
            {
                rank: part.t().contiguous().t()
                for rank, part in locals_of(full, (3,), ((1, 1),)).items()
            }
        )
        tensor = DTensor.from_local(
            columns,
            mesh_of((3,)),
            [Shard(1)],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        for after in (Replicate(), Shard(0), _StridedShard(1, split_factor=3)):
            assert_holds(tensor.redistribute(placements=[after]), full)
        assert_holds(
            distribute(full, (3,), [Shard(1)]).t().redistribute(placements=[Replicate()]), full.t()
        )


# -- meshes ----------------------------------------------------------------------------------------


def placed(full, mesh, ranks, placements):
    """``full`` on a mesh of those ranks, row-major, and of any slices of it; and what each rank is
    to hold of it elsewhere.
    """

    def locals_by_rank(placements):
        by_place = locals_of(full, tuple(mesh.shape), cuts_of(placements))
        return {rank: by_place[i % len(by_place)] for i, rank in enumerate(ranks)}

    tensor = DTensor.from_local(
        LocalTensor(locals_by_rank(placements)),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    return tensor, locals_by_rank


# Over one mesh dim, the other, both, and over both to be replicated.
ON_TWO_DIMS = [
    ([Shard(0), Shard(0)], [Shard(1), Shard(0)]),
    ([Shard(0), Shard(1)], [Shard(0), Shard(0)]),
    ([Shard(0), Shard(0)], [Replicate(), Shard(0)]),
    ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
    ([_StridedShard(1, split_factor=3), Shard(1)], [Replicate(), Replicate()]),
]


@pytest.mark.parametrize("before, after", ON_TWO_DIMS, ids=str)
@pytest.mark.parametrize("which", ["slice", "slice of other dims", "permuted", "flattened"])
def test_meshes_of_any_ranks(which, before, after):
    """A slice of a larger mesh, with the other slices beside it; ranks in any order; mesh dims that
    the program has flattened into one group.
    """
    full = number((5, 7))
    whole = DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2), mesh_dim_names=("a", "b", "c"))
    if which == "permuted":
        ranks = [3, 1, 2, 0]
        mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(2, 2))
    else:
        names = ("a", "c") if which == "slice of other dims" else ("b", "c")
        ranks = [0, 1, 4, 5, 2, 3, 6, 7] if which == "slice of other dims" else list(range(8))
        if which == "flattened":
            whole[names]._flatten("bc")
        mesh = whole[names]
    with ranks_of((len(ranks),)), cute_sharding.enabled(redistribution=True):
        tensor, locals_by_rank = placed(full, mesh, ranks, before)
        result = tensor.redistribute(placements=after)
        for rank, part in locals_by_rank(after).items():
            assert torch.equal(result._local_tensor._local_tensors[rank], part), f"rank {rank}"


# -- errors ----------------------------------------------------------------------------------------


def test_errors_come_before_anything_is_sent(monkeypatch):
    full = number((6, 7))
    with (
        ranks_of((4,)),
        cute_sharding.enabled(redistribution=True),
        watched_wire(monkeypatch) as wire,
    ):
        tensor = distribute(full, (4,), [Shard(0)])
        wrong = of_wrong_shape((4,), full[:2], full, [Shard(0)])
        with pytest.raises(
            RuntimeError, match=r"local tensor has shape \(2, 7\).*give the shape \(0, 7\)"
        ):
            wrong.redistribute(placements=[Replicate()])
        with pytest.raises(RuntimeError, match="from one Partial"):
            before, after = (with_placements(tensor, [Partial(op)]) for op in ("sum", "max"))
            _redistribute.redistribute_local_tensor(tensor._local_tensor, before, after)
        assert not wire


def with_placements(tensor, placements):
    return tensor_specs.DTensorSpec(
        tensor.device_mesh, tuple(placements), tensor_meta=tensor._spec.tensor_meta
    )


def test_reductions_that_do_not_commute_are_not_mixed():
    with (
        ranks_of((2, 2)),
        cute_sharding.enabled(redistribution=True),
        pytest.raises(ValueError, match="Mixed Partial"),
    ):
        moved(number((4, 4)), (2, 2), [Partial(), Partial("max")], [Replicate(), Replicate()])


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_towards_a_pending_reduction(op):
    """What ops ask of their inputs: contributions that reduce to what was there."""
    full = number((5, 6)) * 4
    with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True):
        tensor = distribute(full, (2, 2), [Replicate(), Shard(0)])
        spec = with_placements(tensor, [Partial(op), Shard(1)])
        local = _redistribute.redistribute_local_tensor(tensor._local_tensor, tensor._spec, spec)
        assert_holds(
            DTensor(local, spec, requires_grad=False).redistribute(placements=[Shard(0), Shard(0)]),
            full,
        )


@pytest.mark.costly
def test_truth_values_are_received_in_code_that_compiles():
    """A graph that counts where a gathered mask is not set."""
    count = torch.compile(lambda wire: (~from_wire(wire, torch.bool)).sum())
    assert count(to_wire(torch.arange(8) % 3 == 0)) == 5

"""Redistribution as programs meet it: inputs of other ops, the switch, slices and norms."""

import importlib
import inspect
import random
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from drawing import draw_placements, draw_shape
from simulation import (
    assert_holds,
    cuts_of,
    distribute,
    is_partial,
    locals_of,
    mesh_of,
    number,
    of_wrong_shape,
    plain,
    ranks_of,
)
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _api,
    _dispatch,
    _redistribute,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode

import cute_sharding
from benchmarks.received import Received
from cute_sharding._settings import TABLE
from cute_sharding.dtensor.decide import redistributions
from cute_sharding.dtensor.decide.question import is_torchs_alone
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.communication import in_order, slices
from cute_sharding.dtensor.run.groups import group_of
from cute_sharding.dtensor.run.redistribute import prepare

# -- the inputs of other ops -----------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 3)], ids=str)
def test_inputs_of_other_ops(mesh):
    rng = random.Random(f"inputs {mesh}")
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        for _ in range(10):
            shape = draw_shape(rng)
            one, other = (
                distribute(number(shape) + k, mesh, draw_placements(rng, mesh, shape))
                for k in (0, 1)
            )
            assert_holds(one + other, 2 * number(shape) + 1)


EMBEDDINGS = [
    ((4,), [Shard(0)], [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)], [Shard(0), Replicate()]),
]


@pytest.mark.parametrize("mesh, of_rows, of_indices", EMBEDDINGS, ids=str)
def test_an_embedding_of_rows_spread_over_devices(mesh, of_rows, of_indices):
    """Its output is pending in a way of its own: each device has masked the rows that
    others hold.
    """
    with plain():
        rows, indices = number((10, 3)), torch.tensor([1, 9, 4, 4, 0])
    with ranks_of(mesh), cute_sharding.enabled(redistribution=True):
        for after in ([Replicate()] * len(mesh), [Shard(1)] * len(mesh), [Shard(0)] * len(mesh)):
            result = torch.nn.functional.embedding(
                distribute(indices, mesh, of_indices), distribute(rows, mesh, of_rows)
            )
            assert is_partial(result.placements[-1])
            assert_holds(result.redistribute(placements=after), rows[indices])


# -- on and off ------------------------------------------------------------------------------------


def in_place():
    """What stands in torch where redistribution is called."""
    of_arguments = _dispatch.OpDispatcher.__dict__["redistribute_local_args"]
    assert isinstance(of_arguments, staticmethod)
    return [
        *(module.redistribute_local_tensor.__code__ for module in (_redistribute, _dispatch, _api)),
        of_arguments.__func__,
    ]


TORCHS = in_place()


def assert_torchs():
    assert all(now is torchs for now, torchs in zip(in_place(), TORCHS))
    assert TORCHS[-1].__module__.startswith("torch.distributed.tensor.")


def test_torchs_own_functions_are_back_afterwards():
    assert_torchs()
    cute_sharding.enable(redistribution=True)
    assert not any(now is torchs for now, torchs in zip(in_place(), TORCHS))
    cute_sharding.enable()
    cute_sharding.enable(redistribution=True, views=False)
    cute_sharding.disable()
    assert_torchs()
    with cute_sharding.enabled(redistribution=True), cute_sharding.enabled():
        pass
    assert_torchs()
    with pytest.raises(KeyError), cute_sharding.enabled(redistribution=True):
        raise KeyError
    assert_torchs()


def test_who_has_taken_it_by_name_redistributes_by_plan():
    """Whether before or while it is switched on; with the same arguments, and torch's defaults."""
    of_torch = _redistribute.redistribute_local_tensor
    signature = inspect.signature(of_torch)
    with cute_sharding.enabled(redistribution=True):
        x = DTensor.from_local(torch.ones(2), mesh_of((8,)), [Shard(0)])
        target = x.redistribute(placements=[Replicate()])._spec
        cute_sharding.stats(reset=True)
        assert of_torch(x._local_tensor, x._spec, target).shape == (16,)
        assert cute_sharding.stats()["redistribute"]["plan"] == 1
        assert inspect.signature(of_torch) == signature


def test_enable_that_fails_leaves_torchs_own_functions(monkeypatch):
    monkeypatch.setattr(op_schemas, "install_propagation", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cute_sharding.enable(redistribution=True)
    assert_torchs()


@pytest.fixture
def by_plan(monkeypatch):
    """The redistributions that ran by plan, as (before, after) placements."""
    calls, run = [], redistributions.redistribute_local_tensor

    def watched(local, current, target, **options):
        calls.append((current.placements, target.placements))
        return run(local, current, target, **options)

    monkeypatch.setattr(redistributions, "redistribute_local_tensor", watched)
    return calls


@pytest.mark.parametrize("redistribution", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_what_each_switch_switches(views, redistribution, by_plan):
    """Explicit redistribution is torch's own unless it is asked for; that of a view's input comes
    with the views.
    """
    with (
        ranks_of((2,)),
        cute_sharding.enabled(redistribution=redistribution, views=views),
    ):
        tensor = distribute(number((6, 6)), (2,), [Shard(1)])
        assert_holds(tensor.redistribute(placements=[Replicate()]), number((6, 6)))
        assert len(by_plan) == redistribution
        by_plan.clear()
        # An op that redistributes its input by torch's rule and by ours.
        assert_holds(torch.ops.aten.view_copy.default(tensor, [6, 3, 2]), number((6, 3, 2)))
        assert len(by_plan) == (views or redistribution)
        assert ("view_copy.default" in cute_sharding.stats()) == views
        by_plan.clear()
        # And one that is no view: with views on, what an op is given is brought by plan.
        assert_holds(tensor + distribute(number((6, 6)), (2,), [Shard(0)]), 2 * number((6, 6)))
        assert len(by_plan) == (views or redistribution)


def test_a_view_that_fails_leaves_no_trace(by_plan):
    """After an error while a view's input is on its way, the redistribution of other ops is torch's
    again.
    """
    with ranks_of((2,)), cute_sharding.enabled():
        wrong = of_wrong_shape((2,), number((6, 2)), number((6, 6)), [Shard(1)])
        with pytest.raises(RuntimeError, match="local tensor has shape"):
            wrong.view(6, 3, 2)
        assert len(by_plan) == 1
        distribute(number((6, 6)), (2,), [Shard(1)]).redistribute(placements=[Replicate()])
        assert len(by_plan) == 1


# -- what programs rely on -------------------------------------------------------------------------


def test_slices_of_a_mesh_stay_plain():
    """A program may make the same slice anew in every step: no group each time, and nothing on the
    mesh that cannot be pickled.
    """
    with ranks_of((2, 2, 2)), cute_sharding.enabled(redistribution=True):
        whole = mesh_of((2, 2, 2), ("a", "b", "c"))
        groups = set()
        for _ in range(3):
            slice_ = whole["b", "c"]
            tensor = DTensor.from_local(
                torch.ones(4, 4), slice_, [Shard(0), Shard(1)], run_check=False
            )
            tensor.redistribute(placements=[Shard(1), Shard(0)])
            groups.add(group_of(slice_, (0, 1)))
        assert len(groups) == 1
        assert not any("cute" in name for name in vars(slice_))


def test_slices_keep_the_order_of_dims_in_memory():
    """As clone() does, which is how torch slices: a view after the redistribution may
    depend on it.
    """
    full = number((4, 6))
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
        turned = distribute(full, (2,), [Replicate()]).t()
        assert_holds(turned.redistribute(placements=[Shard(1)]).t().view(24), full.view(24))


def test_slices_lie_in_memory_as_a_copy_of_theirs_does():
    """Drawn: of tensors that are turned and expanded, which no order of strides tells how to lay
    out.
    """
    rng = random.Random("expanded")
    for _ in range(60):
        shape = [rng.choice([1, 2, 4, 6]) for _ in range(rng.randint(1, 4))]
        given = [n if rng.random() < 0.6 else 1 for n in shape]
        turn, dim = rng.sample(range(len(shape)), len(shape)), rng.randrange(len(shape))
        with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
            tensor = distribute(number(given), (2,), [Replicate()]).expand(shape).permute(turn)
            parts = tensor.redistribute(placements=[Shard(dim)]).to_local()
        for part in parts._local_tensors.values():
            whole = number(given).expand(shape).permute(turn)
            expected = whole.narrow(dim, 0, part.shape[dim]).clone()
            lies, wanted = (
                [stride for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1]
                for x in (part, expected)
            )
            assert part.numel() == 0 or lies == wanted, (given, shape, turn, dim)


def test_what_is_replicated_is_cut_as_it_is():
    """Programs shard local tensors of DTensors over one more mesh dim, by torch's own function and
    with the global shape. torch asks the local tensor alone.
    """
    with ranks_of((2,)):
        local = number((5, 3))
        stride = local.stride()
        meta = TensorMeta(torch.Size((12, 3)), stride, local.dtype)
        specs = [DTensorSpec(mesh_of((2,)), (p,), meta) for p in (Replicate(), Shard(0))]
        given = LocalTensor({rank: local.clone() for rank in range(2)})

        def cut(*specs):
            return _redistribute.redistribute_local_tensor(
                local_tensor=given, current_spec=specs[0], target_spec=specs[1]
            )

        expected = cut(*specs)
        with cute_sharding.enabled(redistribution=True):
            parts = cut(*specs)
            for rank, part in parts._local_tensors.items():
                assert torch.equal(part, expected._local_tensors[rank])
            assert [len(part) for part in parts._local_tensors.values()] == [3, 2]
            with pytest.raises(RuntimeError, match="has shape \\(5, 3\\)"):
                cut(*reversed(specs))  # here ranks wait for one another


ROWS, COLUMNS, REPLICATED = Shard(0), Shard(1), Replicate()


@pytest.mark.parametrize(
    ("before", "after", "alone"),
    [
        ((REPLICATED, REPLICATED), (ROWS, COLUMNS), True),
        ((REPLICATED, COLUMNS), (ROWS, COLUMNS), True),
        ((REPLICATED, ROWS), (ROWS, ROWS), False),
        ((ROWS, REPLICATED), (REPLICATED, REPLICATED), False),
        ((ROWS, REPLICATED), (COLUMNS, REPLICATED), False),
        ((Partial(), REPLICATED), (REPLICATED, REPLICATED), False),
    ],
    ids=str,
)
def test_what_a_rank_may_leave_to_torch_by_itself_sends_nothing(before, after, alone):
    meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
    specs = [DTensorSpec(mesh_of((2, 2)), placements, meta) for placements in (before, after)]
    assert is_torchs_alone(*specs) == alone
    if alone:
        with ranks_of((2, 2)), CommDebugMode() as communicated:
            distribute(number((4, 4)), (2, 2), before).redistribute(placements=after)
        assert communicated.get_total_counts() == 0


def test_a_slice_that_is_all_of_it_is_a_copy():
    """Or writing to the result would change the source, on some ranks only."""
    with ranks_of((2,)), cute_sharding.enabled(redistribution=True):
        tensor = distribute(torch.ones(1, 4), (2,), [Replicate()])
        tensor.redistribute(placements=[Shard(0)]).mul_(2)
        assert_holds(tensor, torch.ones(1, 4))


def test_the_contributions_of_a_norm_move():
    """A norm is pending in a Partial of its own kind, and commutes with moving as a sum does."""
    full = number((6, 4)) + 1
    with ranks_of((2, 2)), cute_sharding.enabled(redistribution=True):
        norm = torch.linalg.vector_norm(distribute(full, (2, 2), [Shard(0), Shard(1)]), 2, dim=0)
        assert (
            norm.placements[0].is_partial()
            and type(norm.placements[0]) is not Partial
            and norm.placements[1] == Shard(0)
        )
        gathered = norm.redistribute(placements=[norm.placements[0], Replicate()])
        for rank in range(4):
            local = gathered.full_tensor()
            assert torch.allclose(
                local._local_tensors[rank] if isinstance(local, LocalTensor) else local,
                torch.linalg.vector_norm(full, 2, dim=0),
            )


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("order", [2, 3], ids=str)
def test_norms_are_finished(order, mesh, share):
    """Pending on one mesh dim or on two, and handed out in blocks or not; never for more elements
    than with torch.
    """
    full = number((6, 5, 8)) + 1
    expected = torch.linalg.vector_norm(full, order, dim=0)
    cuts = [Replicate(), *map(Shard, range(3))]
    pairs = [*product(product(cuts, repeat=len(mesh)), product(cuts[:3], repeat=len(mesh)))]
    for before, after in random.Random(f"{order} {mesh}").sample(pairs, share(144, 5)):
        received = []
        for is_ours in (False, True):
            ours = cute_sharding.enabled(redistribution=True) if is_ours else nullcontext()
            with ranks_of(mesh), ours:
                norm = torch.linalg.vector_norm(distribute(full, mesh, before), order, dim=0)
                with Received() as traffic:
                    found = norm.redistribute(placements=after)
                received.append(max(traffic.by_rank.values(), default=0))
            if is_ours:
                parts = locals_of(expected, mesh, cuts_of(after))
                for rank, got in found._local_tensor._local_tensors.items():
                    assert torch.allclose(got, parts[rank]), (before, after)
        assert received[1] <= received[0], (before, after, received)


def test_norms_go_one_way_whatever_their_sizes():
    """A rank that runs eagerly and others in a graph for any sizes do the same collectives."""
    pending = norm_partial()
    rng = random.Random(5)
    for _ in range(150):
        before = [rng.choice([pending, Replicate(), Shard(0), Shard(1)]) for _ in range(3)]
        after = tuple(rng.choice([Replicate(), Shard(0), Shard(1)]) for _ in range(3))
        ways = {
            (tuple([each[:2] for each in way.reductions]), way.first and way.first.target.chains)
            for shape in ((8, 8), (5, 1000), (1000, 5), (1, 3), (7, 0), (9, 10))
            for way in [prepare(shape, (2, 3, 2), tuple(before), after)]
        }
        assert len(ways) == 1, (before, after, ways)


def norm_partial():
    with ranks_of((2,)):
        norm = torch.linalg.vector_norm(distribute(number((4, 2)), (2,), [Shard(0)]), 2, dim=0)
    return norm.placements[0]


def test_compiled_graphs_of_other_settings_are_kept_apart():
    """On disk: a rank that finds a graph there and one that does not must run the same
    collectives.
    """
    importlib.import_module("torch._inductor.compile_fx")
    tags = [torch.compiler.config.cache_key_tag]
    others = [
        {name: value}
        for name, setting in TABLE.items()
        for value in setting.values
        if value != setting.default
    ]
    assert {name for options in others for name in options} == {*TABLE}
    for options in ({}, *others):
        with cute_sharding.enabled(**options):
            tags.append(torch.compiler.config.cache_key_tag)
    assert len(set(tags)) == len(others) + 2
    assert torch.compiler.config.cache_key_tag == tags[0]


def test_the_first_redistribution_of_a_mesh_is_in_inference_mode():
    """The ranks of the mesh are read there, from a tensor that is from outside."""
    with ranks_of((2,)):
        full = number((6, 4))
        distribute(full, (2,), [Shard(0)])  # makes the mesh
        in_order.cache_clear()
        slices.cache_clear()
        with cute_sharding.enabled(), torch.inference_mode():
            x = distribute(full, (2,), [Replicate()])
            assert_holds(x.redistribute(placements=[Shard(1)]), full)

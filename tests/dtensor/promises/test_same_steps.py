"""The collectives of a redistribution, their groups, sizes and order, are the same eagerly and in
graphs, static and dynamic; with the groups at hand and after prepare_groups. No group is made on
the way.
"""

import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from drawing import draw_placements
from processes import search_path
from simulation import zeros_of
from torch._dynamo.backends.common import aot_autograd
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import cute_sharding
from cute_sharding.dtensor.run import groups, in_graphs
from cute_sharding.dtensor.run.groups import groups_at_hand
from cute_sharding.exchange import Network
from cute_sharding.exchange.plan import received_by

R = Replicate()
# Rank 0 is on each, and no other test makes groups for them.
MESHES = {
    "2x2": [[0, 2], [4, 6]],
    "2x2, turned": [[0, 5], [1, 7]],
    "3x2": [[0, 3], [1, 4], [2, 6]],
    "2x2x2": [[[0, 2], [1, 3]], [[4, 6], [5, 7]]],
    "4": [0, 2, 4, 6],
}
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
EVEN, UNEVEN = [(24, 12), (12, 24), (48, 12)], [(11, 7), (13, 9), (24, 12), (17, 31)]


class Recorder(TorchDispatchMode):
    """What goes over the wire: (collective, ranks of the group, sizes)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.cute_sharding.exchange.default:
            with self:  # one op for the compiler, and collectives behind it
                return in_graphs._exchange(*args)
        if func.namespace == "_c10d_functional" and func._opname in COLLECTIVES:
            group = args[-1]  # of one release the name, of another the group
            ranks = dist.get_process_group_ranks(
                distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
            )
            me = ranks.index(dist.get_rank())
            # What a rank keeps itself may go along or not.
            row = args[0][:1].numel() if args[0].numel() else 1
            sizes = [
                [n * row for i, n in enumerate(arg) if i != me]
                for arg in args[1:]
                if isinstance(arg, (list, tuple))
            ] or args[0].numel()
            self.seen.append((func._opname, tuple(ranks), sizes))
        return func(*args, **(kwargs or {}))


def recorded(run, *args):
    with Recorder() as recorder:
        result = run(*args)
    return recorder.seen, result


def compiled(program, dynamic):
    """The program in graphs, and a list of what they send."""
    seen = []

    def compiler(graph, _):
        def call(*args):
            sent, result = recorded(graph, *args)
            seen.extend(sent)
            return result

        return call

    torch._dynamo.reset()
    return torch.compile(
        program, backend=aot_autograd(fw_compiler=compiler), dynamic=dynamic, fullgraph=True
    ), seen


def tensor_of(mesh, shape, placements):
    return zeros_of(mesh, shape, placements).detach().requires_grad_()


def draw(rng, sizes):
    before, after = (draw_placements(rng, sizes, (24, 12), strided=False) for _ in range(2))
    if rng.random() < 0.3:
        before = [Partial() if p == R and rng.random() < 0.5 else p for p in before]
    return before, after


@pytest.fixture
def no_groups(monkeypatch):
    """None but those of single mesh dims and the default one, whatever other tests have
    prepared.
    """
    monkeypatch.setattr(groups, "_groups", WeakKeyDictionary())
    groups._at_hand.cache_clear()
    yield
    groups._at_hand.cache_clear()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MESHES)
def test_graphs_send_what_eager_programs_send(name, dynamic, prepared, no_groups):
    rng = random.Random(f"same steps {name}")
    mesh = DeviceMesh("cpu", torch.tensor(MESHES[name]))
    sizes = tuple(mesh.shape)
    assert groups_at_hand(mesh) <= {
        tuple(range(mesh.ndim))
    }  # the default group is that of a whole mesh
    if prepared:
        cute_sharding.prepare_groups(mesh)
    made = distributed_c10d._world.group_count
    communicated = 0
    with cute_sharding.enabled(redistribution=True):
        for _ in range(2 if dynamic else 4):
            before, after = draw(rng, sizes)
            shapes = rng.choice((EVEN, UNEVEN)) if dynamic else [rng.choice(EVEN + UNEVEN)]

            def program(x, after=after):
                return (x * 2).redistribute(placements=after)

            graph, seen = compiled(program, dynamic)
            for shape in shapes:
                tensor = tensor_of(mesh, shape, before)
                eager, result = recorded(program, tensor)
                gradient = torch.ones_like(result)
                eager += recorded(
                    lambda r=result, g=gradient, t=tensor: torch.autograd.grad(r, t, g)
                )[0]
                seen.clear()
                outcome = graph(tensor)
                torch.autograd.grad(outcome, tensor, torch.ones_like(outcome))
                assert seen == eager, (before, after, shape)
                communicated += len(eager)
    assert distributed_c10d._world.group_count == made
    assert communicated


ON_LISTS = {
    "add": lambda a, b: torch._foreach_add(a, b),
    "write": lambda a, b: (torch._foreach_add_(a, b), a)[1],
    "cat": lambda a, b: [torch.cat([*a, *b])],
}
OF_LISTS = {
    "2x2": [([Shard(0), Shard(1)], [Shard(1), Shard(0)]), ([R, Shard(0)], [Shard(0), Shard(0)])],
    "4": [([Shard(0)], [Shard(1)]), ([R], [Shard(0)])],
}


@pytest.mark.costly
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OF_LISTS)
def test_graphs_send_of_lists_what_eager_programs_send(name, dynamic, prepared, no_groups):
    mesh = DeviceMesh("cpu", torch.tensor(MESHES[name]))
    if prepared:
        cute_sharding.prepare_groups(mesh)
    sent = []
    with cute_sharding.enabled(redistribution=True):
        for (before, after), op in product(OF_LISTS[name], ["add", "cat"] if dynamic else ON_LISTS):

            def program(a, b, run=ON_LISTS[op]):
                return [x * 2 for x in run([x * 2 for x in a], [x * 2 for x in b])]

            graph, seen = compiled(program, dynamic)
            for shape in [(24, 12), (48, 24)] if dynamic else [(11, 7)]:
                a, b = (
                    [tensor_of(mesh, shape, placements).detach() for placements in some]
                    for some in ([before] * 3, [before, after, after])
                )
                eager, results = recorded(program, a, b)
                seen.clear()
                for got, wanted in zip(graph(a, b), results, strict=True):
                    assert got.placements == wanted.placements and got.shape == wanted.shape
                assert seen == eager, (op, before, after, shape)
                sent.append(len(eager))
    assert 0 < max(sent) <= (1 if prepared or name == "4" else 3), sent


def test_more_groups_are_never_worse():
    """By the elements that the busiest device receives, also where a group is of more mesh dims
    than change; and with all of them one exchange is enough.
    """
    rng = random.Random("groups")
    mesh = (2, 3, 2)
    for _ in range(150):
        shape = rng.choice([(24, 12), (11, 7), (36, 36), (5, 8)])
        before, after = (draw_placements(rng, mesh, shape, strided=False) for _ in range(2))
        alone, some, whole, every = (
            cute_sharding.plan_redistribution(
                shape, mesh, before, after, groups=sets, network=Network.flat(alpha=0, beta=1)
            )
            for sets in ([], [(0, 1)], [(0, 1, 2)], None)
        )
        assert all(len(step.mesh_dims) < 2 for step in alone.steps) and all(
            len(step.mesh_dims) < 2 or step.mesh_dims == (0, 1) for step in some.steps
        )
        assert every.received_elements == every.lower_bound
        most = received_by(alone.steps)
        for plan in (some, whole):
            assert every.lower_bound <= received_by(plan.steps) <= most, (shape, before, after)
        assert every.collectives <= 1


@pytest.mark.parametrize(
    "before, after",
    [
        ([Shard(0), Shard(1)], [R, R]),
        ([Shard(0), Shard(0)], [R, R]),
        ([Shard(0), R], [R, Shard(1)]),
        ([R, R], [Shard(0), Shard(1)]),
    ],
)
@pytest.mark.parametrize("shape", [(24, 12), (11, 7)])
def test_cuts_that_are_given_up_or_made_need_no_more_than_one_mesh_dim_at_a_time(
    shape, before, after
):
    plan = cute_sharding.plan_redistribution(shape, (2, 2), before, after, groups=[])
    assert plan.received_elements <= plan.lower_bound * (1 if shape == (24, 12) else 1.25)


@pytest.mark.parametrize("rows", [3, 4])
def test_what_replicas_need_not_hold_is_cut_off_first(rows):
    """Then half as much is gathered, also of rows that mesh dims share unevenly."""
    before, after = [Shard(3), Shard(2), R], [R, R, Shard(1)]
    plan = cute_sharding.plan_redistribution((1, 2, rows, 6), (2, 2, 2), before, after, groups=[])
    first, *others = plan.steps
    assert not first.communicates and all(step.communicates for step in others)
    assert received_by(plan.steps) == plan.lower_bound


def test_what_would_help_is_said_once(caplog):
    mesh = DeviceMesh("cpu", torch.tensor([[0, 6], [3, 7]]), mesh_dim_names=("a", "b"))
    with (
        cute_sharding.enabled(redistribution=True),
        caplog.at_level("WARNING", logger="cute_sharding"),
    ):
        for shape in ((8, 8), (16, 8)):
            tensor_of(mesh, shape, [Shard(0), Shard(1)]).redistribute(
                placements=[Shard(1), Shard(0)]
            )
    assert len(caplog.messages) == 1
    said = "First call cute_sharding.prepare_groups(mesh) or mesh['a', 'b']._flatten() on all ranks"
    assert said in caplog.messages[0]


def test_flattened_dims_have_a_group():
    mesh = DeviceMesh("cpu", torch.tensor([[0, 7], [2, 5]]), mesh_dim_names=("c", "d"))
    assert groups_at_hand(mesh) == frozenset()
    mesh["c", "d"]._flatten()
    assert groups_at_hand(mesh) == {(0, 1)}
    assert (
        cute_sharding.plan_redistribution(
            (8, 8), mesh, [Shard(0), Shard(1)], [Shard(1), Shard(0)]
        ).collectives
        == 1
    )


def test_groups_of_another_mesh_serve_where_all_ranks_have_them():
    """A plan has to be the same on ranks 1, 2, 4 and 7, for which no group was made."""
    cute_sharding.prepare_groups(DeviceMesh("cpu", torch.tensor([[0, 5], [3, 6]])))
    same = DeviceMesh("cpu", torch.tensor([[0, 3], [6, 5]]))
    larger = DeviceMesh("cpu", torch.tensor([[[0, 1], [3, 2]], [[5, 4], [6, 7]]]))
    assert groups_at_hand(same) == {(0, 1)}
    assert (0, 1) not in groups_at_hand(larger)


def test_prepare_groups_refuses_what_is_no_set_of_mesh_dims():
    mesh = DeviceMesh("cpu", torch.tensor([[0, 7], [4, 5]]), mesh_dim_names=("e", "f"))
    with pytest.raises(ValueError, match="got the mesh dim 'g', which DeviceMesh"):
        cute_sharding.prepare_groups(mesh, ("e", "g"))
    with pytest.raises(ValueError, match="fewer than two mesh dims"):
        cute_sharding.prepare_groups(mesh, ("e",))
    assert groups_at_hand(mesh) == frozenset()
    count = distributed_c10d._world.group_count
    cute_sharding.prepare_groups(mesh, ("e", "f"))
    cute_sharding.prepare_groups(
        DeviceMesh("cpu", torch.tensor([[0, 7], [4, 5]]))
    )  # of the same ranks: nothing to make
    assert groups_at_hand(mesh) == {(0, 1)} and distributed_c10d._world.group_count > count


@pytest.mark.costly
@pytest.mark.parametrize("rank", [7])
def test_inductor_keeps_what_other_ranks_wait_in(rank, tmp_path):
    """Also on a rank without rows, where nothing comes of it. In a process of its own, as one rank
    of eight.
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        f"dist.init_process_group('fake', rank={rank}, world_size=8, store=FakeStore())\n"
        "from torch.distributed.device_mesh import DeviceMesh\n"
        "from torch.distributed.tensor import Shard\n"
        "import cute_sharding\n"
        "from torch._inductor.utils import run_and_get_code\n"
        "from test_same_steps import tensor_of\n"
        "mesh = DeviceMesh('cpu', torch.arange(8))\n"
        "def twice(x):\n"
        "    x = x.redistribute(placements=[Shard(1)])\n"
        "    return x.redistribute(placements=[Shard(0)]).to_local().sum()\n"
        "graph = torch.compile(twice, dynamic=True)\n"
        "with cute_sharding.enabled(redistribution=True):\n"
        "    for n in (9, 11):\n"
        "        tensor = tensor_of(mesh, (n, 8), [Shard(0)]).detach()\n"
        "        _, (code,) = run_and_get_code(graph, tensor)\n"
        "        calls = code.count('= torch.ops._c10d_functional.all_to_all_single.default(')\n"
        "        calls += code.count('= torch.ops.cute_sharding.exchange.default(')\n"
        "        assert calls == 2, (n, code)\n"
    )
    here = Path(__file__).parents[1]
    path = search_path(Path(__file__).parent, here, here.parent, here.parent.parent)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr


def test_meshes_without_process_groups_can_be_sliced_on():
    mesh = DeviceMesh("cpu", torch.arange(8).reshape(4, 2), _init_backend=False)
    with cute_sharding.enabled(redistribution=True):
        sliced = DTensor.from_local(torch.ones(8, 8), mesh, [R, R], run_check=False).redistribute(
            placements=[Shard(0), Shard(1)]
        )
    assert tuple(sliced.to_local().shape) == (2, 4)


def test_a_flattened_group_that_is_gone_is_no_group():
    mesh = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 5]]), mesh_dim_names=("h", "i"))
    flattened = mesh["h", "i"]._flatten()
    assert groups_at_hand(mesh) == {(0, 1)}
    dist.destroy_process_group(flattened.get_group())
    assert groups_at_hand(mesh) == frozenset()
    with cute_sharding.enabled(redistribution=True):
        tensor_of(mesh, (8, 8), [Shard(0), Shard(1)]).redistribute(placements=[Shard(1), Shard(0)])

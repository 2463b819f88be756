"""The network that plans are chosen by is a setting: programs, eager and compiled, plans that are
shown, and what ops weigh go by one.
"""

import json
from itertools import product

import pytest
import torch
import torch._functorch.config
from simulation import assert_holds, distribute, mesh_of, number, planned, ranks_of
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cute_sharding
from cute_sharding.exchange import Link, Network
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.propagation.signatures import Operand, assign, received_for
from cute_sharding.relations.signature import parse
from cute_sharding.sharding import Shard as OurShard
from cute_sharding.sharding import Sharding
from cute_sharding.tools import cli

MESH = (2, 4)
HOSTS = "infiniband,nvlink"  # the second mesh dim is the faster
SOURCE, TARGET = (Shard(0), Shard(0)), (Replicate(), Replicate())
OWN = Network((Link(1e-5, 1e-9), Link(1e-6, 1e-11)))


def steps_of(source=SOURCE, target=TARGET, shape=(16, 16), mesh=MESH):
    return planned(mesh_of(mesh), shape, source, target).plan.steps


@pytest.mark.parametrize("network", [HOSTS, OWN, "flat:1e-6,1e-10"], ids=str)
def test_programs_run_by_the_network_that_is_chosen(network):
    """And by the default again after it, whatever was planned before."""
    options = [Replicate(), Shard(0), Shard(1)]
    differ = 0
    for source, target in product(product(options, repeat=2), repeat=2):
        before = steps_of(source, target)
        with cute_sharding.enabled(redistribution=True, network=network):
            found = planned(mesh_of(MESH), (16, 16), source, target).plan
            shown = cute_sharding.plan_redistribution((16, 16), mesh_of(MESH), source, target)
        by = Network.of(MESH, network).without_latency
        question = found.source, found.target, by, None, None
        assert shown.steps == plan_steps(*question)
        assert found.steps == plan_steps(*question, native=True)  # as the backend gathers
        assert found.network == Network.of(MESH, network) and steps_of(source, target) == before
        differ += before != found.steps
    assert bool(differ) == (network != "flat:1e-6,1e-10")


def test_what_runs_is_right_and_as_planned():
    full = number((16, 6))
    for network, collectives in ((None, 1), (HOSTS, 2)):
        with ranks_of(MESH), cute_sharding.enabled(redistribution=True, network=network):
            cute_sharding.stats(reset=True)
            assert_holds(distribute(full, MESH, SOURCE).redistribute(placements=TARGET), full)
            assert cute_sharding.stats()["redistribute"]["collectives"] == collectives


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_programs_are_compiled_again_for_it(dynamic):
    sent = []

    def watching(graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes]
        sent.append(sum("all_gather" in name or "all_to_all" in name for name in names))
        return make_boxed_func(graph)

    program = torch.compile(
        lambda x: x.redistribute(placements=TARGET),
        backend=aot_autograd(fw_compiler=watching),
        dynamic=dynamic,
    )
    x = distribute_tensor(number((16, 6)), mesh_of(MESH), SOURCE, src_data_rank=None)
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        for network in (None, HOSTS, None):
            with cute_sharding.enabled(redistribution=True, network=network):
                for _ in range(2):
                    program(x)
    # For any sizes, several steps are one op that plans anew in each call.
    assert sent == ([1, 0, 1] if dynamic else [1, 2, 1])


def test_ops_weigh_by_it():
    """What bringing an operand receives is what its plan does."""
    softmax, rows = parse("m [n] -> m [n]", (2,)), Operand((16, 16), ((1, 1), (1, 1)))
    plain, hosts = (assign(softmax, [rows], MESH, network=network) for network in (None, HOSTS))
    assert (plain.operands, hosts.operands) == (((None, None),),) * 2
    both, half = Operand((16, 16), ((0, 1), (0, 1))), (None, (0, 1))
    received = [received_for(both, half, MESH, network) for network in (None, HOSTS)]
    assert received == [64, 96]


@pytest.mark.parametrize("mesh", [(8,), (2, 2, 2)])
def test_meshes_that_it_does_not_fit_have_the_default(mesh):
    source = (Shard(0),) * len(mesh)
    target = (Replicate(),) * len(mesh)
    before = steps_of(source, target, mesh=mesh)
    with cute_sharding.enabled(redistribution=True, network=HOSTS):
        assert steps_of(source, target, mesh=mesh) == before
        shown = cute_sharding.plan_redistribution((16, 16), mesh, source, target, itemsize=2)
        assert shown.network == Network.default(mesh)
    uneven = Network((Link(0, 1.0),) * len(mesh), within=(3,) * len(mesh))
    assert not uneven.fits(mesh) and Network.of(mesh, uneven) == Network.default(mesh)


# -- what is shown ---------------------------------------------------------------------------------


def shown(network=None, itemsize=4):
    return cute_sharding.plan_redistribution(
        (16, 16), MESH, SOURCE, TARGET, network=network, itemsize=itemsize
    )


def test_links_with_names_are_timed_for_the_elements():
    with cute_sharding.enabled(network=HOSTS):
        assert shown(itemsize=8).network == Network.parse(HOSTS).of_itemsize(8)
        assert shown(OWN, itemsize=8).network == OWN
    for own in (OWN, "flat:1e-6,1e-10"):
        with cute_sharding.enabled(network=own):
            assert shown(itemsize=8).network == Network.of(MESH, own)


def test_where_nothing_is_on_the_environment_says_it(monkeypatch):
    before = shown()
    monkeypatch.setenv("USE_CUTE_NETWORK", "InfiniBand, NVLink")
    assert shown().network == Network.parse(HOSTS).of_itemsize(4)
    assert len(shown().steps) == 2 == 1 + len(before.steps)
    assert cute_sharding.draw(*pictured()).text() == drawn_with(HOSTS)
    with cute_sharding.enabled():
        assert shown() == before  # arguments are all there is
    monkeypatch.setenv("USE_CUTE_NETWORK", "pigeon")
    with pytest.raises(ValueError, match="USE_CUTE_NETWORK='pigeon' is not understood: write flat"):
        shown()


def pictured():
    return (Sharding((16, 16), MESH, (OurShard(0), OurShard(0))),)


def drawn_with(network):
    with cute_sharding.enabled(network=network):
        return cute_sharding.draw(*pictured()).text()


def test_the_command_line_shows_what_programs_run(monkeypatch, capsys):
    question = ["plan", "--shape", "16,16", "--mesh", "2,4", "--from", "S(0),S(0)", "--to", "R,R"]

    def collectives(*more):
        assert cli.main([*question, "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["ours"]["collectives"], [link["beta"] for link in found["network"]]

    monkeypatch.delenv("USE_CUTE_NETWORK", raising=False)
    assert collectives()[0] == 1
    monkeypatch.setenv("USE_CUTE_NETWORK", HOSTS)
    named = Network.parse(HOSTS).of_itemsize(4)
    assert collectives() == (2, [link.beta for link in named.links])
    assert collectives("--network", "flat:0,1e-10") == (1, [1e-10, 1e-10])


# -- what is no network ----------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["ethernet", "flat:1", "flat:-1,1", "nvlink;nvlink", ""])
def test_text_that_is_no_network(network):
    before = cute_sharding.settings()
    with pytest.raises(ValueError, match=r"network='.*' is not understood: write flat:ALPHA,BETA"):
        cute_sharding.enable(network=network)
    assert cute_sharding.settings() == before


def test_numbers_without_end():
    with pytest.raises(ValueError, match="network 'flat:1e999,1': write flat:ALPHA,BETA"):
        cute_sharding.enable(network="flat:1e999,1")


def test_objects_that_are_no_network():
    with pytest.raises(TypeError, match="network=3 is a int, not a network: pass a"):
        cute_sharding.enable(network=3)
    assert not cute_sharding.is_enabled()

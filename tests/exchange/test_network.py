"""What steps are reckoned to take, against counts by hand of what crosses each host's network
cards.
"""

from dataclasses import replace
from itertools import product

import pytest

from cute_sharding.exchange import Link, Network
from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.plan import received_by
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.exchange.step import AllToAll
from cute_sharding.sharding.rows import chains_of

OUT, IN = Link(0.0, 1.0), Link(0.0, 0.001)


def exchange(shape, mesh, source, target):
    return AllToAll(
        *(
            Placed.numbered(shape, mesh, chains_of(cuts, len(shape), mesh))
            for cuts in (source, target)
        )
    )


@pytest.mark.parametrize("together", [1, 2, 4, 8])
def test_a_gather_brings_each_element_into_a_host_once(together):
    """16 devices in hosts of so many, each with a row of 1: a card carries its share of the rows of
    other hosts, and the host's own link all the others.
    """
    network = Network((OUT,), (together,), IN).checked((16,))
    step = exchange((16,), (16,), [(0, 1)], [None])
    crossing = (16 - together) / together
    assert step.gathers and step.seconds(network) == pytest.approx(
        crossing * 1.0 + (15 - crossing) * (0.001 if together > 1 else 1.0)
    )


@pytest.mark.parametrize("together", [1, 2, 4])
def test_in_an_exchange_each_device_receives_for_itself(together):
    """S(0) -> S(1) of 8 x 8 on 8 devices: one element from each other, of which those in other
    hosts cross the card.
    """
    network = Network((OUT,), (together,), IN).checked((8,))
    step = exchange((8, 8), (8,), [(0, 1)], [(1, 1)])
    assert step.seconds(network) == pytest.approx((8 - together) * 1.0 + (together - 1) * 0.001)


def test_the_default_is_hosts_of_eight():
    found = {
        mesh: Network.default(mesh)
        for mesh in ((64,), (8,), (4, 8), (16, 4), (3, 5), (2, 2, 2, 2), (4, 6))
    }
    assert {mesh: network.within for mesh, network in found.items()} == {
        (64,): (8,),
        (8,): (1,),
        (4, 8): (1, 1),
        (16, 4): (2, 1),
        (3, 5): (1, 1),
        (2, 2, 2, 2): (1, 1, 1, 1),
        (4, 6): (1, 1),
    }
    assert [link.beta for link in found[16, 4].links] == [4e-11, 4.4e-12]
    for mesh, network in found.items():
        assert network.checked(mesh) is network


def test_a_gather_of_uneven_rows_is_cheaper_padded():
    """Over hosts of eight an all-to-all brings the rows of another host to each of its devices,
    over the cards.
    """
    network = Network.default((64,)).without_latency
    rows = Placed.numbered((64 * 100 - 7,), (64,), chains_of([(0, 1)], 1, (64,)))
    (apart,) = plan_steps(rows, rows.cut_as(((),)), network)
    (padded,) = plan_steps(rows, rows.cut_as(((),)), network, native=True)
    assert (
        padded.padded and not apart.padded and padded.received_elements >= apart.received_elements
    )
    assert padded.seconds(network) < 0.3 * apart.seconds(network)


LATENCY = Network.flat(alpha=1.0, beta=0.0)


@pytest.mark.parametrize("parts, messages", [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_latencies_of_one_collective(parts, messages):
    """ceil(log2 p), counted by hand; twice in an all-reduce, and once for each round."""
    n, mesh = 8 * parts * parts, (parts,)
    spread = exchange((n, n), mesh, [(0, 1)], [(1, 1)])
    gather = exchange((n,), mesh, [(0, 1)], [None])
    assert (spread.kind, gather.kind) == ("all-to-all", "all-gather")
    assert spread.seconds(LATENCY) == gather.seconds(LATENCY) == messages
    assert replace(spread, rounds=3).seconds(LATENCY) == 3 * messages
    held = Placed.numbered((n,), mesh, ((),), ((0, "sum"),))
    (scatter,) = plan_steps(held, held.cut_as((((0, 1),),)), LATENCY)
    (reduce,) = plan_steps(held, held.cut_as(((),)), LATENCY)
    assert (scatter.kind, scatter.seconds(LATENCY)) == ("reduce-scatter (sum)", messages)
    assert (reduce.kind, reduce.seconds(LATENCY)) == ("all-reduce (sum)", 2 * messages)
    assert exchange((n,), mesh, [None], [(0, 1)]).seconds(LATENCY) == 0  # a slice sends nothing


def test_latencies_of_mesh_dims_add_up():
    """Each mesh dim with its own: 2 among three at 1 s, 3 among five at 10 s."""
    network = Network((Link(1.0, 0.0), Link(10.0, 0.0)))
    step = exchange((15, 30), (3, 5), [(0, 1), (0, 1)], [(1, 1), (1, 1)])
    assert step.mesh_dims == (0, 1) and step.seconds(network) == 2 * 1 + 3 * 10


def test_alike_is_a_matter_of_hosts_too():
    assert Network((OUT,)).is_flat and Network((OUT, OUT), (1, 1), IN).is_flat
    assert Network((OUT,), (4,), OUT).is_flat
    assert not Network((OUT,), (4,), IN).is_flat and not Network((OUT, IN)).is_flat
    assert Network.default((8,)).is_flat and not Network.default((64,)).is_flat


def test_hosts_decide_between_steps():
    """On one mesh dim of two hosts: a reduction brings each element into a host once, so it is
    faster to reduce more elements than to exchange fewer.
    """
    held = Placed.numbered((6, 64), (16,), ((), ()), ((0, "sum"),))
    question = held, held.cut_as((((0, 2),), ()))
    network = Network.of_programs((16,))
    flat = plan_steps(*question, Network.flat(alpha=0.0, beta=1.0))
    hosts = plan_steps(*question, network)
    assert [step.kind for step in flat] == ["reduce-scatter (sum)", "all-to-all"]
    assert [step.kind for step in hosts] == ["all-reduce (sum)", "local slice"]
    assert received_by(flat) < received_by(hosts)
    assert sum(step.seconds(network) for step in hosts) < sum(
        step.seconds(network) for step in flat
    )


def test_time_grows_with_distance():
    for together, mesh in product((1, 2, 4), ((8,), (16,))):
        near, far = (Network((OUT,), (w,), IN).checked(mesh) for w in (2 * together, together))
        step = exchange((16, 16), mesh, [(0, 1)], [(1, 1)])
        assert step.seconds(near) < step.seconds(far)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="each number must divide the size"):
        Network((OUT,), (3,), IN).checked((8,))
    with pytest.raises(ValueError, match="share a host, at least 1"):
        Network((OUT,), (0,), IN)
    with pytest.raises(ValueError, match="give mesh_dim_names, or a list with one link"):
        Network.named({"dp": "nvlink"})
    with pytest.raises(ValueError, match=r"no link for the mesh dims \['tp'\]: give one link"):
        Network.named({"dp": "nvlink"}, ("dp", "tp"))

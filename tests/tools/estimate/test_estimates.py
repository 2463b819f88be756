"""Estimates as values and as text: what is counted, what grows by layers, what is said of it."""

import functools
import json
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from cute_sharding import estimate
from cute_sharding.exchange import Network
from cute_sharding.exchange.placed import Placed
from cute_sharding.exchange.planner import plan_steps
from cute_sharding.sharding import Sharding, parse_placements
from cute_sharding.tools.estimate import Estimate
from cute_sharding.tools.estimate.estimates import located
from cute_sharding.tools.estimate.values import (
    ACTIVATIONS,
    DEPTHS,
    GRADIENTS,
    PARAMETERS,
    Alike,
    DryRun,
    Memory,
    Traffic,
    counted,
    group_on,
)
from cute_sharding.tools.profile.values import Cause, Collective, Place, seconds_of

HERE, THERE = Place("model.py", 3, "forward"), Place("train.py", 9, "step")


def collective(op, ranks, received, place=HERE, *, busiest=0, backward=False):
    return Collective(
        op, "", ranks, "float32", 4, received, received, busiest or received, place, backward
    )


def traffic(*collectives, mesh=(2, 4)):
    return Traffic.of(collectives, mesh)


def test_collectives_that_are_alike_are_counted_together():
    found = traffic(
        collective("all-gather", (0, 1, 2, 3), 30),
        collective("all-gather", (0, 1, 2, 3), 50, busiest=70),
        collective("all-gather", (0, 4), 10),
        collective("all-gather", (0, 4), 10, backward=True),
        collective("barrier", (0, 4), 0),
        collective("all-to-all", (0, 1), 5, None),
    )
    assert found.collectives == 5
    assert (found.received_bytes, found.busiest_bytes) == (4 * 105, 4 * 125)
    assert found.rows[Alike(HERE, False, "all-gather", ((1, 4),), 4)] == (2, 80, 100)
    assert {place: of.collectives for place, of in found.by_line().items()} == {HERE: 4, None: 1}


@pytest.mark.parametrize(
    ("ranks", "dims"),
    [
        ((0, 1, 2, 3), ((1, 4),)),
        ((1, 5), ((0, 2),)),
        (range(8), ((0, 2), (1, 4))),
        ((0, 2), ((1, 2),)),
        ((3,), ()),
    ],
)
def test_the_mesh_dims_of_a_group(ranks, dims):
    assert group_on((2, 4), list(ranks)) == dims


@pytest.mark.parametrize("network", [None, "nvlink", "infiniband,nvlink", "flat:1e-6,3e-10"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("R,S(0)", "R,R"), ("S(0),R", "R,R"), ("S(0),S(0)", "R,R"), ("R,S(0)", "R,S(1)")],
)
def test_seconds_are_those_of_plans(source, target, network):
    """Of gathers and exchanges of whole dims that divide."""
    shape, mesh = (128, 256), (4, 8)
    chosen = Network.of_elements(mesh, network, 4)
    ends = (
        Placed.of(Sharding(shape, mesh, parse_placements(text, 2))) for text in (source, target)
    )
    steps = [step for step in plan_steps(*ends, chosen) if step.communicates]
    assert steps
    for step in steps:
        op = "all-gather" if step.gathers else "all-to-all"
        group = [(m, mesh[m]) for m in sorted(step.mesh_dims)]
        found = seconds_of(op, group, step.received_elements, 4, mesh, network)
        assert found == pytest.approx(step.seconds(chosen))


def memory(layers, *, uneven=0):
    """Of so many layers: parameters of each, and activations of those that have run."""
    parameters = {(PARAMETERS, f"layers.{k}.linear"): 10 for k in range(layers)}
    parameters[PARAMETERS, "head"] = 100
    found = {}
    for k in range(layers):
        kept = {(ACTIVATIONS, f"layers.{i}"): 7 for i in range(k + 1)}
        found[False, f"layers.{k}.linear"] = {**parameters, **kept}
        given = {(GRADIENTS, f"layers.{i}"): 9 + uneven * k * k for i in range(k, layers)}
        found[True, f"layers.{k}"] = {**parameters, **kept, **given}
    found[False, "head"] = {**parameters, (ACTIVATIONS, ""): 40}
    return Memory.of(found)


def test_the_most_that_is_held():
    few, many = memory(1), memory(30)
    assert few.peak == 110 + 40 and few.by_kind()[ACTIVATIONS] == 40
    assert few.by_layer() == {"layers.*": 10, "head": 100, "": 40}
    # with many layers another stretch of the step holds the most: the backward of the first
    kinds = {PARAMETERS: 400, GRADIENTS: 270, "optimizer": 0, ACTIVATIONS: 7}
    assert many.by_kind() == kinds and set(many.by_layer()) == {"layers.*", "head"}


def run(depth, *collectives, uneven=0):
    return DryRun("all", traffic(*collectives), traffic(), memory(depth, uneven=uneven))


@pytest.mark.parametrize("layers", [5, 30, 126])
def test_layers_that_are_counted_are_as_layers_that_are_run(layers):
    def of(depth):
        sent = depth * [collective("all-gather", (0, 1), 5)]
        return run(depth, *sent, collective("reduce", (0, 4), 3))

    grown, wanted = counted([of(depth) for depth in DEPTHS], layers), of(layers)
    assert grown.step == wanted.step and grown.counted
    assert grown.memory.by_kind() == wanted.memory.by_kind()
    assert grown.memory.by_layer() == wanted.memory.by_layer()


def test_layers_that_differ_are_not_counted():
    assert counted([run(depth, uneven=1) for depth in DEPTHS], 30) is None
    sent = [collective("all-gather", (0, 1), 5 * depth * depth + 2) for depth in DEPTHS]
    assert counted([run(depth, one) for depth, one in zip(DEPTHS, sent)], 30) is None
    failed = replace(run(3), failure="TypeError: no")
    assert counted([run(2), failed, run(4)], 30) is failed


def test_functions_that_another_process_finds():
    assert located("a.b:f") == ("a.b", None, "f")
    file = __file__
    assert located(f"{file}:Job.step") == ("test_estimates", file, "Job.step")
    with pytest.raises(ValueError, match=r"the file 'no/train.py' does not exist: give the path"):
        located("no/train.py:step")
    assert located(collective) == (__name__, None, "collective")
    for bad, said in (
        ("train", "is not the name of a function"),
        (lambda mesh: None, "in a new process: pass"),
        (functools.partial(collective), "in a new process: pass"),
        (3, "in a new process: pass"),
    ):
        with pytest.raises(ValueError, match=said):
            located(bad)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": ()}, "pass the number of devices"),
        ({"mesh": (4, 0)}, "pass the number of devices"),
        ({"rank": 8}, "has the ranks 0 to 7"),
        ({"device": "tpu"}, "neither 'cuda' nor 'cpu'"),
        ({"layers": 0}, "a model has at least one layer"),
        ({"settings": ("stock",)}, "give one or more of PyTorch, views"),
        ({"network": "pigeon"}, "unknown links"),
        ({"network": "nvlink,nvlink,nvlink"}, "the network has 3 links"),
    ],
)
def test_bad_arguments(given, said):
    with pytest.raises(ValueError, match=said):
        estimate("no_such_module:step", **{"mesh": (2, 4), **given})


STOCK = DryRun(
    "PyTorch",
    traffic(
        *4 * [collective("all-gather", (0, 1, 2, 3), 3_000_000)],
        collective("all-reduce", (0, 4), 500_000, THERE, backward=True),
    ),
    traffic(),
    memory(2),
)
LESS = replace(
    STOCK,
    setting="all",
    step=traffic(
        *2 * [collective("all-to-all", (0, 1, 2, 3), 200_000)],
        collective("all-reduce", (0, 4), 500_000, THERE, backward=True),
    ),
    causes=(Cause(HERE, False, "split", "op"),),
)
FAILS = replace(STOCK, setting="views", failure="train.py:9 step: TypeError: no")


def estimated(*runs):
    return Estimate("train.py:step", (2, 4), ("dp", "tp"), 0, "cuda", None, None, runs)


def test_what_an_estimate_says():
    causes = tuple([Cause(HERE, False, f"split{k}", "op") for k in range(4)])
    assert_expected_inline(
        str(estimated(STOCK, FAILS, replace(LESS, causes=causes))),
        """\
train.py:step, one step on mesh (dp=2, tp=4): rank 0 of 8, as on GPUs over NCCL
network: NVLink in hosts of eight devices, InfiniBand between

                          PyTorch  views      all
received                    50 MB      -   3.6 MB
collectives                     5      -        3
time by the network        140 us      -  25.9 us
memory, at most             160 B      -    160 B
  parameters                120 B      -    120 B
  gradients                   0 B      -      0 B
  optimizer                   0 B      -      0 B
  activations                40 B      -     40 B
received before the step      0 B      -      0 B

memory by layer, at the peak  PyTorch  views    all
  head                          100 B      -  100 B
  outside of all layers          40 B      -   40 B
  layers.*                       20 B      -   20 B

received for each line             PyTorch  views                   all
  model.py:3 forward    48 MB in 4, 130 us      -  1.6 MB in 2, 15.5 us
  train.py:9 step       2 MB in 1, 10.4 us      -    2 MB in 1, 10.4 us

ops of DTensors that communicate, all
  model.py:3 forward
    split0 communicates
    split1 communicates
    split2 communicates
    and 1 more op

views: does not run. train.py:9 step: TypeError: no""",
    )


def test_the_page_begins_with_totals_and_charts(tmp_path):
    found = estimated(STOCK, FAILS, LESS)
    page = found.save(tmp_path / "page.html").read_text()
    lines, layers = page.partition("<pre>")[0].split("<figure")[1:]
    assert page.index("160 B") < page.index("<figure")  # the totals
    assert "PyTorch: 48 MB in 4 collectives" in lines and "all: 1.6 MB in 2 collectives" in lines
    assert "<title>all-to-all</title>" in lines and "views:" not in lines
    assert "all: 20 B" in layers and "<title>activations</title>" in layers
    data = json.loads(found.save(tmp_path / "data.json").read_text())
    assert data["settings"]["all"]["memory"]["by_kind"]["activations"] == 40
    assert found.save(tmp_path / "text.txt").read_text() == f"{found}\n"
    with pytest.raises(ValueError, match=r"file name for the estimate that ends in one of \.json"):
        found.save(tmp_path / "page.pdf")
    assert "<figure" not in estimated(FAILS).html()


def test_if_nothing_runs_the_reason_is_said_once():
    runs = [replace(FAILS, setting=name) for name in ("PyTorch", "all")]
    text = str(estimated(*runs)).splitlines()
    assert text[-1] == "PyTorch, all: do not run. train.py:9 step: TypeError: no"
    assert "received" not in " ".join(text)


def test_the_best_setting_takes_the_least_time():
    # Few bytes in many collectives: each takes microseconds, whatever it sends.
    many = traffic(*90 * [collective("all-to-all", (0, 1, 2, 3), 100)])
    assert estimated(STOCK, replace(LESS, step=many)).best is STOCK
    assert estimated(STOCK, LESS).best is LESS
    assert estimated(FAILS).best is None
    # Among equal times the one with the fewest bytes; among equal bytes the first.
    few, fewer = (traffic(*4 * [collective("all-gather", (0, 1, 2, 3), n)]) for n in (100, 50))
    stock, ours = replace(STOCK, step=few), replace(LESS, step=fewer)
    assert estimated(stock, ours).best is ours
    assert estimated(stock, replace(ours, step=few)).best is stock


def test_as_plain_data():
    found = estimated(STOCK, FAILS, LESS).to_dict()
    ours = found["settings"]["all"]
    assert found["mesh"] == [2, 4] and found["mesh_dim_names"] == ["dp", "tp"]
    assert ours["busiest_bytes"] == 4 * 900_000 and ours["memory"]["peak"] == memory(2).peak
    assert sum(line["busiest_bytes"] for line in ours["lines"]) == ours["busiest_bytes"]
    assert ours["causes"][0]["text"] == "split communicates"
    assert found["settings"]["views"]["failure"] == "train.py:9 step: TypeError: no"

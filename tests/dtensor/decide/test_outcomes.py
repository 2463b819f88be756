"""stats() and the logger: what was decided, how often, and why."""

import logging

import pytest
import torch
from simulation import distribute, mesh_of, planned, ranks_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import cute_sharding
from cute_sharding.dtensor.bookkeeping import kept
from cute_sharding.dtensor.bookkeeping.stats import OUTCOMES
from cute_sharding.dtensor.replaced import communication
from cute_sharding.dtensor.run.placements import say_redistributed


def outcomes(op):
    """Without what it received."""
    return {name: n for name, n in cute_sharding.stats()[op].items() if name in OUTCOMES}


def tensor_of(shape, local, mesh, placements, names=None):
    stride = torch.empty(shape).stride()
    return DTensor.from_local(
        torch.zeros(local),
        mesh_of(mesh, names),
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


@pytest.fixture
def on():
    with cute_sharding.enabled():
        cute_sharding.stats(reset=True)
        yield


def test_nothing_is_counted_at_first(on):
    assert cute_sharding.stats() == {}


def test_every_outcome_is_counted_under_its_op(on):
    tensor = tensor_of((4, 8, 6), (4, 2, 6), (4,), [Shard(1)])
    tensor.view(32, 6)
    assert [*cute_sharding.stats()] == ["view.default"]
    assert outcomes("view.default") == {"algebra": 1}
    tensor.permute(2, 0, 1)
    assert outcomes("permute.default") == {"algebra": 1}
    tensor_of((7, 3), (2, 3), (4,), [Shard(0)]).view(21)
    assert outcomes("view.default") == {"algebra": 1, "tracing": 1}
    tensor_of((4, 6), (4, 3), (2,), [Shard(1)]).view(4, 3, 2)
    assert outcomes("view.default") == {"algebra": 1, "tracing": 1, "redistribution": 1}


def test_cached_propagations_are_not_counted_again(on):
    tensor = tensor_of((4, 8, 6), (4, 2, 6), (4,), [Shard(1)])
    for _ in range(3):
        tensor.view(32, 6)
    assert cute_sharding.stats()["view.default"]["algebra"] == 1


def test_stats_are_a_copy_and_can_be_reset(on):
    tensor_of((4, 8, 6), (4, 2, 6), (4,), [Shard(1)]).view(32, 6)
    counts = cute_sharding.stats()
    counts["view.default"]["algebra"] = 100
    assert cute_sharding.stats(reset=True)["view.default"]["algebra"] == 1
    assert cute_sharding.stats() == {}
    tensor_of((4, 8, 2), (4, 2, 2), (4,), [Shard(1)]).view(32, 2)
    cute_sharding.stats(reset=True)
    assert cute_sharding.stats() == {}


def test_nothing_is_counted_while_disabled(on):
    cute_sharding.disable()
    tensor_of((4, 8, 6), (4, 2, 6), (4,), [Shard(1)]).view(32, 6)
    assert cute_sharding.stats() == {}


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "cute_sharding"]


def test_the_log_says_what_was_decided(caplog, on):
    with caplog.at_level(logging.DEBUG, logger="cute_sharding"):
        tensor_of((4, 8, 6), (4, 2, 6), (4,), [Shard(1)]).view(32, 6)
        tensor_of((7, 3), (2, 3), (4,), [Shard(0)]).view(21)
        for _ in range(2):
            tensor_of((4, 6), (4, 3), (2,), [Shard(1)]).view(4, 3, 2)
    levels = [record.levelno for record in caplog.records if record.name == "cute_sharding"]
    assert levels == [logging.DEBUG, logging.DEBUG, logging.INFO]
    assert lines(caplog) == [
        "view.default: (4, 8, 6) [S(1)] -> (32, 6) [_S(0, 4)] on mesh (4,): free",
        "view.default: (7, 3) [S(0)] -> (21,) [S(0)] on mesh (4,): free",
        "view.default: (4, 6) [S(1)] -> (4, 3, 2) [S(2)] on mesh (2,): input redistributed to "
        "[_S(1, 3)], each device receives up to 4 elements",
    ]


@pytest.mark.one_in(1)
def test_the_log_says_what_redistributes(caplog):
    with (
        caplog.at_level(logging.INFO, logger="cute_sharding"),
        cute_sharding.enabled(redistribution=True),
        ranks_of((4,)),
    ):
        for _ in range(2):
            distribute(torch.ones(8, 8), (4,), [Shard(0)]).redistribute(placements=[Shard(1)])
        distribute(torch.ones(8, 8), (4,), [Replicate()]).redistribute(placements=[Shard(1)])
    assert lines(caplog) == [
        "redistribute: (8, 8) [S(0)] -> [S(1)] on mesh (4,): 1 collective, each device receives up "
        "to 12 elements",
        "redistribute: (8, 8) [R] -> [S(1)] on mesh (4,): nothing is sent",
    ]


@pytest.mark.one_in(1)
def test_the_first_rank_of_a_mesh_speaks_for_all(caplog, monkeypatch):
    """Views, redistributions and missing groups: as each rank of a mesh of four, whose ranks are
    not in order.
    """
    mesh = DeviceMesh("cpu", torch.tensor([[6, 1], [5, 0]]), mesh_dim_names=("a", "b"))
    columns, both = [Shard(1), Replicate()], [Shard(0), Shard(1)]
    said = {}
    for rank in (0, 1, 5, 6):  # no other test makes a group for them
        monkeypatch.setattr(communication, "this_rank", lambda rank=rank: rank)
        kept.empty()
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, logger="cute_sharding"),
            cute_sharding.enabled(redistribution=True),
        ):
            say_redistributed(mesh, (8, 8), columns, both, None)
            spec = DTensorSpec(mesh, tuple(columns), TensorMeta((4, 6), (6, 1), torch.float32))
            DTensor(torch.zeros(4, 3), spec, requires_grad=False).view(4, 3, 2)
            planned(mesh, (8, 8), tuple(both), tuple(reversed(both)))
        said[rank] = [line.split(":")[0][:16] for line in lines(caplog)]
    assert said.pop(6) == ["redistribute", "view.default", "redistribute", "redistribution o"]
    assert not any(said.values()), said


def test_the_log_says_when_it_is_switched(caplog):
    with caplog.at_level(logging.DEBUG, logger="cute_sharding"):
        cute_sharding.enable()
        cute_sharding.enable()  # no change, no line
        cute_sharding.disable()
    on, off = lines(caplog)
    assert on.startswith("layout algebra: ") and "redistribution=False" in on
    assert off == "layout algebra: off"


def test_the_log_is_silent_by_default(caplog, on):
    tensor_of((4, 8, 6), (4, 2, 6), (4,), [Shard(1)]).view(32, 6)
    assert lines(caplog) == []
    assert logging.getLogger("cute_sharding").level == logging.NOTSET, (
        "a library leaves levels to the program"
    )

"""Plans for many tensors: all of them move once, nothing is left out, and no rank holds more than
the limit, which is counted here event by event.
"""

import random
from math import prod

import pytest
import torch

from cute_sharding.exchange import Mesh, Network
from cute_sharding.exchange.bundle import own_part, size_of
from cute_sharding.models import PlacedTensor, plan_models
from cute_sharding.models.tensor import itemsize_of

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "float64"]


def drawn_spec(draw, shape, mesh, dtype, pending=0.0):
    placements = []
    for _ in mesh.sizes:
        d = draw.randrange(len(shape) + 1)
        factor = draw.choice([1, 1, 1, 2])
        if d < len(shape):
            placements.append(f"S({d})" if factor == 1 else f"_S({d},{factor})")
        else:
            placements.append("P" if draw.random() < pending else "R")
    return PlacedTensor.of(shape, mesh, ", ".join(placements), dtype)


def drawn_mesh(draw, ranks):
    sizes = draw.choice([(4,), (2, 2), (1, 4), (2,), (3,)])
    some = draw.sample(ranks, prod(sizes))
    return Mesh(sizes, some if draw.random() < 0.3 else sorted(some))


def drawn_model(seed, pending=0.0):
    draw = random.Random(seed)
    meshes = [drawn_mesh(draw, range(draw.choice([4, 6, 8]))) for _ in range(3)]
    model = []
    for k in range(draw.randint(1, 8)):
        shape = tuple(draw.choice([0, 1, 3, 4, 8, 12]) for _ in range(draw.choice([0, 1, 2])))
        one, other = meshes[0], draw.choice(meshes[1:])
        dtype = draw.choice(DTYPES[:2])
        source = drawn_spec(draw, shape, one, dtype, pending)
        target = drawn_spec(draw, shape, other, draw.choice([dtype, dtype, "bfloat16"]))
        model.append((f"w{k}", source, source if draw.random() < 0.1 and not pending else target))
    return model


def is_shared(way, rank):
    """Whether what a rank is to have is what it has. (If that is nothing, it lets go of it.)"""
    alike = way.plan.exchange.is_in_place and way.source.dtype == way.target.dtype
    return alike and way.target.bytes_on(rank) > 0


def events(plan, rank):
    """What a rank holds, at each moment of a run that frees a source once its target is whole.
    Without a limit it keeps as much for buffers as the largest bucket needs, for each that is on
    its way.
    """
    held = sum(way.source.bytes_on(rank) for _, way, _ in plan.tensors)
    yield held
    waiting = None  # what is on the wire: (its sent, its received, its members)

    def sizes(each):
        """In buffers, to send and to receive; and targets that something goes straight into."""
        sent = received = early = 0
        for i, item in zip(each.members, each.bundle.items):
            mine, alone = own_part(item.exchange, rank), item.alone(rank, each.bundle.long)
            straight = [sum(s.size for s in side if s.start is not None) for side in alone]
            sent += (size_of(mine.sent) - straight[0]) * item.itemsize
            received += (size_of(mine.taken) - straight[1]) * item.itemsize
            if any(single.start is not None for single in alone.taken):
                early += plan.tensors[i].way.target.bytes_on(rank)
        return sent, received, early

    def landed(held, each, received):
        for i in each.members:
            way = plan.tensors[i].way
            held += 0 if is_shared(way, rank) else way.target.bytes_on(rank)
            yield held
        for i in each.members:
            way = plan.tensors[i].way
            held -= 0 if is_shared(way, rank) else way.source.bytes_on(rank)
        yield held - received

    keeps = plan.memory_limit is None
    if keeps:
        at_once = 1 + any(each.follows_at_once for each in plan.packed)
        held += at_once * max(sum(sizes(each)[:2]) for each in plan.packed)
        yield held
    for each in plan.packed:
        sent, received, early = sizes(each)
        if keeps:
            sent = received = 0
        if waiting is not None and not each.follows_at_once:
            yield from (last := [*landed(held - waiting[0] - waiting[2], *waiting[3:], waiting[1])])
            held, waiting = last[-1], None
        held += sent
        yield held
        held += received + early
        yield held
        if waiting is not None:
            yield from (last := [*landed(held - waiting[0] - waiting[2], *waiting[3:], waiting[1])])
            held = last[-1]
        waiting = sent, received, early, each
    if waiting is not None:
        yield from landed(held - waiting[0] - waiting[2], waiting[3], waiting[1])


# The last ones: what grows waits for what shrinks, also where that is of another kind.
@pytest.mark.parametrize("seed", [*range(150), 11757, 12036])
def test_no_rank_holds_more_than_the_limit(seed):
    model = drawn_model(seed)
    plan = plan_models(model)
    if not plan.packed:
        return
    with pytest.raises(ValueError, match="a device needs at least") as refused:
        plan_models(model, -1)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    for limit in (least, least + 7, (least + plan.peak_bytes) // 2, plan.peak_bytes, None):
        if limit is None or limit >= least:
            limited = plan_models(model, limit)
            most = max(max(events(limited, rank)) for rank in limited.ranks)
            assert most == limited.peak_bytes
            assert limit is None or limited.peak_bytes <= limit
            members = sorted(i for each in limited.packed for i in each.members)
            moving = [i for i, (_, _, stays) in enumerate(limited.tensors) if not stays]
            assert members == moving
            assert limited.coverage.is_whole
            assert limited.received_bytes == limited.lower_bound


@pytest.mark.parametrize("seed", range(60))
def test_coverage_is_of_what_is_needed(seed):
    plan = plan_models(drawn_model(seed, pending=0.3))
    needed = sum(
        prod(way.target.placed.local_shape(rank)) * way.target.itemsize
        for _, way, _ in plan.tensors
        for rank in way.target.placed.mesh.ranks
    )
    assert plan.coverage.needed == needed and plan.coverage.is_whole
    ways = [way for _, way, _ in plan.tensors]
    if any(way.source.pending and 0 not in way.source.placed.shape for way in ways):
        assert plan.lower_bound is None
    found = plan.to_dict()
    assert sum(len(bucket["tensors"]) for bucket in found["buckets"]) == sum(
        tensor["kind"] != "nothing" for tensor in found["tensors"]
    )
    assert found["coverage"]["needed"] == needed


def test_what_shrinks_goes_first():
    mesh = Mesh((2,), (0, 1))
    one, other = (PlacedTensor.of((64, 2), mesh, placements) for placements in ("S(0)", "R"))
    model = [("grows", one, other), ("stays", one, PlacedTensor.of((64, 2), mesh, "S(1)"))]
    model += [("shrinks", other, one), ("as it is", one, one)]
    plan = plan_models(model)
    assert [[plan.tensors[i].name for i in each.members] for each in plan.packed] == [
        ["shrinks", "stays", "grows"]
    ]
    assert plan.collectives == 1
    # The sources, which the first of them frees before the last is there.
    assert plan_models(model, 256 * 3 + 512 + 300 + 512).peak_bytes < plan.peak_bytes


def test_what_changes_nothing_costs_nothing():
    spec = PlacedTensor.of((64, 2), (2,), "S(0)")
    plan = plan_models([("a", spec, spec)])
    assert plan.packed == () and plan.collectives == plan.received_bytes == 0
    assert plan.peak_bytes == 256 and "nothing" in str(plan)
    square = PlacedTensor.of((64, 2), (2, 1), "S(0), R")
    plan = plan_models([("a", spec, square)])
    assert plan.collectives == 0 and plan.peak_bytes == 256


def test_what_is_refused():
    one = PlacedTensor.of((4,), (2,), "S(0)")
    with pytest.raises(
        ValueError, match="the target must have the same shape, and must not have a Partial"
    ):
        plan_models([("w", one, PlacedTensor.of((5,), (2,), "S(0)"))])
    with pytest.raises(
        ValueError, match="the target must have the same shape, and must not have a Partial"
    ):
        plan_models([("w", one, PlacedTensor.of((4,), (2,), "P"))])
    with pytest.raises(ValueError, match="give the name of a PyTorch dtype"):
        PlacedTensor.of((4,), (2,), "R", "half")


def test_the_bytes_of_dtypes_are_torchs():
    names = {str(x).removeprefix("torch.") for x in vars(torch).values() if type(x) is torch.dtype}
    assert len(names) > 20
    for name in names:
        assert itemsize_of(name) == getattr(torch, name).itemsize, name


def test_smaller_dtypes_travel():
    wide, narrow = (PlacedTensor.of((8,), (2,), "S(0)", dtype) for dtype in ("float32", "bfloat16"))
    for one, other in ((wide, "bfloat16"), (narrow, "float32")):
        plan = plan_models([("w", one, PlacedTensor.of((8,), (2,), "R", other))])
        assert plan.received_bytes == plan.lower_bound == 8


def test_links():
    """Ranks 0 to 7 are a host, and 8 to 15 another."""
    one, other = PlacedTensor.of((32, 2), (16,), "S(0)"), PlacedTensor.of((32, 2), (16,), "R")
    network = Network.parse("flat:0,2")
    plan = plan_models([("w", one, other), ("v", one, other)], network=network)
    assert plan.received_by_link == {"in a host": 2 * 7 * 16, "between hosts": 2 * 8 * 16}
    assert plan.seconds == pytest.approx(2 * 8 * 16 * 2 / 2 + 7 * 16 * network.inner.beta)


def test_many_ranks_and_layers_are_planned_at_once():
    """A dense model of 1,137 tensors: as many layers cost little more than one."""

    def model(dp):
        by_rows, by_columns = "_S(0,8), S(0)", "S(0), S(1)"
        return [
            (f"layers.{i}.{name}", PlacedTensor.of(shape, (dp, 8), placements, "bfloat16"))
            for i in range(126)
            for name, shape, placements in (
                ("wq", (16384, 16384), by_rows),
                ("wo", (16384, 16384), by_columns),
                ("norm", (16384,), "S(0), R"),
            )
        ]

    plan = plan_models((name, one, other) for (name, one), (_, other) in zip(model(64), model(128)))
    assert len(plan.ways) == 3 and len(plan.ranks) == 1024 and len(plan.looked_at) <= 64
    assert plan.coverage.is_whole and plan.received_bytes == plan.lower_bound
    assert len(plan.packed) <= 10
    assert plan.packed[0].bundle.part(5).peers

"""Pictures of plans for many tensors, beside the bytes that the plans say."""

import random

import pytest
import torch
from test_picture_between_meshes import amounts_of

from cute_sharding import Spec, draw, plan_refit, plan_reshard
from cute_sharding.exchange import Mesh

SHAPES = ((8, 4), (6, 10), (5, 7), (16,))
WIDTHS = {torch.float32: 4, torch.bfloat16: 2, torch.float64: 8}


def drawn_state(draw_of, names, mesh, shapes, dtypes):
    placements = [", ".join(draw_of.choice(["R", "S(0)"]) for _ in mesh.sizes) for _ in names]
    return {
        name: Spec(shape, mesh, text, dtype)
        for name, text, shape, dtype in zip(names, placements, shapes, dtypes)
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_matrix_is_what_each_rank_receives(seed):
    draw_of = random.Random(seed)
    names = [f"layers.{i}.weight" for i in range(draw_of.randint(1, 6))]
    shapes = [draw_of.choice(SHAPES) for _ in names]
    dtypes = [draw_of.choice([*WIDTHS]) for _ in names]
    one, other = Mesh((2, 2), range(4)), Mesh((3,), draw_of.sample(range(6), 3))
    source, target = (drawn_state(draw_of, names, mesh, shapes, dtypes) for mesh in (one, other))
    plan = plan_reshard(source, target)
    picture = draw(plan)
    assert [section.title for section in picture.sections] == ["bytes in all"]
    amounts = amounts_of(picture.sections[-1])
    ranks = {receiver for _, receiver in amounts}
    assert ranks == {*other.ranks}
    received = {
        rank: sum(n for (i, j), n in amounts.items() if j == rank and i != rank) for rank in ranks
    }
    assert max(received.values()) == plan.received_bytes
    assert [picture.title, *picture.captions] == str(plan).splitlines()


def test_a_refit():
    source = {name: Spec((8, 4), (2,), "S(0)") for name in "qkv"}
    source["norm"] = Spec((4,), (2,), "R", torch.bfloat16)
    plan = plan_refit(
        lambda w: {"qkv": torch.cat([w["q"], w["k"], w["v"]]), "norm": w["norm"].flip(0)},
        source,
        {"qkv": ((2,), "S(1)"), "norm": ((2,), "S(0)")},
    )
    picture = draw(plan)
    assert "3 pieces of q, k, v" in str(picture.captions)
    amounts = amounts_of(picture.sections[-1])
    assert amounts[0, 1] == amounts[1, 0] == plan.received_bytes == 3 * 4 * 2 * 4


def test_of_many_buckets_some_are_left_out():
    names = [f"layers.{i}" for i in range(40)]
    source = {name: Spec((64, 8), (4,), "S(0)") for name in names}
    target = {name: Spec((64, 8), (4,), "S(1)") for name in names}
    least = plan_reshard(source, target)
    plan = plan_reshard(source, target, memory_limit=40 * 512 + 2048)
    said = draw(plan).captions
    assert len(least.packed) < len(plan.packed) and len(said) == 17 and said[8] == ".."


def test_large_models_have_small_pictures():
    weights = {f"layers.{i}": Spec((8192, 8192), (64, 8), "S(0), S(1)") for i in range(500)}
    moved = {name: Spec((8192, 8192), (128, 8), "S(0), S(0)") for name in weights}
    picture = draw(plan_reshard(weights, moved))
    (panel,) = picture.sections[-1].panels
    assert len(panel.rows) <= 17 and len(panel.columns) <= 17
    assert any("ranks that send are shown" in text for text in picture.sections[-1].captions)

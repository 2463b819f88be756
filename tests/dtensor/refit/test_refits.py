"""Refits on real processes, where each rank sees its own, and with all ranks in one; and plans of
specs alone.
"""

import pytest
import refit_worker
import torch
from drawn_moves import drawn_program
from gloo import run, spawn
from simulation import assert_holds, distribute, mesh_of, number, ranks_of
from torch.distributed.tensor import Partial, Replicate, Shard

import cute_sharding
from cute_sharding import Spec, plan_refit
from cute_sharding.exchange import Mesh
from cute_sharding.relations import NotOnlyMoved


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.parametrize("prepared", [False, True])
def test_drawn_refits(prepared, share, tmp_path):
    run(4, tmp_path, (refit_worker.refits, 0, share(250, 12), prepared))


@pytest.mark.processes
@pytest.mark.one_in(1)
def test_programs(tmp_path):
    run(4, tmp_path, *[(program,) for program in refit_worker.PROGRAMS])


@pytest.mark.processes
@pytest.mark.one_in(1)
@pytest.mark.costly
def test_a_process_that_dies_half_way(tmp_path):
    spawn(refit_worker.dying, 4, 4, str(tmp_path / "rendezvous"), str(tmp_path))
    for rank in (2, 3):
        assert (tmp_path / str(rank)).read_text() == "ReshardError True"
    assert (tmp_path / "0").exists()


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_in_one_process(seed):
    program = drawn_program(seed)

    def generator(w):
        return dict(zip("abcdefghijklmnop", program([*w.values()])))

    with ranks_of((4,)):
        given = {f"w{k}": number(shape) for k, shape in enumerate(program.shapes)}
        state = {name: distribute(whole, (4,), [Shard(0)]) for name, whole in given.items()}
        after = [Shard(0), Replicate()] if seed % 2 else [Replicate(), Shard(0)]
        plan = plan_refit(
            generator,
            state,
            lambda name, x: (mesh_of((2, 2)), after if x.ndim else [Replicate()] * 2),
        )
        results = plan.run(state)
        for name, whole in generator(given).items():
            assert_holds(results[name], whole)


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.complex128]
)
def test_what_is_turned_is_so_in_any_dtype(dtype):
    """Also in those that torch cannot flip, and where nothing in the code is one."""

    def generator(w):
        pairs = w["x"].unflatten(1, (2, 2))
        return {
            "turned": w["x"].index_select(1, torch.tensor([3, 2, 1, 0])),
            "rolled": pairs.roll(1, 2),
        }

    whole = number((6, 4))
    with ranks_of((2,)):
        x = distribute(whole, (2,), [Replicate()]).to(dtype)
        results = plan_refit(generator, {"x": x}, {"*": (mesh_of((2,)), "S(0)")}).run({"x": x})
        for name, wanted in generator({"x": whole.to(dtype).to(torch.complex128)}).items():
            assert_holds(results[name].to(torch.complex128), wanted)


def test_what_ran_is_counted():
    with ranks_of((4,)):
        x = distribute(number((8, 6)), (4,), [Shard(0)])
        cute_sharding.stats(reset=True)
        plan_refit(lambda w: {"y": w["x"].mT}, {"x": x}, {"y": (mesh_of((4,)), "S(0)")}).run(
            {"x": x}
        )
        counts = cute_sharding.stats()["redistribute"]
        assert counts["plan"] == 1 and counts["collectives"] == 1


# -- plans -----------------------------------------------------------------------------------------

TRAINER, GENERATOR = Mesh((4,), range(4)), Mesh((2, 2), range(4, 8))


def spec(*shape, dtype=torch.float32, placements="S(0)"):
    return Spec(shape, TRAINER, placements, dtype)


def fused(w):
    k, v = (w[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for name in "kv")
    return {
        "attn.qkv_proj.weight": torch.cat([w["q"], k, v]).to(torch.bfloat16),
        "norm.weight": w["norm"],
    }


SOURCE = {"q": spec(16, 8), "k": spec(8, 8), "v": spec(8, 8), "norm": spec(8), "bias": spec(8)}
TARGET = {"*.qkv_proj.weight": (GENERATOR, "R, S(0)"), "norm.*": (GENERATOR, "R, R")}


def test_a_plan_as_text():
    assert str(plan_refit(fused, SOURCE, TARGET)) == (
        "refit of 5 tensors to 2, mesh (4,) of ranks 0 to 3 -> mesh (2, 2) of ranks 4 to 7\n"
        "  attn.qkv_proj.weight (48, 8) bfloat16 as [R, S(0)]: 3 pieces of q, k, v\n"
        "  norm.weight (8,) float32 as [R, R]: 1 piece of norm\n"
        "  8 elements of bias are in no result\n"
        "in all: 1 exchange, a rank receives 352 bytes at the most; 800 bytes of results, all "
        "covered"
    )


def test_a_plan_as_data():
    plan = plan_refit(fused, SOURCE, TARGET)
    data = plan.to_dict()
    assert data["said_bytes"] == data["result_bytes"] == 48 * 8 * 2 + 8 * 4
    assert data["results"][0]["of"] == ["q", "k", "v"]
    assert data["results"][0]["placements"] == "[R, S(0)]"
    assert [each["dtype"] for each in data["sent"]] == ["bfloat16", "float32"]
    assert data["unread_elements"] == {"bias": 8} == plan.unread
    # heads are repeated on the way, and sent once: half of q, k or v, of two bytes
    assert plan.received_by(4) == (16 * 8 + 8 * 8) * 2 + 8 * 4 - 64
    assert plan.received_by(0) == 0


def test_the_inverse_of_a_plan():
    source = {name: each for name, each in SOURCE.items() if name != "bias"}
    back = plan_refit(fused, source, TARGET).inverse()
    assert [*back.target] == [*source] and back.target["q"] == source["q"]
    turned = plan_refit(lambda w: {"v": w["q"].mT}, {"q": spec(16, 8)}, {"v": (GENERATOR, "R, R")})
    assert turned.inverse().inverse().relation == turned.relation
    with pytest.raises(ValueError, match="the results lack 8 elements of the source tensor 'bias'"):
        plan_refit(fused, SOURCE, TARGET).inverse()


def test_layers_of_one_form_share_their_exchange():
    names = [f"layers.{k}" for k in range(50)]
    plan = plan_refit(
        lambda w: {
            f"{name}.gate_up": torch.cat([w[f"{name}.{k}"] for k in ("gate", "up")])
            for name in names
        },
        {f"{name}.{k}": spec(64, 8) for name in names for k in ("gate", "up")},
        {"*": (GENERATOR, "S(0), S(1)")},
    )
    assert len({id(member.exchange) for member in plan.members}) == 1
    assert len(plan.members) == 50 and plan.received_by(4) == 50 * 128 * 8


def test_a_limit_of_memory_makes_more_exchanges():
    names = [f"layers.{k}" for k in range(9)]

    def plan(limit):
        return plan_refit(
            lambda w: {name: w[name].mT for name in names},
            {name: spec(8, 8) for name in names},
            {"*": (GENERATOR, "R, S(0)")},
            memory_limit=limit,
        )

    # A rank gets 4 x 8 floats of a layer, and none has more to do.
    every = [plan(limit) for limit in (None, 9 * 128, 256, 128)]
    assert [each.collectives for each in every] == [1, 3, 9, 9]
    assert [each.buffer_bytes for each in every] == [9 * 128, 4 * 128 + 4 * 128, 256, 128]
    assert len({each.received_bytes for each in every}) == 1
    assert str(every[1]).endswith("in 3 parts: a rank holds 1,024 bytes of buffers at the most"), (
        str(every[1])
    )
    assert [len(each.parts(4)) for each in every] == [1, 3, 9, 9]
    assert sum(sum(part.receives) for part in every[1].parts(4)) == every[1].received_by(4)
    assert every[1].inverse().memory_limit == 9 * 128
    with pytest.raises(ValueError, match="127 is too small: a device needs at least 128 bytes"):
        plan(127)


def test_what_is_narrower_is_cast_before_it_is_sent():
    def generator(w):
        return {"x": w["x"].to(torch.bfloat16), "y": w["y"].double(), "z": w["y"][:1]}

    source = {"x": spec(8, 8), "y": spec(8, 8)}
    plan = plan_refit(generator, source, {"*": (GENERATOR, "R, R")})
    assert plan.received_by(4) == 64 * 2 + 64 * 4


def test_what_is_refused():
    ok, onto = {"x": spec(8, 8)}, {"*": (GENERATOR, "R, R")}
    turn = lambda w: {"y": w["x"].mT}  # noqa: E731
    for words, kind, args in (
        ("the refit has no source tensors", ValueError, (turn, {}, onto)),
        ("'x' is a Tensor: give a DTensor", TypeError, (turn, {"x": torch.ones(2)}, onto)),
        (
            "the target has no entry for result 'y' .entries: 'z'.: add",
            ValueError,
            (turn, ok, {"z": onto["*"]}),
        ),
        (
            "no result has a name that matches 'z': in the target, write names of results .'y'.",
            ValueError,
            (turn, ok, {"y": (GENERATOR, "R, R"), "z": (GENERATOR, "R, R")}),
        ),
        (
            "result 'y' has shape .8, 8. and dtype torch.float32, but its entry in the target",
            ValueError,
            (turn, ok, {"y": spec(4, 8)}),
        ),
        (
            "must not have a Partial",
            ValueError,
            (turn, {"x": spec(8, 8, placements=[Partial()])}, onto),
        ),
        ("must not have a Partial", ValueError, (turn, ok, {"y": (TRAINER, [Partial()])})),
        ("aten.exp.default computes", NotOnlyMoved, (lambda w: {"y": w["x"].exp()}, ok, onto)),
        ("placements has 1 placements", ValueError, (turn, ok, {"y": (GENERATOR, "R")})),
    ):
        with pytest.raises(kind, match=words):
            plan_refit(*args)
    with pytest.raises(TypeError, match="call plan_refit with DeviceMeshes"):
        plan_refit(turn, ok, onto).run({})

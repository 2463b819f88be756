"""``plan`` and ``draw`` from one mesh to another, and the ranks of a mesh."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cute_sharding
from cute_sharding import draw, plan_redistribution
from cute_sharding.dtensor.replaced import redistribution_hook
from cute_sharding.exchange import Mesh
from cute_sharding.tools.cli import main
from cute_sharding.tools.cli.arguments import read_mesh_of_ranks

OF = "--shape 1024,64 --mesh dp=2,tp=4"
PLAN = f"plan {OF} --from S(0),S(1) --to-mesh gen=4@8-11 --to S(0)"
DRAW = f"draw {OF} --placements S(0),S(1) --to-mesh gen=4@8-11 --to S(0)"


def run(capsys, command):
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys, command):
    code, out, err = run(capsys, f"{command} --json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


@pytest.mark.parametrize(
    "text, names, sizes, ranks",
    [
        ("dp=2,tp=4", ("dp", "tp"), (2, 4), range(8)),
        ("4@8-11", ("mesh0",), (4,), range(8, 12)),
        ("gen=4@8,9,10,11", ("gen",), (4,), range(8, 12)),
        ("(dp=2, tp=2)@0, 1, 8-9", ("dp", "tp"), (2, 2), (0, 1, 8, 9)),
        ("2,2@3,1,2,0", ("mesh0", "mesh1"), (2, 2), (3, 1, 2, 0)),
        ("tp=1 @ 7", ("tp",), (1,), range(7, 8)),
    ],
)
def test_the_ranks_of_a_mesh(text, names, sizes, ranks):
    found = read_mesh_of_ranks(text)
    assert found == (names, Mesh(sizes, ranks))
    assert [*found[1].ranks] == [*ranks]


def test_plan_as_text(capsys):
    code, out, err = run(capsys, PLAN)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "(1_024, 64), elements of 4 bytes: [S(0), S(1)] on mesh (dp=2, tp=4)@0-7 -> [S(0)] on mesh "
        "(gen=4)@8-11",
        "network: dp 3e-06 s + 8.8e-12 s an element, tp 3e-06 s + 8.8e-12 s an element; between "
        "the meshes 3e-06 s + 8.8e-12 s an element",
        "",
        "by plan, with layouts (devices, local) -> flat index:",
        "  exchange between meshes: receives 16,384 elements (65.54 kB), 9.14 us",
        "    from ((2,4),(512,16)):((32768,16),(64,1))",
        "    to   ((4,),(256,64)):((16384,),(64,1))",
        "    at most 4 peers a rank",
        "  in all: 1 collective, 16,384 elements (65.54 kB) received, 9.14 us",
        "  at most 32,768 elements (131.1 kB) held at once",
        "  lower bound: 16,384 elements (65.54 kB), the most that a device needs and does not hold",
        "",
        "by torch itself:",
        "  raises: NotImplementedError: Cross device mesh comm not supported yet!",
    ]


def test_plan_as_json(capsys):
    found = as_json(capsys, PLAN)
    assert (found["mesh"], found["ranks"]) == ({"dp": 2, "tp": 4}, [*range(8)])
    assert (found["to_mesh"], found["to_ranks"]) == ({"gen": 4}, [*range(8, 12)])
    assert found["ours"]["received_bytes"] == 4 * found["ours"]["received_elements"] == 65536
    assert found["torch"]["steps"] is None and found["ours_over_torch"]["seconds"] is None
    plan = plan_redistribution(
        (1024, 64), (2, 4), "S(0), S(1)", "S(0)", target_mesh=Mesh((4,), range(8, 12))
    ).to_dict()
    for key in ("steps", "collectives", "received_elements", "lower_bound", "peak_elements"):
        assert found["ours"][key] == plan[key]


def test_plan_of_a_pending_sum(capsys):
    found = as_json(
        capsys, "plan --shape 8,6 --mesh dp=2,tp=2 --from P,S(1) --to-mesh 3@9,4,5 --to S(0)"
    )
    first, second = found["ours"]["steps"]
    assert (first["kind"], first["mesh_dims"]) == ("reduce-scatter (sum)", ["dp"])
    assert second["kind"] == "exchange between meshes" and found["to_ranks"] == [9, 4, 5]
    assert found["from"] == ["P(sum)", "S(1)"] and found["ours"]["lower_bound"] is None


@pytest.mark.parametrize(
    "options", ["--network infiniband,nvlink --itemsize 2", "--dtype bfloat16"]
)
def test_plan_takes_the_options_of_one_mesh(capsys, options):
    found = as_json(capsys, f"{PLAN} {options}")
    assert found["itemsize"] == 2 and found["ours"]["received_bytes"] == 32768
    if "network" in options:
        assert found["network_between"] == found["network"][0] != found["network"][1]


def test_plan_and_draw_take_what_they_print(capsys):
    printed = (
        "--mesh '(dp=2, tp=4)@0-7' --to-mesh '(gen=4)@8-11' --to '[S(0)]' --shape '(1_024, 64)'"
    )
    assert run(capsys, f"plan {printed} --from '[S(0), S(1)]'") == run(capsys, PLAN)
    assert run(capsys, f"draw {printed} --placements '[S(0), S(1)]'") == run(capsys, DRAW)


def test_one_mesh_said_twice_is_one(capsys):
    wanted = run(capsys, "plan --shape 8,8 --mesh tp=4 --from S(0) --to S(1)")
    twice = "--mesh tp=4@0-3 --to-mesh tp=4"
    assert run(capsys, f"plan --shape 8,8 {twice} --from S(0) --to S(1)") == wanted


def test_what_torch_says_is_asked(capsys, monkeypatch):
    def does_it(local, source, target):
        assert source.mesh.mesh.flatten().tolist() == [*range(8)]
        assert target.mesh.mesh.flatten().tolist() == [*range(8, 12)]
        return local

    monkeypatch.setattr(redistribution_hook, "stock_redistribute", does_it)
    assert "this torch does it" in as_json(capsys, PLAN)["torch"]["error"]


def test_what_is_drawn(capsys):
    plan = plan_redistribution(
        (1024, 64), (2, 4), "S(0), S(1)", "S(0)", target_mesh=Mesh((4,), range(8, 12))
    )
    picture = draw(plan.named(("dp", "tp"), ("gen",)))
    code, out, err = run(capsys, f"{DRAW} --width 100")
    assert (code, err) == (0, "")
    assert out == f"{picture}\n"
    assert as_json(capsys, DRAW)["picture"]["sections"][2]["panels"][0]["columns"] == [
        *("8", "9", "10", "11")
    ]


@pytest.mark.parametrize("suffix", ["svg", "png", "txt"])
def test_files(capsys, tmp_path, suffix):
    path = tmp_path / f"picture.{suffix}"
    assert run(capsys, f"{DRAW} --output {path}") == (0, f"wrote {path}\n", "")
    assert path.stat().st_size > 1000


def test_pictures_by_the_ranks_of_one_mesh(capsys):
    of = "draw --shape 4,6 --mesh tp=2@4,9"
    _, out, _ = run(capsys, f"{of} --placements S(1)")
    assert out.startswith("(4, 6) on mesh (tp=2) of ranks 4, 9 as [S(1)]\n")
    assert "rank 9 (tp=1): holds (4, 3)" in out and "device" not in out
    _, out, _ = run(capsys, f"{of} --placements P")
    assert "4+9" in out
    _, out, _ = run(capsys, f"{of} --placements S(1) --to S(0)")
    assert "step 1: all-to-all on tp" in out and "9   6   (6)\n" in out and "device" not in out


@pytest.mark.parametrize(
    "command, message",
    [
        (f"plan {OF} --from S(0),S(1) --to S(0) --to-mesh gen=4@8-x", "write the ranks after @"),
        (f"plan {OF} --from S(0),S(1) --to S(0) --to-mesh gen=4@", "or one by one, such as dp=2"),
        (f"plan {OF} --from S(0),S(1) --to S(0) --to-mesh gen=4@11-8", "--to-mesh 'gen=4@11-8'"),
        (f"plan {OF} --from S(0),S(1) --to S(0) --to-mesh gen=4@8-10", "such as gen=4@8-11"),
        (
            f"plan {OF} --from S(0),S(1) --to S(0) --to-mesh 4@0-99999999999",
            "has 100,000,000,000 ranks after @ for",
        ),
        (f"plan {OF} --from S(0),S(1) --to S(0) --to-mesh 4@8-10,9", "rank 9 is given twice"),
        (f"plan {OF} --from S(0),S(1) --to S(0) --to-mesh gen:4", "--to-mesh 'gen:4': write name="),
        (
            f"plan {OF} --from S(0),S(1) --to S(0),R --to-mesh 4",
            "the list of placements [S(0), R] has 2",
        ),
        (f"plan {OF} --from S(0),S(1) --to P --to-mesh 4", "a plan cannot create a Partial"),
        (f"{PLAN} --memory-limit 1", "the smallest possible limit is memory_limit="),
        ("plan --shape 8 --mesh 2@4-5 --from R --to R", "would not be used: write 2"),
        ("explain --shape 8 --mesh 2@4-5 --placements R --view 4,2", "would not be used: write 2"),
        ("draw --shape 8 --mesh 2@4-5 --placements R --view 4,2", "would not be used: write 2"),
        ("draw --shape 8 --mesh 2 --placements R --to-mesh 2@4-5", "--to-mesh needs --to"),
        (
            "draw --shape 8 --mesh 2 --placements R --to-mesh 2@4-5 --to P",
            "another mesh must not have a Partial",
        ),
        (
            "draw --shape 8 --mesh 2 --placements R --to-mesh 2@4 --to R",
            "2@4' has 1 rank after @ for a mesh of 2 devices",
        ),
    ],
)
def test_bad_arguments_are_told_in_one_line(capsys, command, message):
    code, out, err = run(capsys, command)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and message in err, err


def test_draw_needs_no_torch():
    code = f"""
import sys
from cute_sharding.tools.cli import main
assert main({shlex.split(DRAW)}) == 0 and "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(cute_sharding.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["plan", "draw"])
def test_help_says_how_ranks_are_written(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "gen=4@8-11" in capsys.readouterr().out

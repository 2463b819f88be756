"""python -m cute_sharding: what is printed, and what bad arguments are told."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cute_sharding.tools.cli import main

ISSUE = "explain --shape 4,16,32 --mesh dp=2,tp=4 --placements S(0),S(2) --view 4,16,8,4"
MOVE = (
    "plan --shape 10000000,512 --mesh 2,4 --from S(0),S(1) --to S(0),S(0) "
    "--network flat:1e-6,3.2e-10"
)


def run(capsys, command):
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    return code, out, err


def test_explain_as_text(capsys):
    code, out, err = run(capsys, ISSUE)
    assert (code, err) == (0, "")
    assert "before: shape (4, 16, 32), placements [S(0), S(2)]" in out
    assert "((2,4),(2,16,8)):((1024,8),(512,32,1))" in out
    assert "4:8     tp     dim 2" in out  # which mode belongs to which mesh dim
    assert "after: shape (4, 16, 8, 4), placements [S(0), S(2)]" in out
    assert "dp=1, tp=3: local (2, 16, 2, 4)  [2:4] x [0:16] x [6:8] x [0:4]" in out
    assert "free: no communication" in out


def test_explain_as_json(capsys):
    code, out, _ = run(capsys, f"{ISSUE} --json")
    result = json.loads(out)
    assert code == 0 and result["free"] and result["how"] == "algebra"
    assert result["output"]["placements"] == ["S(0)", "S(2)"]
    assert result["output"]["devices"][7] == {
        "coordinate": {"dp": 1, "tp": 3},
        "local_shape": [2, 16, 2, 4],
        "rows": [[[2, 4]], [[0, 16]], [[6, 8]], [[0, 4]]],
    }


def test_explain_what_is_not_free(capsys):
    code, out, _ = run(
        capsys, "explain --shape 4,16,32 --mesh 4 --placements S(2) --view 4,16,2,16"
    )
    assert code == 0
    assert (
        "not free: no Shard or _StridedShard of the output gives the devices of mesh dim mesh0"
        in out
    )
    assert "[S(0)]  then the output is [S(0)]; a device receives up to 384 elements" in out


def test_explain_uneven_shards_and_other_views(capsys):
    _, out, _ = run(capsys, "explain --shape 7,4 --mesh 3 --placements S(1) --view 28")
    assert (
        "placements [_S(0,7)]" in out
        and "proved for each kind of device" in out
        and "has no layout" in out
    )
    _, out, _ = run(
        capsys, "explain --shape 2,6 --mesh tp=2 --placements S(1) --permute 1,0 --json"
    )
    assert json.loads(out)["output"]["placements"] == ["S(0)"]
    _, out, _ = run(capsys, "explain --shape 6 --mesh tp=2 --placements S(0) --repeat 3 --json")
    assert json.loads(out)["output"]["placements"] == ["_S(0,3)"]
    _, out, _ = run(
        capsys, "explain --shape 1,6 --mesh tp=2 --placements P(sum) --expand 5,6 --json"
    )
    assert json.loads(out)["output"]["placements"] == ["P(sum)"]


@pytest.mark.parametrize(
    "shape, placements, view",
    [("", "R", ""), ("0,4", "S(1)", "4,0"), ("1", "S(0)", "1,1"), ("", "R", "1")],
)
def test_explain_scalars_and_empty_tensors(capsys, shape, placements, view):
    code, out, err = run(
        capsys, f"explain --shape '{shape}' --mesh 2 --placements {placements} --view='{view}'"
    )
    assert (code, err) == (0, ""), err
    assert "free" in out


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("--slice 1,1", "a device receives up to 4 elements\n  (1,) -> (0,): 4"),
        ("--slice 1,0,15", "free: no communication"),
        ("--select 1,-1", "after: shape (4,), placements [S(0)]"),
        ("--split 1,8", "after, part 1: shape (4, 8), placements [S(1)]"),
        ("--roll 1,2", "(3,) -> (0,): 8"),
        ("--flip 1", "(3,) -> (0,): 16"),
        ("--pad 1,2,2", "after: shape (4, 20)"),
        ("--cat 1", "after: shape (4, 32), placements [_S(1,2)]"),
        ("--unfold 1,3,1", "after: shape (4, 14, 3)"),
        ("--reflect 1,2,0", "after: shape (4, 18)"),
        ("--diagonal 0,0,1", "free: no communication"),
    ],
)
def test_explain_of_movement_ops(capsys, op, said):
    code, out, _ = run(capsys, f"explain --shape 4,16 --mesh 4 --placements S(1) {op}")
    assert code == 0 and said in out, out


def test_explain_needs_no_torch():
    code = (
        f"import sys; from cute_sharding.tools.cli import main; main({ISSUE.split()}); "
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


def planned(capsys, shape, mesh, source, target, options=""):
    code, out, err = run(
        capsys,
        f"plan --shape {shape} --mesh {mesh} --from {source} --to {target} {options} --json",
    )
    assert (code, err) == (0, ""), err
    return json.loads(out)


def test_plan_as_text(capsys):
    code, out, err = run(capsys, MOVE)
    assert (code, err) == (0, "")
    assert (
        "(10_000_000, 512) on mesh (mesh0=2, mesh1=4), elements of 4 bytes: [S(0), S(1)] -> [S(0), "
        "S(0)]" in out
    )
    assert (
        "network: mesh0 1e-06 s + 3.2e-10 s an element, mesh1 1e-06 s + 3.2e-10 s an element" in out
    )
    assert "  all-to-all on mesh1: receives 480,000,000 elements (1.92 GB), 0.154 s" in out
    assert "    from ((2,4),(5000000,128)):((2560000000,128),(512,1))" in out
    assert "    to   ((2,4),(1250000,512)):((2560000000,640000000),(512,1))" in out
    assert "  at most 1,920,000,000 elements (7.68 GB) held at once" in out
    assert "  lower bound: 480,000,000 elements (1.92 GB)" in out
    assert (
        "  all-to-all on mesh1, S(1) -> S(0): receives 480,000,000 elements (1.92 GB), 0.154 s"
        in out
    )  # torch's own
    assert "ours over torch's: received 1, memory 1, time 1" in out


def test_plan_as_json(capsys):
    code, out, _ = run(capsys, f"{MOVE} --json")
    result = json.loads(out)
    assert code == 0 and result["network"] == [{"alpha": 1e-6, "beta": 3.2e-10}] * 2
    ours, torchs = result["ours"], result["torch"]
    assert (
        [step["kind"] for step in ours["steps"]]
        == [step["kind"] for step in torchs["steps"]]
        == ["all-to-all"]
    )
    assert (
        ours["received_elements"]
        == ours["lower_bound"]
        == torchs["received_elements"]
        == 480_000_000
    )
    assert ours["received_bytes"] == torchs["received_bytes"] == 1_920_000_000
    assert ours["seconds"] == pytest.approx(0.154, abs=5e-4)
    assert torchs["seconds"] == pytest.approx(ours["seconds"])
    assert result["ours_over_torch"]["received_elements"] == 1


def test_plan_beside_what_torch_does(capsys):
    """torch gathers what ours moves in one step; an element need not have four bytes, and mesh dims
    have their names and links.
    """
    result = planned(
        capsys,
        "64,64",
        "dp=2,tp=4",
        "S(0),S(1)",
        "S(1),S(0)",
        "--network infiniband,nvlink --itemsize 2",
    )
    assert (
        result["mesh"] == {"dp": 2, "tp": 4}
        and result["network"][0]["beta"] > result["network"][1]["beta"]
    )
    ours, torchs = result["ours"], result["torch"]
    assert {name for step in ours["steps"] for name in step["mesh_dims"]} == {"dp", "tp"}
    assert [(step["kind"], step["mesh_dims"]) for step in torchs["steps"]] == [
        ("all-gather", ["tp"]),
        ("all-to-all", ["dp"]),
        ("local slice", ["tp"]),
    ]
    assert (
        torchs["received_elements"] == 3 * 512 + 4 * 256
        and torchs["received_bytes"] == 2 * torchs["received_elements"]
    )
    assert (
        result["ours_over_torch"]["received_elements"]
        == ours["received_elements"] / torchs["received_elements"]
        < 0.3
    )
    _, out, _ = run(capsys, "plan --shape 64,64 --mesh dp=2,tp=4 --from S(0),S(1) --to S(1),S(0)")
    assert (
        "on mesh (dp=2, tp=4)" in out
        and "all-gather on tp, S(1) -> R: receives 1,536 elements (6.144 kB)" in out
    )
    assert "local slice on tp, R -> S(0): nothing to receive" in out


def test_named_links_have_so_many_bytes_a_second(capsys):
    """Elements twice as large take twice as long, but for the latency."""
    two, four = (
        planned(
            capsys, "4096,4096", "4", "S(0)", "S(1)", f"--network infiniband --itemsize {size}"
        )["ours"]["seconds"]
        for size in ("2", "4")
    )
    assert four - 2e-5 == pytest.approx(2 * (two - 2e-5))


def test_plan_of_pending_reductions_and_uneven_shards(capsys):
    result = planned(capsys, "64,64", "dp=2,tp=4", "P(sum),S(0)", "S(0),R")
    assert (
        result["ours"]["lower_bound"] is None
        and result["ours"]["steps"][0]["kind"] == "reduce-scatter (sum)"
    )
    assert [step["kind"] for step in result["torch"]["steps"]] == [
        "all-gather",
        "reduce-scatter (sum)",
    ]
    result = planned(capsys, "7,5", "4", "S(0)", "S(1)")
    assert (
        result["ours"]["received_elements"] == result["ours"]["lower_bound"] == 10
        and result["ours"]["steps"][0]["source_layout"] is None
    )
    assert result["torch"]["received_elements"] == 12  # with padding
    _, out, _ = run(capsys, "plan --shape 7,5 --mesh 2,2 --from _S(0,3),S(0) --to R,R")
    assert "beware: torch may misread" in out


def test_plan_where_nothing_moves(capsys):
    _, out, _ = run(capsys, "plan --shape 8,8 --mesh 2 --from S(0) --to S(0)")
    assert out.count("nothing to do: 0 collectives, 0 elements (0 B) received, 0 s") == 2
    assert "ours over torch's: received -, memory 1, time -" in out


def test_plan_where_torch_raises(capsys, monkeypatch):
    from cute_sharding.dtensor.replaced import redistribution_hook

    def raises(source, target):
        raise AssertionError("no path\nand more")

    monkeypatch.setattr(redistribution_hook, "stock_transforms", raises)
    _, out, _ = run(capsys, MOVE)
    assert out.endswith("by torch itself:\n  raises: no path\n")
    result = planned(capsys, "8,8", "2", "S(0)", "S(1)")
    assert (
        result["torch"]["error"] == "no path"
        and result["torch"]["steps"] is None
        and result["ours_over_torch"]["seconds"] is None
    )


def test_plan_within_a_memory_limit(capsys):
    at_once = planned(capsys, "64,64", "4", "S(0)", "S(1)")["ours"]
    within = planned(
        capsys, "64,64", "4", "S(0)", "S(1)", f"--memory-limit {at_once['peak_elements'] - 1}"
    )["ours"]
    assert (
        within["peak_elements"] < at_once["peak_elements"]
        and within["collectives"] > at_once["collectives"]
    )
    code, out, err = run(capsys, f"{MOVE} --memory-limit 1000")
    assert code == 2 and out == "" and err.count("\n") == 1 and "the smallest possible limit" in err


@pytest.mark.parametrize(
    "command, message",
    [
        ("", "give a command"),
        ("explain --shape 4", "--mesh, --placements"),
        ("explain --shape 4,x --mesh 2 --placements R --view 4", "--shape '4,x'"),
        ("explain --shape 4 --mesh tp:2 --placements R --view 4", "--mesh 'tp:2'"),
        ("explain --shape 4 --mesh 0 --placements R --view 4", "--mesh '0'"),
        ("explain --shape 4 --mesh 2 --placements Q(0) --view 4", "'Q(0)'"),
        ("explain --shape 4 --mesh 2 --placements S(1) --view 4", "for tensor dim 1"),
        ("explain --shape 4 --mesh 2 --placements R,R --view 4", "[R, R] has 2: "),
        ("explain --shape 4 --mesh 2 --placements R --roll 0", "--roll '0': write DIM,SHIFT"),
        ("explain --shape 4 --mesh 2 --placements R --flip 3", "dim 3 is out of range"),
        (
            "explain --shape 4 --mesh 2 --placements R --flip 0 --view 4",
            "give exactly one of the options --flip, --view",
        ),
        ("explain --shape 4 --mesh 2 --placements R --unfold 0,9,1", "does not fit a tensor"),
        ("explain --shape 4 --mesh 2 --placements R --view 5", "5 elements"),
        ("explain --shape 4 --mesh 2 --placements R --permute 1", "out of range"),
        ("explain --shape 4 --mesh 2 --placements R", "--view, --permute"),
        ("explain --shape 4 --mesh 2 --placements R --view 4 --json --colour", "--colour"),
        ("explain --shape -4 --mesh 2 --placements R --view 4", "shape"),
        ("explain --shape 4 --mesh tp=2,tp=2 --placements R,R --view 4", "a different name"),
        ("plan --shape 4 --mesh 2 --from R", "--to"),
        ("plan --shape 4 --mesh 2 --from R,R --to R", "--from: the mesh (2,) has 1 dim, but"),
        ("plan --shape 4 --mesh 2 --from R --to S(1)", "--to: placement S(1) is for tensor dim 1"),
        ("plan --shape 4 --mesh 2 --from Q --to R", "'Q'"),
        ("plan --shape 4 --mesh 2 --from P(mean) --to R", "the reduction of P(mean) is unknown"),
        ("plan --shape 4 --mesh 2 --from R --to P", "from R to P(sum)"),
        ("plan --shape 4 --mesh 2,2 --from P,P(max) --to R,R", "Mixed Partial"),
        ("plan --shape=-4 --mesh 2 --from R --to R", "negative"),
        ("plan --shape 4 --mesh 2 --from R --to R --network flat:1e-6", "flat:ALPHA,BETA"),
        ("plan --shape 4 --mesh 2 --from R --to R --network flat:1e-6,nan", "flat:ALPHA,BETA"),
        ("plan --shape 4 --mesh 2 --from R --to R --network flat:-1,1", "must be 0 or more"),
        ("plan --shape 4 --mesh 2 --from R --to R --network pigeon", "'pigeon'"),
        ("plan --shape 4 --mesh 2 --from R --to R --network nvlink,nvlink", "2 links"),
        ("plan --shape 4 --mesh 2 --from R --to R --itemsize 0", "--itemsize 0"),
        ("plan --shape 4 --mesh 2 --from R --to R --memory-limit 1GB", "--memory-limit"),
    ],
)
def test_bad_arguments_are_told_in_one_line(capsys, command, message):
    code, out, err = run(capsys, command)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and message in err


def test_explain_says_what_it_assumes_of_sizes_with_names(capsys):
    code, out, _ = run(
        capsys, "explain --shape b=8,s=6,16 --mesh 4 --placements S(0) --view b*s,16"
    )
    assert code == 0
    assert "for all sizes: (b, s, 16) -> (b*s, 16): [S(0)]" in out
    assert "assumed: b % 4 == 0" in out
    code, out, _ = run(
        capsys, "explain --shape b=2,s=9,16 --mesh 4 --placements S(1) --view b*s,16 --json"
    )
    assert code == 0 and json.loads(out)["for_all"] == {
        "shape": ["b", "s", "16"],
        "target_shape": ["b*s", "16"],
        "output": ["_S(0,b)"],
        "assumed": [],
    }
    code, _, err = run(capsys, "explain --shape b=8,16 --mesh 4 --placements S(0) --view b*t")
    assert code == 2 and "no number for t" in err
    code, _, err = run(capsys, "explain --shape b=0,16 --mesh 4 --placements S(0) --view b*16")
    assert code == 2 and "write the size 0 without a name" in err

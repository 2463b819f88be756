"""python -m cute_sharding: what is printed, and what bad arguments are told."""

import json

import pytest

from cute_sharding.cli import main

ISSUE = ["explain", "--shape", "4,16,32", "--mesh", "dp=2,tp=4", "--placements", "S(0),S(2)", "--view", "4,16,8,4"]


def run(capsys, *argv):
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_explain_as_text(capsys):
    code, out, err = run(capsys, *ISSUE)
    assert (code, err) == (0, "")
    assert "before: shape (4, 16, 32), placements [S(0), S(2)]" in out
    assert "((2,4),(2,16,8)):((1024,8),(512,32,1))" in out
    assert "4:8     tp     dim 2" in out  # which mode belongs to which mesh dim
    assert "after: shape (4, 16, 8, 4), placements [S(0), S(2)]" in out
    assert "dp=1, tp=3: local (2, 16, 2, 4)  [2:4] x [0:16] x [6:8] x [0:4]" in out
    assert "free: no communication" in out


def test_explain_as_json(capsys):
    code, out, _ = run(capsys, *ISSUE, "--json")
    result = json.loads(out)
    assert code == 0 and result["free"] and result["how"] == "algebra"
    assert result["output"]["placements"] == ["S(0)", "S(2)"]
    assert result["output"]["devices"][7] == {"coordinate": {"dp": 1, "tp": 3}, "local_shape": [2, 16, 2, 4], "rows": [[[2, 4]], [[0, 16]], [[6, 8]], [[0, 4]]]}


def test_explain_what_is_not_free(capsys):
    code, out, _ = run(capsys, "explain", "--shape", "4,16,32", "--mesh", "4", "--placements", "S(2)", "--view", "4,16,2,16")
    assert code == 0
    assert "not free: what S(2) gives to the devices of mesh dim mesh0" in out
    assert "[S(0)]  then the output is [S(0)]; a device receives up to 384 elements" in out


def test_explain_uneven_shards_and_other_views(capsys):
    _, out, _ = run(capsys, "explain", "--shape", "7,4", "--mesh", "3", "--placements", "S(1)", "--view", "28")
    assert "placements [_S(0,7)]" in out and "traced" in out and "is no layout" in out
    _, out, _ = run(capsys, "explain", "--shape", "2,6", "--mesh", "tp=2", "--placements", "S(1)", "--permute", "1,0", "--json")
    assert json.loads(out)["output"]["placements"] == ["S(0)"]
    _, out, _ = run(capsys, "explain", "--shape", "6", "--mesh", "tp=2", "--placements", "S(0)", "--repeat", "3", "--json")
    assert json.loads(out)["output"]["placements"] == ["_S(0,3)"]
    _, out, _ = run(capsys, "explain", "--shape", "1,6", "--mesh", "tp=2", "--placements", "P(sum)", "--expand", "5,6", "--json")
    assert json.loads(out)["output"]["placements"] == ["P(sum)"]


@pytest.mark.parametrize("shape, placements, view", [("", "R", ""), ("0,4", "S(1)", "4,0"), ("1", "S(0)", "1,1"), ("", "R", "1")])
def test_explain_scalars_and_empty_tensors(capsys, shape, placements, view):
    code, out, err = run(capsys, "explain", "--shape", shape, "--mesh", "2", "--placements", placements, f"--view={view}")
    assert (code, err) == (0, ""), err
    assert "free" in out


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "give a command"),
        (["explain", "--shape", "4"], "--mesh, --placements"),
        (["explain", "--shape", "4,x", "--mesh", "2", "--placements", "R", "--view", "4"], "--shape '4,x'"),
        (["explain", "--shape", "4", "--mesh", "tp:2", "--placements", "R", "--view", "4"], "--mesh 'tp:2'"),
        (["explain", "--shape", "4", "--mesh", "0", "--placements", "R", "--view", "4"], "--mesh '0'"),
        (["explain", "--shape", "4", "--mesh", "2", "--placements", "Q(0)", "--view", "4"], "'Q(0)'"),
        (["explain", "--shape", "4", "--mesh", "2", "--placements", "S(1)", "--view", "4"], "names dim 1"),
        (["explain", "--shape", "4", "--mesh", "2", "--placements", "R,R", "--view", "4"], "2 placements"),
        (["explain", "--shape", "4", "--mesh", "2", "--placements", "R", "--view", "5"], "5 elements"),
        (["explain", "--shape", "4", "--mesh", "2", "--placements", "R", "--permute", "1"], "out of range"),
        (["explain", "--shape", "4", "--mesh", "2", "--placements", "R"], "--view, --permute"),
        (["explain", "--shape", "4", "--mesh", "2", "--placements", "R", "--view", "4", "--json", "--colour"], "--colour"),
        (["explain", "--shape", "-4", "--mesh", "2", "--placements", "R", "--view", "4"], "shape"),
    ],
)
def test_bad_arguments_are_told_in_one_line(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and message in err

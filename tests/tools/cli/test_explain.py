"""``cute_sharding.explain``: the command's answer as a value."""

import json
import shlex

import pytest

import cute_sharding
from cute_sharding import explain
from cute_sharding.sharding import Shard, Sharding
from cute_sharding.tools.cli import main

CASES = [
    ("--view 4,8,2,32", {"view": (4, 8, 2, 32)}),
    ("--view=-1,32", {"view": (-1, 32)}),
    ("--permute 1,0,2", {"permute": [1, 0, 2]}),
    ("--slice 1,1", {"slice": (1, 1)}),
    ("--slice 1,,8", {"slice": (1, None, 8)}),
    ("--flip 1", {"flip": 1}),
    ("--cat 1,2", {"cat": (1, 2)}),
]


@pytest.mark.parametrize("option, op", CASES, ids=[option for option, _ in CASES])
def test_it_is_what_the_command_says(capsys, option, op):
    command = f"explain --shape 4,16,32 --mesh dp=2,tp=2 --placements S(0),S(1) {option}"
    assert main([*shlex.split(command.replace("S(0),S(1)", "'S(0),S(1)'")), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = explain(shape=(4, 16, 32), mesh={"dp": 2, "tp": 2}, placements="S(0), S(1)", **op)
    assert json.loads(json.dumps(found.to_dict())) == said
    assert found.is_free == said["free"] and isinstance(str(found), str)


def test_of_a_sharding_and_where_a_view_is_not_free():
    rows = Sharding((6, 4), (4,), (Shard(0),))
    found = explain(rows, view=(24,))
    assert not found.is_free and found.output is None and found.data["redistribute_to"]
    assert explain(rows, permute=(1, 0)).output == ("S(1)",)
    assert "not free" in str(found)


def test_what_is_wrong_is_said():
    with pytest.raises(TypeError, match="takes exactly one op, such as view"):
        explain(shape=(4,), mesh=(2,), placements="S(0)")
    with pytest.raises(TypeError, match="takes exactly one op, not turn: use one of view"):
        explain(shape=(4,), mesh=(2,), placements="S(0)", turn=1)
    with pytest.raises(TypeError, match="needs a DTensor, a Sharding, or all of shape="):
        explain(shape=(4,), view=(2, 2))
    with pytest.raises(TypeError, match="takes a DTensor or a Sharding, not a list"):
        explain([4], view=(2, 2))
    with pytest.raises(ValueError, match="write DIM,START,STOP,STEP"):
        explain(shape=(4,), mesh=(2,), placements="S(0)", slice=0)


def test_the_former_name_of_resetting_counts_warns():
    with pytest.warns(DeprecationWarning, match=r"call cute_sharding.stats\(reset=True\)"):
        cute_sharding.reset_stats()

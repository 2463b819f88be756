"""``estimate``: its options, and what bad ones are told."""

import json
import shlex
from pathlib import Path

import pytest

from cute_sharding.tools.cli import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "language_model.py"


def run(capsys, command):
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train", "'train' is not the name of a function: write module:function or"),
        ("train:f --mesh dp:2", "--mesh 'dp:2': write name=size"),
        ("train:f --settings stock", "--settings stock: give one or more of PyTorch, views"),
        ("train:f --settings views --details all", "--details all: give one or more of views"),
        ("train:f --network pigeon", "unknown links"),
        ("train:f --rank 9", "rank=9: the mesh (2, 4) has the ranks 0 to 7"),
        ("train:f --layers 0", "layers=0: a model has at least one layer"),
        ("train:f --device tpu", "invalid choice: 'tpu'"),
    ],
)
def test_bad_arguments(capsys, command, said):
    mesh = "" if "--mesh" in command else " --mesh dp=2,tp=4"
    code, out, err = run(capsys, f"estimate {command}{mesh}")
    assert (code, out) == (2, "") and said in err


@pytest.mark.costly
def test_the_example(capsys):
    code, out, err = run(
        capsys, f"estimate {EXAMPLE}:small --mesh dp=2,tp=4 --settings PyTorch,all --json"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    stock, ours = (found["settings"][name] for name in ("PyTorch", "all"))
    assert stock["failure"] is ours["failure"] is None
    assert 0 < ours["busiest_bytes"] < stock["busiest_bytes"]
    assert ours["memory"]["peak"] < stock["memory"]["peak"]
    assert {cause["op"] for cause in ours["causes"]} > {"_log_softmax"}
    assert "ops of DTensors that communicate, all" in found["text"]


@pytest.mark.costly
def test_details_of_a_column(capsys):
    code, out, err = run(
        capsys, f"estimate {EXAMPLE}:small --mesh dp=2,tp=4 --settings PyTorch --details PyTorch"
    )
    assert (code, err) == (0, "")
    assert "ops of DTensors that communicate, PyTorch" in out

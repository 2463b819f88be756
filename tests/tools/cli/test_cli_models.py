"""``plan --model``: what it says of the models in examples/, and of files that are none."""

import json
import shlex
from math import prod
from pathlib import Path

import pytest

from cute_sharding.models.shapes import shapes_of
from cute_sharding.tools.cli import main

MODELS = Path(__file__).parents[3] / "examples" / "models"
PLACED = "*norm*=S(0),R; *wo*=S(0),S(1); *w2.*=S(0),S(1); *.w2=S(1),S(2); *=S(0),S(0)"


def sizes(name):
    return shapes_of(json.loads((MODELS / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    "name, tensors, billions",
    [("dense_8b", 291, 8.03), ("dense_405b", 1137, 405.9), ("experts_8x7b", 323, 46.7)],
)
def test_the_models_have_the_sizes_that_they_say(name, tensors, billions):
    found = sizes(name)
    count = sum(prod(shape) for shape, _ in found.values())
    assert len(found) == tensors and count / 1e9 == pytest.approx(billions, rel=2e-3)


def plan(capsys, *more, model="dense_8b", placed=PLACED):
    said = f"plan --mesh dp=4,tp=2 --from '{placed}' --to '{placed}' {' '.join(more)}"
    code = main([*shlex.split(said), "--model", str(MODELS / f"{model}.json")])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("model", ["dense_8b", "experts_8x7b"])
def test_a_plan_as_text_and_as_data(capsys, model):
    code, out, _ = plan(capsys, "--to-mesh", "dp=2,tp=2@8-11", "--json", model=model)
    found = json.loads(out)
    covered = found["coverage"]
    assert code == 0 and covered["needed"] == covered["kept"] + covered["received"]
    assert covered["kept"] == 0 and found["ranks"] == 12
    assert found["received_bytes"] == found["lower_bound"]
    assert sum(len(each["tensors"]) for each in found["buckets"]) == len(sizes(model))
    code, out, _ = plan(capsys, "--to-mesh", "dp=2,tp=2@8-11", model=model)
    assert (
        code == 0
        and f"{len(sizes(model))} tensors of " in out
        and "-> mesh (2, 2) of ranks 8 to 11" in out
    )


def test_a_limit_is_of_bytes(capsys):
    _, out, _ = plan(capsys, "--to-mesh", "dp=2,tp=4", "--json")
    most = json.loads(out)["peak_bytes"]
    code, out, _ = plan(
        capsys, "--to-mesh", "dp=2,tp=4", "--json", f"--memory-limit={most * 9 // 10}"
    )
    assert code == 0 and json.loads(out)["peak_bytes"] <= most * 9 // 10
    code, _, err = plan(capsys, "--to-mesh", "dp=2,tp=4", "--memory-limit=1")
    assert code == 2 and "a device needs at least" in err


def test_what_is_refused(capsys, tmp_path):
    assert "leave out --shape and --groups" in plan(capsys, "--shape", "4")[2]
    assert "matches tok_embeddings.weight: separate" in plan(capsys, placed="*norm*=R,R")[2]
    assert "--from of norm.weight: " in plan(capsys, placed="norm*=S(0),S(3); *=R,R")[2]
    file = tmp_path / "model.json"
    command = ["plan", "--model", str(file), "--mesh", "2", "--from", "R", "--to", "R"]
    for text, said in (
        ("{", "cannot be read as JSON"),
        ("[]", "write an object with dtype, sizes and tensors"),
        ('{"dtype": "half", "tensors": {}}', "give the name of a PyTorch dtype"),
        ('{"tensors": {}}', "a model file needs dtype"),
        ('{"dtype": "int8", "tensors": {"a": ["n"]}}', "the size 'n' of a must be an integer"),
        (
            '{"dtype": "int8", "sizes": {"n": "4"}, "tensors": {"a": ["n"]}}',
            "the size 'n' of a must be an integer",
        ),
    ):
        file.write_text(text)
        assert main(command) == 2 and said in capsys.readouterr().err


def test_a_picture_of_it(capsys, tmp_path):
    """Of the bytes from rank to rank, which come to what the busiest receives."""
    file = tmp_path / "plan.txt"
    code, out, _ = plan(capsys, "--to-mesh", "dp=2,tp=2@8-11", "--output", str(file))
    assert code == 0 and out.strip().splitlines()[-1] == f"wrote {file}"
    said = file.read_text()
    assert "291 tensors of" in said and "down: sender" in said and "bytes in all" in said
    code, _, err = plan(capsys, "--to-mesh", "dp=2,tp=2@8-11", "--output", str(tmp_path / "x.pdf"))
    assert code == 2 and "ends in '.pdf'" in err

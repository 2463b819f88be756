"""``python -m cute_sharding draw``."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cute_sharding import draw
from cute_sharding.sharding import Shard, Sharding
from cute_sharding.tools.cli import main

OF = "draw --shape 4,6 --mesh tp=2 --placements S(1)"


def run(capsys, command):
    code = main(shlex.split(command))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "options, drawn",
    [
        ("", {}),
        ("--view 24", {"view": (24,)}),
        ("--to S(0)", {"to": "S(0)"}),
    ],
)
def test_what_is_drawn_on_the_terminal(capsys, options, drawn):
    picture = draw(Sharding((4, 6), (2,), (Shard(1),)), names=("tp",), **drawn)
    assert run(capsys, f"{OF} {options} --width 100") == (0, f"{picture}\n", "")
    assert run(capsys, f"{OF} {options} --width 30") == (0, f"{picture.text(30)}\n", "")


@pytest.mark.parametrize("view, title", [("permute 1,0", "after: (6, 4) as [S(0)]")])
def test_other_views(capsys, view, title):
    assert title in run(capsys, f"{OF} --{view}")[1]
    assert "[_S(1,2)]" in run(capsys, f"{OF} --repeat 1,2")[1]
    _, out, _ = run(capsys, "draw --shape 1,6 --mesh 2 --placements P --expand 2,6")
    assert "after: (2, 6) as [P(sum)]" in out and "0+1" in out


def test_layouts(capsys):
    _, out, _ = run(capsys, "draw --layout (2,3):(1,2)")
    assert out.splitlines()[-2:] == ["0  0  2  4", "1  1  3  5"]
    code, out, _ = run(capsys, "draw --layout ((2,),(4,3)):((3,),(6,1)) --shape 4,6")
    assert code == 0 and "as [S(1)]" in out


@pytest.mark.parametrize("suffix", ["svg", "png", "txt"])
def test_files(capsys, tmp_path, suffix):
    path = tmp_path / f"picture.{suffix}"
    assert run(capsys, f"{OF} --output {path}") == (0, f"wrote {path}\n", "")
    assert path.stat().st_size > 200


def test_as_json(capsys):
    code, out, _ = run(capsys, f"{OF} --view 24 --json")
    result = json.loads(out)
    assert code == 0 and result["saved"] is None
    before, after = result["picture"]["sections"]
    assert after["table"]["marked"] == [0, 1] and after["title"] == "after: (24,) as [_S(0,4)]"
    assert before["panels"][0]["cells"][0][5] == {"label": "1", "device": 1, "share": None}


@pytest.mark.parametrize(
    "command, message",
    [
        (
            "draw",
            "or only --layout: also give --shape, --mesh, --placements",
        ),
        ("draw --shape 4,6 --mesh 2", "also give --placements"),
        (f"{OF} --view 24 --to R", "a picture shows only one change"),
        (f"{OF} --layout 4:1", "with --layout, leave out"),
        (f"{OF} --width 5", "20 columns or more"),
        (f"{OF} --output picture.gif", "ends in '.gif'"),
        (f"{OF} --output /nowhere/picture.txt", "--output /nowhere/picture.txt"),
        (f"{OF} --view 5", "5"),
        (f"{OF} --to S(7)", "--to"),
        ("draw --layout 4", "cannot read '4' as a layout"),
    ],
)
def test_bad_arguments_are_told_in_one_line(capsys, command, message):
    code, out, err = run(capsys, command)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("cute_sharding: ") and err.count("\n") == 1


def test_the_command_needs_no_torch_and_names_what_is_missing():
    code = f"""
import sys
from cute_sharding.tools.cli import main
assert main({OF.split()}) == 0 and "torch" not in sys.modules
sys.modules.update(dict.fromkeys([m for m in sys.modules if m.split(".")[0] == "rich"]))
sys.exit(main({OF.split()}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert 'pip install "cute-sharding[draw]"' in done.stderr

"""The generated sources as PyTorch's linter sees them, with the settings of its pyproject.toml."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parent.parent.parent
sys.path.insert(0, str(REPOSITORY))  # `upstream` is no part of the package

from upstream.patches import BUGS, STACK  # noqa: E402
from upstream.stack import write  # noqa: E402

SETTINGS = REPOSITORY / "upstream" / "pytorch_ruff.toml"


def found_in(tree, commit):
    """What ruff says of the files of a commit, and how often."""
    subprocess.run(["git", "checkout", "--quiet", commit], cwd=tree, check=True)
    options = ["--no-cache", "--output-format=json", "--config", SETTINGS]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options, "."],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    said = json.loads(done.stdout)
    return Counter((one["filename"], one["code"], one["message"]) for one in said)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("patches", [STACK, *([bug] for bug in BUGS)], ids=lambda p: p[-1].name)
def test_ruff_finds_nothing_that_it_does_not_find_without(patches, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    write(patches, Path(torch.__file__).parent, tree, tmp_path / "out")
    *made, stock = [found_in(tree, f"main~{k}") for k in range(len(patches) + 1)]
    for found in made:
        assert found - stock == Counter()


def test_ruff_is_given_the_settings(tmp_path):
    """One thing that PyTorch asks for and this project does not."""
    (tmp_path / "a.py").write_text("assert 1\n")
    for arguments, fails in ((["--isolated"], False), (["--config", SETTINGS], True)):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--no-cache", *arguments, "a.py"],
            cwd=tmp_path,
            capture_output=True,
        )
        assert bool(done.returncode) is fails

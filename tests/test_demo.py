"""The demo, where its program fails: the failing worker's own words come first."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import demo
import transformer_block

FAILS = """
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ArithmeticError("of rank one")
    dist.barrier()
main()
"""


def test_it_shows_what_the_readme_says():
    """Its flag, and the ops of the table at the top of the page."""
    page = (Path(__file__).parent.parent / "README.md").read_text()
    names = {pattern.name for pattern in transformer_block.PATTERNS}
    said = re.findall(r"^\| ([^|]+?) \|", page.partition("Try it")[0], re.M)
    ops = {op.replace("`", "") for op in said if "`" in op}
    assert len(ops) == 5 and ops <= names, ops - names
    assert f"with and without `{demo.FLAG}=1`" in " ".join(page.split())


@pytest.mark.processes
@pytest.mark.costly
@pytest.mark.parametrize(
    ("program", "first", "said"),
    [
        (FAILS, "rank 1", "ArithmeticError: of rank one"),
        (
            "import no_such_module",
            "Traceback",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
    ],
    ids=["in the program", "before it"],
)
def test_the_traceback_of_the_worker_that_failed_first(
    program, first, said, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "program.py"
    path.write_text(program)
    monkeypatch.setattr(demo, "PROGRAM", path)
    monkeypatch.setattr(demo, "WORKERS", 2)
    with pytest.raises(SystemExit, match="USE_CUTE_SHARDING=0: exit code 1"):
        demo.run("0")
    printed = capsys.readouterr().out.strip()
    assert printed.startswith(first) and printed.splitlines()[-1] == said

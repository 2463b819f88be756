"""The tutorial as a notebook: what it is made of, and its cells, which run one after the other in
one process, as a reader runs them. Jupyter is not needed.
"""

import doctest
import json
import os
import subprocess
import sys

import pages
import pytest
from processes import search_path

NOTEBOOK = pages.ROOT / "docs/tutorial.ipynb"

# Runs each cell of code in names of one module, and prints what it printed as JSON.
RUN = """
import contextlib, io, json, sys
names, printed = {"__name__": "__main__"}, []
for source in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, "cell", "exec"), names)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def cells_of_code():
    return [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]


def test_a_cell_for_each_program_of_one_process():
    names = {cell["metadata"]["name"] for cell in cells_of_code()}
    programs = pages.programs("docs/tutorial.md")
    assert names == set(programs) - {"tiny_lm.py"} and len(names) == 5
    for cell in cells_of_code():
        assert cell["source"] == programs[cell["metadata"]["name"]].rstrip("\n")


@pytest.mark.costly
def test_cells_run_and_print_what_the_notebook_says():
    cells = cells_of_code()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN],
        input=json.dumps([cell["source"] for cell in cells]),
        env={
            **{k: v for k, v in os.environ.items() if "CUTE" not in k},
            "PYTHONPATH": search_path(pages.ROOT),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    how = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for cell, printed in zip(cells, json.loads(done.stdout), strict=True):
        (output,) = cell["outputs"]
        assert doctest.OutputChecker().check_output(output["text"], printed, how), (
            f"{cell['metadata']['name']} prints:\n{printed}"
        )

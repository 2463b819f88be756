"""The tutorial as a notebook has all programs and commands of the page, which test_docs.py runs.
Jupyter is not needed.
"""

import json
import re

import pages

NOTEBOOK = pages.ROOT / "docs/tutorial.ipynb"


def sources():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell["source"] for cell in cells if cell["cell_type"] == "code"]


def test_a_cell_writes_each_program():
    written = dict(
        source.removeprefix("%%writefile ").split("\n", 1)
        for source in sources()
        if source.startswith("%%writefile ")
    )
    programs = pages.programs("docs/tutorial.md")
    assert len(programs) >= 3 and written == {
        name: text.rstrip("\n") for name, text in programs.items()
    }


def test_a_cell_runs_each_command():
    commands = [command.text for command in pages.commands("docs/tutorial.md")]
    run = [command for command in commands if not command.startswith("pip ")]
    assert len(run) >= 6 and ["!" + command for command in run] == [
        re.sub(r"\\\n\s*", "", source) for source in sources() if source.startswith("!")
    ]


def test_programs_are_written_before_they_run():
    seen = ""
    for source in sources():
        if source.startswith("!"):
            names = [name for name in pages.programs("docs/tutorial.md") if name in source]
            assert all(f"%%writefile {name}\n" in seen for name in names), source
        seen += source + "\n"


def test_the_demo_runs_its_model():
    """examples/train.py is the program of the page, as it stands."""
    program = pages.programs("docs/tutorial.md")["train.py"]
    assert (pages.ROOT / "examples/train.py").read_text() == program

"""What fits on a screen: functions, files and lines are as long as can be read at one sitting."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINES_OF_A_FUNCTION, LINES_OF_A_FILE, COLUMNS = 60, 450, 100
SOURCES = sorted(
    path
    for folder in ("cute_sharding", "benchmarks", "docs", "examples", "tests", "upstream")
    for path in (ROOT / folder).rglob("*.py")
)

# Functions that are longer, by folder and name, and why. None is added without a reason.
LONGER = {
    ("tools", "draw"): "its docstring: what is drawn of each kind of argument",
    ("dtensor", "plan_redistribution"): "its docstring: arguments, result, errors, an example",
    ("dtensor", "reshard"): "its docstring: what a state is, what placements may be, a program",
    (
        "dtensor",
        "load_checkpoint",
    ): "its docstring: what a state and a checkpoint may be, a program",
    ("dtensor", "prepare_groups"): "its docstring: who is to call it, and a program that runs",
}

# Files that are longer, and why.
LONGER_FILES = {
    "cute_sharding/dtensor/replaced/patches.py": "a table: a row for each part of torch, with why",
}


def functions_of(path):
    """(name, how many lines) of each function, nested ones by themselves as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1


def test_functions_fit_on_a_screen():
    long = [
        (path.relative_to(ROOT), name, lines)
        for path in SOURCES
        for name, lines in functions_of(path)
        if lines > LINES_OF_A_FUNCTION
    ]
    unexpected = [found for found in long if (found[0].parts[1], found[1]) not in LONGER]
    assert not unexpected, "split it by naming its parts"


def test_files_can_be_read_in_one_sitting():
    sources = [path for path in SOURCES if str(path.relative_to(ROOT)) not in LONGER_FILES]
    long = [path for path in sources if len(path.read_text().splitlines()) > LINES_OF_A_FILE]
    assert not long, "move a part of it to a file of its own"


def test_lines_are_not_longer_than_the_formatter_makes_them():
    long = [
        f"{path}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert not long

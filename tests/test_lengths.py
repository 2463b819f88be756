"""What fits on a screen: functions and lines. A file is as long as its one idea."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINES_OF_A_FUNCTION, COLUMNS = 60, 100
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
    ("propagation", "assign"): "its docstring: what a search may be told, and three examples",
    ("dtensor", "prepare_groups"): "its docstring: who is to call it, and a program that runs",
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


def test_lines_are_not_longer_than_the_formatter_makes_them():
    long = [
        f"{path}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert not long

"""What the patches take of this project's sources is named by code: prose can be put in other
words.
"""

import ast
import io
import sys
import textwrap
import tokenize
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
sys.path.insert(0, str(REPOSITORY))  # `upstream` is no part of the package

from upstream import extract  # noqa: E402
from upstream.exchange_redistribution import patch as exchange  # noqa: E402
from upstream.symbolic_sizes import patch as symbolic  # noqa: E402
from upstream.view_propagation import patch as views  # noqa: E402


def in_other_words(text):
    """A definition with other docstrings, comments and messages."""
    indent = text[: len(text) - len(text.lstrip())]
    lines = textwrap.dedent(text).splitlines(keepends=True)
    for token in list(tokenize.generate_tokens(io.StringIO("".join(lines)).readline)):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column] + "# other words\n"
    spans = {}
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            spans[node.body[0]] = '"""Other words."""'
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            spans[node] = f'raise {ast.unparse(node.exc.func)}("other words")'
    for node in sorted(spans, key=lambda node: -node.lineno):
        new = " " * node.col_offset + spans[node] + "\n"
        lines[node.lineno - 1 : node.end_lineno] = [new]
    return textwrap.indent("".join(lines).rstrip(), indent)


def code_of(source):
    """All of a module but its prose."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = []
    return ast.unparse(tree)


@pytest.mark.parametrize("patch", [views, symbolic, exchange], ids=lambda patch: patch.MODULE)
def test_other_words_make_the_same_code(patch, monkeypatch):
    expected, definition = patch.module(), extract.definition
    monkeypatch.setattr(extract, "definition", lambda *asked: in_other_words(definition(*asked)))
    reworded = patch.module()
    assert "other words" in reworded and "Other words." in reworded
    assert code_of(reworded) == code_of(expected)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"docs": {"Of.read": "New."}}, "Of.read has no docstring"),
        ({"docs": {"Of.write": "New."}}, "one definition should be .write, and 0 are"),
        ({"statements": {"Of": [("return", "")]}}, "one statement should begin so, and 2 do"),
        ({"statements": {"Of.read": [("x = ", "")]}}, "one statement should begin so, and 0 do"),
        ({"edits": {"Of": [("return 3", "")]}}, "to be replaced once, and found 0 times"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_change_that_does_not_fit_is_refused(change, why):
    source = (
        "class Of:\n    def read(self):\n        if self:\n            return 1\n        return 2"
    )
    with pytest.raises(LookupError, match=why):
        extract.rewritten(source, "Of", extract.Form(**change))


def test_two_definitions_of_one_name_are_refused():
    """The later would stand for both."""
    with pytest.raises(LookupError, match=r"are in this file already: .'deal'"):
        extract.expanded(
            "#: sharding/rows.py: deal\n\n#: sharding/rows.py: dim_of, deal\n", extract.Form()
        )

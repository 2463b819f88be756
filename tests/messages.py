"""Every message that the package raises, warns of or logs as a warning, read from its sources:
``…`` stands for what is filled in.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

FILLED = "…"
# Exceptions that make their own message of what they are given.
OWN_WORDS = {
    "Undecided": "the answer depends on the fact `…`. If the fact is true, put the call inside: "
    "with assuming(…): ..."
}
# Functions that build one of several lines: how it begins, and words of it to look for there.
BUILT = {
    "communicates": (
        "… at … communicates inside a no_communication() block: … among … ranks, because …. "
        "What to do:",
        "communicates inside a no_communication() block",
    ),
    "in_words": (
        "… of … is not possible, because the op writes to a tensor, and what it writes has a shape "
        "that depends on values. Use the op that returns a new tensor. Or call the op on "
        ".full_tensor() on each rank.",
        "what it writes has a shape that depends on values",
    ),
}


class Message(NamedTuple):
    text: str
    where: str

    def beginning(self, length: int = 60) -> str:
        return normal(self.text)[:length].rstrip()


def normal(text: str) -> str:
    """Without what a page adds to a message: code marks, line ends, and names in braces for what is
    filled in; runs of blanks, and of what is filled in, as one.
    """
    text = re.sub(r"\{[a-z ]+\}", FILLED, text.replace("`", ""))
    return re.sub(f"{FILLED}+", FILLED, re.sub(r"\s+", " ", text)).strip()


def messages(package: Path) -> list[Message]:
    """
    Raises:
        LookupError: a raise whose message cannot be read from the source.
    """
    found = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            for child in ast.iter_child_nodes(function):
                child.parent = function
        for node in ast.walk(tree):
            given = _given(node)
            if given is not None:
                where = f"{path.relative_to(package)}:{node.lineno}"
                found += [Message(text, where) for text in _texts(given, node, where)]
    return found


def _given(node: ast.AST) -> ast.expr | None:
    """What a raise or a warning is given as its message; None where the node is neither, or passes
    on an error as it is.
    """
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        is_built = _name(node.exc) in (*OWN_WORDS, *BUILT)
        return node.exc if is_built or not node.exc.args else node.exc.args[0]
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("warn", "warning")
        and ast.unparse(node.func) in ("warnings.warn", "logger.warning")
    ):
        return node.args[0]
    return None


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _texts(value: ast.expr, node: ast.AST, where: str) -> list[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return [re.sub(r"%[sdr]", FILLED, value.value)]
    if isinstance(value, ast.JoinedStr):
        first = value.values[0]
        rest = "".join(v.value if isinstance(v, ast.Constant) else FILLED for v in value.values[1:])
        if isinstance(first, ast.Constant):
            return [first.value + rest]
        return [text + rest for text in _beginnings(first.value, node, where)]
    if isinstance(value, ast.Call) and _name(value) in OWN_WORDS:
        return [OWN_WORDS[_name(value)]]
    if isinstance(value, ast.Call) and _name(value) in BUILT:
        return [BUILT[_name(value)][0]]
    if isinstance(value, ast.Name):
        texts = [text for given in _assigned(value.id, node) for text in _texts(given, node, where)]
        if texts or value.id in _arguments(node):
            return texts  # an argument is said by who calls
    raise LookupError(f"{where}: what does {ast.unparse(value)} say? See BUILT in {__file__}")


def _beginnings(value: ast.expr, node: ast.AST, where: str) -> list[str]:
    """What a value says that a message begins with: what is built in the same function, if it is;
    else it is filled in.
    """
    try:
        return _texts(value, node, where) or [FILLED]
    except LookupError:
        return [FILLED]


def _function(node: ast.AST) -> ast.AST | None:
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.Module)):
        node = getattr(node, "parent", None)
    return node


def _assigned(name: str, node: ast.AST) -> list[ast.expr]:
    return [
        child.value
        for child in ast.walk(_function(node))
        if isinstance(child, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in child.targets)
        and isinstance(child.value, (ast.Constant, ast.JoinedStr))
    ]


def _arguments(node: ast.AST) -> set[str]:
    function = _function(node)
    return {a.arg for a in function.args.args} if isinstance(function, ast.FunctionDef) else set()

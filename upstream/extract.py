"""Definitions of this project, taken out of its sources and put into another form.

They are found by their syntax tree and changed as text, so that comments stay. Two kinds of change
are made: *rewrites*, which say once and for all what a call or a name becomes, and changes of one
definition: another docstring, other statements, other text. A change that no longer fits is an
error: the source has changed, and whoever changed it learns what the patch makes of it.

What is replaced is named by code alone, never by prose: a docstring by whose it is, a statement by
how its code begins, text by code. So comments, docstrings and messages can be put in other words.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent / "cute_sharding"


@dataclass(frozen=True)
class Form:
    """What definitions are turned into.

    Attributes:
        calls: what a call of a function becomes, given its arguments as text.
        names: what a name becomes.
        conditional: which arm of ``a if type(n) is int else b`` is kept, 0 or 1; None for both.
        docs: for each definition, another docstring, without the quotes; of methods, as
            ``Class.name``.
        statements: for each definition, how a statement begins as ``ast.unparse`` writes it, and
            what stands in its place, from the first column on. The comments above it and behind it
            go with it.
        edits: for each definition, what code is replaced by what, as far in as it stands where the
            definition stands in the first column; of methods that are asked for, as
            ``Class.name``.
        leave: attributes and methods of classes that are left out, as ``Class.name``.
    """

    calls: Mapping[str, Callable[..., str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    conditional: int | None = 0
    docs: Mapping[str, str] = field(default_factory=dict)
    statements: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    edits: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    leave: frozenset[str] = frozenset()


def chosen(template: str, **conditions: bool) -> str:
    """A template with those parts between lines ``#if condition``, ``#else`` and ``#endif`` that
    hold, and without the others.
    """
    result, keep = [], True
    for line in template.splitlines(keepends=True):
        if line.startswith("#if "):
            keep = conditions[line[4:].strip()]
        elif line.strip() == "#else":
            keep = not keep
        elif line.strip() == "#endif":
            keep = True
        elif keep:
            result.append(line)
    return "".join(result)


def expanded(template: str, form: Form) -> str:
    """A template with the definitions that its lines ``#: path: name, name`` ask for, in their new
    form; methods, asked for as ``Class.name``, as far in as their line.

    Raises:
        LookupError: two that are asked for at the top level have one name.
    """
    taken: set[str] = set()

    def definitions(line: re.Match[str]) -> str:
        indent, path, names = line[1], line[2], [name.strip() for name in line[3].split(",")]
        again = [name for name in names if not indent and name in taken]
        if again:
            raise LookupError(f"{path}: another module's are in this file already: {again}")
        taken.update(names if not indent else ())
        found = [rewritten(definition(PACKAGE / path, name), name, form) for name in names]
        between = (
            "\n\n\n" if any(re.search("^(def|class) ", text, re.M) for text in found) else "\n"
        )
        return textwrap.indent(between.join(found), indent)

    return re.sub(r"^( *)#: (\S+): (.+)$", definitions, template, flags=re.M)


def definition(path: Path, name: str) -> str:
    """The text of a function, a class or an assignment at a module's top level, or of a method, as
    ``Class.name``; with the comment above it, as far in as it stands.

    Raises:
        LookupError: the module has none of that name.
    """
    source = path.read_text()
    nodes: Sequence[ast.stmt] = [ast.parse(source)]  # type: ignore[list-item]
    for part in name.split("."):
        nodes = [
            child for node in nodes for child in getattr(node, "body", ()) if part in _bound(child)
        ]
    if not nodes:
        raise LookupError(f"{path} defines no {name}")
    node, lines = nodes[0], source.splitlines()
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
    while first and lines[first - 1][node.col_offset :].startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def rewritten(text: str, name: str, form: Form) -> str:
    """A definition in its new form."""
    text = _restated(textwrap.dedent(text), name, form)
    for old, new in form.edits.get(name, ()):
        if text.count(old) != 1:
            raise LookupError(
                f"{name}: to be replaced once, and found {text.count(old)} times: {old}"
            )
        text = text.replace(old, new)
    text = _without_examples(_without(text, form.leave))
    text = re.sub(r"  # type: ignore\[.*?\]", "", text)
    text = re.sub(r":(?:func|class|meth|mod):`~?(?:[\w.]*\.)?(\w+)`", r"``\1``", text)
    while (change := _next_change(text, form)) is not None:
        (start, stop), new = change
        text = text[:start] + new + text[stop:]
    return text


def _restated(text: str, name: str, form: Form) -> str:
    """A definition with its other docstrings and statements, and those of its methods.

    Raises:
        LookupError: it has no such method, docstring or statement, or several.
    """

    def of_it(path: str) -> bool:
        return path == name or path.startswith(f"{name}.")

    for path, doc in form.docs.items():
        if of_it(path):
            node = _inside(text, path.removeprefix(name))
            if ast.get_docstring(node) is None:
                raise LookupError(f"{path} has no docstring")
            lines = doc.strip().splitlines()
            new = "\n".join([f'"""{lines[0]}', *lines[1:]]) + ("\n" if lines[1:] else "") + '"""'
            text = _replaced(text, node.body[0], new)
    for path, changes in form.statements.items():
        for begins, new in changes if of_it(path) else ():
            found = [
                node
                for node in ast.walk(_inside(text, path.removeprefix(name)))
                if isinstance(node, ast.stmt) and ast.unparse(node).startswith(begins)
            ]
            if len(found) != 1:
                raise LookupError(
                    f"{path}: one statement should begin so, and {len(found)} do: {begins}"
                )
            text = _replaced(text, found[0], new)
    return text


def _inside(text: str, path: str) -> ast.FunctionDef | ast.ClassDef:
    """The definition that ``text`` is, or one of its methods, as ``.name``."""
    nodes: list[Any] = ast.parse(text).body
    for part in filter(None, path.split(".")):
        nodes = [child for node in nodes for child in node.body if part in _bound(child)]
    if len(nodes) != 1:
        raise LookupError(f"one definition should be {path}, and {len(nodes)} are:\n{text}")
    return nodes[0]


def _replaced(text: str, node: ast.stmt, new: str) -> str:
    """The text with ``new`` for a statement, as far in, and for the comments above it."""
    lines, indent = text.splitlines(), " " * node.col_offset
    first = node.lineno - 1
    while first and lines[first - 1].startswith(f"{indent}#"):
        first -= 1
    lines[first : node.end_lineno] = textwrap.indent(new, indent).splitlines()
    return "\n".join(lines)


def _without(text: str, leave: frozenset[str]) -> str:
    lines = text.splitlines()
    for top in ast.parse(text).body:
        for node in reversed(getattr(top, "body", ())):
            names = _bound(node)
            if any(f"{getattr(top, 'name', '')}.{name}" in leave for name in names):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                del lines[first - 1 : node.end_lineno]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _without_examples(text: str) -> str:
    """Docstrings up to their first example."""
    return re.sub(r"\n*[ ]*>>> (?:.|\n)*?(\n?[ ]*)\"\"\"", r'\1"""', text)


def _next_change(text: str, form: Form) -> tuple[tuple[int, int], str] | None:
    """The last innermost place of ``text`` that the form says something about, and what it says."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def source(node: ast.expr) -> str:
        return text[slice(*span(node))]

    def argument(node: ast.expr) -> str:
        simple = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.Starred)
        return source(node) if isinstance(node, simple) else f"({source(node)})"

    found = []
    bound_tightly = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, (ast.BinOp, ast.Compare, ast.Attribute, ast.Subscript))
        for child in ast.iter_child_nodes(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in form.calls:
                form_of = form.calls[node.func.id]
                new = form_of(*map(argument if form_of.__name__ == "format" else source, node.args))
                found.append((span(node), f"({new})" if id(node) in bound_tightly else new))
        elif isinstance(node, ast.Name) and node.id in form.names:
            found.append((span(node), form.names[node.id]))
        elif form.conditional is None:
            continue
        elif isinstance(node, ast.IfExp) and re.fullmatch(r"type\(\w+\) is int", source(node.test)):
            start, stop = span(node)
            if re.search(r"[^\w]\($", text[:start]) and text[stop : stop + 1] == ")":
                start, stop = start - 1, stop + 1  # parentheses that held its two arms together
            found.append(((start, stop), source((node.body, node.orelse)[form.conditional])))
    # Shortest first: what lies within another is changed before it.
    return min(
        (change for change in found if text[slice(*change[0])] != change[1]),
        key=lambda change: change[0][1] - change[0][0],
        default=None,
    )

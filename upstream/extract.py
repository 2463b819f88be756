"""Definitions of this project, taken out of its sources and put into another form.

They are found by their syntax tree and changed as text, so that comments stay. Two kinds of change
are made: *rewrites*, which say once and for all what a call or a name becomes, and *edits*, of one
definition, which quote what they replace. An edit that no longer fits is an error: the source has
changed, and whoever changed it learns what the patch makes of it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "cute_sharding"


@dataclass(frozen=True)
class Form:
    """What definitions are turned into.

    Attributes:
        calls: what a call of a function becomes, given its arguments as text.
        names: what a name becomes.
        conditional: which arm of ``a if type(n) is int else b`` is kept, 0 or 1; None for both.
        edits: for each definition, what is replaced by what; of methods that are asked for, as
            ``Class.name``.
        leave: attributes and methods of classes that are left out, as ``Class.name``.
    """

    calls: Mapping[str, Callable[..., str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    conditional: int | None = 0
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
    """

    def definitions(line: re.Match[str]) -> str:
        indent, path, names = line[1], line[2], [name.strip() for name in line[3].split(",")]
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
    for old, new in form.edits.get(name, ()):
        if text.count(old) != 1:
            raise LookupError(
                f"{name}: to be replaced once, and found {text.count(old)} times: {old}"
            )
        text = text.replace(old, new)
    text = _without_examples(_without(textwrap.dedent(text), form.leave))
    text = re.sub(r"  # type: ignore\[.*?\]", "", text)
    text = re.sub(r":(?:func|class|meth|mod):`~?(?:[\w.]*\.)?(\w+)`", r"``\1``", text)
    while (change := _next_change(text, form)) is not None:
        (start, stop), new = change
        text = text[:start] + new + text[stop:]
    return text


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

"""Comments and docstrings within PyTorch's line length; code is the formatter's."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap

COLUMNS = 88


def formatted(source: str) -> str:
    """A module as PyTorch's formatter leaves it, with no line over :data:`COLUMNS`.

    Raises:
        ValueError: a line stays too long.
    """
    source = _formatter(_docstrings(_messages(_trailing(_formatter(_comments(source))))))
    long = [line for line in source.splitlines() if len(line) > COLUMNS]
    if long:
        raise ValueError(f"lines of more than {COLUMNS} columns: {long}")
    return source


def _formatter(source: str) -> str:
    command = ["format", "--isolated", f"--line-length={COLUMNS}"]
    command += ["--config=format.skip-magic-trailing-comma=true", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"ruff cannot format what was generated: {done.stderr}\n{source}")
    return done.stdout


def filled(text: str, indent: str, prefix: str = "") -> list[str]:
    """Paragraphs, lists and indented blocks of ``text`` (of lines without ``indent``), each filled
    to the line length behind ``indent`` and ``prefix``.
    """
    width = COLUMNS - len(indent) - len(prefix)
    result: list[str] = []
    for block in _blocks(text.splitlines()):
        if not block[0].strip() or any("  " in line.strip() for line in block):
            result += block  # tables and formulas stay as they are
            continue
        lead = re.match(r"\s*(?:[-*] |\d\. )?", block[0])[0]  # type: ignore[index]
        rest = " " * len(lead)
        if not lead.strip() and len(block) > 1:
            rest = re.match(r"\s*", block[1])[0]  # type: ignore[index]
        words = " ".join(line.strip() for line in block)[len(lead.strip()) :].strip()
        result += textwrap.wrap(
            words,
            width,
            initial_indent=lead,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [f"{indent}{prefix}{line}".rstrip() for line in result]


def _blocks(lines: list[str]) -> list[list[str]]:
    """Lines that are filled together: up to an empty line, an item of a list, or less indent."""
    blocks: list[list[str]] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        begins = (
            not blocks
            or not line.strip()
            or not blocks[-1][0].strip()
            or re.match(r"\s*(?:[-*] |\d\. )", line)
            or indent < len(blocks[-1][-1]) - len(blocks[-1][-1].lstrip())
            or (indent == 4 and re.match(r"\s+\w+: ", line))
            or blocks[-1][-1].rstrip().endswith(("Args:", "Returns:", "Raises:", "Attributes:"))
        )
        if begins:
            blocks.append([line])
        else:
            blocks[-1].append(line)
    return blocks


def _comments(source: str) -> str:
    """Lines that are nothing but a comment, one after the other, filled together."""
    result: list[str] = []
    pending: list[str] = []
    indent = ""

    def flush() -> None:
        if any(len(f"{indent}# {line}") > COLUMNS for line in pending):
            result.extend(filled("\n".join(pending), indent, "# "))
        else:
            result.extend(f"{indent}# {line}".rstrip() for line in pending)
        pending.clear()

    for line in source.splitlines():
        comment = re.fullmatch(r"(\s*)#(?: (.*))?", line)
        if comment is None or (pending and comment[1] != indent):
            flush()
        if comment is None:
            result.append(line)
        else:
            indent = comment[1]
            pending.append(comment[2] or "")
    flush()
    return "\n".join(result) + "\n"


def _trailing(source: str) -> str:
    """Comments behind code that do not fit there, above it."""
    result: list[str] = []
    for line in source.splitlines():
        found = re.fullmatch(r"(\s*)(\S.*?)  # (.*)", line)
        if len(line) > COLUMNS and found:
            result += filled(found[3], found[1], "# ")
            result.append(found[1] + found[2])
        else:
            result.append(line)
    return "\n".join(result) + "\n"


def _messages(source: str) -> str:
    """String literals one below the other, of which one is too long, filled together."""
    result: list[str] = []
    pending: list[str] = []
    literal = re.compile(r'(\s*)(f?)"((?:[^"\\]|\\.)*)"(,?)')

    def flush() -> None:
        if any(len(line) > COLUMNS for line in pending):
            found = [literal.fullmatch(line) for line in pending]
            indent, ending = found[0][1], found[-1][4]  # type: ignore[index]
            if any("{" in line[3] and not line[2] for line in found):  # type: ignore[index]
                raise ValueError(f"braces in a plain literal: {pending}")
            text = "".join(line[3] for line in found)  # type: ignore[index]
            new = [""]
            for word in re.findall(r"(?:\{[^{}]*\}|[^ {])+ ?| ", text):
                if len(indent) + len(new[-1] + word) + 4 > COLUMNS:
                    new.append("")
                new[-1] += word
            result.extend(f'{indent}{"f" if "{" in line else ""}"{line}"' for line in new)
            result[-1] += ending
        else:
            result.extend(pending)
        pending.clear()

    for line in source.splitlines():
        found = literal.fullmatch(line)
        if found is None:
            flush()
            result.append(line)
            continue
        if pending and found[1] != re.match(r"\s*", pending[0])[0]:  # type: ignore[index]
            flush()
        pending.append(line)
        if found[4]:
            flush()
    flush()
    return "\n".join(result) + "\n"


def _docstrings(source: str) -> str:
    lines = source.splitlines()
    found = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and ast.get_docstring(node) is not None
    ]
    for node in sorted(found, key=lambda node: -node.lineno):
        first, last = node.lineno - 1, node.end_lineno
        block = lines[first:last]
        if all(len(line) <= COLUMNS for line in block):
            continue
        indent = re.match(r"\s*", block[0])[0]  # type: ignore[index]
        text = textwrap.dedent(indent + block[0].strip()[3:] + "\n" + "\n".join(block[1:]))
        text = text.rstrip().removesuffix('"""').rstrip()
        new = filled('"""' + text, indent)
        closed = len(new) == 1 and len(new[0]) + 3 <= COLUMNS
        if len(new) == 1 and not closed:  # else the formatter closes it on its only line
            new = filled('"""' + text + '"""', indent)
            new[-1] = new[-1].removesuffix('"""')
        lines[first:last] = [new[0] + '"""'] if closed else [*new, f'{indent}"""']
    return "\n".join(lines) + "\n"

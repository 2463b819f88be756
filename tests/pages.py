"""What a page of docs/ or the README has to run: its blocks of code. The standard library alone, as
tests/check_wheel.py runs it in an environment that has nothing else.

- ``pycon`` or ``python`` beginning with ``>>>``: a doctest.
- ``python title="name.py"``: a program, for the commands of the page to run.
- ``diff title="name.py" of="other.py"``: another program of the page, in which this is changed.
- ``console``: lines that begin with ``$`` are commands, and what follows one is what it prints,
  with ``...`` for any text. A command that is followed by nothing has to succeed, no more.
- ``pytb``, ``text``, ``ini`` or no language: nothing to run.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if path.name != "CHANGELOG.md"
)
NOT_RUN = ("", "text", "ini", "pytb")
TIMEOUT = 240  # seconds a command: some start processes, and a machine may be slow

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)


class Block(NamedTuple):
    language: str
    title: str | None
    text: str
    line: int
    of: str | None = None


class Command(NamedTuple):
    text: str
    output: str
    line: int


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for match in _FENCE.finditer(text):
        language, _, rest = match[2].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, match.start()) + 2
        body = textwrap.dedent(match[3])
        of = re.search(r'of="([^"]+)"', rest)
        found.append(Block(language, title and title[1], body, line, of and of[1]))
    return found


def programs(page: str) -> dict[str, str]:
    found = dict[str, str]()
    for block in blocks(page):
        if block.language == "diff":
            found[block.title] = _changed(found[block.of], block.text)
        elif block.title:
            found[block.title] = block.text
    return found


def _changed(program: str, diff: str) -> str:
    """A program with the changes of a diff, whose parts begin with lines of ``@@``."""
    for part in re.split(r"^@@.*\n", diff, flags=re.M):
        before, after = (
            "".join(line[1:] for line in part.splitlines(keepends=True) if line[0] not in skipped)
            for skipped in ("+", "-")
        )
        if program.count(before) != 1:
            raise ValueError(f"the program has {program.count(before)} times:\n{before}")
        program = program.replace(before, after)
    return program


def commands(page: str) -> list[Command]:
    found = []
    for block in blocks(page):
        if block.language != "console":
            continue
        parts = re.split(r"^\$ ", block.text, flags=re.M)
        if parts[0].strip():
            raise ValueError(f"{page}:{block.line}: a console begins with a command, $ and a blank")
        line = block.line
        for part in parts[1:]:
            command, output = re.match(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", part, re.S).groups()
            found.append(Command(re.sub(r"\\\n\s*", "", command), output, line))
            line += part.count("\n")
    return found


# What gloo says where a process that is done ends before its threads do. On a busy machine that is
# one run in thirty of torch alone.
ABORTED_AT_EXIT = "terminate called without an active exception"


@cache
def _ran(
    command: str, files: tuple[tuple[str, str], ...], environment: tuple[tuple[str, str], ...]
) -> tuple[int, str, str]:
    for _ in range(3):
        code, out, err = _ran_once(command, files, environment)
        if not (code and ABORTED_AT_EXIT in err):
            break
    return code, out, err


def _ran_once(
    command: str, files: tuple[tuple[str, str], ...], environment: tuple[tuple[str, str], ...]
) -> tuple[int, str, str]:
    with TemporaryDirectory() as folder:
        for name, text in files:
            Path(folder, name).write_text(text)
        Path(folder, "examples").symlink_to(ROOT / "examples")  # as in a clone
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    return done.returncode, done.stdout, done.stderr


def _named(programs: Mapping[str, str], text: str) -> dict[str, str]:
    """The programs that a text names, and those that these import."""
    found = {
        name: program
        for name, program in programs.items()
        if name in text or re.search(rf"^(import|from) {name.removesuffix('.py')}\b", text, re.M)
    }
    rest = {name: program for name, program in programs.items() if name not in found}
    for program in found.values() if rest else ():
        found = {**found, **_named(rest, program)}
    return found


def complaint(command: Command, page: str, environment: Mapping[str, str] = os.environ) -> str:
    """Runs the command beside the programs of its page: what is wrong with what it did, or nothing.
    A command that stands on two pages with the same programs runs once.
    """
    named = _named(programs(page), command.text)
    code, out, err = _ran(
        command.text, tuple(sorted(named.items())), tuple(sorted(environment.items()))
    )
    said = f"{page}:{command.line}: $ {command.text}\n{out}{err[-3000:]}"
    if code:
        return f"{said}\nexit code {code}"
    if command.output.strip() and not doctest.OutputChecker().check_output(
        command.output.strip() + "\n",
        out.strip() + "\n",
        doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    ):
        return f"{said}\nis not what the page says:\n{command.output}"
    return ""

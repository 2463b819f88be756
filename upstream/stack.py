"""A stack of patches, each on top of the one before, as ``git format-patch`` writes them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from upstream.edits import EitherHook, Hook
from upstream.wrap import COLUMNS

# The same stack from the same sources, to the last byte.
AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "the cute-sharding authors"),
        ("EMAIL", "cute-sharding@users.noreply.github.com"),
        ("DATE", "2026-01-01T00:00:00+0000"),
    )
}


@dataclass(frozen=True)
class Patch:
    """One commit on PyTorch's sources.

    Attributes:
        name: a word for it.
        message: the commit message.
        files: what each new or rewritten file reads, made when asked.
        hooks: changes of files that are there.
        tests: those of its files that are tests, run by the proof.
    """

    name: str
    message: str
    files: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    hooks: Sequence[Hook | EitherHook] = ()

    @property
    def tests(self) -> list[str]:
        return [path for path in self.files if path.startswith("test/")]

    def apply(self, tree: Path) -> None:
        """Change the files of a checkout so."""
        for path, text in self.files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text())
        for hook in self.hooks:
            path = tree / hook.path
            path.write_text(hook.applied(path.read_text()))


def touched(patches: Sequence[Patch]) -> list[str]:
    """The files that are there before the stack and changed by it."""
    new: set[str] = set()
    old: dict[str, None] = {}
    for patch in patches:
        old |= {hook.path: None for hook in patch.hooks if hook.path not in new}
        new |= set(patch.files)
    return list(old)


def write(patches: Sequence[Patch], package: Path, tree: Path, out: Path) -> list[Path]:
    """Write the stack against the PyTorch whose ``torch`` package is installed at ``package``, and
    return the patches' files, in order.

    ``tree`` is an empty folder, or none yet: a repository of the files that the stack touches is
    made there, with one commit for each patch.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgsign=false", *arguments],
            cwd=tree,
            env={**os.environ, **AUTHOR},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    tree.mkdir(parents=True, exist_ok=True)
    git("init", "--quiet", "--initial-branch=main")
    for path in touched(patches):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes((package.parent / path).read_bytes())
    git("add", "--all")
    git("commit", "--quiet", "--allow-empty", "--message=base")
    for patch in patches:
        patch.apply(tree)
        git("add", "--all")
        git("commit", "--quiet", f"--message={patch.message}")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.patch"):
        old.unlink()
    names = git(
        "format-patch", "--no-signature", f"--output-directory={out}", f"-{len(patches)}"
    ).splitlines()
    return [Path(name) for name in names]


@dataclass(frozen=True)
class Counted:
    """What a patch counts: lines added and removed outside of tests, lines of tests, and its
    longest line.
    """

    added: int
    removed: int
    tests: int
    columns: int

    def __str__(self) -> str:
        return (
            f"+{self.added} -{self.removed} outside of tests, +{self.tests} tests, "
            f"lines of at most {self.columns} columns (of {COLUMNS})"
        )


def counted(patch: Path) -> Counted:
    """Count the lines of a patch."""
    added = removed = tests = columns = 0
    path = ""
    for line in patch.read_text().splitlines():
        if line.startswith(("+++ ", "--- ")):
            path = line[6:] if line.startswith("+++ b/") else path
        elif line.startswith("+"):
            columns = max(columns, len(line) - 1)
            if path.startswith("test/"):
                tests += 1
            else:
                added += 1
        elif line.startswith("-") and path:  # before the first file stands the message
            removed += not path.startswith("test/")
    return Counted(added, removed, tests, columns)

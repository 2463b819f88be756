"""The installed torch with patches applied, aside: all that they do not touch is linked, so that it
takes no time and no room; and this package is not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def shadow(site: Path, folder: Path, changed: Iterable[str]) -> None:
    """Make ``folder`` a copy of the site-packages ``site``: the files ``changed`` (paths below it,
    there or not) are its own, all else is linked.
    """
    own = {Path(path) for path in changed}
    above = {parent for path in own for parent in path.parents}
    folder.mkdir(parents=True, exist_ok=True)
    _mirror(site, folder, Path(), own, above)


def _mirror(site: Path, folder: Path, at: Path, own: set[Path], above: set[Path]) -> None:
    for entry in (site / at).iterdir():
        path = at / entry.name
        if at == Path() and _is_left_out(entry.name):
            continue
        if entry.name == "__pycache__":
            _link_compiled(entry, folder / path, {each.stem for each in own if each.parent == at})
        elif path in above:
            (folder / path).mkdir(exist_ok=True)
            _mirror(site, folder, path, own, above)
        elif path in own:
            (folder / path).write_bytes(entry.read_bytes())
        else:
            (folder / path).symlink_to(entry)


def _link_compiled(compiled: Path, folder: Path, changed: set[str]) -> None:
    """Also the bytecode of what is linked: its sources are the same files."""
    folder.mkdir()
    for entry in compiled.iterdir():
        if entry.name.partition(".")[0] not in changed:
            (folder / entry.name).symlink_to(entry)


def _is_left_out(name: str) -> bool:
    """What would bring this package in."""
    return "cute_sharding" in name or name.endswith(".pth")


def apply(patch: Path, folder: Path) -> None:
    """Apply a patch to a shadow, as git does: a line that does not fit is an error."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(
        ["git", "apply", "--whitespace=error", str(patch)],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )


def run(
    folder: Path, arguments: Sequence[str], *, given: str = "", timeout: int = 300, **flags: str
) -> str:
    """What a Python program prints that finds the shadow's packages and no others.

    It sees nothing of how this process runs: where ``CI`` is set, torch's own tests want to write a
    report, with a package that only torch's CI has.

    Raises:
        AssertionError: it fails; the message is what it wrote.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if "CUTE" not in name and name not in ("CI", "PYTHONPATH", "PYTHONSTARTUP")
    }
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **flags},
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout

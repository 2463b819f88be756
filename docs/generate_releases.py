"""Runs the tests on every supported release of torch, and writes docs/lists/releases.md of what
they found.

    python docs/generate_releases.py          # each release; takes an hour or more
    python docs/generate_releases.py 2.15.0   # this one only; the rows of the others stay

That is ``make thorough TORCH=...``, and drawn views, for each. Each release has an environment of
its own, made by the Makefile. Nothing is written of a release that could not be installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LISTS = Path(__file__).parent / "lists"
PAGE, ROWS = LISTS / "releases.md", LISTS / "releases.json"
RELEASES = ("2.13.0", "2.14.1", "2.15.0")
PINNED = (ROOT / "constraints.txt").read_text().strip().removeprefix("torch==")
CASES = 1000

FACTS = ("Python", "commit", "tests that pass", "tests that fail", "wrong views")
HEAD = f"""# Releases of PyTorch

With each of these releases, all tests of one commit ran on CPUs, and `python -m benchmarks.views
--answers --cases {CASES}`, which counts views with a wrong result. The commit may be older than the
page. To test the present commit, run `make test TORCH=2.15.0`; to make this page, `make releases`.

"""

SKIPPED = """
| torch | reason for skipped tests |
|---|---|
"""

VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"


def tested(release: str) -> dict[str, Any]:
    """What the tests find with that release, and which they skip."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        arguments = (
            f"PYTEST_ARGUMENTS=-n 2 --dist loadfile --no-loadscope-reorder --junitxml={report}"
        )
        process = subprocess.run(
            ["make", "thorough", f"TORCH={release}", arguments], cwd=ROOT, check=False
        )
        if not report.exists():
            sys.exit(f"torch {release}: the tests did not run (exit code {process.returncode})")
        outcomes: Counter[str] = Counter()
        skips = set()
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            skipped = case.find("skipped")
            if kinds & {"failure", "error"}:
                outcomes["failed"] += 1
            elif skipped is None:
                outcomes["passed"] += 1
            elif skipped.get("type") == "pytest.xfail":
                outcomes["xfailed"] += 1
            else:
                outcomes["skipped"] += 1
                # Of a file that is skipped whole, the reason is at the end of the text.
                skips.add(
                    (skipped.text or "").rsplit("Skipped: ", 1)[-1].strip().removesuffix("')")
                    if skipped.get("message") == "collection skipped"
                    else str(skipped.get("message"))
                )
    return {
        "passed": outcomes["passed"],
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "xfailed": outcomes["xfailed"],
        "skips": sorted(skips),
    }


def measured(release: str) -> dict[str, Any]:
    python = ROOT / (".venv" if release == PINNED else f".venv-{release}") / "bin" / "python"
    versions = subprocess.run(
        [python, "-c", VERSIONS], capture_output=True, text=True, check=True
    ).stdout.split()
    lines = subprocess.run(
        [python, "-m", "benchmarks.views", "--answers", "--cases", str(CASES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    views = []
    for line in lines:
        if "Shard, " in line:
            can, ours, wrong = line.split("even", 1)[1].split()[1:4]
            views.append(f"{ours} of {can}, {wrong} wrong")
    assert len(views) == 4, lines
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return {"python": versions[0], "torch": versions[1], "commit": commit, "views": views}


def main() -> None:
    asked = sys.argv[1:] or RELEASES
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    for release in asked:
        if release not in RELEASES:
            sys.exit(f"torch {release} is none of those that are supported: {', '.join(RELEASES)}")
        rows[release] = {**tested(release), **measured(release)}
        ROWS.write_text(json.dumps(rows, indent=1) + "\n")
        write(rows)


def write(rows: dict[str, Any]) -> None:
    """The page, of what is known of each release."""
    known = [rows[name] for name in RELEASES if name in rows]
    names = "torch", *FACTS
    keys = "torch", "python", "commit", "passed", "failed"
    values = [
        [*(str(row[key]) for key in keys), str(sum(map(_wrong, row["views"])))] for row in known
    ]
    lines = [f"| {' | '.join(line)} |" for line in zip(names, *values)]
    lines.insert(1, "|---" * (len(known) + 1) + "|")
    skips = [
        f"| {name} | {skip} |" for name in RELEASES if name in rows for skip in rows[name]["skips"]
    ]
    PAGE.write_text(
        HEAD + "\n".join(lines) + "\n" + (SKIPPED + "\n".join(skips) + "\n" if skips else "")
    )
    print("\n".join(lines))


def _wrong(views: str) -> int:
    """Of "100.0% of 165, 0 wrong"."""
    return int(views.split()[-2])


if __name__ == "__main__":
    main()

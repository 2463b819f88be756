"""Every benchmark once, at its smallest size: ``python -m benchmarks [NAME ...]``.

Shows that all of them run and find no wrong result; figures at these sizes mean nothing. What they
print is shown only of those that fail.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from cute_sharding.tools.progress import progress

FOLDER = Path(__file__).parent
PATIENCE = 600  # seconds
SMALLEST: dict[str, tuple[str, ...]] = {
    "along": ("--only", "softmax"),
    "accelerator": ("--device", "cpu", "--ranks", "2", "--only", "redistributions"),
    "checkpoints": ("--width", "32", "--layers", "1", "--repeat", "1", "--only", "fsdp to fsdp"),
    "compiled": ("--only", "split to heads"),
    "first_step": ("--repeat", "1"),
    "folds": ("--megabytes", "1", "--repeats", "1"),
    "host": ("--calls", "1"),
    "loads": ("--layers", "1", "--experts", "2", "--trainer", "2", "--engine", "1"),
    "movement": ("--megabytes", "0.1", "--repeats", "1"),
    "ops": ("--only", "add", "--samples", "1"),
    "overhead": ("--calls", "1", "--rounds", "1", "--only", "view"),
    "peers": (),
    "plans": ("--layers", "1", "--mesh", "4", "--width", "64", "--limit", "0.9"),
    "profiled": ("--rounds", "1"),
    "programs": ("--only", "add", "--samples", "1"),
    "redistribution": ("--megabytes", "1", "--repeat", "1"),
    "reshard": ("--width", "32", "--layers", "1", "--repeat", "1", "--only", "fsdp to tp"),
    "search": (),
    "steps": ("--only", "vocabulary", "--mesh", "2"),
    "sequence": ("--shape", "1", "1", "8", "8", "--cache", "8"),
    "strategies": ("--only", "softmax", "--samples", "1", "--calls", "1"),
    "views": ("--answers", "--cases", "20"),
}


def commands() -> list[str]:
    """The benchmarks: files here with a command of their own."""
    return sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if path.stem != "__main__" and "__main__" in path.read_text()
    )


def main() -> None:
    asked = sys.argv[1:] or commands()
    failed = []
    for name in asked:
        begin = time.monotonic()
        with progress(f"benchmarks.{name}"):
            done = subprocess.run(
                [sys.executable, "-m", f"benchmarks.{name}", *SMALLEST[name]],
                cwd=FOLDER.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
            )
        is_right = done.returncode == 0 and "WRONG" not in done.stdout
        print(f"{name:16}{time.monotonic() - begin:6.0f} s  {'ran' if is_right else 'FAILED'}")
        if not is_right:
            print(done.stdout)
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""What make dist asks of an environment in which nothing but the wheel is installed: all files are
there, the flags work, and the README's first program does what the README says.

    .venv-wheel/bin/python tests/check_wheel.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pages

# A program that only sets the flag.
SWITCHED_ON = """
import torch.distributed.tensor
from cute_sharding import settings
found = settings()
assert found.views and found.ops and found.redistribution and found.movement, found
"""


def files_missing(installed: Path) -> list[str]:
    """Those of the package that are in the repository and not where it is installed."""
    package = pages.ROOT / "cute_sharding"
    return [
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
        if not (installed / path.relative_to(package)).exists()
    ]


def main() -> None:
    import cute_sharding

    installed = Path(cute_sharding.__file__).parent
    assert installed != pages.ROOT / "cute_sharding", f"{installed} is not what the wheel installed"
    assert not files_missing(installed), files_missing(installed)

    found = distribution("cute-sharding")
    assert found.version == cute_sharding.__version__, (found.version, cute_sharding.__version__)
    assert any(path.name == "LICENSE" for path in found.files or ()), "the licence is not there"
    [hook] = entry_points(group="torch.backends", name="cute_sharding")
    assert callable(hook.load())
    [fixtures] = entry_points(group="pytest11", name="cute_sharding")
    assert fixtures.value == "cute_sharding._pytest"

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    name = next(iter(pages.programs("README.md")))
    commands = [command for command in pages.commands("README.md") if name in command.text]
    assert commands
    status = "USE_CUTE_SHARDING=1 cute-sharding status"
    commands.append(pages.Command(status, "", 0))
    for command in commands:
        said = pages.complaint(command, "README.md", environment)
        assert not said, said
        print(f"$ {command.text}\n{command.output.strip()}")
    subprocess.run(
        [sys.executable, "-c", SWITCHED_ON],
        env={**environment, "USE_CUTE_SHARDING": "1"},
        check=True,
        timeout=120,
    )
    print(f"OK: cute-sharding {found.version} in {installed}")


if __name__ == "__main__":
    main()

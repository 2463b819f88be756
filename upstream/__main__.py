"""Write the stack against the installed torch: ``python -m upstream [--out FOLDER]``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from upstream.patches import STACK
from upstream.stack import counted, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    release = torch.__version__.split("+")[0]
    parser.add_argument("--out", type=Path, default=Path("build/upstream") / release)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as tree:
        package = Path(torch.__file__).parent
        for patch in write(STACK, package, Path(tree), arguments.out.absolute()):
            print(f"{patch.name}: {counted(patch)}")


if __name__ == "__main__":
    main()

"""Write the stack against the installed torch, and count its lines.

python -m upstream             # to build/upstream/<release>/
python -m upstream --measure   # and time a rule and a propagation with the flag over that without
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.timing import geometric_mean
from benchmarks.views import MODEL_VIEWS
from upstream import conformance
from upstream.patches import BUGS, STACK
from upstream.shadow import apply, run, shadow
from upstream.stack import counted, touched, write

PACKAGE = Path(torch.__file__).parent


def measured(patches: Sequence[Path]) -> list[float]:
    """Of each model view, the time with the flag over that without, where all patches are applied:
    of a rule and a propagation, in one process, nothing cached.
    """
    cases = [
        {
            "shape": shape,
            "target": target,
            "mesh": mesh,
            "placements": list(map(conformance.cut, p)),
        }
        for _, shape, target, mesh, p in MODEL_VIEWS
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        changed = [*touched(STACK), *(path for patch in STACK for path in patch.files)]
        shadow(PACKAGE.parent, folder, changed)
        for patch in patches:
            apply(patch, folder)
        worker = str(Path(conformance.__file__).absolute())
        said = json.loads(run(folder, [worker], given=json.dumps({"times": cases})))
        ratios: list[float] = said["times"]
        return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    release = torch.__version__.split("+")[0]
    parser.add_argument("--out", type=Path, default=Path("build/upstream") / release)
    parser.add_argument("--measure", action="store_true", help="time the model views as well")
    arguments = parser.parse_args()
    out: Path = arguments.out.absolute()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        patches = write(STACK, PACKAGE, tree / "stack", out)
        bugs = [write([bug], PACKAGE, tree / bug.name, out / bug.name)[0] for bug in BUGS]
    for patch in [*patches, *bugs]:
        print(f"{patch.relative_to(out)}: {counted(patch)}")
    if arguments.measure:
        ratios = measured(patches)
        print(
            f"rule and propagation with the flag, over those without: {geometric_mean(ratios):.2f} "
            f"(geometric mean of {len(ratios)}), at most {max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()

"""Writes docs/patches.md from the table of what is replaced in torch.

python docs/generate_patches.py          # write it
python docs/generate_patches.py --check  # fail if it is not what the code says
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cute_sharding.dtensor.bookkeeping import versions
from cute_sharding.dtensor.replaced import compiler_patches, patches
from cute_sharding.dtensor.replaced.patch import Patch
from cute_sharding.dtensor.replaced.patches import TABLE, WATCHED

PAGE = Path(__file__).with_name("patches.md")
ADAPTER = Path(__file__).parent.parent / "cute_sharding" / "dtensor"


def installers(row: Patch) -> list[str]:
    """The files of the adapter that name the row, which replace it."""
    rows = {**vars(patches), **vars(compiler_patches)}
    name = next(name for name, value in rows.items() if value is row)
    return [
        path.relative_to(ADAPTER).as_posix()
        for path in sorted(ADAPTER.rglob("*.py"))
        if re.search(rf"\b(compiler_)?patches\.{name}\b", path.read_text())
    ]


def section(row: Patch) -> list[str]:
    return [
        f"## `{row.name}`",
        "",
        row.why,
        "",
        f"- File in torch {versions.RANGE}: `{row.file}`.",
        f"- File in `cute_sharding/dtensor` that replaces the object: "
        f"{', '.join(f'`{file}`' for file in installers(row))}.",
        f"- The replacement can be removed once {row.until}.",
        f"- This test fails without the replacement: `{row.test}`.",
        "- If a release of torch does not have this object, "
        + (
            f"`enable` raises an error. Without the replacement, {row.lacking}."
            if row.lacking
            else "the package logs one warning, and replaces nothing here."
        ),
        "",
    ]


def page() -> str:
    return "\n".join(
        [
            "# What is replaced in torch",
            "",
            "`make pages` generates this page from `patches.py` and `compiler_patches.py` in "
            "`cute_sharding/dtensor/replaced/`. A test checks that the page agrees with these "
            "files.",
            "",
            f"While the package is on, it replaces {len(TABLE)} objects of torch: functions, "
            "methods, attributes, and entries of dicts. Nothing else in torch changes. To check "
            "this, a test compares all objects of torch before `enable`, after `enable` and after "
            "`disable`.",
            "",
            "`enable` replaces the objects that the settings need, and `disable` restores them. If "
            "`enable` fails, it undoes all of its changes.",
            "",
            "Some objects belong to modules that many programs never import, such as the compiler, "
            "`torch.distributed.tensor.parallel` and `local_map`. `enable` does not import these "
            "modules. If the program imports such a module later, the package then replaces the "
            "objects of the module.",
            "",
            "Each section below is about one object. It describes what torch does, and what this "
            "package does instead.",
            "",
            *(line for row in TABLE for line in section(row)),
            "# While communication is recorded",
            "",
            "Inside `profile()` and `no_communication()`, and while `estimate` runs a program, the "
            f"package replaces {len(WATCHED)} more objects. It does so even if the package is "
            "switched off. The replacements record the ops and collectives that run, and "
            "otherwise do the same as torch. When the last recording ends, the package restores "
            "the objects.",
            "",
            *(line for row in WATCHED for line in section(row)),
        ]
    )


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0
            if PAGE.exists() and PAGE.read_text() == page()
            else f"{PAGE} is out of date: run make pages"
        )
    PAGE.write_text(page())
    print(f"wrote {PAGE}")

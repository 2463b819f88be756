"""Writes docs/lists/patches.md from the table of what is replaced in PyTorch.

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

PAGE = Path(__file__).parent / "lists" / "patches.md"
ROOT = Path(__file__).parent.parent
ADAPTER = ROOT / "cute_sharding" / "dtensor"


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
    files = ", ".join(f"`{(ADAPTER / file).relative_to(ROOT)}`" for file in installers(row))
    refuses = "the recording" if row in WATCHED else "`enable`"
    return [
        f"## `{row.name}`",
        "",
        row.why,
        "",
        "| fact | value |",
        "|---|---|",
        f"| file in PyTorch {versions.RANGE} | `{row.file}` |",
        f"| replaced in | {files} |",
        f"| needed until | {row.until} |",
        f"| test that fails without the replacement | `{row.test}` |",
        "| if PyTorch lacks the object | "
        f"{f'{refuses} raises: {row.lacking}' if row.lacking else 'one warning'} |",
        "",
    ]


def page() -> str:
    return "\n".join(
        [
            "# What is replaced in PyTorch",
            "",
            "`make pages` generates this page from `patches.py` and `compiler_patches.py` in "
            "`cute_sharding/dtensor/replaced/`.",
            "",
            f"While `cute_sharding` is on, it replaces up to {len(TABLE)} objects of PyTorch: "
            "functions, methods, attributes, and dicts of which it replaces entries. `python -m "
            "cute_sharding status` lists those that are replaced now. A test checks that `enable` "
            "changes only objects on this page, and that `disable` undoes all changes.",
            "",
            "If `enable` raises an error, no object of PyTorch stays replaced.",
            "",
            "`cute_sharding` replaces `local_map` and functions of PyTorch's compiler only after "
            "the program imports their modules.",
            "",
            "If `cute_sharding` replaces `function.__code__`, modules that imported the function "
            "earlier also run the new code.",
            "",
            *(line for row in TABLE for line in section(row)),
            "# While communication is recorded",
            "",
            "`profile()`, `no_communication()` and `estimate` temporarily replace the following "
            f"{len(WATCHED)} PyTorch objects, even without `enable`.",
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

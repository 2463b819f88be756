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
        *(
            [f"- what is replaced: entries of this dict: {row.entries.format('an op')}"]
            if row.entries
            else []
        ),
        f"- in torch: `{row.file}`, {versions.RANGE}",
        f"- replaced in: {', '.join(f'`{file}`' for file in installers(row))}",
        f"- no longer needed when: {row.until}",
        f"- a test that fails without it: `{row.test}`",
        "- where a torch lacks it: "
        + (
            f"enable raises ({row.lacking})"
            if row.lacking
            else "it is left out, with one warning that names it"
        ),
        "",
    ]


def page() -> str:
    return "\n".join(
        [
            "# What is replaced in torch",
            "",
            "Generated from `cute_sharding/dtensor/replaced/patches.py` by `make pages`; a "
            "test fails when it is out of date.",
            "",
            f"While the package is enabled it stands in for torch in {len(TABLE)} places, and in "
            "no other (a test compares all of",
            "torch before, while and after). `enable` replaces all that the settings need, or, "
            "where it fails, nothing; `disable`",
            "puts the very objects back. What belongs to the compiler, to state dicts and to "
            "pictures is replaced once the program",
            "has imported it.",
            "",
            *(line for row in TABLE for line in section(row)),
            "# While what a program sends is watched",
            "",
            "Inside of `profile()`, `no_communication()` and a dry run the package replaces "
            f"{len(WATCHED)} more places,",
            "also when it is switched off. They note what runs, and do what torch does. All are "
            "put back when nobody watches any longer.",
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

"""Writes docs/patches.md from the table of what is replaced in torch.

python docs/generate_patches.py          # write it
python docs/generate_patches.py --check  # fail if it is not what the code says
"""

from __future__ import annotations

import sys
from pathlib import Path

from cute_sharding.dtensor.torch_private.patch import Patch
from cute_sharding.dtensor.torch_private.patches import TABLE

PAGE = Path(__file__).with_name("patches.md")


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
        f"- in torch: `{row.file}`, {row.versions}",
        f"- no longer needed when: {row.until}",
        f"- a test of what it does: `{row.test}`",
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
            "Generated from `cute_sharding/dtensor/torch_private/patches.py` by `make docs`; a "
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
        ]
    )


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0
            if PAGE.exists() and PAGE.read_text() == page()
            else f"{PAGE} is out of date: run make docs"
        )
    PAGE.write_text(page())
    print(f"wrote {PAGE}")

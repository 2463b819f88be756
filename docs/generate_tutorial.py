"""Writes docs/tutorial.ipynb from docs/tutorial.md: the text as cells of text, and each program
that one process runs as a cell of code, with the output that the page says.

python docs/generate_tutorial.py          # write it
python docs/generate_tutorial.py --check  # fail if it is not what the page says
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")

# A program, and behind it the command that runs it in one process, with what it prints.
PROGRAM = re.compile(
    r'^```python title="([^"]+)"\n(.*?)^```\n\n```console\n\$ python \1\n(.*?)^```\n', re.M | re.S
)


def text_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def code_cell(name: str, program: str, output: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {"name": name},
        "outputs": [{"name": "stdout", "output_type": "stream", "text": output}],
        "source": program.rstrip("\n"),
    }


def notebook(page: str) -> str:
    """The notebook of a page of Markdown."""
    cells, end = [], 0
    for found in PROGRAM.finditer(page):
        cells += [text_cell(page[end : found.start()]), code_cell(*found.groups())]
        end = found.end()
    cells.append(text_cell(page[end:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    made = notebook(PAGE.read_text())
    if "--check" in sys.argv:
        fresh = NOTEBOOK.exists() and NOTEBOOK.read_text() == made
        sys.exit(0 if fresh else f"out of date: {NOTEBOOK}: run make pages")
    NOTEBOOK.write_text(made)
    print(f"wrote {NOTEBOOK}")

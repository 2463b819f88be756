"""Writes docs/tutorial.ipynb from docs/tutorial.md: the text as cells of text, each program as a
cell that writes it to a file, and each command as a cell that runs it, with the output that the
page says.

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

# A program, or commands that are not those of the installation.
CODE = re.compile(
    r'^```python title="(?P<name>[^"]+)"\n(?P<program>.*?)^```\n'
    r"|^```console\n(?P<commands>\$ (?!pip).*?)^```\n",
    re.M | re.S,
)
COMMAND = re.compile(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)(?=^\$ |\Z)", re.M | re.S)


def text_cell(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def code_cell(source: str, output: str = "") -> dict[str, Any]:
    outputs = [{"name": "stdout", "output_type": "stream", "text": output}] if output else []
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": outputs,
        "source": source.rstrip("\n"),
    }


def cells_of(found: re.Match[str]) -> list[dict[str, Any]]:
    if found["name"]:
        return [code_cell(f"%%writefile {found['name']}\n{found['program']}")]
    return [
        code_cell("!" + command, output) for command, output in COMMAND.findall(found["commands"])
    ]


def notebook(page: str) -> str:
    """The notebook of a page of Markdown."""
    cells, end = [], 0
    for found in CODE.finditer(page):
        cells += [text_cell(page[end : found.start()]), *cells_of(found)]
        end = found.end()
    cells.append(text_cell(page[end:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    cells = [cell for cell in cells if cell["source"]]
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1) + "\n"


if __name__ == "__main__":
    made = notebook(PAGE.read_text())
    if "--check" in sys.argv:
        fresh = NOTEBOOK.exists() and NOTEBOOK.read_text() == made
        sys.exit(0 if fresh else f"out of date: {NOTEBOOK}: run make pages")
    NOTEBOOK.write_text(made)
    print(f"wrote {NOTEBOOK}")

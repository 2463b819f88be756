"""For mkdocs (see mkdocs.yml): docstrings as the sources have them, made Markdown. Roles such as
:func:`name` become links, and examples code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr):`(~?)([\w.]+)`")
EXAMPLE = re.compile(r"^([ ]*)>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


def markdown(text: str) -> str:
    """The text with its roles and examples as Markdown has them."""

    def role(match: re.Match[str]) -> str:
        short, name = match.groups()
        shown = name.rpartition(".")[2] if short else name.lstrip(".")
        return f"[`{shown}`][{name}]" if name.startswith("cute_sharding.") else f"`{shown}`"

    def example(match: re.Match[str]) -> str:
        return f"{match[1]}```pycon\n{match[0]}\n{match[1]}```"

    return EXAMPLE.sub(example, ROLE.sub(role, text))


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

"""The two libraries that render pictures. They are optional: a picture is made without either."""

from __future__ import annotations

import importlib
from typing import Any

PURPOSES = {"rich": "on a terminal", "matplotlib": "as SVG or PNG"}


def library(name: str) -> Any:
    """A module of rich or matplotlib, by its dotted name.

    Raises:
        ImportError: the library is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        of = name.split(".")[0]
        raise ImportError(
            f"a picture {PURPOSES[of]} needs {of}, which cannot be imported ({error}): run "
            'pip install "cute-sharding[draw]"',
            name=of,
        ) from error

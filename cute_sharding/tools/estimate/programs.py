"""The function of a program that a dry run calls, and the program's line of an error."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, cast

from cute_sharding.dtensor.replaced import observing
from cute_sharding.tools.estimate.stand_ins import NEEDS_VALUES
from cute_sharding.tools.profile.report import Place


def function_of(module: str, file: str | None, name: str) -> Callable[..., Any]:
    """The function with this name in a module, or in a file that runs as a module with another name
    than ``__main__``.

    Raises:
        ImportError: there is no such function.
    """
    if file is None:
        found: Any = importlib.import_module(module)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
        spec = importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file: give a file whose name ends in .py")
        found = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ImportError(f"{file or module} has no function {name!r}")
    return cast(Callable[..., Any], found)


def place_of(error: BaseException) -> Place | None:
    """The innermost line of the program in the traceback of the error; None if there is none."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if observing.kind_of(frame).is_own:
            found = Place(frame.f_code.co_filename, line, frame.f_code.co_name)
    return found


def said(error: BaseException) -> str:
    """The error in one line, with a remedy if there is one."""
    words = " ".join(str(error).split())
    text = f"{type(error).__name__}{f': {words}' if words else ', without a message'}"
    if isinstance(error, NEEDS_VALUES):
        return (
            f"the elements of a tensor are asked for ({text.rpartition(' ')[2]}), and a dry run "
            "has none: leave out of the step what reads a value (item(), bool(), tolist()), and "
            "what has a shape that depends on values (nonzero, unique, indexing by a mask)"
        )
    return text

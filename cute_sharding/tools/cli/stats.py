"""The command ``stats``: runs a program, and at its end shows how its ops were decided, and the
elements that ranks received.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from typing import Any

from cute_sharding.tools.cli.arguments import UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="PROGRAM is the name of a module, as for python -m",
    )
    parser.add_argument("program", metavar="PROGRAM", help="a Python file or, with -m, a module")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments"
    )


def run_stats(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the program as ``python PROGRAM`` does, in this process, and reads the counts, even if
    the program raises an error or exits.
    """
    program = arguments.program
    if not arguments.is_module and not os.path.exists(program):
        raise UsageError(
            f"the file {program!r} does not exist: give a Python file, or -m and a module name"
        )
    code = _run(program, arguments.arguments, is_module=arguments.is_module)
    import cute_sharding

    return {
        "stats": cute_sharding.stats(),
        "is_on": cute_sharding.is_enabled(),
        "code": code,
        "speaks": os.environ.get("RANK", "0") == "0",
    }


def _run(program: str, arguments: list[str], *, is_module: bool) -> int:
    """Runs the program, and returns the exit status."""
    before = sys.argv, sys.path[:]
    sys.argv = [program, *arguments]
    # As python does: for a file, its directory comes first; for a module, the current directory.
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(program)))
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def show_stats(result: dict[str, Any]) -> str:
    if not result["stats"] and not result["is_on"]:
        return "nothing was counted, because no flag is on. Set a flag, such as USE_CUTE_SHARDING=1"
    return f"\n{result['stats'].table()}"

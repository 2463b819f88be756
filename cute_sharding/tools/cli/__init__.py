"""The command line ``python -m cute_sharding``: a file for each command, and ``main``. This package
does not import torch.

- :mod:`.explain`: the sharding before and after a view, as layouts; with :mod:`.for_all` for sizes
  that have names, and :mod:`.moves` for movement ops.
- :mod:`.draw`: pictures of shardings, views, redistributions and layouts.
- :mod:`.plan`: a redistribution by this package's plan and by torch's own steps; with
  :mod:`.models` for all tensors of a model.
- :mod:`.stats`: how the ops of a program were decided, and the elements that ranks received.
- :mod:`.estimate`: the communication and memory of a step of a program.
- :mod:`.status`: the settings in force, and whether the package works here.
- :mod:`.parser`, :mod:`.arguments`: the options, and the conversion of their text to values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cute_sharding.tools.cli.arguments import UsageError
from cute_sharding.tools.cli.explain import explain
from cute_sharding.tools.cli.parser import COMMANDS, make_parser
from cute_sharding.tools.cli.plan import plan

__all__ = ["explain", "main", "plan"]


# The errors that a bad argument may cause, and the error for a missing library.
CAUGHT = (
    *(UsageError, ValueError, IndexError, TypeError, RuntimeError, OverflowError),
    ImportError,
)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = make_parser().parse_args(argv)
        if arguments.command is None:
            raise UsageError(
                f"give a command: {', '.join(command.name for command in COMMANDS)} (see --help)"
            )
        result = arguments.run(arguments)
    except CAUGHT as error:
        print(f"cute_sharding: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=2) if arguments.json else arguments.show(result)
    if result.get("speaks", True):
        print(text)
    return int(arguments.code(result))

"""``python -m cute_sharding``: a file for each command, and ``main``. Imports no torch.

- :mod:`.explain`, and for sizes that have names :mod:`.for_all`: what a view does to a sharding, as
  layouts. :mod:`.moves`: the same of a movement op.
- :mod:`.draw`: pictures of shardings, views, redistributions and layouts.
- :mod:`.plan`: how a redistribution goes, by plan and as torch would do it; :mod:`.models`: of all
  tensors of a model.
- :mod:`.stats`: what a program received, beside torch's own rules.
- :mod:`.estimate`: what a step of a program would receive and hold.
- :mod:`cute_sharding.status`: what is switched on.
- :mod:`.parser`, :mod:`.arguments`: the options, and what is read from them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cute_sharding.cli.arguments import UsageError
from cute_sharding.cli.explain import explain
from cute_sharding.cli.parser import COMMANDS, make_parser
from cute_sharding.cli.plan import plan

__all__ = ["explain", "main", "plan"]


# What a bad argument may come to; and a library that is missing.
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

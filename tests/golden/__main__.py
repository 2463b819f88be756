"""Compares what ops do now with the golden table, and prints the lines that differ:

    python -m tests.golden [--write] [--only WORD ...] [--workers 2]

A line of the table says, for one op on one mesh and one way to place its tensors, how the results
lie, which collectives were started for them, and the bytes that the busiest rank received. After
a change, run this, read what it prints, and say in the commit why each group of lines has changed.
``--write`` puts what is found in the table; with ``--only``, in the lines of those cases alone.
"""

import argparse
import sys
from pathlib import Path

from cute_sharding.tools.progress import progress

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "dtensor")]


def main():
    from golden import table

    parser = argparse.ArgumentParser(
        prog="python -m tests.golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="cases whose names have one of these"
    )
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if reason := table.of_another_release():
        parser.error(reason)
    before = table.read()
    chosen = table.chosen(options.only)
    with progress(f"{len(chosen)} cases are measured"):
        found = table.measured(chosen, options.workers)
    report = table.differences(before, found, whole=not options.only)
    print(report)
    if options.write:
        table.write({**before, **found} if options.only else found)
        return 0
    return 1 if report != table.SAME else 0


if __name__ == "__main__":
    sys.exit(main())

"""The commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import cute_sharding
from cute_sharding.tools.cli import estimate, moves, stats, status
from cute_sharding.tools.cli.arguments import UsageError
from cute_sharding.tools.cli.draw import run_draw, show_draw
from cute_sharding.tools.cli.explain import run_explain, show_explain
from cute_sharding.tools.cli.plan import run_plan, show_plan

PLACEMENTS = (
    'placements, one for each mesh dim, such as "S(0),S(2)" or "_S(0,2),R"; or a layout '
    "(devices, local), in the form that explain prints"
)

TO_MESH = (
    "the mesh of --to, if it differs from --mesh; write its ranks after @, such as gen=4@8-11 or "
    "gen=2@3,9 (default: ranks from 0 on). With --to-mesh, --mesh also takes ranks after @"
)


def _explain_options(parser: argparse.ArgumentParser) -> None:
    _sharding_options(parser)
    parser.add_argument(
        "--placements",
        required=True,
        help=PLACEMENTS,
    )
    _view_options(parser)
    moves.add_options(parser)
    parser.add_argument(
        "--torch",
        action="store_true",
        help="add the result of torch's own rule for the op (imports torch)",
    )


def _view_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--view", help="the new shape, such as 4,16,8,4; one dim may be -1 (write --view=-1,4)"
    )
    parser.add_argument("--permute", help="the new order of dims, such as 1,0,2")
    parser.add_argument("--expand", help="the expanded shape")
    parser.add_argument("--repeat", help="how often to repeat each dim")


def _draw_options(parser: argparse.ArgumentParser) -> None:
    _sharding_options(parser, required=False)
    parser.add_argument("--placements", help=PLACEMENTS)
    _view_options(parser)
    parser.add_argument(
        "--to", metavar="PLACEMENTS", help="draw the redistribution to these placements"
    )
    parser.add_argument("--to-mesh", metavar="MESH", help=TO_MESH)
    parser.add_argument(
        "--layout",
        help="draw a layout, such as (4,6):(1,4); with --shape, draw the sharding that the "
        "layout describes",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the picture to a .svg, .png or .txt file instead of the terminal",
    )
    parser.add_argument(
        "--width",
        type=int,
        metavar="COLUMNS",
        help="the width of the picture (default: the width of the terminal)",
    )


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _sharding_options(parser, shape_required=False)
    parser.add_argument(
        "--model",
        metavar="FILE",
        help="in place of --shape: a JSON file with the dtype, sizes and tensors of a model, "
        "such as examples/models/dense_8b.json",
    )
    parser.add_argument(
        "--from",
        required=True,
        metavar="PLACEMENTS",
        help='one for each mesh dim, such as "S(0),S(1)" or "P(sum),R"; with --model, placements '
        'for patterns of names, such as "*norm*=R; *=S(0)"',
    )
    parser.add_argument("--to", required=True, metavar="PLACEMENTS", help="as for --from")
    parser.add_argument("--to-mesh", metavar="MESH", help=TO_MESH)
    links = (
        "flat:ALPHA,BETA (latency in seconds, and seconds for each element), or one link for "
        "each mesh dim, such as infiniband,nvlink"
    )
    parser.add_argument(
        "--network",
        help=(
            f"{links}; default: $USE_CUTE_NETWORK, or if this is not set, nvlink within hosts of "
            "eight devices and infiniband between hosts"
        ),
    )
    parser.add_argument(
        "--groups",
        metavar="SETS",
        help=(
            "the sets of mesh dims that have a common process group, such as dp+tp,cp+tp, or "
            "none (default: all sets)"
        ),
    )
    parser.add_argument(
        "--memory-limit",
        type=int,
        metavar="ELEMENTS",
        help="the largest number of elements that a device may hold at once in this package's "
        "plan; with --model, the number of bytes",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="with --model, also write a picture of the bytes that each rank sends to each other "
        "rank, as .svg, .png or .txt",
    )
    parser.add_argument(
        "--itemsize",
        "--dtype",
        default="4",
        metavar="BYTES",
        help="the number of bytes of an element, or a dtype such as bfloat16 (default: 4)",
    )


def _sharding_options(
    parser: argparse.ArgumentParser, required: bool = True, shape_required: bool = True
) -> None:
    parser.add_argument(
        "--shape",
        required=required and shape_required,
        help="the tensor's global shape, such as 4,16,32; explain also takes b=4,s=16,32",
    )
    parser.add_argument("--mesh", required=required, help="the device mesh, such as dp=2,tp=4")


class Command(NamedTuple):
    """A command.

    Attributes:
        name, text: the name of the command, and its help text.
        options: adds the options of the command to a parser.
        run: runs the command, and returns the result as data.
        show: converts the result to text.
        code: the exit status for the result.
    """

    name: str
    text: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], dict[str, Any]]
    show: Callable[[dict[str, Any]], str]
    code: Callable[[dict[str, Any]], int] = lambda result: 0


COMMANDS = (
    Command(
        "explain",
        "show the placements and layouts before and after a view or a movement op, and the cost "
        "of the op",
        _explain_options,
        run_explain,
        show_explain,
    ),
    Command(
        "plan",
        "show the steps and the cost of a redistribution, with this package and with PyTorch alone",
        _plan_options,
        run_plan,
        show_plan,
    ),
    Command(
        "draw",
        "draw which device has each element; for a view, before and after the view; for a "
        "redistribution, how many elements each rank sends to each other rank",
        _draw_options,
        run_draw,
        show_draw,
    ),
    Command(
        "stats",
        "run a Python program; at its end, print on rank 0 how its ops were decided, and how many "
        "elements views, movement ops and redistributions received",
        stats.add_options,
        stats.run_stats,
        stats.show_stats,
        lambda result: result["code"],
    ),
    Command(
        "estimate",
        "predict the communication, time and memory of one step of a program on a mesh of any "
        "size, with PyTorch alone and with each flag; needs no device",
        estimate.add_options,
        estimate.run_estimate,
        estimate.show_estimate,
    ),
    Command(
        "status",
        "show the settings in force and the reason for each, the release of torch, and the "
        "replaced parts of torch; also check a view and a redistribution",
        lambda parser: None,
        lambda arguments: status.status(),
        status.show,
        lambda result: not status.is_well(result),
    ),
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:  # one line, as for other bad arguments
        raise UsageError(message)


def make_parser() -> Parser:
    parser = Parser(
        prog="python -m cute_sharding",
        description="Shardings, views and redistributions as CuTe layouts.",
    )
    parser.add_argument(
        "--version", action="version", version=f"cute_sharding {cute_sharding.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=Parser)
    for command in COMMANDS:
        added = commands.add_parser(command.name, help=command.text, description=command.text)
        added.set_defaults(run=command.run, show=command.show, code=command.code)
        added.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.options(added)
    return parser

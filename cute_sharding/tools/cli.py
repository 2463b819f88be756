"""The command line ``python -m cute_sharding``: each command is a function of the package with its
arguments, and prints what it gives as text or as JSON. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import traceback
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import cute_sharding
from cute_sharding._words import counted
from cute_sharding.exchange import Mesh, Network
from cute_sharding.layout import Layout
from cute_sharding.models import PlacedTensor, plan_models
from cute_sharding.models.shapes import Shape, shapes_of
from cute_sharding.programs.plan import StepPlan
from cute_sharding.tools.drawing import Picture, draw
from cute_sharding.tools.drawing.pictures import draw_sharding
from cute_sharding.tools.estimate import estimate
from cute_sharding.tools.estimate.values import SETTINGS
from cute_sharding.tools.explain import MOVES, explain
from cute_sharding.tools.files import checked
from cute_sharding.tools.inputs import VIEWS, sharding_of, view_of
from cute_sharding.tools.profile import profile
from cute_sharding.tools.progress import progress
from cute_sharding.tools.steps.plan_step import plan_step

# The smallest width of a picture, in columns.
NARROWEST = 20


# -- arguments -------------------------------------------------------------------------------------


class UsageError(ValueError):
    """A bad argument. The message is one line."""


def _inside(text: str) -> str:
    """Sizes without the brackets of their printed form: ``(4, 16)``, ``[4, 16]``, ``torch.Size([4,
    16])``.
    """
    match = re.fullmatch(r"\s*(?:torch\.Size)?(?:\(\[(.*)\]\)|\((.*)\)|\[(.*)\])\s*", text)
    return text if match is None else next(part for part in match.groups() if part is not None)


def read_sizes(text: str, option: str) -> tuple[int, ...]:
    """Sizes, as they are printed."""
    if not re.fullmatch(r"\s*(-?[\d_]+\s*(,\s*-?[\d_]+\s*)*)?,?\s*", _inside(text)):
        raise UsageError(f"{option} {text!r}: write integers separated by commas, such as 4,16,32")
    return tuple(int(part) for part in _inside(text).split(",") if part.strip())


def read_numbers(text: str, option: str, form: str) -> tuple[int | None, ...]:
    """The numbers of a movement op; one that is left out is None."""
    if not re.fullmatch(r"\s*-?\d+\s*(,\s*(-?\d+)?\s*)*", text):
        raise UsageError(f"{option} {text!r}: write {form}")
    return tuple(int(part) if part.strip() else None for part in text.split(","))


def read_mesh(text: str, option: str = "--mesh") -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names and the sizes of mesh dims."""
    if "@" in text:
        raise UsageError(
            f"{option} {text!r}: the ranks after @ would not be used: write "
            f"{text.partition('@')[0].strip()}"
        )
    names, sizes = [], []
    for i, part in enumerate(_inside(text).removesuffix(",").split(",")):
        match = re.fullmatch(r"\s*(?:([A-Za-z_]\w*)=)?(\d+)\s*", part)
        if not match or int(match[2]) < 1:
            raise UsageError(
                f"{option} {text!r}: write name=size or size, separated by commas, such as "
                "dp=2,tp=4"
            )
        names.append(match[1] or f"mesh{i}")
        sizes.append(int(match[2]))
    if len(set(names)) < len(names):
        raise UsageError(f"{option} {text!r}: give each mesh dim a different name")
    return tuple(names), tuple(sizes)


def read_mesh_of_ranks(text: str, option: str = "--mesh") -> tuple[tuple[str, ...], Mesh]:
    """A mesh with its ranks after an @: ``gen=4@8-11``, ``dp=2,tp=2@0,1,4,5``. Without an @, the
    ranks start at 0.
    """
    before, at, behind = text.partition("@")
    names, sizes = read_mesh(before, option)
    if not at:
        return names, Mesh.numbered(sizes)
    runs = []
    for part in behind.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(
                f"{option} {text!r}: write the ranks after @ as first-last or one by one, such as "
                "dp=2,tp=2@4-7 or gen=2@3,9"
            )
        runs.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    many, first = sum(map(len, runs)), runs[0].start
    if many != prod(sizes):
        raise UsageError(
            f"{option} {text!r} has {counted(many, 'rank')} after @ for a mesh of "
            f"{counted(prod(sizes), 'device')}: write one rank for each device, such as "
            f"{before.strip()}@{first}-{first + prod(sizes) - 1}"
        )
    return names, Mesh(sizes, runs[0] if len(runs) == 1 else [rank for run in runs for rank in run])


def read_network(text: str, mesh: tuple[int, ...], itemsize: int) -> Network:
    """The links of a mesh."""
    network = Network.parse(text).checked(mesh)
    return network if text.startswith("flat:") else network.of_itemsize(itemsize)


def read_groups(text: str, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Sets of mesh dims, given by name or number, and joined by +."""
    known = {**{str(m): m for m in range(len(names))}, **{name: m for m, name in enumerate(names)}}
    sets = [part.split("+") for part in text.split(",") if part != "none"]
    unknown = [name for some in sets for name in some if name not in known]
    if unknown:
        raise UsageError(
            f"--groups {text}: the mesh has no dim {', '.join(unknown)}. Join names of mesh dims "
            f"({', '.join(names)}) by +, such as {'+'.join(names[:2])}. For groups of single "
            "mesh dims only, write --groups none"
        )
    return [tuple([known[name] for name in some]) for some in sets]


def read_itemsize(text: str) -> int:
    """The bytes of an element, from a number or the name of a dtype of torch."""
    if re.fullmatch(r"\s*-?\d+\s*", text):
        return int(text)
    from cute_sharding.dtensor.run.plan import itemsize_of

    found = itemsize_of(text.strip())
    if found is None:
        raise UsageError(
            f"--itemsize or --dtype {text!r} is neither a number of bytes nor a PyTorch dtype, "
            "such as bfloat16"
        )
    return found


def read_model(path: str) -> dict[str, Shape]:
    """The shapes and dtypes of the tensors of a model, from a JSON file."""
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--model {path!r} cannot be opened: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--model {path!r} cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise UsageError(
            f"--model {path!r} is not a JSON object: write an object with dtype, sizes and tensors"
        )
    return shapes_of(found)


def read_placed(
    tensors: Mapping[str, Shape], text: str, option: str, mesh: Mesh
) -> dict[str, PlacedTensor]:
    """The placements of each tensor, by patterns of names: ``*norm*=R; *=S(0)``. The first pattern
    that fits is used.
    """
    rows = [part.strip() for part in text.split(";") if part.strip()]
    patterns = [row.partition("=")[::2] if "=" in row else ("*", row) for row in rows]
    found = {}
    for name, (shape, dtype) in tensors.items():
        fits = [said for pattern, said in patterns if fnmatchcase(name, pattern.strip())]
        if not fits:
            raise UsageError(
                f"no pattern of {option} {text!r} matches {name}: separate PATTERN=PLACEMENTS by "
                "semicolons, and end with *=PLACEMENTS for all other tensors"
            )
        try:
            found[name] = PlacedTensor.of(shape, mesh, fits[0], dtype)
        except ValueError as error:
            raise UsageError(f"{option} of {name}: {error}") from error
    return found


def read_plan(path: str) -> StepPlan:
    """The plan of a step, from a file."""
    try:
        return StepPlan.load(path)
    except OSError as error:
        raise UsageError(f"--plan {path}: {error}") from None


# -- commands --------------------------------------------------------------------------------------


class Printed(NamedTuple):
    """The result of a command: as plain data, as text (None: nothing is printed), and the exit
    status.
    """

    data: dict[str, Any]
    text: str | None
    code: int = 0


def run_explain(given: Namespace) -> Printed:
    """``explain``."""
    asked = {name: text for name in (*VIEWS, *MOVES) if (text := getattr(given, name)) is not None}
    if len(asked) != 1:
        options = ", --".join(asked or (*VIEWS, *MOVES))
        raise UsageError(f"give exactly one of the options --{options}")
    ((name, text),) = asked.items()
    names, mesh = read_mesh(given.mesh)
    if name in VIEWS:
        numbers: Any = read_sizes(text, f"--{name}")
    else:
        numbers = read_numbers(text, f"--{name}", MOVES[name].form)
    found = explain(
        shape=read_sizes(given.shape, "--shape"),
        mesh=dict(zip(names, mesh)),
        placements=given.placements,
        **{name: numbers},
    )
    return Printed(found.to_dict(), str(found))


def run_plan(given: Namespace) -> Printed:
    """``plan``: of a tensor, or of a model."""
    if given.model is not None:
        return _plan_of_model(given)
    if given.output is not None:
        raise UsageError(
            "plan --output needs --model: for a picture of one tensor, use draw --to --output"
        )
    if given.shape is None:
        raise UsageError("plan needs --shape, or --model FILE")
    from cute_sharding.dtensor import plan_redistribution

    shape = read_sizes(given.shape, "--shape")
    names, mesh = read_mesh_of_ranks(given.mesh)
    if given.to_mesh is None:
        read_mesh(given.mesh)
    to_names, to_mesh = read_mesh_of_ranks(given.to_mesh or given.mesh, "--to-mesh")
    itemsize = read_itemsize(given.itemsize)
    ends = getattr(given, "from"), given.to
    texts = [
        ", ".join(map(str, sharding_of(shape, of.sizes, text).placements))
        for text, of in zip(ends, (mesh, to_mesh))
    ]
    plan: Any = plan_redistribution(
        shape,
        mesh,
        *texts,
        target_mesh=to_mesh,
        memory_limit=given.memory_limit,
        network=given.network and read_network(given.network, mesh.sizes, itemsize),
        groups=given.groups and read_groups(given.groups, names),
        itemsize=itemsize,
    )
    plan = plan.named(names) if to_mesh == mesh else plan.named(names, to_names)
    links = [plan.network.link(m) for m in range(len(mesh.sizes))]
    data = {"from": texts[0], "to": texts[1], "itemsize": itemsize, "ours": plan.to_dict()}
    data["network"] = [{"alpha": link.alpha, "beta": link.beta} for link in links]
    said = [f"{of} {a.alpha:.3g} s + {a.beta:.3g} s an element" for of, a in zip(names, links)]
    lines = [
        f"{shape}: [{texts[0]}] on {mesh.text(names)} -> [{texts[1]}] on {to_mesh.text(to_names)}",
        *(f"network: {', '.join(said)}", "", str(plan)),
    ]
    if plan.lower_bound is not None:
        lines.append(
            f"lower bound: {plan.lower_bound:,} elements, the most that a device needs and does "
            "not hold"
        )
    return Printed(data, "\n".join(lines))


def _plan_of_model(given: Namespace) -> Printed:
    if given.shape is not None or given.groups is not None:
        raise UsageError("--model gives the shapes of all tensors: leave out --shape and --groups")
    _, mesh = read_mesh_of_ranks(given.mesh)
    _, to_mesh = read_mesh_of_ranks(given.to_mesh or given.mesh, "--to-mesh")
    tensors = read_model(given.model)
    source = read_placed(tensors, getattr(given, "from"), "--from", mesh)
    target = read_placed(tensors, given.to, "--to", to_mesh)
    plan = plan_models(
        ((name, source[name], target[name]) for name in tensors),
        given.memory_limit,
        given.network and Network.parse(given.network),
    )
    text = str(plan)
    if given.output is not None:
        text += f"\n{_saved(draw(plan), given.output)}"
    return Printed(plan.to_dict(), text)


def run_draw(given: Namespace) -> Printed:
    """``draw``: a picture, on the terminal or in a file."""
    if given.width is not None and given.width < NARROWEST:
        raise UsageError(f"--width {given.width}: a picture needs {NARROWEST} columns or more")
    picture = _picture(given)
    if given.output is not None:
        text = _saved(picture, given.output)
    else:
        from cute_sharding.tools.drawing.picture import as_text

        text = "" if given.json else as_text(picture, given.width, None)
    return Printed(picture.to_dict(), text)


def _save(save: Callable[[str], Any], path: str | None) -> None:
    """Write to the file of ``--save``, if it is given."""
    if path is not None:
        try:
            save(path)
        except OSError as error:
            raise UsageError(f"--save {path}: {error}") from None


def _saved(picture: Picture, path: str) -> str:
    try:
        return f"wrote {picture.save(path)}"
    except OSError as error:
        raise UsageError(f"--output {path}: {error}") from None


def _picture(given: Namespace) -> Picture:
    shape = None if given.shape is None else read_sizes(given.shape, "--shape")
    views = {name: text for name in VIEWS if (text := getattr(given, name)) is not None}
    if len(views) + (given.to is not None) > 1:
        raise UsageError(
            "give only one of --view, --permute, --expand, --repeat, --to: a picture shows only "
            "one change"
        )
    if given.layout is not None:
        if views or given.to is not None or given.placements is not None:
            raise UsageError(f"with --layout, leave out --placements, --to, --{', --'.join(VIEWS)}")
        return draw(Layout.parse(given.layout), shape=shape)
    missing = [name for name in ("shape", "mesh", "placements") if getattr(given, name) is None]
    if shape is None or missing:
        raise UsageError(
            f"draw needs --shape, --mesh and --placements, or only --layout: also give "
            f"--{', --'.join(missing)}"
        )
    names, mesh = read_mesh_of_ranks(given.mesh)
    sharding = sharding_of(shape, mesh.sizes, given.placements)
    view: Any = None
    to_mesh = None
    for name, text in views.items():
        read_mesh(given.mesh)
        sizes = read_sizes(text, f"--{name}")
        view = sizes if name == "view" else view_of(name, sizes, shape)[1]
    to_names = names
    if given.to_mesh is not None:
        if given.to is None:
            raise UsageError("--to-mesh needs --to: give the placements on the mesh of --to-mesh")
        to_names, to_mesh = read_mesh_of_ranks(given.to_mesh, "--to-mesh")
    return draw_sharding(sharding, view, given.to, to_mesh, names, of=mesh, to_names=to_names)


def run_estimate(given: Namespace) -> Printed:
    """``estimate``."""
    names, sizes = read_mesh(given.mesh)
    if given.save is not None:
        checked(given.save, "estimate")
    with progress(f"estimate runs the step with {given.settings.replace(',', ', ')}"):
        found = estimate(
            given.step,
            dict(zip(names, sizes)) if "=" in given.mesh else sizes,
            network=given.network,
            layers=given.layers,
            rank=given.rank,
            device=given.device,
            settings=[name.strip() for name in given.settings.split(",")],
            plan=given.plan and read_plan(given.plan),
        )
    _save(found.save, given.save)
    return Printed(found.to_dict(), str(found))


def run_plan_step(given: Namespace) -> Printed:
    """``plan-step``."""
    names, sizes = read_mesh(given.mesh)
    with progress("plan-step runs the step and plans it"):
        found = plan_step(
            given.step,
            dict(zip(names, sizes)) if "=" in given.mesh else sizes,
            network=given.network,
            rank=given.rank,
            device=given.device,
            memory_limit=given.memory_limit,
            free=given.free,
            fixed=[line.strip() for line in given.fixed.split(",") if line.strip()],
            each_line=given.each_line,
        )
    _save(found.save, given.save)
    return Printed(json.loads(found.to_json()), str(found))


def run_program(given: Namespace) -> int:
    """Run a program as ``python PROGRAM`` does, in this process. Its exit status, also if it raises
    an error or exits.
    """
    program = given.program
    if not given.is_module and not os.path.exists(program):
        raise UsageError(
            f"the file {program!r} does not exist: give a Python file, or -m and a module name"
        )
    code, before = 0, (sys.argv, sys.path[:])
    sys.argv = [program, *given.arguments]
    # As python does: for a file, its directory comes first; for a module, the current directory.
    sys.path.insert(
        0, os.getcwd() if given.is_module else os.path.dirname(os.path.abspath(program))
    )
    try:
        if given.is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except Exception:
        code = 1
        traceback.print_exc()
    finally:
        sys.argv, sys.path[:] = before
    return code


def is_first() -> bool:
    """Whether this process is rank 0, as torchrun says, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def run_stats(given: Namespace) -> Printed:
    """``stats``: runs the program, and reads the counts."""
    code = run_program(given)
    found = cute_sharding.stats()
    text: str | None = f"\n{found.table()}"
    if not found and not cute_sharding.is_enabled():
        text = "nothing was counted, because no flag is on. Set a flag, such as USE_CUTE_SHARDING=1"
    return Printed({"stats": found}, text if is_first() else None, code)


def run_profile(given: Namespace) -> Printed:
    """``profile``: runs the program in a profile."""
    plan = given.plan and read_plan(given.plan)
    if given.save is not None:
        checked(given.save, "profile")
    with profile(network=given.network, plan=plan) as found:
        code = run_program(given)
    if is_first():
        _save(found.save, given.save)
    return Printed(found.to_dict(), f"\n{found}" if is_first() else None, code)


def run_status(given: Namespace) -> Printed:
    """``status``."""
    from cute_sharding.tools import status

    found = status.status()
    return Printed(found, status.show(found), int(not status.is_well(found)))


# -- options ---------------------------------------------------------------------------------------

# The options by name; those of movement ops are in MOVES.
HELP = {
    "shape": "the tensor's global shape, such as 4,16,32",
    "mesh": "the device mesh, such as dp=2,tp=4",
    "placements": 'placements, one for each mesh dim, such as "S(0),S(2)" or "_S(0,2),R"; or a '
    "layout (devices, local), in the form that explain prints",
    "view": "the new shape, such as 4,16,8,4; one dim may be -1",
    "permute": "the new order of dims, such as 1,0,2",
    "expand": "the expanded shape",
    "repeat": "how often to repeat each dim",
    **{name: f"a movement op, {of.form}; write {of.example}" for name, of in MOVES.items()},
    "from": 'as for --placements, such as "S(0),S(1)" or "P(sum),R"; with --model, placements for '
    'patterns of names, such as "*norm*=R; *=S(0)"',
    "to": "the placements after a redistribution",
    "to-mesh": "the mesh of --to, if it differs from --mesh; write its ranks after @, such as "
    "gen=4@8-11 or gen=2@3,9 (default: ranks from 0 on), as those of --mesh then",
    "model": "in place of --shape: a JSON file with the dtype, sizes and tensors of a model, such "
    "as examples/models/dense_8b.json",
    "network": "one link for each mesh dim, such as infiniband,nvlink, or flat:ALPHA,BETA "
    "(latency in seconds, and seconds for each element); default: $USE_CUTE_NETWORK, or if this "
    "is not set, nvlink within hosts of eight devices and infiniband between hosts",
    "groups": "the sets of mesh dims that have a common process group, such as dp+tp,cp+tp, or "
    "none (default: all sets)",
    "memory-limit": "the largest number of elements that a device may hold at once in this "
    "package's plan; with --model and for a step, the number of bytes",
    "output": "write the picture to a .svg, .png or .txt file",
    "itemsize": "the number of bytes of an element, or a dtype such as bfloat16 (default: 4)",
    "layout": "draw a layout, such as (4,6):(1,4); with --shape, draw the sharding that the "
    "layout describes",
    "width": "the columns of the picture (default: those of the terminal)",
    "layers": "the number of layers of the model: estimate calls the function with layers=2, 3 "
    "and 4, and computes the figures of N layers from these runs if each layer adds the same",
    "rank": "the rank that is run (default: 0)",
    "free": "parameters: also choose the placements of the weights",
    "fixed": "lines whose ops the plan leaves as they are, such as model.py:31,model.py:40",
    "each-line": "also count what each line that changes saves alone; one more run for each",
    "plan": "a file that plan-step --save wrote: what the step receives as planned is shown too",
    "save": "write the result to this file: a plan, for USE_CUTE_PLAN or cute_sharding.planned; a "
    "profile or an estimate as a page with charts (.html), as data (.json) or as text (.txt)",
    "device": "cuda: run the step as on GPUs over NCCL (default); cpu: as on CPUs over gloo",
    "settings": "the columns to show, such as PyTorch,all; default: %(default)s",
    "m": "the program is the name of a module, as for python -m",
    "program": "a Python file or, with -m, a module",
    "arguments": "the program's own arguments",
    "step": "module:function or file.py:function: a function that takes a DeviceMesh, builds a "
    "model, and returns one step as a function without arguments",
}
# What else argparse is told of some of them.
HOW: dict[str, dict[str, Any]] = {
    **{name: {"type": int} for name in ("memory-limit", "width", "layers")},
    "itemsize": {"default": "4"},
    "rank": {"type": int, "default": 0},
    "fixed": {"default": ""},
    "free": {"choices": ("parameters",)},
    "each-line": {"action": "store_true"},
    "device": {"choices": ("cuda", "cpu"), "default": "cuda"},
    "settings": {"default": ",".join(SETTINGS)},
    "m": {"action": "store_true", "dest": "is_module"},
    "arguments": {"nargs": REMAINDER},
}


class Command(NamedTuple):
    """A command: what it is for, what runs it, and its arguments by name: options that it needs
    with a ``!``, and those that are given without a name in brackets.
    """

    text: str
    run: Callable[[Namespace], Printed]
    arguments: str


COMMANDS = {
    "explain": Command(
        "show the placements and layouts before and after a view or a movement op, and the cost "
        "of the op",
        run_explain,
        f"shape! mesh! placements! {' '.join((*VIEWS, *MOVES))}",
    ),
    "plan": Command(
        "show the steps and the cost of a redistribution",
        run_plan,
        "shape mesh! model from! to! to-mesh network groups memory-limit output itemsize",
    ),
    "draw": Command(
        "draw which rank has each element; for a view, before and after the view; for a "
        "redistribution, how many elements each rank sends to each other rank",
        run_draw,
        f"shape mesh placements {' '.join(VIEWS)} to to-mesh layout output width",
    ),
    "stats": Command(
        "run a Python program; at its end, print on rank 0 how its ops were decided, and how many "
        "elements views, movement ops and redistributions received",
        run_stats,
        "m [program] [arguments]",
    ),
    "profile": Command(
        "run a Python program; at its end, print on rank 0 which lines communicate: bytes, "
        "collectives, time and cause",
        run_profile,
        "m network plan save [program] [arguments]",
    ),
    "estimate": Command(
        "predict the communication, time and memory of one step of a program on a mesh of any "
        "size, with PyTorch alone and with each flag; needs no device",
        run_estimate,
        "[step] mesh! network layers rank device settings plan save",
    ),
    "plan-step": Command(
        "plan one step of a program: which values are redistributed where, so that the step "
        "receives the fewest bytes; needs no device",
        run_plan_step,
        "[step] mesh! network rank device memory-limit free fixed each-line save",
    ),
    "status": Command(
        "show the settings in force and the reason for each, the release of torch, and the "
        "replaced parts of torch; also check a view and a redistribution",
        run_status,
        "",
    ),
}


class Parser(ArgumentParser):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        # As argparse of Python 3.14 on: -1,4 is a value, and no option.
        self._negative_number_matcher = re.compile(r"-\.?\d")

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
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.text, description=command.text)
        added.add_argument("--json", action="store_true", help="print JSON instead of text")
        for each in command.arguments.split():
            argument = each.strip("![]")
            names = [argument] if "[" in each else [f"-{'-' * (len(argument) > 1)}{argument}"]
            names += ["--dtype"] if argument == "itemsize" else []
            how: dict[str, Any] = {"help": HELP[argument], **HOW.get(argument, {})}
            if "!" in each:
                how["required"] = True
            added.add_argument(*names, **how)
    return parser


# The errors that a bad argument may cause, and the error for a missing library.
CAUGHT = (ValueError, IndexError, TypeError, RuntimeError, OverflowError, ImportError)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        parser = make_parser()
        given = parser.parse_args(argv)
        if given.command is None:
            print_lines(parser.format_help().rstrip())
            return 2
        result = COMMANDS[given.command].run(given)
    except CAUGHT as error:
        print(f"cute_sharding: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if result.text is not None:
        print_lines(json.dumps(result.data, indent=2) if given.json else result.text)
    return result.code


def print_lines(text: str) -> None:
    """Print, also into a pipe whose reader stops early, as ``head`` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

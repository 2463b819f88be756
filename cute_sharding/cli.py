"""``python -m cute_sharding``: ``explain`` shows what a view does to a sharding, as layouts;
``plan`` how a redistribution goes, by plan and as torch would do it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from itertools import islice, product
from math import isfinite, prod
from typing import Any

from cute_sharding import status
from cute_sharding.layout import Fact, Layout, LayoutError, asking, assuming, symbol
from cute_sharding.layout.size import size
from cute_sharding.layout.symbolic import parse_expr
from cute_sharding.redistribution import Network, free_targets
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding, parse_placements
from cute_sharding.views import BY_OP, View, carry

# Who holds what is listed device by device, and interval by interval, only up to here.
DEVICES_SHOWN = 16
RUNS_LISTED = 64
RUNS_SHOWN = 4

REDUCTIONS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
# The named links are timed for elements of two bytes.
LINK_ITEMSIZE = 2


class UsageError(Exception):
    """A bad argument, in one line."""


def _sizes(text: str, what: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*(-?\d+\s*(,\s*-?\d+\s*)*)?,?\s*", text):
        raise UsageError(f"{what} {text!r}: write integers separated by commas, such as 4,16,32")
    return tuple(int(part) for part in text.split(",") if part.strip())


def _mesh(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names, sizes = [], []
    for i, part in enumerate(text.split(",")):
        match = re.fullmatch(r"\s*(?:([A-Za-z_]\w*)=)?(\d+)\s*", part)
        if not match or int(match[2]) < 1:
            raise UsageError(
                f"--mesh {text!r}: write name=size or size, separated by commas, such as dp=2,tp=4"
            )
        names.append(match[1] or f"mesh{i}")
        sizes.append(int(match[2]))
    if len(set(names)) < len(names):
        raise UsageError(f"--mesh {text!r}: give each mesh dim a name of its own")
    return tuple(names), tuple(sizes)


def _view(arguments: argparse.Namespace, shape: tuple[int, ...]) -> tuple[str, View]:
    chosen = {
        name: getattr(arguments, name)
        for name in ("view", "permute", "expand", "repeat")
        if getattr(arguments, name) is not None
    }
    if len(chosen) != 1:
        raise UsageError("give one of --view, --permute, --expand, --repeat")
    ((name, text),) = chosen.items()
    sizes = _sizes(text, f"--{name}")
    op = {
        "view": "Tensor.view",
        "permute": "torch.permute",
        "expand": "Tensor.expand",
        "repeat": "Tensor.repeat",
    }[name]
    return f"{name}{sizes}", BY_OP[op].view(shape, sizes)


def explain(
    what: str,
    view: View,
    names: Sequence[str],
    mesh: tuple[int, ...],
    placements: tuple[Shard | Replicate | Partial, ...],
) -> dict[str, Any]:
    """The propagation as data: before, the view, after, or what would make it free."""
    before = Sharding(tuple(view.input_shape), mesh, placements)
    carried = carry(view, before.cuts, mesh)
    result: dict[str, Any] = {
        "op": what,
        "mesh": dict(zip(names, mesh)),
        "input": _described(before, names),
    }
    result["view"] = {
        "layout": repr(view.layout),
        "source_dims": list(view.source),
        "source_sizes": list(view.sizes),
        "target_shape": list(view.output_shape),
    }
    if carried.blocked is None:
        after = Sharding(view.output_shape, mesh, _replaced(placements, carried.cuts))
        result["free"] = True
        result["how"] = "tracing" if carried.traced else "algebra"
        result["output"] = _described(after, names)
        return result
    result["free"] = False
    result["blocked_by"] = {
        "mesh_dim": names[carried.blocked],
        "placement": str(placements[carried.blocked]),
    }
    fixed = [m for m, p in enumerate(placements) if isinstance(p, Partial)]
    result["redistribute_to"] = [
        {
            "input": list(map(str, _replaced(placements, t.source))),
            "output": list(map(str, _replaced(placements, t.output))),
            "received_elements": t.received,
        }
        for t in free_targets(view, before.cuts, mesh, fixed=fixed)
    ]
    return result


def _replaced(
    placements: Sequence[Shard | Replicate | Partial], cuts: Sequence[tuple[int, int] | None]
) -> tuple[Shard | Replicate | Partial, ...]:
    return tuple(
        Shard(*cut) if cut is not None else p if isinstance(p, Partial) else Replicate()
        for p, cut in zip(placements, cuts)
    )


def _described(sharding: Sharding, names: Sequence[str]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "shape": list(sharding.shape),
        "placements": list(map(str, sharding.placements)),
    }
    try:
        layout = sharding.layout
        described["layout"] = repr(layout)
        described["modes"] = _modes(layout, sharding, names)
    except LayoutError as error:
        described["layout"] = None
        described["no_layout"] = str(error)
    devices = list(islice(product(*map(range, sharding.mesh)), DEVICES_SHOWN))
    described["devices"] = [
        {
            "coordinate": dict(zip(names, device)),
            "local_shape": list(sharding.local_shape(device)),
            "rows": [_rows(sharding, dim, device) for dim in range(len(sharding.shape))],
        }
        for device in devices
    ]
    described["devices_not_shown"] = prod(sharding.mesh) - len(devices)
    return described


def _rows(
    sharding: Sharding, dim: int, device: tuple[int, ...]
) -> list[list[int]] | dict[str, int]:
    """The intervals of rows held; of very many, the first and the last row, and how many rows."""
    if prod(cut[1] for cut in sharding.cuts if cut is not None and cut[0] == dim) <= RUNS_LISTED:
        return [list(run) for run in sharding.rows(dim, device)]
    count = sharding.local_shape(device)[dim]
    if not count:
        return []
    return {
        "first": sharding.row_at(dim, device, 0),
        "last": sharding.row_at(dim, device, count - 1),
        "count": count,
    }


def _modes(layout: Layout, sharding: Sharding, names: Sequence[str]) -> list[dict[str, Any]]:
    modes = []
    for name, mode, placement in zip(names, layout[0], sharding.placements):
        modes.append(
            {
                "mode": repr(mode),
                "owner": name,
                "of": f"dim {placement.dim}" if isinstance(placement, Shard) else str(placement),
            }
        )
    for dim, mode in enumerate(layout[1]):
        modes.append({"mode": repr(mode), "owner": "local", "of": f"dim {dim}"})
    return modes


def _show(result: dict[str, Any]) -> str:
    mesh = ", ".join(f"{name}={n}" for name, n in result["mesh"].items())
    lines = [f"{result['op']} on mesh ({mesh})", ""]
    if "for_all" in result:
        for_all = result["for_all"]
        outcome = "not free" if for_all["output"] is None else f"[{', '.join(for_all['output'])}]"
        lines += [
            f"for all sizes: ({', '.join(for_all['shape'])}) -> "
            f"({', '.join(for_all['target_shape'])}): {outcome}"
        ]
        lines += [
            f"  assumed: {', '.join(for_all['assumed']) or 'nothing'} (and that sizes that are 2 "
            "or more now are so)",
            "",
            "for the sizes at hand:",
            "",
        ]
    lines += _show_side("before", result["input"])
    lines += ["", f"the view, output index -> input index: {result['view']['layout']}", ""]
    if result["free"]:
        how = (
            "blocks of one size: by layout algebra"
            if result["how"] == "algebra"
            else "sizes that do not divide: traced and proved on each kind of device"
        )
        lines += _show_side("after", result["output"])
        lines += ["", f"free: no communication ({how})"]
    else:
        by = result["blocked_by"]
        lines.append(
            f"not free: what {by['placement']} gives to the devices of mesh dim {by['mesh_dim']} "
            "is no Shard or _StridedShard of the output"
        )
        lines.append("redistribute the input first, cheapest first:")
        for t in result["redistribute_to"]:
            lines.append(
                f"  [{', '.join(t['input'])}]  then the output is [{', '.join(t['output'])}]; a "
                f"device receives up to {t['received_elements']} elements"
            )
    return "\n".join(lines)


def _show_side(title: str, side: dict[str, Any]) -> list[str]:
    lines = [f"{title}: shape {tuple(side['shape'])}, placements [{', '.join(side['placements'])}]"]
    if side["layout"] is None:
        lines.append(f"  {side['no_layout']}")
    else:
        lines.append(f"  layout (devices, local) -> flat index: {side['layout']}")
        width = max((len(m["mode"]) for m in side["modes"]), default=0)
        lines += [f"    {m['mode']:<{width}}  {m['owner']:<6} {m['of']}" for m in side["modes"]]
    lines.append("  who holds what (rows of each dim):")
    for device in side["devices"]:
        at = ", ".join(f"{name}={c}" for name, c in device["coordinate"].items())
        rows = " x ".join(_show_rows(runs) for runs in device["rows"]) or "the scalar"
        lines.append(f"    {at}: local {tuple(device['local_shape'])}  {rows}")
    if side["devices_not_shown"]:
        lines.append(f"    ... and {side['devices_not_shown']} more devices")
    return lines


def _show_rows(runs: list[list[int]] | dict[str, int]) -> str:
    if isinstance(runs, dict):
        return f"[{runs['count']} rows from {runs['first']} to {runs['last']}]"
    shown = [f"{start}:{stop}" for start, stop in runs[:RUNS_SHOWN]]
    more = [f"... {len(runs) - RUNS_SHOWN} more"] if len(runs) > RUNS_SHOWN else []
    return f"[{', '.join(shown + more)}]"


# -- plan ------------------------------------------------------------------------------------------


def plan(
    source: Sharding,
    target: Sharding,
    names: Sequence[str],
    network: Network,
    *,
    memory_limit: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    itemsize: int = 4,
) -> dict[str, Any]:
    """The redistribution as data: our plan and what torch's own would do, in elements and seconds
    on one network.
    """
    from cute_sharding import plan_redistribution
    from cute_sharding.dtensor.stock import stock_plan

    shape, mesh = source.shape, source.mesh
    before, after = _of_torch(source), _of_torch(target)
    ours = (
        plan_redistribution(
            shape, mesh, before, after, memory_limit=memory_limit, network=network, groups=groups
        )
        .named(names)
        .to_dict()
    )
    torchs = stock_plan(shape, mesh, before, after).to_dict(network, names)
    ours = {key: value for key, value in ours.items() if key not in ("shape", "mesh")}
    for side in (ours, torchs):
        for what in ("received", "peak"):
            elements = side[f"{what}_elements"]
            side[f"{what}_bytes"] = None if elements is None else elements * itemsize
    return {
        "shape": list(shape),
        "mesh": dict(zip(names, mesh)),
        "from": list(map(str, source.placements)),
        "to": list(map(str, target.placements)),
        "itemsize": itemsize,
        "memory_limit": memory_limit,
        "network": [
            {"alpha": link.alpha, "beta": link.beta} for link in map(network.link, range(len(mesh)))
        ],
        "ours": ours,
        "torch": torchs,
        "ours_over_torch": {
            key: ours[key] / torchs[key] if torchs[key] else None
            for key in ("received_elements", "peak_elements", "seconds")
        },
    }


def _of_torch(sharding: Sharding) -> list[Any]:
    from cute_sharding.dtensor import compat
    from cute_sharding.dtensor.placements import placement_of

    return [
        compat.Partial(p.reduce_op) if isinstance(p, Partial) else placement_of(cut)
        for p, cut in zip(sharding.placements, sharding.cuts)
    ]


def _sharding(text: str, option: str, shape: tuple[int, ...], mesh: tuple[int, ...]) -> Sharding:
    placements = parse_placements(text)
    for p in placements:
        if isinstance(p, Partial) and p.reduce_op not in REDUCTIONS:
            raise UsageError(f"{option}: unknown reduction {p}: use one of {', '.join(REDUCTIONS)}")
    try:
        return Sharding(shape, mesh, placements)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def _network(text: str | None, mesh: tuple[int, ...], itemsize: int) -> Network:
    if text is not None and text.startswith("flat:"):
        try:
            alpha, beta = map(float, text.removeprefix("flat:").split(","))
        except ValueError:
            alpha = beta = float("nan")
        if not (isfinite(alpha) and isfinite(beta)):
            raise UsageError(
                f"--network {text!r}: write flat:ALPHA,BETA, the latency and the seconds for each "
                "element, such as flat:1e-6,3.2e-10"
            )
        return Network.flat(alpha=alpha, beta=beta)
    network = (
        Network.default(mesh)
        if text is None
        else Network.named([name.strip() for name in text.split(",")]).checked(mesh)
    )
    return network.scaled(itemsize / LINK_ITEMSIZE)


def _show_plan(result: dict[str, Any]) -> str:
    mesh = ", ".join(f"{name}={n}" for name, n in result["mesh"].items())
    ours, torchs, itemsize = result["ours"], result["torch"], result["itemsize"]
    shape, source, target = (
        ", ".join(items)
        for items in ([f"{n:,}" for n in result["shape"]], result["from"], result["to"])
    )
    links = ", ".join(
        f"{name} {link['alpha']:.3g} s + {link['beta']:.3g} s an element"
        for name, link in zip(result["mesh"], result["network"])
    )
    lines = [
        f"({shape}) on mesh ({mesh}), elements of {itemsize} bytes: [{source}] -> [{target}]",
        f"network: {links}",
    ]
    lines += [
        "",
        "by plan, with layouts (devices, local) -> flat index:",
        *_show_steps(ours, itemsize),
    ]
    if ours["lower_bound"] is not None:
        lines.append(
            f"  lower bound: {_amount(ours['lower_bound'], itemsize)}, what some device needs and "
            "does not hold"
        )
    lines += ["", "by torch itself:"]
    if torchs["error"] is not None:
        return "\n".join([*lines, f"  raises: {torchs['error']}"])
    lines += _show_steps(torchs, itemsize)
    if torchs["misread"]:
        lines.append(
            "  beware: torch may misread these _StridedShard placements, and then raise or give "
            "wrong data"
        )
    ratio = {
        key: "-" if value is None else f"{value:.3g}"
        for key, value in result["ours_over_torch"].items()
    }
    return "\n".join(
        [
            *lines,
            "",
            f"ours over torch's: received {ratio['received_elements']}, memory "
            f"{ratio['peak_elements']}, time {ratio['seconds']}",
        ]
    )


def _show_steps(side: dict[str, Any], itemsize: int) -> list[str]:
    lines = []
    for step in side["steps"]:
        where = f" on {', '.join(step['mesh_dims'])}" if step["mesh_dims"] else ""
        change = f", {step['change']}" if "change" in step else ""
        cost = (
            f": receives {_amount(step['received_elements'], itemsize)}, "
            f"{_seconds(step['seconds'])}"
            if step["communicates"]
            else ": nothing to receive"
        )
        lines.append(f"  {step['kind']}{where}{change}{cost}")
        if step.get("source_layout") is not None and step["target_layout"] is not None:
            lines += [f"    from {step['source_layout']}", f"    to   {step['target_layout']}"]
    count = side["collectives"]
    total = (
        f"{count} collective{'s' * (count != 1)}, {_amount(side['received_elements'], itemsize)} "
        f"received, {_seconds(side['seconds'])}"
    )
    held = f"at most {_amount(side['peak_elements'], itemsize)} held at once"
    return [*lines, f"  {'in all' if side['steps'] else 'nothing to do'}: {total}", f"  {held}"]


def _amount(elements: int, itemsize: int) -> str:
    size, unit = float(elements * itemsize), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{elements:,} element{'s' * (elements != 1)} ({size:.4g} {unit})"


def _seconds(seconds: float) -> str:
    if seconds >= 0.1 or not seconds:
        return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


# -- the command line ------------------------------------------------------------------------------


class _Numbers:
    """Sizes by name, with the numbers that they have in the case at hand: what is asked of them,
    beyond their being 2 or more, is kept (an Oracle).
    """

    def __init__(self, text: str) -> None:
        self.numbers = {
            symbol(name): int(number)
            for name, number in re.findall(r"([A-Za-z_]\w*)\s*=\s*(\d+)", text)
        }
        self.asked: list[str] = []

    def number(self, expr: Any) -> int:
        return expr if isinstance(expr, int) else int(expr.subs(self.numbers))

    def holds(self, fact: Fact) -> bool:
        left, right = self.number(fact.left), self.number(fact.right)
        answer = {
            "divides": lambda: left % right == 0,
            "equal": lambda: left == right,
            "at most": lambda: left <= right,
        }[fact.relation]()
        return answer is fact.holds

    def assume(self, fact: Fact) -> None:
        self.asked.append(str(fact))


def _explain_for_all(
    arguments: argparse.Namespace, placements: tuple[Shard | Replicate | Partial, ...]
) -> dict[str, Any]:
    """The propagation where sizes have names (``b=2,s=8,16``): the output's placements for all
    sizes that satisfy what is assumed.
    """
    sizes = _Numbers(arguments.shape)
    if 0 in sizes.numbers.values():
        raise UsageError(
            f"--shape {arguments.shape!r}: a size with a name stands for sizes of 1 or more; write "
            "0 without a name"
        )
    if arguments.view is None:
        raise UsageError(
            "sizes with names go with --view, such as --shape b=2,s=8,16 --view b*s,16"
        )

    def read(text: str) -> tuple[Any, ...]:
        exprs = tuple([parse_expr(part) for part in text.split(",") if part.strip()])
        unknown = {
            str(name)
            for expr in exprs
            if not isinstance(expr, int)
            for name in expr.free_symbols - sizes.numbers.keys()
        }
        if unknown:
            raise UsageError(
                f"{', '.join(sorted(unknown))}: give each size that has a name a number in "
                "--shape, such as b=2"
            )
        return exprs

    named = read(re.sub(r"=\s*\d+", "", arguments.shape)), read(arguments.view)
    _, mesh = _mesh(arguments.mesh)
    with (
        asking(sizes),
        assuming(*(f"{name} >= 2" for name, number in sizes.numbers.items() if number >= 2)),
    ):
        shape, target = (tuple([size(n) for n in exprs]) for exprs in named)
        view = BY_OP["Tensor.view"].view(shape, target)
        cuts = tuple(
            [(p.dim, p.split_factor) if isinstance(p, Shard) else None for p in placements]
        )
        carried = carry(view, cuts, mesh)
    for name, exprs in zip(("shape", "view"), named):
        setattr(arguments, name, ",".join(str(sizes.number(n)) for n in exprs))
    output = None
    if carried.blocked is None:
        output = [
            str(p)
            if cut is None and isinstance(p, Partial)
            else "R"
            if cut is None
            else f"S({cut[0]})"
            if isinstance(cut[1], int) and cut[1] == 1
            else f"_S({cut[0]},{cut[1]})"
            for p, cut in zip(placements, carried.cuts)
        ]
    return {
        "shape": [str(n) for n in named[0]],
        "target_shape": [str(n) for n in named[1]],
        "output": output,
        "assumed": sizes.asked,
    }


def _run_explain(arguments: argparse.Namespace) -> dict[str, Any]:
    placements = parse_placements(arguments.placements)
    for_all = _explain_for_all(arguments, placements) if "=" in arguments.shape else None
    shape = _sizes(arguments.shape, "--shape")
    names, mesh = _mesh(arguments.mesh)
    Sharding(shape, mesh, placements)  # checks that they fit together
    what, view = _view(arguments, shape)
    result = explain(what, view, names, mesh, placements)
    return result if for_all is None else {**result, "for_all": for_all}


def _run_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = _sizes(arguments.shape, "--shape")
    names, mesh = _mesh(arguments.mesh)
    source, target = (
        _sharding(getattr(arguments, name), f"--{name}", shape, mesh) for name in ("from", "to")
    )
    if arguments.itemsize < 1:
        raise UsageError(f"--itemsize {arguments.itemsize}: an element has at least one byte")
    network = _network(arguments.network, mesh, arguments.itemsize)
    groups = (
        None
        if arguments.groups is None
        else [_group(text, names) for text in arguments.groups.split(",") if text != "none"]
    )
    return plan(
        source,
        target,
        names,
        network,
        memory_limit=arguments.memory_limit,
        groups=groups,
        itemsize=arguments.itemsize,
    )


def _group(text: str, names: Sequence[str]) -> tuple[int, ...]:
    """Mesh dims by name or number, joined by +."""
    known = {**{str(m): m for m in range(len(names))}, **{name: m for m, name in enumerate(names)}}
    unknown = [name for name in text.split("+") if name not in known]
    if unknown:
        raise UsageError(
            f"--groups {text}: the mesh has no dim {', '.join(unknown)}; give sets of "
            f"{', '.join(names)}, such as {'+'.join(names[:2])}, or none"
        )
    return tuple([known[name] for name in text.split("+")])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:  # one line, as for every other bad argument
        raise UsageError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m cute_sharding",
        description="Shardings, views and redistributions as CuTe layouts.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)

    def command(name: str, text: str, run: Any, show: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run, show=show, is_well=lambda result: True)
        added.add_argument("--json", action="store_true", help="print JSON instead of text")
        return added

    def of_shardings(added: argparse.ArgumentParser) -> argparse.ArgumentParser:
        added.add_argument(
            "--shape",
            required=True,
            help="the tensor's global shape, such as 4,16,32; explain also takes b=4,s=16,32",
        )
        added.add_argument("--mesh", required=True, help="the device mesh, such as dp=2,tp=4")
        return added

    added = of_shardings(
        command(
            "explain",
            "what a view does to a sharding: layouts, placements, who holds what",
            _run_explain,
            _show,
        )
    )
    added.add_argument(
        "--placements",
        required=True,
        help='one for each mesh dim, such as "S(0),S(2)" or "_S(0,2),R"',
    )
    added.add_argument(
        "--view", help="the new shape, such as 4,16,8,4; one dim may be -1 (write --view=-1,4)"
    )
    added.add_argument("--permute", help="the new order of dims, such as 1,0,2")
    added.add_argument("--expand", help="the expanded shape")
    added.add_argument("--repeat", help="how often to repeat each dim")

    added = of_shardings(
        command(
            "plan",
            "how a redistribution goes and what it costs, by plan and as torch itself would do it",
            _run_plan,
            _show_plan,
        )
    )
    added.add_argument(
        "--from",
        required=True,
        metavar="PLACEMENTS",
        help='one for each mesh dim, such as "S(0),S(1)" or "P(sum),R"',
    )
    added.add_argument("--to", required=True, metavar="PLACEMENTS", help='such as "S(0),S(0)"')
    links = (
        "flat:ALPHA,BETA (latency, and seconds for each element), or a link for each mesh dim, "
        "such as infiniband,nvlink"
    )
    added.add_argument(
        "--network",
        help=(
            f"{links}; by default nvlink within hosts of eight devices and infiniband between. "
            "Links have so many bytes a second"
        ),
    )
    added.add_argument(
        "--groups",
        metavar="SETS",
        help=(
            "the sets of mesh dims that have a process group together, such as dp+tp,cp+tp, or "
            "none; by default all"
        ),
    )
    added.add_argument(
        "--memory-limit",
        type=int,
        metavar="ELEMENTS",
        help="the most elements that a device may hold at once in our plan",
    )
    added.add_argument(
        "--itemsize", type=int, default=4, metavar="BYTES", help="bytes of an element (default 4)"
    )

    text = (
        "what is switched on and why, on which torch, what of it is replaced, and whether a view "
        "and a redistribution come out right here"
    )
    command("status", text, lambda arguments: status.status(), status.show).set_defaults(
        is_well=status.is_well
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = _parser().parse_args(argv)
        if arguments.command is None:
            raise UsageError("give a command: explain, plan or status (see --help)")
        result = arguments.run(arguments)
    except (UsageError, ValueError, IndexError, TypeError, RuntimeError, OverflowError) as error:
        print(f"cute_sharding: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if arguments.json else arguments.show(result))
    return 0 if arguments.is_well(result) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The command ``explain``: the sharding before and after a view, as data and as text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice, product
from math import prod
from typing import Any

from cute_sharding.exchange import local_elements
from cute_sharding.layout import Layout, LayoutError
from cute_sharding.propagation.views import carry, cheapest, parts_that_do_not_divide
from cute_sharding.relations.table import BY_OP
from cute_sharding.relations.view import View
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding
from cute_sharding.tools.cli import moves
from cute_sharding.tools.cli.arguments import (
    VIEWS,
    UsageError,
    asked_view,
    read_mesh,
    read_sharding,
    read_sizes,
    read_view,
)
from cute_sharding.tools.cli.for_all import explain_for_all, without_names
from cute_sharding.tools.cli.torchs import by_torch, show_by_torch
from cute_sharding.tools.drawing.views import replaced

# The most devices and intervals of rows to list.
DEVICES_SHOWN = 16
RUNS_LISTED = 64
RUNS_SHOWN = 4


def run_explain(arguments: argparse.Namespace) -> dict[str, Any]:
    if not any(getattr(arguments, name) is not None for name in (*VIEWS, *moves.OPTIONS)):
        views, movements = (", --".join(known) for known in (VIEWS, moves.OPTIONS))
        raise UsageError(f"explain needs one op: give one of the options --{views}, --{movements}")
    names, mesh = read_mesh(arguments.mesh)
    shape = read_sizes(without_names(arguments.shape), "--shape")
    before = read_sharding(arguments.placements, "--placements", shape, mesh)
    moved = moves.asked(arguments)
    if moved is not None:
        text = getattr(arguments, moved)
        result = moves.explain_move(moved, text, names, before, _described)
        if arguments.torch:
            result["torch"] = by_torch(*moves.of_torch(moved, text, before))
        return result
    for_all = None
    if "=" in arguments.shape:
        for_all, arguments = explain_for_all(arguments, before.placements)
    what, view = read_view(arguments, shape)
    result = explain(what, view, names, mesh, before.placements)
    if arguments.torch:
        name, sizes = asked_view(arguments)
        row = BY_OP[VIEWS[name]]
        result["torch"] = by_torch(row.overloads[0], before, [sizes])
    return result if for_all is None else {**result, "for_all": for_all}


def explain(
    what: str,
    view: View,
    names: Sequence[str],
    mesh: tuple[int, ...],
    placements: tuple[Shard | Replicate | Partial, ...],
) -> dict[str, Any]:
    """The propagation as data: the sharding before and after the view; if the view is not free,
    the placements that its input is redistributed to.
    """
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
        after = Sharding(view.output_shape, mesh, replaced(placements, carried.cuts))
        result["free"] = True
        result["how"] = "tracing" if carried.traced else "algebra"
        result["output"] = _described(after, names)
        return result
    result["free"] = False
    result["blocked_by"] = {
        "mesh_dim": names[carried.blocked],
        "placement": str(placements[carried.blocked]),
        "split": parts_that_do_not_divide(view, before.cuts, mesh, carried.blocked),
    }
    fixed = [m for m, p in enumerate(placements) if isinstance(p, Partial)]
    target = cheapest(view, before.cuts, mesh, fixed=fixed)
    result["redistribute_to"] = [
        {
            "input": list(map(str, replaced(placements, target.source))),
            "output": list(map(str, replaced(placements, target.output))),
            "received_elements": target.received,
        }
    ]
    return result


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
    described["balance"] = _balance(sharding)
    return described


def _balance(sharding: Sharding) -> dict[str, int] | None:
    """If the fullest device holds more elements than with plain shards of the same dims: the
    elements that it holds, and the elements that it would hold. None otherwise.
    """
    plain = [None if cut is None else (cut[0], 1) for cut in sharding.cuts]
    most, fair = (
        local_elements(sharding.shape, cuts, sharding.mesh) for cuts in (sharding.cuts, plain)
    )
    return {"most": most, "plain": fair} if most > fair else None


def _rows(
    sharding: Sharding, dim: int, device: tuple[int, ...]
) -> list[list[int]] | dict[str, int]:
    """The intervals of rows that the device holds. For very many intervals, the first row, the last
    row and the number of rows.
    """
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


def show_explain(result: dict[str, Any]) -> str:
    lines = [
        moves.show_move(result, _show_side) if "outputs" in result else _show_view(result),
    ]
    if "torch" in result:
        lines.append(show_by_torch(result["torch"], result["input"]["placements"]))
    return "\n".join(lines)


def _show_view(result: dict[str, Any]) -> str:
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
            f"  assumed: {', '.join(for_all['assumed']) or 'nothing'} (and sizes that are 2 or "
            "more now are always 2 or more)",
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
            else "blocks of different sizes: proved for each kind of device"
        )
        lines += _show_side("after", result["output"])
        lines += ["", f"free: no communication ({how})"]
    else:
        by = result["blocked_by"]
        lines.append(
            "not free: no Shard or _StridedShard of the output gives the devices of mesh dim "
            f"{by['mesh_dim']} the elements that {by['placement']} gives them"
        )
        if by["split"]:
            lines.append(by["split"])
        lines.append("the input is redistributed first, to the cheapest placements:")
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
    lines.append("  rows of each dim, by device:")
    for device in side["devices"]:
        at = ", ".join(f"{name}={c}" for name, c in device["coordinate"].items())
        rows = " x ".join(_show_rows(runs) for runs in device["rows"]) or "the scalar"
        lines.append(f"    {at}: local {tuple(device['local_shape'])}  {rows}")
    if side["devices_not_shown"]:
        lines.append(f"    ... and {side['devices_not_shown']} more devices")
    if side["balance"] is not None:
        lines.append(
            f"  out of balance: the fullest device holds {side['balance']['most']} elements; "
            f"with plain shards of the same dims, it would hold {side['balance']['plain']}"
        )
    return lines


def _show_rows(runs: list[list[int]] | dict[str, int]) -> str:
    if isinstance(runs, dict):
        return f"[{runs['count']} rows from {runs['first']} to {runs['last']}]"
    shown = [f"{start}:{stop}" for start, stop in runs[:RUNS_SHOWN]]
    more = [f"... {len(runs) - RUNS_SHOWN} more"] if len(runs) > RUNS_SHOWN else []
    return f"[{', '.join(shown + more)}]"

"""``plan``: how a redistribution goes, by plan and as torch would do it, as data and as text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from cute_sharding._settings import network_in_force
from cute_sharding.cli.arguments import (
    read_group,
    read_itemsize,
    read_mesh,
    read_network,
    read_sharding,
    read_sizes,
)
from cute_sharding.redistribution import Network
from cute_sharding.sharding import Partial, Sharding


def run_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = read_sizes(arguments.shape, "--shape")
    names, mesh = read_mesh(arguments.mesh)
    source, target = (
        read_sharding(getattr(arguments, name), f"--{name}", shape, mesh) for name in ("from", "to")
    )
    itemsize = read_itemsize(arguments.itemsize)
    text = arguments.network
    network = None if text is None else read_network(text, mesh, itemsize)
    groups = (
        None
        if arguments.groups is None
        else [read_group(text, names) for text in arguments.groups.split(",") if text != "none"]
    )
    return plan(
        source,
        target,
        names,
        network,
        memory_limit=arguments.memory_limit,
        groups=groups,
        itemsize=itemsize,
    )


def plan(
    source: Sharding,
    target: Sharding,
    names: Sequence[str],
    network: Network | None,
    *,
    memory_limit: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    itemsize: int = 4,
) -> dict[str, Any]:
    """The redistribution as data: our plan and what torch's own would do, in elements and seconds
    on one network; None: the one by which programs choose, and as they do.
    """
    from cute_sharding import plan_redistribution
    from cute_sharding.dtensor.reports.stock import stock_plan

    shape, mesh = source.shape, source.mesh
    before, after = of_torch(source), of_torch(target)
    ours = (
        plan_redistribution(
            shape,
            mesh,
            before,
            after,
            memory_limit=memory_limit,
            network=network,
            groups=groups,
            itemsize=itemsize,
        )
        .named(names)
        .to_dict()
    )
    if network is None:
        network = Network.of_elements(mesh, network_in_force(), itemsize)
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


def of_torch(sharding: Sharding) -> list[Any]:
    """The placements as torch's own."""
    from cute_sharding.dtensor.replaced import tensor_specs
    from cute_sharding.dtensor.run.placements import placement_of

    return [
        tensor_specs.Partial(p.reduce_op) if isinstance(p, Partial) else placement_of(cut)
        for p, cut in zip(sharding.placements, sharding.cuts)
    ]


def show_plan(result: dict[str, Any]) -> str:
    mesh = ", ".join(f"{name}={n}" for name, n in result["mesh"].items())
    ours, torchs, itemsize = result["ours"], result["torch"], result["itemsize"]
    shape, source, target = (
        ", ".join(items)
        for items in ([f"{n:_}" for n in result["shape"]], result["from"], result["to"])
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
        least = _in_bytes(ours["lower_bound"], itemsize)
        lines.append(f"  lower bound: {least}, what some device needs and does not hold")
    lines += ["", "by torch itself:"]
    if torchs["error"] is not None:
        return "\n".join([*lines, f"  raises: {torchs['error']}"])
    # Where sizes do not divide torch pads, in copies that are not counted.
    lines += _show_steps(torchs, itemsize, most="at least")
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


def _show_steps(side: dict[str, Any], itemsize: int, *, most: str = "at most") -> list[str]:
    lines = []
    for step in side["steps"]:
        where = f" on {', '.join(step['mesh_dims'])}" if step["mesh_dims"] else ""
        change = f", {step['change']}" if "change" in step else ""
        cost = (
            f": receives {_in_bytes(step['received_elements'], itemsize)}, "
            f"{_seconds(step['seconds'])}"
            if step["communicates"]
            else ": nothing to receive"
        )
        lines.append(f"  {step['kind']}{where}{change}{cost}")
        if step.get("source_layout") is not None and step["target_layout"] is not None:
            lines += [f"    from {step['source_layout']}", f"    to   {step['target_layout']}"]
    count = side["collectives"]
    total = (
        f"{count} collective{'s' * (count != 1)}, {_in_bytes(side['received_elements'], itemsize)} "
        f"received, {_seconds(side['seconds'])}"
    )
    held = f"{most} {_in_bytes(side['peak_elements'], itemsize)} held at once"
    return [*lines, f"  {'in all' if side['steps'] else 'nothing to do'}: {total}", f"  {held}"]


def _in_bytes(elements: int, itemsize: int) -> str:
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

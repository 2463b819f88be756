"""The command ``plan``: a redistribution by this package's plan and by torch's own steps, as data
and as text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeAlias

from cute_sharding._settings import network_in_force
from cute_sharding._words import bytes_text, counted
from cute_sharding.exchange import Mesh, Network
from cute_sharding.exchange.meshes import ExchangePlan
from cute_sharding.exchange.placed import ranks_text
from cute_sharding.sharding import Partial, Sharding
from cute_sharding.tools.cli.arguments import (
    UsageError,
    read_group,
    read_itemsize,
    read_mesh,
    read_mesh_of_ranks,
    read_network,
    read_sharding,
    read_sizes,
)
from cute_sharding.tools.cli.models import run_model_plan, show_model_plan


def run_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.model is not None:
        return run_model_plan(arguments)
    if arguments.output is not None:
        raise UsageError(
            "plan --output needs --model: for a picture of one tensor, use draw --to --output"
        )
    if arguments.shape is None:
        raise UsageError("plan needs --shape, or --model FILE")
    shape = read_sizes(arguments.shape, "--shape")
    if arguments.to_mesh is not None:
        names, on = read_mesh_of_ranks(arguments.mesh)
        to_names, to = read_mesh_of_ranks(arguments.to_mesh, "--to-mesh")
        mesh, to_mesh = on.sizes, to.sizes
    else:
        names, mesh = read_mesh(arguments.mesh)
        to_mesh = mesh
    source = read_sharding(getattr(arguments, "from"), "--from", shape, mesh)
    target = read_sharding(arguments.to, "--to", shape, to_mesh)
    itemsize = read_itemsize(arguments.itemsize)
    text = arguments.network
    network = None if text is None else read_network(text, mesh, itemsize)
    groups = (
        None
        if arguments.groups is None
        else [read_group(text, names) for text in arguments.groups.split(",") if text != "none"]
    )
    given = {"memory_limit": arguments.memory_limit, "groups": groups, "itemsize": itemsize}
    if arguments.to_mesh is not None and to != on:
        return plan_between((source, on, names), (target, to, to_names), network, **given)
    return plan(source, target, names, network, **given)


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
    """The redistribution as data: this package's plan and torch's own steps, in elements and
    seconds on one network. None: the network of the settings, by which programs choose plans.
    """
    from cute_sharding.dtensor import plan_redistribution
    from cute_sharding.tools.stock import stock_plan

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
        **_sides(ours, torchs, itemsize),
    }


# A sharding on the ranks of a mesh, and the names of its dims.
Side: TypeAlias = "tuple[Sharding, Mesh, Sequence[str]]"


def plan_between(
    before: Side,
    after: Side,
    network: Network | None,
    *,
    memory_limit: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    itemsize: int = 4,
) -> dict[str, Any]:
    """As :func:`plan`, from one mesh to another mesh; ``network`` belongs to the first mesh."""
    from cute_sharding.dtensor import plan_redistribution
    from cute_sharding.tools.stock import stock_plan_between

    (source, mesh, names), (target, to_mesh, to_names) = before, after
    src, dst = of_torch(source), of_torch(target)
    found = plan_redistribution(
        source.shape,
        mesh,
        src,
        dst,
        target_mesh=to_mesh,
        memory_limit=memory_limit,
        network=network,
        groups=groups,
        itemsize=itemsize,
    )
    assert isinstance(found, ExchangePlan), "the meshes are two"
    torchs = stock_plan_between(source.shape, mesh, src, to_mesh, dst)
    ours = found.named(names, to_names).to_dict()
    links = [found.network.link(m) for m in range(len(mesh.sizes))]
    between = found.network.slowest
    return {
        "shape": ours.pop("shape"),
        "mesh": dict(zip(names, mesh.sizes)),
        "ranks": ours.pop("source_mesh")["ranks"],
        "to_mesh": dict(zip(to_names, to_mesh.sizes)),
        "to_ranks": ours.pop("target_mesh")["ranks"],
        "from": list(map(str, source.placements)),
        "to": list(map(str, target.placements)),
        "itemsize": itemsize,
        "memory_limit": memory_limit,
        "network": [{"alpha": link.alpha, "beta": link.beta} for link in links],
        "network_between": {"alpha": between.alpha, "beta": between.beta},
        **_sides(ours, torchs.to_dict(found.network, names), itemsize),
    }


def _sides(ours: dict[str, Any], torchs: dict[str, Any], itemsize: int) -> dict[str, Any]:
    """This package's plan and torch's steps, with bytes, and the ratios of the two."""
    for side in (ours, torchs):
        for what in ("received", "peak"):
            elements = side[f"{what}_elements"]
            side[f"{what}_bytes"] = None if elements is None else elements * itemsize
    return {
        "ours": ours,
        "torch": torchs,
        "ours_over_torch": {
            key: ours[key] / torchs[key] if torchs[key] else None
            for key in ("received_elements", "peak_elements", "seconds")
        },
    }


def of_torch(sharding: Sharding) -> list[Any]:
    """The placements as torch's own objects."""
    from cute_sharding.dtensor.replaced import tensor_specs
    from cute_sharding.dtensor.run.placements import placement_of

    return [
        tensor_specs.Partial(p.reduce_op) if isinstance(p, Partial) else placement_of(cut)
        for p, cut in zip(sharding.placements, sharding.cuts)
    ]


def show_plan(result: dict[str, Any]) -> str:
    if "model" in result:
        return show_model_plan(result)
    ours, torchs, itemsize = result["ours"], result["torch"], result["itemsize"]
    shape, source, target = (
        ", ".join(items)
        for items in ([f"{n:_}" for n in result["shape"]], result["from"], result["to"])
    )
    links = ", ".join(
        f"{name} {link['alpha']:.3g} s + {link['beta']:.3g} s an element"
        for name, link in zip(result["mesh"], result["network"])
    )
    mesh = _mesh_text(result["mesh"], result.get("ranks"))
    if "to_mesh" in result:
        to_mesh, between = (result[name] for name in ("to_mesh", "network_between"))
        links += (
            f"; between the meshes {between['alpha']:.3g} s + {between['beta']:.3g} s an element"
        )
        lines = [
            f"({shape}), elements of {itemsize} bytes: [{source}] on {mesh} -> [{target}] on "
            f"{_mesh_text(to_mesh, result['to_ranks'])}"
        ]
    else:
        lines = [f"({shape}) on {mesh}, elements of {itemsize} bytes: [{source}] -> [{target}]"]
    lines.append(f"network: {links}")
    lines += [
        "",
        "by plan, with layouts (devices, local) -> flat index:",
        *_show_steps(ours, itemsize),
    ]
    if ours["lower_bound"] is not None:
        least = _in_bytes(ours["lower_bound"], itemsize)
        lines.append(f"  lower bound: {least}, the most that a device needs and does not hold")
    lines += ["", "by torch itself:"]
    if torchs["error"] is not None:
        return "\n".join([*lines, f"  raises: {torchs['error']}"])
    # For uneven shards, torch pads, and the copies for this are not counted.
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


def _mesh_text(mesh: dict[str, int], ranks: Sequence[int] | None) -> str:
    """The mesh in the form of the option ``--mesh``."""
    at = "" if ranks is None else f"@{ranks_text(ranks, '-', ',', most=None)}"
    return f"mesh ({', '.join(f'{name}={n}' for name, n in mesh.items())}){at}"


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
        if step.get("most_peers"):
            peers = step["most_peers"]
            lines.append(f"    at most {peers} peer{'s' * (peers != 1)} a rank")
    count = side["collectives"]
    total = (
        f"{count} collective{'s' * (count != 1)}, {_in_bytes(side['received_elements'], itemsize)} "
        f"received, {_seconds(side['seconds'])}"
    )
    held = f"{most} {_in_bytes(side['peak_elements'], itemsize)} held at once"
    return [*lines, f"  {'in all' if side['steps'] else 'nothing to do'}: {total}", f"  {held}"]


def _in_bytes(elements: int, itemsize: int) -> str:
    return f"{counted(elements, 'element')} ({bytes_text(elements * itemsize, 4)})"


def _seconds(seconds: float) -> str:
    if seconds >= 0.1 or not seconds:
        return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"

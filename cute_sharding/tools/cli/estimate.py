"""The command ``estimate``: the communication and memory of a step, with each flag."""

from __future__ import annotations

import argparse
from typing import Any

from cute_sharding.tools.cli.arguments import UsageError, read_mesh
from cute_sharding.tools.estimate import estimate
from cute_sharding.tools.estimate.values import SETTINGS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "step",
        metavar="MODULE:FUNCTION",
        help="a function that takes a DeviceMesh, builds a model, and returns one step as a "
        "function without arguments; FILE.py:FUNCTION is also allowed",
    )
    parser.add_argument("--mesh", required=True, help="the device mesh, such as dp=64,tp=8")
    parser.add_argument(
        "--network",
        help="one link for each mesh dim, such as infiniband,nvlink, or flat:ALPHA,BETA "
        "(default: nvlink within hosts of eight devices, infiniband between hosts)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="the number of layers of the model: estimate calls the function with layers=2, 3 "
        "and 4, and computes the figures of N layers from these runs if each layer adds the same",
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="the rank that estimate runs (default: 0)"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda: run the step as on GPUs over NCCL (default); cpu: as on CPUs over gloo",
    )
    parser.add_argument(
        "--settings",
        metavar="NAMES",
        help=f"the columns to show, such as PyTorch,all; default: {','.join(SETTINGS)}",
    )
    parser.add_argument(
        "--details",
        metavar="NAMES",
        help="the columns for which to show layers, lines and ops (default: PyTorch and the "
        "setting with the least time)",
    )


def run_estimate(arguments: argparse.Namespace) -> dict[str, Any]:
    """The estimate as data, and as text."""
    names, sizes = read_mesh(arguments.mesh)
    has_names = "=" in arguments.mesh
    chosen = [*SETTINGS] if arguments.settings is None else _names(arguments.settings)
    if not {*chosen} <= {*SETTINGS}:
        raise UsageError(
            f"--settings {arguments.settings}: give one or more of {', '.join(SETTINGS)}"
        )
    details = [] if arguments.details is None else _names(arguments.details)
    if not {*details} <= {*chosen}:
        raise UsageError(f"--details {arguments.details}: give one or more of {', '.join(chosen)}")
    found = estimate(
        arguments.step,
        dict(zip(names, sizes)) if has_names else sizes,
        network=arguments.network,
        layers=arguments.layers,
        rank=arguments.rank,
        device=arguments.device,
        settings=chosen,
    )
    return {**found.to_dict(), "text": found.with_details(*details).splitlines()}


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",")]


def show_estimate(result: dict[str, Any]) -> str:
    return "\n".join(result["text"])

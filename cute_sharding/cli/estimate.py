"""``estimate``: what a step of a program would receive and hold, with each flag."""

from __future__ import annotations

import argparse
from typing import Any

from cute_sharding.cli.arguments import UsageError, read_mesh
from cute_sharding.estimates import estimate
from cute_sharding.estimates.values import SETTINGS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "step",
        metavar="MODULE:FUNCTION",
        help="a function that gets a DeviceMesh, makes a model, and returns one step as a function "
        "without arguments; or FILE.py:FUNCTION",
    )
    parser.add_argument("--mesh", required=True, help="the device mesh, such as dp=64,tp=8")
    parser.add_argument(
        "--network",
        help="a link for each mesh dim, such as infiniband,nvlink, or flat:ALPHA,BETA; by default "
        "nvlink within hosts of eight devices and infiniband between",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="how many layers the model has: the function is called with layers=2, 3 and 4, and "
        "the others are counted, where each adds the same",
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank that is run (default 0)")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda: what GPUs would run over NCCL (default); cpu: CPUs over gloo",
    )
    parser.add_argument(
        "--settings",
        metavar="NAMES",
        help=f"which columns, such as PyTorch,all; by default {','.join(SETTINGS)}",
    )
    parser.add_argument(
        "--details",
        metavar="NAMES",
        help="of which columns layers, lines and the ops to change are shown; by default of "
        "PyTorch and of the best one",
    )


def run_estimate(arguments: argparse.Namespace) -> dict[str, Any]:
    """The estimate as data, and as text."""
    names, sizes = read_mesh(arguments.mesh)
    has_names = "=" in arguments.mesh
    chosen = [*SETTINGS] if arguments.settings is None else _names(arguments.settings)
    if not {*chosen} <= {*SETTINGS}:
        raise UsageError(f"--settings {arguments.settings}: give some of {', '.join(SETTINGS)}")
    details = [] if arguments.details is None else _names(arguments.details)
    if not {*details} <= {*chosen}:
        raise UsageError(f"--details {arguments.details}: give some of {', '.join(chosen)}")
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

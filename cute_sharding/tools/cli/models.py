"""The command ``plan --model``: the plan for the tensors of a model between two meshes, as data and
as text.
"""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cute_sharding.exchange import Mesh, Network
from cute_sharding.models import PlacedTensor, plan_models
from cute_sharding.models.shapes import Shape, shapes_of
from cute_sharding.tools.cli.arguments import UsageError, read_mesh_of_ranks
from cute_sharding.tools.cli.draw import saved
from cute_sharding.tools.drawing import draw


def run_model_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan for the model in a file."""
    if arguments.shape is not None or arguments.groups is not None:
        raise UsageError("--model gives the shapes of all tensors: leave out --shape and --groups")
    _, mesh = read_mesh_of_ranks(arguments.mesh)
    to_mesh = mesh
    if arguments.to_mesh is not None:
        _, to_mesh = read_mesh_of_ranks(arguments.to_mesh, "--to-mesh")
    tensors = _read(arguments.model)
    source = _placed(tensors, getattr(arguments, "from"), "--from", mesh)
    target = _placed(tensors, arguments.to, "--to", to_mesh)
    network = None if arguments.network is None else Network.parse(arguments.network)
    plan = plan_models(
        ((name, source[name], target[name]) for name in tensors), arguments.memory_limit, network
    )
    result = {"model": arguments.model, **plan.to_dict(), "text": str(plan).splitlines()}
    if arguments.output is not None:
        result["saved"] = saved(draw(plan), arguments.output)
    return result


def show_model_plan(result: dict[str, Any]) -> str:
    lines = list(result["text"])
    if "saved" in result:
        lines.append(f"wrote {result['saved']}")
    return "\n".join(lines)


def _read(path: str) -> dict[str, Shape]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {path!r} cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise UsageError(
            f"--model {path!r} is not a JSON object: write an object with dtype, sizes and tensors"
        )
    return shapes_of(found)


def _placed(
    tensors: dict[str, Shape], text: str, option: str, mesh: Mesh
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

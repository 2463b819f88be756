"""The command ``draw``: a picture of a sharding, a view, a redistribution or a layout, on the
terminal or in a file.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from cute_sharding.layout import Layout
from cute_sharding.tools.cli.arguments import (
    VIEWS,
    UsageError,
    read_mesh,
    read_mesh_of_ranks,
    read_sharding,
    read_sizes,
    read_view,
)
from cute_sharding.tools.drawing import Picture, draw
from cute_sharding.tools.drawing.dispatch import holding_picture
from cute_sharding.tools.drawing.holding import Holding, title_of
from cute_sharding.tools.drawing.moves import plan_picture
from cute_sharding.tools.drawing.plans import planned, planned_between
from cute_sharding.tools.drawing.views import view_picture

# The smallest width of a picture, in columns.
NARROWEST = 20


def run_draw(arguments: argparse.Namespace) -> dict[str, Any]:
    """The picture as data, and as text if no ``--output`` is given. Writes the picture to
    ``--output``.
    """
    if arguments.width is not None and arguments.width < NARROWEST:
        raise UsageError(f"--width {arguments.width}: a picture needs {NARROWEST} columns or more")
    picture = _picture(arguments)
    result: dict[str, Any] = {"picture": picture.to_dict(), "saved": None}
    if arguments.output is not None:
        result["saved"] = saved(picture, arguments.output)
    elif not arguments.json:
        result["text"] = _on_terminal(picture, arguments.width)
    return result


def saved(picture: Picture, path: str) -> str:
    """Writes the picture, and returns the path.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        return str(picture.save(path))
    except OSError as error:
        raise UsageError(f"--output {path}: {error}") from None


def _picture(arguments: argparse.Namespace) -> Picture:
    shape = None if arguments.shape is None else read_sizes(arguments.shape, "--shape")
    views = [name for name in VIEWS if getattr(arguments, name) is not None]
    if arguments.to_mesh is not None and arguments.to is None:
        raise UsageError("--to-mesh needs --to: give the placements on the mesh of --to-mesh")
    if len(views) + (arguments.to is not None) > 1:
        raise UsageError(
            "give only one of --view, --permute, --expand, --repeat, --to: a picture shows only "
            "one change"
        )
    if arguments.layout is not None:
        if views or arguments.to is not None or arguments.placements is not None:
            raise UsageError(f"with --layout, leave out --placements, --to, --{', --'.join(VIEWS)}")
        return draw(Layout.parse(arguments.layout), shape=shape)
    missing = [name for name in ("shape", "mesh", "placements") if not _given(arguments, name)]
    if shape is None or missing:
        raise UsageError(
            f"draw needs --shape, --mesh and --placements, or only --layout: also give "
            f"--{', --'.join(missing)}"
        )
    if views:
        names, sizes = read_mesh(arguments.mesh)
        sharding = read_sharding(arguments.placements, "--placements", shape, sizes)
        what, view = read_view(arguments, shape)
        return view_picture(sharding, view, names, what)
    if arguments.to_mesh is not None or "@" in arguments.mesh:
        return _picture_of_ranks(arguments, shape)
    names, sizes = read_mesh(arguments.mesh)
    sharding = read_sharding(arguments.placements, "--placements", shape, sizes)
    to = None if arguments.to is None else read_sharding(arguments.to, "--to", shape, sizes)
    return draw(sharding, to=to, names=names)


def _picture_of_ranks(arguments: argparse.Namespace, shape: tuple[int, ...]) -> Picture:
    """The picture of a tensor on a mesh with given ranks, or of its move to another mesh."""
    names, mesh = read_mesh_of_ranks(arguments.mesh)
    sharding = read_sharding(arguments.placements, "--placements", shape, mesh.sizes)
    if arguments.to is None:
        holding = replace(Holding.of(sharding, names), ranks=mesh.ranks)
        return holding_picture(holding, title_of(sharding, holding))
    to_names, to_mesh = names, mesh
    if arguments.to_mesh is not None:
        to_names, to_mesh = read_mesh_of_ranks(arguments.to_mesh, "--to-mesh")
    to = read_sharding(arguments.to, "--to", shape, to_mesh.sizes)
    if to_mesh == mesh:
        return plan_picture(planned(sharding, to), names, mesh.ranks)
    return draw(planned_between(sharding, mesh, to, to_mesh).named(names, to_names))


def _given(arguments: argparse.Namespace, name: str) -> bool:
    return getattr(arguments, name) is not None


def _on_terminal(picture: Picture, width: int | None) -> str:
    """The picture in the width of the terminal, and with colours if the terminal has colours."""
    from cute_sharding.tools.drawing.terminal import for_output

    return for_output(picture, width)


def show_draw(result: dict[str, Any]) -> str:
    saved = result["saved"]
    return f"wrote {saved}" if saved is not None else result["text"]

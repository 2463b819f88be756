"""Converts the text of command-line arguments to values, and raises errors for bad arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

from cute_sharding._words import counted
from cute_sharding.exchange import Mesh, Network
from cute_sharding.models import PlacedTensor
from cute_sharding.models.shapes import Shape, shapes_of


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
            f"--itemsize {text!r} is neither a number of bytes nor a PyTorch dtype, such as "
            "bfloat16"
        )
    return found


def read_model(path: str) -> dict[str, Shape]:
    """The shapes and dtypes of the tensors of a model, from a JSON file."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
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

"""Converts the text of command-line arguments to values, and raises errors for bad arguments."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from math import prod

from cute_sharding._words import counted
from cute_sharding.exchange import Mesh, Network
from cute_sharding.layout import Layout
from cute_sharding.relations.table import BY_OP
from cute_sharding.relations.view import View
from cute_sharding.sharding import Partial, Sharding, parse_placements

REDUCTIONS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


class UsageError(ValueError):
    """A bad argument. The message is one line."""


def read_sizes(text: str, what: str) -> tuple[int, ...]:
    inside = _without_brackets(text)
    if not re.fullmatch(r"\s*(-?[\d_]+\s*(,\s*-?[\d_]+\s*)*)?,?\s*", inside):
        raise UsageError(f"{what} {text!r}: write integers separated by commas, such as 4,16,32")
    return tuple(int(part) for part in inside.split(",") if part.strip())


def _without_brackets(text: str) -> str:
    """Sizes without the brackets of their printed form: ``(4, 16)``, ``[4, 16]``, ``torch.Size([4,
    16])``.
    """
    match = re.fullmatch(r"\s*(?:torch\.Size)?(?:\(\[(.*)\]\)|\((.*)\)|\[(.*)\])\s*", text)
    return text if match is None else next(part for part in match.groups() if part is not None)


def read_mesh(text: str, option: str = "--mesh") -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names and the sizes of mesh dims."""
    if "@" in text:
        raise UsageError(
            f"{option} {text!r}: the ranks after @ would not be used: write "
            f"{text.partition('@')[0].strip()}"
        )
    names, sizes = [], []
    for i, part in enumerate(_without_brackets(text).removesuffix(",").split(",")):
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
        return names, Mesh(sizes, range(prod(sizes)))
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
    if len(runs) == 1:
        return names, Mesh(sizes, runs[0])
    ranks = [rank for run in runs for rank in run]
    for rank, times in Counter(ranks).items():
        if times > 1:
            raise UsageError(f"{option} {text!r}: rank {rank} is given twice: write each rank once")
    return names, Mesh(sizes, ranks)


# The options for views, with the rows of the rule table.
VIEWS = {
    "view": "Tensor.view",
    "permute": "torch.permute",
    "expand": "Tensor.expand",
    "repeat": "Tensor.repeat",
}


def asked_view(arguments: argparse.Namespace) -> tuple[str, tuple[int, ...]]:
    """The option of the view, and the sizes that it has."""
    chosen = {
        name: getattr(arguments, name) for name in VIEWS if getattr(arguments, name) is not None
    }
    if len(chosen) != 1:
        options = ", ".join(f"--{name}" for name in VIEWS)
        raise UsageError(f"give exactly one of the options {options}")
    ((name, text),) = chosen.items()
    return name, read_sizes(text, f"--{name}")


def read_view(arguments: argparse.Namespace, shape: tuple[int, ...]) -> tuple[str, View]:
    name, sizes = asked_view(arguments)
    return f"{name}{sizes}", BY_OP[VIEWS[name]].view(shape, sizes)


def read_sharding(
    text: str, option: str, shape: tuple[int, ...], mesh: tuple[int, ...]
) -> Sharding:
    """A sharding from the text of its placements, or of its layout."""
    try:
        if ":" in text:
            sharding = Sharding.read(Layout.parse(text), shape)
            if sharding.mesh != mesh:
                raise UsageError(
                    f"{option}: the layout {text} needs a mesh of sizes {sharding.mesh}, but the "
                    f"given mesh has sizes {mesh}"
                )
            return sharding
        placements = parse_placements(text, len(shape))
        for p in placements:
            if isinstance(p, Partial) and p.reduce_op not in REDUCTIONS:
                raise UsageError(
                    f"{option}: the reduction of {p} is unknown: use one of {', '.join(REDUCTIONS)}"
                )
        return Sharding(shape, mesh, placements)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def read_network(text: str, mesh: tuple[int, ...], itemsize: int) -> Network:
    network = Network.parse(text).checked(mesh)
    return network if text.startswith("flat:") else network.of_itemsize(itemsize)


def read_group(text: str, names: Sequence[str]) -> tuple[int, ...]:
    """Mesh dims, given by name or number, and joined by +."""
    known = {**{str(m): m for m in range(len(names))}, **{name: m for m, name in enumerate(names)}}
    unknown = [name for name in text.split("+") if name not in known]
    if unknown:
        raise UsageError(
            f"--groups {text}: the mesh has no dim {', '.join(unknown)}. Join names of mesh dims "
            f"({', '.join(names)}) by +, such as {'+'.join(names[:2])}. For groups of single "
            "mesh dims only, write --groups none"
        )
    return tuple([known[name] for name in text.split("+")])


def read_itemsize(text: str) -> int:
    """The bytes of an element, from a number or the name of a dtype of torch."""
    if re.fullmatch(r"\s*-?\d+\s*", text):
        if int(text) < 1:
            raise UsageError(f"--itemsize {text}: an element has at least one byte")
        return int(text)
    from cute_sharding.dtensor.run.plan import itemsize_of

    found = itemsize_of(text.strip())
    if found is None:
        raise UsageError(
            f"--itemsize {text!r} is neither a number of bytes nor a PyTorch dtype, such as "
            "bfloat16"
        )
    return found

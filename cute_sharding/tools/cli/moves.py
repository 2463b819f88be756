"""The command ``explain`` for movement ops: the elements of the result that each device already
has, and the elements that each device sends to each other device.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from cute_sharding.exchange import Exchange
from cute_sharding.propagation.movements import chosen
from cute_sharding.relations.table import BY_OP
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding
from cute_sharding.tools.cli.arguments import UsageError

Placements = tuple["Shard | Replicate | Partial", ...]
# The most devices whose messages are listed.
DEVICES_SHOWN = 16


class Option(NamedTuple):
    """An option of ``explain``: the form of its numbers, the least count of numbers, and the op for
    these numbers. A number that is left out is None.
    """

    form: str
    least: int
    op: str
    arguments: Callable[..., tuple[Any, ...]]
    example: str


def _pads(ndim: int, dim: int, before: int, after: int) -> tuple[Any, ...]:
    return ((0, 0) * (ndim - 1 - dim % ndim) + (before, after),)


# By name. ``arguments`` is called with the number of dims, and the numbers.
OPTIONS = {
    "slice": Option(
        "DIM,START,STOP,STEP",
        2,
        "Tensor.__getitem__",
        lambda _, dim, start, stop=None, step=1: (dim, start, stop, step or 1),
        "1,1 for x[:, 1:]",
    ),
    "select": Option(
        "DIM,INDEX", 2, "torch.select", lambda _, *numbers: numbers, "1,-1 for x[:, -1]"
    ),
    "split": Option(
        "DIM,ROWS",
        2,
        "torch.split",
        lambda _, dim, rows: (rows, dim),
        "1,6 for parts of 6 rows of dim 1",
    ),
    "roll": Option(
        "DIM,SHIFT",
        2,
        "torch.roll",
        lambda _, dim, shift: ([shift], [dim]),
        "0,1 to roll dim 0 by 1 row",
    ),
    "flip": Option("DIM,...", 1, "torch.flip", lambda _, *dims: (dims,), "0 to flip dim 0"),
    "pad": Option(
        "DIM,BEFORE,AFTER", 3, "torch.nn.functional.pad", _pads, "1,2,0 for 2 rows before dim 1"
    ),
    "reflect": Option(
        "DIM,BEFORE,AFTER",
        3,
        "torch.nn.functional.pad, reflect",
        _pads,
        "1,2,0 to pad dim 1 by reflection of 2 rows",
    ),
    "diagonal": Option(
        "OFFSET,DIM,DIM",
        1,
        "torch.diagonal",
        lambda _, offset, one=0, other=1: (offset, one, other),
        "0,0,1 for the main diagonal of dims 0 and 1",
    ),
    "cat": Option(
        "DIM,TIMES",
        1,
        "torch.cat",
        lambda _, dim, times=2: (dim,),
        "1,2 for a cat of x with itself along dim 1",
    ),
    "unfold": Option(
        "DIM,SIZE,STEP",
        3,
        "Tensor.unfold",
        lambda _, *numbers: numbers,
        "1,3,1 for windows of 3 rows of dim 1, with step 1",
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, option in OPTIONS.items():
        parser.add_argument(
            f"--{name}", metavar=option.form, help=f"a movement op; write {option.example}"
        )


def asked(arguments: argparse.Namespace) -> str | None:
    """The option of the movement op.

    Raises:
        UsageError: there are several movement ops, or also a view.
    """
    names = [name for name in OPTIONS if getattr(arguments, name) is not None]
    views = [name for name in ("view", "permute", "expand", "repeat") if getattr(arguments, name)]
    if len(names) > 1 or (names and views):
        raise UsageError(f"give exactly one of the options --{', --'.join([*names, *views])}")
    return names[0] if names else None


def explain_move(
    name: str,
    text: str,
    names: Sequence[str],
    before: Sharding,
    described: Callable[[Sharding, Sequence[str]], dict[str, Any]],
) -> dict[str, Any]:
    """The movement as data: before, after, and the messages."""
    numbers = _read(name, text)
    shape, mesh, option = before.shape, before.mesh, OPTIONS[name]
    times = (numbers[1] or 2) if name == "cat" and len(numbers) > 1 else 2
    given: Any = [shape] * times if name == "cat" else shape
    try:
        move = BY_OP[option.op].move(given, *option.arguments(len(shape), *numbers))
    except (IndexError, TypeError) as error:
        raise UsageError(f"--{name} {text!r}: {error}") from None
    if move is None:
        raise UsageError(f"--{name} {text!r} does not fit a tensor of shape {shape}")
    choice = chosen(move, (before.cuts,) * len(move.inputs), mesh, anyway=True)
    assert choice is not None
    return {
        "op": f"{name}({text})",
        "mesh": dict(zip(names, mesh)),
        "input": described(before, names),
        "free": not choice.exchange.communicates,
        "received_elements": choice.exchange.received_elements,
        "mesh_dims": [names[m] for m in choice.exchange.mesh_dims],
        "messages": _messages(choice.exchange),
        "outputs": [
            described(Sharding(x, mesh, _placements(before.placements, cuts)), names)
            for x, cuts in zip(move.outputs, choice.cuts)
        ],
    }


def of_torch(name: str, text: str, before: Sharding) -> tuple[str, Sharding, list[Any], int | None]:
    """The movement op in torch: the aten overload, the sharding of its operand, the further
    arguments, and the number of times that the operand is given.
    """
    numbers, option, ndim = _read(name, text), OPTIONS[name], len(before.shape)
    given = list(option.arguments(ndim, *numbers))
    overloads = BY_OP[option.op].overloads
    if name in ("pad", "reflect"):
        # Pads begin at the last dim. Some ops have an overload for each number of padded dims.
        given = [[*given[0]]]
        overloads = tuple([o for o in overloads if f"{len(given[0]) // 2}d." in o]) or overloads
    times = (numbers[1] or 2) if name == "cat" and len(numbers) > 1 else 2
    return overloads[0], before, given, times if name == "cat" else None


def _read(name: str, text: str) -> list[int | None]:
    if not re.fullmatch(r"\s*-?\d+\s*(,\s*(-?\d+)?\s*)*", text):
        raise UsageError(f"--{name} {text!r}: write {OPTIONS[name].form}")
    numbers = [int(part) if part.strip() else None for part in text.split(",")]
    if len(numbers) < OPTIONS[name].least:
        raise UsageError(f"--{name} {text!r}: write {OPTIONS[name].form}")
    return numbers


def _placements(given: Placements, cuts: Sequence[tuple[int, int] | None]) -> Placements:
    return tuple(
        p if isinstance(p, Partial) else Replicate() if cut is None else Shard(*cut)
        for p, cut in zip(given, cuts)
    )


def _messages(exchange: Exchange) -> list[dict[str, Any]]:
    """For each of the first devices, the elements that other devices send to it."""
    mesh, found = exchange.sources[0].mesh, []
    for receiver in islice(mesh.ranks, DEVICES_SHOWN):
        sent: dict[int, int] = defaultdict(int)
        for message in exchange.sent_to(receiver):
            sent[message.peer] += message.size
        for sender, size in sorted(sent.items()):
            one, other = mesh.coordinates(sender), mesh.coordinates(receiver)
            found.append({"from": [*(one or ())], "to": [*(other or ())], "elements": size})
    return found


def show_move(result: dict[str, Any], show_side: Callable[[str, dict[str, Any]], list[str]]) -> str:
    mesh = ", ".join(f"{name}={n}" for name, n in result["mesh"].items())
    lines = [f"{result['op']} on mesh ({mesh})", "", *show_side("before", result["input"]), ""]
    several = len(result["outputs"]) > 1
    for k, output in enumerate(result["outputs"]):
        lines += [*show_side(f"after, part {k}" if several else "after", output), ""]
    if result["free"]:
        return "\n".join([*lines, "free: no communication"])
    lines.append(
        f"one exchange on {', '.join(result['mesh_dims'])}: a device receives up to "
        f"{result['received_elements']} elements"
    )
    for message in result["messages"]:
        sender, receiver = (tuple(message[side]) for side in ("from", "to"))
        lines.append(f"  {sender} -> {receiver}: {message['elements']}")
    return "\n".join(lines)

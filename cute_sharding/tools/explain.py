"""``explain``: what a view or a movement op does to a sharding: what each device holds before and
after, and what is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple, TypeAlias

from cute_sharding._html import of_text
from cute_sharding._words import columns
from cute_sharding.exchange import Exchange, local_elements
from cute_sharding.layout import LayoutError
from cute_sharding.propagation.movements import chosen
from cute_sharding.propagation.views import carry, cheapest, parts_that_do_not_divide
from cute_sharding.relations.table import BY_OP
from cute_sharding.relations.view import View
from cute_sharding.sharding import Partial, Replicate, Shard, Sharding, format_placements
from cute_sharding.tools.inputs import (
    VIEWS,
    DTensorLike,
    PlacementsLike,
    names_of,
    sharding_of,
    sharding_of_dtensor,
    view_of,
)

# The numbers of an op. None stands for a number that is left out, as in ``x[:, 1:]``.
Numbers: TypeAlias = "int | Sequence[int | None]"
# The most devices to list, and the most intervals of rows to list and to print.
DEVICES = 16
RUNS_LISTED, RUNS_SHOWN = 64, 4


class MoveOption(NamedTuple):
    """A movement op: the form of its numbers, an example, the row of the op table, and the
    arguments for the row, from the number of dims and the numbers.
    """

    form: str
    example: str
    op: str
    arguments: Callable[..., tuple[Any, ...]]


def _pads(ndim: int, dim: int, before: int, after: int) -> tuple[Any, ...]:
    return ((0, 0) * (ndim - 1 - dim % ndim) + (before, after),)


def _slice(ndim: int, dim: int, start: int, stop: Any = None, step: Any = 1) -> tuple[Any, ...]:
    return dim, start, stop, step or 1


MOVES = {
    "slice": MoveOption("DIM,START,STOP,STEP", "1,1 for x[:, 1:]", "Tensor.__getitem__", _slice),
    "select": MoveOption(
        "DIM,INDEX", "1,-1 for x[:, -1]", "torch.select", lambda _, dim, index: (dim, index)
    ),
    "split": MoveOption(
        "DIM,ROWS", "1,6 for parts of 6 rows of dim 1", "torch.split", lambda _, d, rows: (rows, d)
    ),
    "roll": MoveOption(
        "DIM,SHIFT", "0,1 to roll dim 0 by 1 row", "torch.roll", lambda _, d, by: ([by], [d])
    ),
    "flip": MoveOption("DIM,...", "0 to flip dim 0", "torch.flip", lambda _, *dims: (dims,)),
    "pad": MoveOption(
        "DIM,BEFORE,AFTER", "1,2,0 for 2 rows before dim 1", "torch.nn.functional.pad", _pads
    ),
    "reflect": MoveOption(
        "DIM,BEFORE,AFTER",
        "1,2,0 to pad dim 1 by reflection of 2 rows",
        "torch.nn.functional.pad, reflect",
        _pads,
    ),
    "diagonal": MoveOption(
        "OFFSET,DIM,DIM",
        "0,0,1 for the main diagonal of dims 0 and 1",
        "torch.diagonal",
        lambda _, offset, one=0, other=1: (offset, one, other),
    ),
    "cat": MoveOption(
        "DIM,TIMES",
        "1,2 for a cat of x with itself along dim 1",
        "torch.cat",
        lambda _, dim, times=2: (dim,),
    ),
    "unfold": MoveOption(
        "DIM,SIZE,STEP",
        "1,3,1 for windows of 3 rows of dim 1, with step 1",
        "Tensor.unfold",
        lambda _, dim, size, step: (dim, size, step),
    ),
}


@dataclass(frozen=True)
class Explanation:
    """The explanation of an op on a sharding, which you can print.

    Attributes:
        op: the op with its numbers.
        names: the names of the mesh dims.
        input: the sharding of the tensor.
        outputs: the shardings of the results.
        is_free: whether the op needs no communication.
        received_elements: the most elements that a device receives.
        redistributed: what the input is redistributed to first; None for a view that is free, and
            for a movement op, whose missing elements are sent in one exchange.
        why: why a view is not free, line by line.
        exchange: who sends what, of a movement op.
    """

    op: str
    names: tuple[str, ...]
    input: Sharding
    outputs: tuple[Sharding, ...]
    is_free: bool = True
    received_elements: int = 0
    redistributed: Sharding | None = None
    why: tuple[str, ...] = ()
    exchange: Exchange | None = None

    @property
    def output(self) -> tuple[str, ...]:
        """The placements of the result, or of the first result."""
        return tuple(map(str, self.outputs[0].placements))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """For each of the first devices, the elements that other devices send to it."""
        if self.exchange is None:
            return []
        mesh, found = self.exchange.sources[0].mesh, []
        for receiver in islice(mesh.ranks, DEVICES):
            sent: Counter[int] = Counter()
            for message in self.exchange.sent_to(receiver):
                sent[message.peer] += message.size
            found += [
                {"from": [*mesh.device(one)], "to": [*mesh.device(receiver)], "elements": size}
                for one, size in sorted(sent.items())
            ]
        return found

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        to = self.redistributed
        return {
            "op": self.op,
            "mesh": dict(zip(self.names, self.input.mesh)),
            "input": _described(self.input, self.names),
            "outputs": [_described(output, self.names) for output in self.outputs],
            "free": self.is_free,
            "received_elements": self.received_elements,
            "redistribute_to": None if to is None else list(map(str, to.placements)),
            "why": list(self.why),
            "messages": self.messages,
        }

    def _repr_html_(self) -> str:
        return of_text(str(self))

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={n}" for name, n in zip(self.names, self.input.mesh))
        lines = [f"{self.op} on mesh ({mesh})", *self._cost(), ""]
        lines += [*_side("before", self.input, self.names), ""]
        for k, output in enumerate(self.outputs):
            title = f"after, part {k}" if len(self.outputs) > 1 else "after"
            lines += [*_side(title, output, self.names), ""]
        return "\n".join(lines).rstrip()

    def _cost(self) -> list[str]:
        """What the op costs."""
        if self.redistributed is not None:
            return [
                "the input is redistributed first, to the cheapest placements: "
                f"{format_placements(self.redistributed.placements)}; a device receives up to "
                f"{self.received_elements} elements",
                *self.why,
            ]
        if self.exchange is None or self.is_free:
            return ["free: no communication"]
        dims = ", ".join(self.names[m] for m in self.exchange.mesh_dims)
        said = f"one exchange on {dims}: a device receives up to {self.received_elements} elements"
        return [
            said,
            *[
                f"  {tuple(each['from'])} -> {tuple(each['to'])}: {each['elements']}"
                for each in self.messages
            ],
        ]


def explain(
    x: DTensorLike | Sharding | None = None,
    *,
    shape: Sequence[int] | None = None,
    mesh: Mapping[str, int] | Sequence[int] | None = None,
    placements: PlacementsLike | None = None,
    **op: Numbers,
) -> Explanation:
    """Explain a view or a movement op of a sharded tensor: the elements of each device before and
    after the op, whether the op is free, and its communication. Nothing is communicated.

    Args:
        x: a DTensor or a :class:`~cute_sharding.sharding.Sharding`. Instead of it, give ``shape``,
            ``mesh`` and ``placements``.
        shape: the tensor's global shape.
        mesh: the device mesh: sizes, or names with sizes, such as ``{"dp": 2, "tp": 4}``.
        placements: one for each mesh dim, as text (``"S(0), R"``) or as PyTorch's objects.
        op: one op as a keyword argument, with its numbers: ``view``, ``permute``, ``expand`` or
            ``repeat`` with sizes, or a movement op as ``python -m cute_sharding explain --help``
            lists them, such as ``slice=(1, 1)`` for ``x[:, 1:]`` or ``roll=(0, 1)``.

    Returns:
        The explanation, which you can print. It has ``.is_free``, ``.output`` and ``.to_dict()``.

    Raises:
        TypeError: the op or the tensor is missing, or the op has an unknown name.
        ValueError: the arguments do not fit together.

    >>> found = explain(shape=(4, 16), mesh={"tp": 4}, placements="S(1)", view=(4, 8, 2))
    >>> found.is_free, found.output
    (True, ('S(1)',))
    >>> found = explain(shape=(4, 16), mesh=(4,), placements="S(1)", slice=(1, 1))
    >>> found.is_free, found.output, found.received_elements
    (False, ('S(1)',), 4)
    """
    known = (*VIEWS, *MOVES)
    if len(op) != 1 or next(iter(op)) not in known:
        said = f"not {', '.join(op)}" if op else "such as view=(4, 8)"
        raise TypeError(f"explain takes exactly one op, {said}: use one of {', '.join(known)}")
    ((name, numbers),) = op.items()
    before, named = _sharding(x, shape, mesh, placements)
    if name in VIEWS:
        what, view = view_of(name, numbers, before.shape)
        return explain_view(what, view, before, named)
    some = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return _explain_move(name, some, before, named)


def _sharding(x: Any, shape: Any, mesh: Any, placements: Any) -> tuple[Sharding, tuple[str, ...]]:
    """The sharding, and the names of the mesh dims."""
    if isinstance(x, DTensorLike):
        before = sharding_of_dtensor(x)
        return before, names_of(x.device_mesh.mesh_dim_names, before.mesh)
    if isinstance(x, Sharding):
        return x, names_of(None, x.mesh)
    if x is not None:
        raise TypeError(f"explain takes a DTensor or a Sharding, not a {type(x).__name__}")
    if shape is None or mesh is None or placements is None:
        raise TypeError(
            "explain needs a DTensor, a Sharding, or all of shape=, mesh= and placements="
        )
    sizes = tuple(mesh.values()) if isinstance(mesh, Mapping) else tuple(mesh)
    names = tuple(mesh) if isinstance(mesh, Mapping) else None
    return sharding_of(shape, sizes, placements), names_of(names, sizes)


def explain_view(what: str, view: View, before: Sharding, names: tuple[str, ...]) -> Explanation:
    """The explanation of a view."""
    carried = carry(view, before.cuts, before.mesh)
    if carried.blocked is None:
        after = _replaced(before, view.output_shape, carried.cuts)
        return Explanation(what, names, before, (after,))
    fixed = [m for m, p in enumerate(before.placements) if isinstance(p, Partial)]
    target = cheapest(view, before.cuts, before.mesh, fixed=fixed)
    split = parts_that_do_not_divide(view, before.cuts, before.mesh, carried.blocked)
    why = (
        "not free: no Shard or _StridedShard of the output gives the devices of mesh dim "
        f"{names[carried.blocked]} the elements that {before.placements[carried.blocked]} "
        "gives them"
    )
    return Explanation(
        what,
        names,
        before,
        (_replaced(before, view.output_shape, target.output),),
        is_free=False,
        received_elements=target.received,
        redistributed=_replaced(before, before.shape, target.source),
        why=(why, *([split] if split else [])),
    )


def _explain_move(
    name: str,
    numbers: tuple[int | None, ...],
    before: Sharding,
    names: tuple[str, ...],
) -> Explanation:
    option, text = MOVES[name], ",".join("" if n is None else str(n) for n in numbers)
    times = (numbers[1:2] or (None,))[0] or 2 if name == "cat" else None
    given: Any = before.shape if times is None else [before.shape] * times
    try:
        arguments = option.arguments(len(before.shape), *numbers)
    except TypeError:
        raise ValueError(f"{name} {text!r}: write {option.form}") from None
    try:
        move = BY_OP[option.op].move(given, *arguments)
    except (IndexError, TypeError) as error:
        raise ValueError(f"{name} {text!r}: {error}") from None
    if move is None:
        raise ValueError(f"{name} {text!r} does not fit a tensor of shape {before.shape}")
    choice = chosen(move, (before.cuts,) * len(move.inputs), before.mesh, anyway=True)
    assert choice is not None
    return Explanation(
        f"{name}({text})",
        names,
        before,
        tuple(map(lambda x, cuts: _replaced(before, x, cuts), move.outputs, choice.cuts)),
        is_free=not choice.exchange.communicates,
        received_elements=choice.exchange.received_elements,
        exchange=choice.exchange,
    )


def _replaced(
    of: Sharding, shape: Sequence[int], cuts: Sequence[tuple[int, int] | None]
) -> Sharding:
    """The sharding with these cuts of a tensor of ``shape``; a pending reduction stays."""
    placements = [
        Shard(*cut) if cut is not None else p if isinstance(p, Partial) else Replicate()
        for p, cut in zip(of.placements, cuts)
    ]
    return Sharding(tuple(shape), of.mesh, tuple(placements))


def modes_of(sharding: Sharding, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """(mode, owner, of) for each mode of a sharding's layout: those of mesh dims with their
    placements, then the local ones with their dims.

    Raises:
        LayoutError: it has no layout.
    """
    devices, local = sharding.layout
    modes = [
        (repr(mode), name, f"dim {p.dim}" if isinstance(p, Shard) else str(p))
        for name, mode, p in zip(names, devices, sharding.placements)
    ]
    return modes + [(repr(mode), "local", f"dim {dim}") for dim, mode in enumerate(local)]


def _described(sharding: Sharding, names: Sequence[str]) -> dict[str, Any]:
    """A sharding as plain data."""
    devices = list(islice(product(*map(range, sharding.mesh)), DEVICES))
    plain = [None if cut is None else (cut[0], 1) for cut in sharding.cuts]
    most, fair = (
        local_elements(sharding.shape, cuts, sharding.mesh) for cuts in (sharding.cuts, plain)
    )
    try:
        layout, modes = repr(sharding.layout), modes_of(sharding, names)
        no_layout = None
    except LayoutError as error:
        layout, modes, no_layout = None, [], str(error)
    return {
        "shape": list(sharding.shape),
        "placements": list(map(str, sharding.placements)),
        "layout": layout,
        "no_layout": no_layout,
        "modes": [dict(zip(("mode", "owner", "of"), mode)) for mode in modes],
        "devices": [
            {
                "coordinate": dict(zip(names, device)),
                "local_shape": list(sharding.local_shape(device)),
                "rows": [_rows(sharding, dim, device) for dim in range(len(sharding.shape))],
            }
            for device in devices
        ],
        "devices_not_shown": prod(sharding.mesh) - len(devices),
        # What the fullest device holds, and would hold with plain shards of the same dims.
        "balance": {"most": most, "plain": fair} if most > fair else None,
    }


def _rows(
    sharding: Sharding, dim: int, device: tuple[int, ...]
) -> list[list[int]] | dict[str, int]:
    """The intervals of rows that the device holds. For very many intervals, the first row, the last
    row and the number of rows.
    """
    if prod(cut[1] for cut in sharding.cuts if cut is not None and cut[0] == dim) <= RUNS_LISTED:
        return [list(run) for run in sharding.rows(dim, device)]
    count = sharding.local_shape(device)[dim]
    ends = [sharding.row_at(dim, device, at) for at in (0, count - 1)] if count else [0, 0]
    return {"first": ends[0], "last": ends[1], "count": count}


def _side(title: str, sharding: Sharding, names: Sequence[str]) -> list[str]:
    side = _described(sharding, names)
    lines = [
        f"{title}: shape {sharding.shape}, placements {format_placements(sharding.placements)}"
    ]
    lines.append(
        f"  {side['no_layout'] or 'layout (devices, local) -> flat index: ' + side['layout']}"
    )
    lines += [f"    {line}" for line in columns([[*mode.values()] for mode in side["modes"]])]
    lines.append("  rows of each dim, by device:")
    for device in side["devices"]:
        at = ", ".join(f"{name}={c}" for name, c in device["coordinate"].items())
        rows = " x ".join(map(_rows_text, device["rows"])) or "the scalar"
        lines.append(f"    {at}: local {tuple(device['local_shape'])}  {rows}")
    if side["devices_not_shown"]:
        lines.append(f"    ... and {side['devices_not_shown']} more devices")
    if side["balance"] is not None:
        lines.append(
            f"  out of balance: the fullest device holds {side['balance']['most']} elements; "
            f"with plain shards of the same dims, it would hold {side['balance']['plain']}"
        )
    return lines


def _rows_text(runs: list[list[int]] | dict[str, int]) -> str:
    if isinstance(runs, dict):
        return f"[{runs['count']} rows from {runs['first']} to {runs['last']}]"
    shown = [f"{start}:{stop}" for start, stop in runs[:RUNS_SHOWN]]
    more = [f"... {len(runs) - RUNS_SHOWN} more"] if len(runs) > RUNS_SHOWN else []
    return f"[{', '.join(shown + more)}]"

"""Writes docs/lists/rules.md from the table of ops.

python docs/generate_rules.py          # write it
python docs/generate_rules.py --check  # fail if it is not what the code says
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cute_sharding.relations import Diagonal, Fold, Link, Move, Window
from cute_sharding.relations.moves import Form
from cute_sharding.relations.table import (
    TABLE,
    ByDimMap,
    ByRows,
    OfTorch,
    Row,
    movement,
    steps,
    torchs,
    views,
)
from cute_sharding.relations.view import DimSpec, View
from cute_sharding.sharding.rows import Run

PAGE = Path(__file__).parent / "lists" / "rules.md"

# One example for each op: input shape and arguments.
EXAMPLES = {
    "Tensor.view": ((2, 3, 4), ((6, 4),)),
    "torch.reshape": ((2, 6), ((3, 4),)),
    "torch.flatten": ((2, 3, 4), (1,)),
    "torch.unflatten": ((2, 12), (1, (3, 4))),
    "torch.ravel": ((2, 3), ()),
    "torch.squeeze": ((2, 1, 3), ()),
    "torch.unsqueeze": ((2, 3), (1,)),
    "Tensor.expand": ((2, 1, 3), ((5, 2, 4, 3),)),
    "torch.broadcast_to": ((1, 3), ((2, 3),)),
    "torch.permute": ((2, 3, 4), ((2, 0, 1),)),
    "torch.transpose": ((2, 3, 4), (0, 2)),
    "torch.t": ((2, 3), ()),
    "torch.alias_copy": ((2, 3), ()),
    "torch.movedim": ((2, 3, 4), (0, 2)),
    "Tensor.repeat": ((2, 3), ((2, 1, 4),)),
    "torch.tile": ((2, 3), ((4,),)),
    "torch.atleast_1d": ((), ()),
    "torch.atleast_2d": ((3,), ()),
    "torch.atleast_3d": ((2, 3), ()),
    "torch.view_as_real": ((2, 3), ()),
    "torch.view_as_complex": ((2, 3, 2), ()),
    "Tensor.view, of a dtype": ((2, 12), (1, 4)),
}


# The same for movement ops; operands that are several are a list.
MOVED = {
    "Tensor.__getitem__": ((4, 12), (1, 1, 9, 2)),
    "slice's gradient": ((4, 4), ((4, 12), 1, 1, 9, 2)),
    "torch.select": ((4, 12), (1, -1)),
    "select's gradient": ((4,), ((4, 12), 1, 11)),
    "torch.unbind": ((3, 4), (0,)),
    "torch.split": ((4, 12), (5, 1)),
    "torch.split, by sizes": ((4, 12), ((3, 9), 1)),
    "torch.cat": ([(4, 3), (4, 5)], (1,)),
    "torch.block_diag": ([(4, 3), (2, 5)], ()),
    "torch.roll": ((4, 12), (2, 1)),
    "torch.narrow_copy": ((4, 12), (1, 2, 5)),
    "torch.flip": ((4, 12), ((1,),)),
    "torch.rot90": ((4, 12), (1, (0, 1))),
    "torch.nn.functional.pad": ((4, 12), ((2, 1),)),
    "torch.tril": ((4, 4), (1,)),
    "torch.triu": ((4, 4), (1,)),
    "Tensor.unfold": ((4, 12), (1, 4, 2)),
    "unfold's gradient": ((4, 5, 4), ((4, 12), 1, 4, 2)),
    "torch.nn.functional.pad, reflect": ((4, 12), ((2, 1),)),
    "reflection_pad's gradient": ((4, 15), ((4, 12), (2, 1))),
    "torch.nn.functional.pad, replicate": ((4, 12), ((2, 1),)),
    "replication_pad's gradient": ((4, 15), ((4, 12), (2, 1))),
    "torch.diagonal": ((4, 12), (1,)),
    "diagonal's gradient": ((4,), ((4, 12), 1, 0, 1)),
    "torch.diag_embed": ((2, 4), (1,)),
}


def pieces(move: Move) -> str:
    """The rows of the results, and of the operands that they are made of, one dim a text."""
    found = [text for link in move.links for text in pieces_of(move, link)]
    if move.triangle is not None:
        found.append("rows stay; elements beyond the diagonal become 0")
    return "; ".join(found) or "as they are"


def pieces_of(move: Move, link: Link) -> list[str]:
    """Of which dim they are is said where that is not one alone."""
    found = []
    is_turned = len(move.inputs[link.source]) == len(move.outputs[link.target])
    changed = [
        (source, target)
        for source, target in link.pairs
        if not (source.is_plain and target.is_plain) or (is_turned and source.dim != target.dim)
    ]
    several = len(changed) > 1
    for source, target in changed:
        some = source if source.dim is not None else target
        name = f"in{link.source}" if len({one.source for one in move.links}) > 1 else "in"
        out = f"out{link.target}" if len(move.outputs) > 1 else "out"
        if several:
            name, out = (
                text if rows.dim is None else f"{text}.d{rows.dim}"
                for text, rows in ((name, source), (out, target))
            )
        if target.backward and some.dim is not None:
            found.append(f"{out}[j] = {name}[{move.inputs[0][some.dim] - 1} - j]")
        elif (form := source.form or target.form) is not None:
            found += formed(form, name, out, target.form is not None)
        elif source.is_plain and target.is_plain:
            found.append(f"{out}[j] = {name}[j]")
        else:
            runs = source.runs or target.runs or ()
            found += [run_text(run, name, out, source.runs is not None) for run in runs]
    return found


def formed(form: Form, name: str, out: str, is_of_target: bool) -> list[str]:
    """What rows stand for others: those of the result; or of the operand, which are added up."""

    def said(row: str, of: str, more: str) -> str:
        return (
            f"{out}[{row}] = {name}[{of}]" if is_of_target else f"{out}[{of}] += {name}[{row}]"
        ) + more

    match form:
        case Window(_, size, step):
            return [said("w, i", f"{step}w + i", f", i < {size}")]
        case Fold(pieces):
            signs = {0: "", 1: "j", -1: "-j"}
            return [
                said("j", f"{signs[a]}{b:+}" if a else str(b), f", {start} <= j < {stop}")
                for start, stop, a, b in pieces
            ]
        case Diagonal(_, down, right, length):
            pair = f"{affine(down, 1, 2)}, {affine(right, 1, 2)}"
            one, other = (f"{out}[{pair}]", f"{name}[j]")
            if not is_of_target:
                one, other = f"{out}[j]", f"{name}[{pair}]"
            return [f"{one} = {other}, j < {length}"]


def run_text(run: Run, name: str, out: str, is_of_source: bool) -> str:
    count, dx, dy = run.loops[0] if run.loops else (run.length, 1, 1)
    x, y = (affine(start, step, count) for start, step in ((run.x, dx), (run.y, dy)))
    one, other = (x, y) if is_of_source else (y, x)
    return f"{out}[{one}] = {name}[{other}]" + (f", j < {count}" if count > 1 else "")


def affine(start: int, step: int, count: int) -> str:
    if count == 1:
        return str(start)
    return f"{'' if step == 1 else step}j" + (f" + {start}" if start else "")


def line_of_movement(row: ByRows) -> str:
    shape, args = MOVED[row.op]
    move = row.move(shape, *args)
    assert move is not None
    example = ", ".join([f"`{shape}`", *[f"`{', '.join(map(str, args))}`" for _ in args[:1]]])
    overloads = ", ".join(f"`{name}`" for name in row.overloads)
    return f"| `{row.op}` | {overloads} | {example} | {pieces(move)} | {signature(row)} |"


def signature(row: ByRows) -> str:
    """What follows from the map for the example, and the overloads that go by it alone."""
    if not row.signed:
        return " | "
    shape, args = MOVED[row.op]
    also = ", ".join([f"`{name}`" for name in row.by_names])
    return f"`{row.pattern(shape, *args)}` | {also}"


def spec_text(spec: DimSpec) -> str:
    match type(spec).__name__:
        case "InputDim":
            return f"in{spec.input_dim}"
        case "Singleton":
            return "1"
        case "NewDim":
            return f"new {spec.size}"
        case "Flatten":
            return f"({' '.join(map(spec_text, spec.input_dims))})"
        case "Split":
            sizes = str(spec.group_shape).replace(" ", "")
            return f"{spec_text(spec.input_dim)}/{sizes}[{spec.split_id}]"
        case "Broadcast":
            return f"{spec_text(spec.dim)} x {spec.dim_size}"
        case _:
            return f"{spec.times} times {spec_text(spec.input_dim)}"


def of_runs(view: View) -> str:
    """The dims of a view each of whose elements is several elements of the input's last dim."""
    last, *sizes = len(view.input_shape) - 1, *view.target[len(view.input_shape) - 1 :]
    split = [f"in{last}/({sizes[0]},{sizes[1]})[0]"] if len(sizes) > 1 else []
    return f"{', '.join([*(f'in{d}' for d in range(last)), *split])}; {sizes[-1]} elements are one"


def line(row: ByDimMap) -> str:
    shape, arguments = EXAMPLES[row.op]
    rule = row.rule(shape, *arguments)
    dim_map = of_runs(rule) if isinstance(rule, View) else ", ".join(map(spec_text, rule))
    overloads = (
        ", ".join(
            [f"`{name}`" for name in row.overloads]
            + [f"`{name}` (signature)" for name in row.by_names]
        )
        or row.note
    )
    call = f"{shape} {', '.join(map(str, arguments))}".strip()
    return (
        f"| `{row.op}` | {overloads} | {call} | {dim_map} | "
        f"`{row.view(shape, *arguments).layout!r}` |"
    )


def line_by_names(row: Row) -> str:
    """A pattern, or the first sentence of what a rule says of itself."""
    if isinstance(row.rule, str):
        says = f"`{row.rule}`"
    else:
        says = re.split(r"(?<=[\w)])\.(?= |$)", " ".join((row.rule.__doc__ or "").split()))[0]
        says = says.replace("``", "`").replace("|", "or")
        says = re.sub(r":func:`(\w+)`", r"`\1`", says)
    pending = row.reduce.__name__ if callable(row.reduce) else row.reduce or ""
    return f"| {names_of(row)} | {says} | {pending} |"


def names_of(row: Row) -> str:
    return ", ".join([f"`{name}`" for name in row.overloads])


def line_of_torch(row: OfTorch) -> str:
    more = [row.note]
    if row.writes:
        more.append(f"writes to {', '.join([f'`{name}`' for name in row.writes])}")
    if row.made_of:
        more.append(f"PyTorch decomposes it to `{row.made_of}`")
    return f"| {names_of(row)} | {'yes' if row.carries_any_cut else ''} | {'; '.join(more)} |"


def section_of_views() -> list[str]:
    """The ops by DimMap, each with an example."""
    noted = [row for row in views.ROWS if row.note and row.overloads]
    return [
        "## Views",
        "",
        "The column *example* contains an input shape, followed by the arguments of a view op. The "
        "column *DimMap* has one entry for each output dim of the view op:",
        "",
        "| entry | output dim |",
        "|---|---|",
        "| `in0` | dim 0 of the input |",
        "| `(in0 in1)` | dims 0 and 1 of the input, flattened |",
        "| `in1/(3,4)[0]` | the dim of size 3, if dim 1 of the input is unflattened to `(3, 4)` |",
        "| `in1/(3,4)[1]` | the dim of size 4, if dim 1 of the input is unflattened to `(3, 4)` |",
        "| `1` | a new dim of size 1 |",
        "| `in0 x 2` | dim 0 of the input, expanded from size 1 to size 2 |",
        "| `4 times in1` | dim 1 of the input, repeated 4 times |",
        "",
        "For each view op, a CuTe layout maps the flat index of an output element to the flat "
        "input index. In the CuTe layout of `view_as_complex`, a complex number counts as two "
        "elements. In the CuTe layout of `view.dtype`, an element of the larger dtype counts as "
        "several of the smaller.",
        "",
        "| word after an overload | meaning |",
        "|---|---|",
        "| *signature* | the output placements come from a [signature](../ops.md#signatures) |",
        "",
        "| op | aten overloads | example | DimMap | layout, output index -> input index |",
        "|---|---|---|---|---|",
        *map(line, views.ROWS),
        "",
        *notes_of(noted),
    ]


def notes_of(rows: Sequence[ByDimMap | ByRows]) -> list[str]:
    """A table of what rows say of their ops."""
    return ["| op | note |", "|---|---|", *[f"| `{row.op}` | {row.note} |" for row in rows], ""]


def section_of_movement() -> list[str]:
    """The ops by rows, each with an example."""
    return [
        "## Movement ops",
        "",
        "A [movement op](../redistribution.md#rows-that-move) copies rows of its inputs to rows of "
        "its outputs. The column "
        "*example* contains an input shape, followed by the arguments of the op. In the column "
        "*rows*, `in` is the input and `out` is the output of the op:",
        "",
        "| rows | meaning |",
        "|---|---|",
        "| `out[j] = in[j + 2], j < 5` | output rows 0 to 4 are input rows 2 to 6 |",
        "| `out[j] += in[j]` | the op adds up rows of the input |",
        "| `.d0` | dim 0, if the op changes several dims |",
        "| no entry for an output row | a new row, such as the zeros of a pad |",
        "",
        "The column *signature* shows the [signature](../ops.md#signatures) of the op for the "
        "example input.",
        "",
        "| op | aten overloads | example | rows | signature "
        "| overloads that always use the signature |",
        "|---|---|---|---|---|---|",
        *map(line_of_movement, movement.ROWS),
        "",
        *notes_of([row for row in movement.ROWS if row.note]),
    ]


def section_by_names() -> list[str]:
    """The ops without an example."""
    return [
        "## Ops by names",
        "",
        "A [signature](../ops.md#signatures) has four kinds of tensor dims:",
        "",
        "| dim | in the signature | placement |",
        "|---|---|---|",
        "| free | in inputs and outputs | may be sharded |",
        "| contracted | missing in an output | may be sharded, if *Partial* has an entry |",
        "| folded | in parentheses | may be sharded: [ranks exchange states](../ops.md#folds) |",
        "| whole | in brackets | never sharded |",
        "",
        "The column *Partial* has the reduction of a `Partial` output, or a function that returns "
        "the reduction.",
        "",
        "If a signature depends on arguments of the op, the column *signature* has words or the "
        "following signs:",
        "",
        "| sign | meaning |",
        "|---|---|",
        "| `x` | all dims of the first input |",
        "| `x/[k]` | the dims of `x`; the whole dim `k` replaces the dim of the op |",
        "| `x/` | the dims of `x` without the dim of the op |",
        "| `x/?` | as `x/`; with `keepdim=True`, the dim stays, with size 1 |",
        "| `last` | the dims that a norm normalizes |",
        "| `each` | the dims of the statistics of a norm |",
        "| `?` after an input | an optional input |",
        "| `{v}` | a contracted dim; the next input has the row of `v` for each output row |",
        "| `0` | a dim of size 0 |",
        "| `x -> y`, for pools and other ops on windows | last dims of `x`: image sizes; last dims "
        "of `y`: one row for each window |",
        "| `query key value`, for attention | names of tensors, not of dims |",
        "| `.`, for attention | an argument that the signature ignores |",
        "",
        "| aten overloads | signature | `Partial` |",
        "|---|---|---|",
        *[line_by_names(row) for row in TABLE if not (row.is_moved or isinstance(row, OfTorch))],
        "",
    ]


def sections_of_torch_and_kernels() -> list[str]:
    return [
        "## Ops with PyTorch's rules",
        "",
        "The package uses PyTorch's sharding rules for the following ops. A *yes* means that "
        "PyTorch's sharding rule is correct for all placements.",
        "",
        "| aten overloads | correct for all placements | notes |",
        "|---|---|---|",
        *map(line_of_torch, torchs.ROWS),
        "",
        "## Arguments of kernels",
        "",
        "For the following ops, the package converts arguments for local tensors, for example "
        "global to local sizes. The column *conversion* names a class of "
        "`cute_sharding/relations/table/kernels.py`. In the column *conversion*, the arguments of "
        "an op are counted from 0.",
        "",
        "| aten overloads | conversion |",
        "|---|---|",
        *[f"| {names_of(row)} | `{row.kernel!r}` |" for row in TABLE if row.kernel is not None],
        "",
    ]


def page() -> str:
    return "\n".join(
        [
            "# The rule table",
            "",
            "`make pages` generates this page from the files in `cute_sharding/relations/table/`.",
            "",
            *section_of_views(),
            *section_of_movement(),
            "## Ops of several steps",
            "",
            "The package runs each of the following ops as several views and movement ops.",
            "",
            "| aten overloads | steps |",
            "|---|---|",
            *[line_by_names(row).rsplit("|", 2)[0] + "|" for row in steps.ROWS],
            "",
            *section_by_names(),
            *sections_of_torch_and_kernels(),
        ]
    )


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0
            if PAGE.exists() and PAGE.read_text() == page()
            else f"{PAGE} is out of date: run make pages"
        )
    PAGE.write_text(page())
    print(f"wrote {PAGE}")

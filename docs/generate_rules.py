"""Writes docs/rules.md from the table of ops.

python docs/generate_rules.py          # write it
python docs/generate_rules.py --check  # fail if it is not what the code says
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cute_sharding.relations import Diagonal, Fold, Link, Move, Window
from cute_sharding.relations.dim_map import DimSpec
from cute_sharding.relations.forms import Form
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
from cute_sharding.sharding.meeting import Run

PAGE = Path(__file__).with_name("rules.md")

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
        return ""
    shape, args = MOVED[row.op]
    also = "".join(f", `{name}`" for name in row.by_names)
    return f"`{row.pattern(shape, *args)}`{also}"


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


def line(row: ByDimMap) -> str:
    shape, arguments = EXAMPLES[row.op]
    dim_map = ", ".join(map(spec_text, row.rule(shape, *arguments)))
    overloads = (
        ", ".join(
            [f"`{name}`{' (strict)' if row.strict else ''}" for name in row.overloads]
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
    notes = [f"- `{row.op}`: {row.note}." for row in views.ROWS if row.note and row.overloads]
    return [
        "## Views",
        "",
        "Each row of the table describes one view op. The column *example* has the shape of an "
        "input, and then the arguments of the op. The last two columns describe the view of "
        "this example:",
        "",
        "- *DimMap* gives, for each dim of the output, the dims of the input that form this dim.",
        "- *layout* has a layout that maps the flat index of an output element to the flat "
        "index of an input element. For a permutation, the strides of this layout are "
        "permuted. For a broadcast or a repeat, the layout has modes of stride 0.",
        "",
        "A DimMap is written as follows:",
        "",
        "- `in0` is dim 0 of the input.",
        "- `(in0 in1)` is a dim that flattens dims 0 and 1 of the input.",
        "- `in1/(3,4)[0]` splits dim 1 of the input into two dims of sizes 3 and 4. `[0]` is "
        "the first of the two dims, and `[1]` is the second.",
        "- `1` is a new dim of size 1.",
        "- `in0 x 2` is dim 0 of the input, which has size 1, broadcast to size 2.",
        "- `4 times in1` is dim 1 of the input, repeated 4 times.",
        "",
        "For `view_as_complex` and `view_as_real`, a complex number counts as two real numbers.",
        "",
        "If a view needs communication, its overloads redistribute the input. But with the "
        'setting `implicit_redistribution="error"`, overloads with the word *strict* in the table '
        "raise an error instead.",
        "",
        "For overloads with the word *signature* in the table, the package derives a signature "
        "from the DimMap. This signature gives the placements of the result "
        "([Ops](ops.md#signatures)).",
        "",
        "| op | aten overloads | example | DimMap | layout, output index -> input index |",
        "|---|---|---|---|---|",
        *map(line, views.ROWS),
        "",
        *notes,
        "",
    ]


def section_of_movement() -> list[str]:
    """The ops by rows, each with an example."""
    return [
        "## Movement ops",
        "",
        "A movement op copies rows of its operands to rows of its results "
        "([Movement](movement.md)). The column *example* has the shape of an operand, and then "
        "the arguments of the op. For this example, the column *rows* tells which row of the "
        "operand (`in`) becomes a row of the result (`out`).",
        "",
        "If several dims change, `.d0` stands for dim 0. `+=` means that the op adds up rows. "
        "Rows of the result that the column does not list are new: for example, the zeros of a "
        "pad.",
        "",
        "The package derives a signature from the rows, and the last column has this signature "
        "([Ops](ops.md#signatures)). After the signature, the column lists overloads that "
        "always use the signature. The other overloads use the rows.",
        "",
        "| op | aten overloads | example | rows | signature |",
        "|---|---|---|---|---|",
        *map(line_of_movement, movement.ROWS),
        "",
        *[f"- `{row.op}`: {row.note}." for row in movement.ROWS if row.note],
        "",
    ]


def section_by_names() -> list[str]:
    """The ops without an example."""
    return [
        "## Ops by names",
        "",
        "The column *signature* has the signature of the op, in a notation like einsum's "
        "([Ops](ops.md#signatures) explains the notation). In a signature, each dim has one of "
        "three kinds:",
        "",
        "- A *free* dim may be sharded.",
        "- A *contracted* dim may be sharded if the column *Partial* names a reduction, or a "
        "function that returns one. The result is then a `Partial` with this reduction.",
        "- A *whole* dim is never sharded. It stands in brackets.",
        "",
        "The signature of some ops depends on the arguments. For these ops, the column describes "
        "the signature in words, or with the following signs:",
        "",
        "- `x` stands for all dims of the first operand.",
        "- `x/[k]` stands for the same dims, with the whole dim `k` in place of the dim along "
        "which the op runs.",
        "- `x/` stands for the same dims, without the dim along which the op runs.",
        "- `x/?` stands for the same as `x/`. But with `keepdim=True`, the dim stays, and has size "
        "1.",
        "- `last` stands for the dims that a norm normalizes, and `each` for the dims of its "
        "statistics.",
        "- `?` after an operand: the program may leave this operand out.",
        "- `{v}` is a contracted dim. For each row of the result, the op reads only the row of "
        "`v` that the next operand names.",
        "- `0` is a dim without rows. Such a result has no elements.",
        "- For ops on windows, such as pools, the last dims of `x` have the sizes of the image, "
        "and the last dims of `y` have one row for each window.",
        "- For attention, a signature has the names of tensors instead of the names of dims. A "
        "`.` stands for an argument that the signature ignores.",
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
        "For these ops, the package uses PyTorch's rules. The second column has a *yes* if "
        "PyTorch's rule gives correct results for all placements ([Ops](ops.md#who-answers)).",
        "",
        "| aten overloads | correct for all placements | notes |",
        "|---|---|---|",
        *map(line_of_torch, torchs.ROWS),
        "",
        "## Arguments of kernels",
        "",
        "On each device, the kernel of an op runs on the local tensors. The kernels of the ops "
        "below need other arguments than the program passes. For example, a kernel may need the "
        "sizes of the local tensor in place of the sizes of the whole tensor. The second column "
        "describes how the package converts the arguments: it has a class of "
        "`cute_sharding/relations/table/kernels.py`, with the positions of the arguments, counted "
        "from 0.",
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
            "`make pages` generates this page from the files in `cute_sharding/relations/table/`. "
            "A test checks that the page agrees with these files.",
            "",
            *section_of_views(),
            *section_of_movement(),
            "## Ops of several steps",
            "",
            "For the package, each of these ops consists of several views and movement ops, one "
            "after the other. The column *steps* describes what the steps do together.",
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

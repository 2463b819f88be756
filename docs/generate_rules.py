"""Writes docs/rules.md from the rule table.

python docs/generate_rules.py          # write it
python docs/generate_rules.py --check  # fail if it is not what the code says
"""

from __future__ import annotations

import sys
from pathlib import Path

from cute_sharding.views import TABLE, Row
from cute_sharding.views.dim_map import DimSpec

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
    "torch.movedim": ((2, 3, 4), (0, 2)),
    "Tensor.repeat": ((2, 3), ((2, 1, 4),)),
    "torch.tile": ((2, 3), ((4,),)),
    "torch.atleast_1d": ((), ()),
    "torch.atleast_2d": ((3,), ()),
    "torch.atleast_3d": ((2, 3), ()),
    "torch.view_as_real": ((2, 3), ()),
    "torch.view_as_complex": ((2, 3, 2), ()),
}


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


def line(row: Row) -> str:
    shape, arguments = EXAMPLES[row.op]
    dim_map = ", ".join(map(spec_text, row.rule(shape, *arguments)))
    overloads = (
        ", ".join(
            [f"`{name}` (strict)" for name in row.strict] + [f"`{name}`" for name in row.lenient]
        )
        or row.note
    )
    call = f"{shape} {', '.join(map(str, arguments))}".strip()
    return (
        f"| `{row.op}` | {overloads} | {call} | {dim_map} | "
        f"`{row.view(shape, *arguments).layout!r}` |"
    )


def page() -> str:
    notes = [
        f"- `{row.op}`: {row.note}." for row in TABLE if row.note and (row.strict or row.lenient)
    ]
    return "\n".join(
        [
            "# The rule table",
            "",
            "Generated from `cute_sharding/views/table.py` by `make pages`; a test fails when it "
            "is out of date.",
            "",
            "Each op is a DimMap, and each DimMap a layout from the output's flat index to the "
            "input's: reshapes keep the input's strides, permutations permute them,",
            "broadcasts and repeats add modes of stride 0. In the DimMaps `in0` is input dim 0, "
            "`(in0 in1)` their flattening, `x/(3,4)[0]` dim 0 of x split into (3, 4),",
            "`1` a fresh dim of size 1. *Strict* overloads never communicate unless told to. "
            "(`view_as_complex` is read in units of real numbers.)",
            "",
            "| op | aten overloads | example | DimMap | layout, output index -> input index |",
            "|---|---|---|---|---|",
            *map(line, TABLE),
            "",
            *notes,
            "",
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

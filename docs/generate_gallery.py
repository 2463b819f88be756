"""Writes docs/lists/gallery.md and the pictures in docs/gallery, with what torch does, measured.

python docs/generate_gallery.py          # measure, and write all of it
python docs/generate_gallery.py --check  # fail if it is not what the code draws
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_sharding.exchange import Mesh
from cute_sharding.sharding import Sharding, format_placements, parse_placements
from cute_sharding.tools.drawing import Picture
from cute_sharding.tools.drawing.pictures import draw_sharding

PAGE = Path(__file__).parent / "lists" / "gallery.md"
FOLDER = Path(__file__).with_name("gallery")
MEASURED = FOLDER / "measured.json"


@dataclass(frozen=True)
class Pattern:
    """A pattern of real models, in small sizes: a view of a tensor, or a redistribution; that to
    another mesh, if ``to_mesh`` is one.
    """

    name: str
    title: str
    text: str
    sharding: Sharding
    names: tuple[str, ...]
    view: tuple[int, ...] | None = None
    to: Any = None
    to_mesh: Mesh | None = None
    to_names: tuple[str, ...] = ()

    def picture(self) -> Picture:
        return draw_sharding(
            self.sharding,
            self.view,
            self.to,
            self.to_mesh,
            self.names,
            to_names=self.to_names,
        )


def pattern(
    name: str,
    title: str,
    text: str,
    shape: tuple[int, ...],
    mesh: dict[str, int],
    placements: str,
    view: tuple[int, ...] | None = None,
    to: str | None = None,
    to_mesh: tuple[dict[str, int], Sequence[int]] | None = None,
) -> Pattern:
    sharding = Sharding(shape, tuple(mesh.values()), parse_placements(placements))
    target = None if to is None else parse_placements(to)
    sizes, ranks = to_mesh or ({}, ())
    other = Mesh(tuple(sizes.values()), ranks) if to_mesh else None
    return Pattern(name, title, text, sharding, tuple(mesh), view, target, other, tuple(sizes))


PATTERNS = (
    pattern(
        "patches",
        "Patches of an image, merged in pairs",
        "Two neighbors become one patch with twice as many features. PyTorch gathers all "
        "features before; here each rank keeps its own.",
        *((1, 8, 6), {"tp": 2}, "S(2)", (1, 4, 12)),
    ),
    pattern(
        "qkv",
        "Fused queries, keys and values",
        "Each rank has the rows of its heads of q, k and v. A view that divides all rows into "
        "four groups does not fit that: PyTorch returns wrong data, and cute-sharding moves rows "
        "first.",
        *((24, 4), {"tp": 2}, "_S(0,3)", (4, 6, 4)),
    ),
    pattern(
        "gqa",
        "Grouped-query attention: fewer key heads than devices",
        "With two key heads on four ranks, each has half a head, so a view that splits columns "
        "into heads has to communicate.",
        *((2, 2, 16), {"tp": 4}, "S(2)", (2, 2, 2, 8)),
    ),
    pattern(
        "fsdp_tp",
        "FSDP over tensor parallelism",
        "Tensor parallelism shards a weight by columns, and `fully_shard` shards each shard again "
        "by columns. An optimizer that flattens such a weight gets wrong data by PyTorch. Here "
        "it gets the right data, and nothing is sent.",
        *((3, 8), {"dp": 2, "tp": 2}, "_S(1,2),S(1)", (24,)),
    ),
    pattern(
        "context",
        "Context parallelism: striped blocks",
        "Each rank has some early and some late positions of each sequence. To flatten batch and "
        "sequence, PyTorch raises; here nothing is sent.",
        *((2, 8, 3), {"cp": 2}, "_S(1,2)", (16, 3)),
    ),
    pattern(
        "meshes",
        "Weights from training to generation, on another mesh",
        "Four ranks train a weight, and two of them also generate text with it. PyTorch does not "
        "redistribute to another mesh; here each missing element is received once.",
        *((8, 6), {"dp": 2, "tp": 2}, "S(0),S(1)"),
        to="S(0)",
        to_mesh=({"gen": 2}, (2, 3)),
    ),
    pattern(
        "redistribution",
        "A redistribution, S(0) to S(1)",
        "Each rank sends some of its columns to every other rank.",
        *((8, 8), {"tp": 4}, "S(0)"),
        to="S(1)",
    ),
    pattern(
        "heads",
        "Attention heads, split",
        "A column-parallel projection returns a tensor (batch, sequence, heads * head size), "
        "sharded by columns. Each rank has whole heads, so splitting columns into heads sends "
        "nothing.",
        *((2, 4, 16), {"tp": 4}, "S(2)", (2, 4, 8, 2)),
    ),
    pattern(
        "merge",
        "Attention heads, merged",
        "After attention, heads and head size become columns again.",
        *((2, 4, 8, 2), {"tp": 4}, "S(2)", (2, 4, 16)),
    ),
    pattern(
        "sequence",
        "Sequence parallelism: batch and sequence, flattened",
        "Each rank then has consecutive rows of each sequence, which is a strided shard.",
        *((2, 8, 4), {"tp": 4}, "S(1)", (16, 4)),
    ),
    pattern(
        "gate_up",
        "Gate and up projections in one weight",
        "Two weights are stacked in one tensor, sharded by rows, and then flattened into one "
        "matrix. Each rank keeps its rows of each weight.",
        *((2, 6, 4), {"tp": 3}, "S(1)", (12, 4)),
    ),
    pattern(
        "experts",
        "Expert parallelism: experts and their tokens in one dim",
        "One mesh dim shards the experts, the other the tokens of each expert. A view flattens "
        "both into one dim.",
        *((4, 4, 3), {"ep": 2, "tp": 2}, "S(0),S(1)", (16, 3)),
    ),
    pattern(
        "vocabulary",
        "An uneven vocabulary",
        "Four ranks share eleven words: three ranks have three, and one has two. A beam search "
        "turns (batch, beams, words) into (batch, beams * words).",
        *((2, 2, 11), {"tp": 4}, "S(2)", (2, 22)),
    ),
)


def page(measured: dict[str, Any]) -> str:
    lines = [
        "# Gallery",
        "",
        "Patterns of real models, on small tensors: which rank has which element, before and after "
        "an op. For the last seven, PyTorch and cute-sharding do the same. `make pages` writes "
        "this page.",
        "",
        f"The tables have PyTorch {measured['torch']} alone beside cute-sharding:",
        "",
        "```text",
        "free          the result is correct, and no rank sends data",
        "communicates  the result is correct, and ranks send data",
        "raises        the op raises an error",
        "wrong         ranks have other elements than the placements of the result describe",
        "S(0)          Shard(0)",
        "R             Replicate()",
        "_S(0,3)       _StridedShard(0, split_factor=3)",
        "```",
        "",
        "For a picture of your own tensor, run `python -m cute_sharding draw --shape 4,6 "
        '--mesh tp=2 --placements "S(1)" --view 24`. In a program, call '
        "`cute_sharding.draw(tensor)` "
        "([reference](../reference/index.md#cute_sharding.tools.drawing.draw)).",
        "",
    ]
    for p in PATTERNS:
        found = measured["outcomes"][p.name]
        if p.view is not None:
            change = f"`.view{p.view}`"
        else:
            change = f"redistribution to `{format_placements(p.to)}`"
        if p.to_mesh is not None:
            change += f" on {p.to_mesh.text(p.to_names)}"
        mesh = ", ".join(f"{name}={n}" for name, n in zip(p.names, p.sharding.mesh))
        before = f"`{format_placements(p.sharding.placements)}`"
        lines += [
            f"## {p.title}",
            "",
            p.text,
            "",
            f"| shape | `{p.sharding.shape}` |",
            "|---|---|",
            f"| placements | {before} |",
            f"| mesh | {mesh} |",
            f"| op | {change} |",
            f"| PyTorch | {found['torch']} |",
            f"| cute-sharding | {found['ours']} |",
            "",
            f"![{p.picture().title}](../gallery/{p.name}.svg)",
            "",
        ]
    return "\n".join(lines)


def texts(svg: str) -> list[str]:
    """What is written in an SVG: this does not depend on matplotlib's version."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def out_of_date() -> list[str]:
    """The files that are not what the code says."""
    found = []
    if not MEASURED.exists() or not PAGE.exists():
        return [str(PAGE)]
    if PAGE.read_text() != page(json.loads(MEASURED.read_text())):
        found.append(str(PAGE))
    for p in PATTERNS:
        path, made = FOLDER / f"{p.name}.svg", p.picture().svg()
        if not path.exists() or texts(path.read_text()) != texts(made):
            found.append(str(path))
    drawn = {f"{p.name}.svg" for p in PATTERNS}
    return found + [str(path) for path in FOLDER.glob("*.svg") if path.name not in drawn]


def write() -> None:
    from measure_gallery import measure

    FOLDER.mkdir(exist_ok=True)
    measured = measure(PATTERNS)
    MEASURED.write_text(json.dumps(measured, indent=2) + "\n")
    PAGE.write_text(page(measured))
    for p in PATTERNS:
        p.picture().save(FOLDER / f"{p.name}.svg")


if __name__ == "__main__":
    if "--check" in sys.argv:
        stale = out_of_date()
        sys.exit(f"out of date: {', '.join(stale)}: run make pages" if stale else 0)
    write()
    print(f"wrote {PAGE}")

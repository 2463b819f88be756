"""Writes docs/gallery.md and the pictures in docs/gallery, with what torch does, measured.

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

from cute_sharding import draw
from cute_sharding.drawing import Picture
from cute_sharding.drawing.dispatch import planned_between
from cute_sharding.drawing.inputs import mesh_of
from cute_sharding.exchange import Mesh
from cute_sharding.sharding import Sharding, format_placements, parse_placements

PAGE = Path(__file__).with_name("gallery.md")
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
        if self.to_mesh is None:
            return draw(self.sharding, view=self.view, to=self.to, names=self.names)
        here, there = mesh_of(self.sharding.mesh), self.to_mesh
        target = Sharding(self.sharding.shape, there.sizes, self.to)
        plan = planned_between(self.sharding, here, target, there)
        return draw(plan.named(self.names, self.to_names))


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
        "A view turns (batch, patches, hidden) into (batch, patches / 2, 2 * hidden). The dim "
        "hidden is sharded. PyTorch gathers the input of the view. But each device already has "
        "its columns of both patches of each pair, so nothing has to be sent. With this package, "
        "the result is a _StridedShard.",
        *((1, 8, 6), {"tp": 2}, "S(2)", (1, 4, 12)),
    ),
    pattern(
        "qkv",
        "Fused queries, keys and values",
        "A fused weight has the rows of q, then of k, then of v. Each device has its heads of q, "
        "k and v, so the weight is a _StridedShard of split factor 3. The view reads the rows as "
        "four groups of six rows. The first device has four rows of the first group, but two rows "
        "of the last group. No placements describe this. PyTorch returns wrong data for the view. "
        "With this package, the view communicates.",
        *((24, 4), {"tp": 2}, "_S(0,3)", (4, 6, 4)),
    ),
    pattern(
        "gqa",
        "Grouped-query attention: fewer key heads than devices",
        "With two key heads on four devices, each device has half a head. No placements of a "
        "tensor (batch, sequence, heads, head size) describe half a head. PyTorch raises an error "
        "for the view. With this package, the view communicates. The last lines of the picture "
        "name placements of the input for which the view is free.",
        *((2, 2, 16), {"tp": 4}, "S(2)", (2, 2, 2, 8)),
    ),
    pattern(
        "fsdp_tp",
        "FSDP over tensor parallelism",
        "Tensor parallelism shards a weight by columns, and fully_shard shards each of these "
        "shards again by columns. If an optimizer flattens the weight, PyTorch returns wrong "
        "data. With this package, the result is correct, and nothing is sent.",
        *((3, 8), {"dp": 2, "tp": 2}, "_S(1,2),S(1)", (24,)),
    ),
    pattern(
        "context",
        "Context parallelism: striped blocks",
        "Each sequence is divided into two stripes. Each device has a part of both stripes: some "
        "early and some late positions of the sequence. If a view flattens batch and sequence, "
        "PyTorch raises an error. With this package, the view is free.",
        *((2, 8, 3), {"cp": 2}, "_S(1,2)", (16, 3)),
    ),
    pattern(
        "meshes",
        "Weights from training to generation, on another mesh",
        "Four ranks train a weight. Two of these ranks form a smaller mesh, and also generate "
        "text with the weight. With this package, these two ranks keep the elements that they "
        "already have, and receive each missing element once. PyTorch raises an error, because "
        "the target is on another mesh.",
        *((8, 6), {"dp": 2, "tp": 2}, "S(0),S(1)"),
        to="S(0)",
        to_mesh=({"gen": 2}, (2, 3)),
    ),
    pattern(
        "redistribution",
        "A redistribution, S(0) to S(1)",
        "At first, each device has some rows. It divides its rows into four blocks of columns, "
        "keeps one block, and sends one block to each other device.",
        *((8, 8), {"tp": 4}, "S(0)"),
        to="S(1)",
    ),
    pattern(
        "heads",
        "Attention heads, split",
        "A column-parallel projection returns a tensor (batch, sequence, heads * head size), "
        "which is sharded by columns. The view splits the columns into heads. Each device has "
        "whole heads, so nothing is sent.",
        *((2, 4, 16), {"tp": 4}, "S(2)", (2, 4, 8, 2)),
    ),
    pattern(
        "merge",
        "Attention heads, merged",
        "After attention, a view merges the dims of heads and of head size into columns again.",
        *((2, 4, 8, 2), {"tp": 4}, "S(2)", (2, 4, 16)),
    ),
    pattern(
        "sequence",
        "Sequence parallelism: batch and sequence, flattened",
        "Each device has a part of each sequence. A view flattens batch and sequence. In the "
        "result, each of these parts is a run of consecutive rows.",
        *((2, 8, 4), {"tp": 4}, "S(1)", (16, 4)),
    ),
    pattern(
        "gate_up",
        "Gate and up projections in one weight",
        "The weights of two projections are stacked in one tensor, and each weight is sharded by "
        "rows. A view flattens the two weights into one matrix. In the result, each device has "
        "two runs of consecutive rows, one from each weight.",
        *((2, 6, 4), {"tp": 3}, "S(1)", (12, 4)),
    ),
    pattern(
        "experts",
        "Expert parallelism: experts and their slots in one dim",
        "The mesh dim ep shards the experts, and the mesh dim tp shards the slots of each expert. "
        "A view flattens experts and slots into one dim.",
        *((4, 4, 3), {"ep": 2, "tp": 2}, "S(0),S(1)", (16, 3)),
    ),
    pattern(
        "vocabulary",
        "An uneven vocabulary",
        "A vocabulary of eleven words is sharded on four devices: three devices have three words, "
        "and the last device has two words. A beam search picks from all words of all beams, so a "
        "view turns (batch, beams, words) into (batch, beams * words).",
        *((2, 2, 11), {"tp": 4}, "S(2)", (2, 22)),
    ),
)


def page(measured: dict[str, Any]) -> str:
    lines = [
        "# Gallery",
        "",
        "The pictures show patterns of real models, with small tensors. A picture shows which "
        "device has each element, before and after the op. The page begins with patterns for "
        "which PyTorch gathers, raises an error or returns wrong data. For the other patterns, "
        "PyTorch and this package give the same result. `make pages` generates this page.",
        "",
        f"The tables compare PyTorch {measured['torch']} alone with this package. *Free* means "
        "that the result is correct, and that nothing is sent. *Communicates* means that the "
        "result is correct, and that the op communicates. *Raises* means that the op raises the "
        "given error. *Wrong* means that devices do not hold the elements that the placements "
        "of the result describe.",
        "",
        "In the placements, `S(0)` is `Shard(0)`, `R` is `Replicate()`, and `_S(0,3)` is "
        "`_StridedShard(0, split_factor=3)`.",
        "",
        "To draw a picture of your own tensor, run `python -m cute_sharding draw --shape 4,6 "
        '--mesh tp=2 --placements "S(1)" --view 24`, or call `cute_sharding.draw(tensor)` '
        "in a program ([reference](reference/index.md#cute_sharding.drawing.draw)).",
        "",
    ]
    for p in PATTERNS:
        found = measured["outcomes"][p.name]
        if p.view is not None:
            change = f"`.view{p.view}`"
        else:
            change = f"a redistribution to `{format_placements(p.to)}`"
        if p.to_mesh is not None:
            change += f" on {p.to_mesh.text(p.to_names)}"
        mesh = ", ".join(f"{name}={n}" for name, n in zip(p.names, p.sharding.mesh))
        before = f"`{format_placements(p.sharding.placements)}`"
        lines += [
            f"## {p.title}",
            "",
            p.text,
            "",
            f"The tensor has the shape `{p.sharding.shape}` and the placements {before} on mesh "
            f"({mesh}). The op is {change}:",
            "",
            "| PyTorch | cute-sharding |",
            "|---|---|",
            f"| {found['torch']} | {found['ours']} |",
            "",
            f"![{p.picture().title}](gallery/{p.name}.svg)",
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

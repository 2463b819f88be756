"""What views cost under torch.compile with dynamic shapes: graphs compiled, and the guards that
propagation adds, beside PyTorch in a process that never imports the package.

python -m benchmarks.compiled              # the table
python -m benchmarks.compiled --write      # into docs/lists/graphs.md
"""

from __future__ import annotations

import argparse
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from benchmarks.sides import Side, torch_alone, with_flags

PAGE = Path(__file__).parents[1] / "docs" / "lists" / "graphs.md"
DEVICES = 4


class Pattern(NamedTuple):
    """A view, on inputs of the shapes named: dims that are given numbers are constants of the
    model.
    """

    dims: str
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    run: Callable[[Any], Any]
    shapes: tuple[tuple[int, ...], ...]
    split_factors: int  # how many different ones the outputs have that depend on a size


def patchify(x: Any) -> Any:
    b, c, h, w = x.shape
    return x.view(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 16)


def grouped_heads(x: Any) -> Any:
    b, s, h, d = x.shape
    return x[:, :, :, None, :].expand(b, s, h, 3, d).reshape(b, s, h * 3, d)


SEQUENCES = ((2, 12, 16), (3, 16, 16), (2, 24, 16), (5, 32, 16), (3, 40, 16))
PATTERNS = {
    "flatten": Pattern(
        "b s d",
        (4,),
        (Shard(1),),
        lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2]),
        SEQUENCES,
        3,
    ),
    "flatten, unflatten": Pattern(
        "b s d",
        (4,),
        (Shard(1),),
        lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2]).view(x.shape),
        SEQUENCES,
        0,
    ),
    "flatten, uneven sequences": Pattern(
        "b s d",
        (4,),
        (Shard(1),),
        lambda x: x.flatten(0, 1),
        ((2, 13, 16), (3, 18, 16), (2, 30, 16), (3, 23, 16)),
        2,
    ),
    "reshape(-1, d)": Pattern(
        "b s d",
        (4,),
        (Shard(0),),
        lambda x: x.reshape(-1, x.shape[-1]),
        ((8, 6, 16), (12, 7, 16), (20, 24, 16), (16, 32, 16)),
        0,
    ),
    "split to heads": Pattern(
        "b s d",
        (4,),
        (Shard(2),),
        lambda x: x.view(x.shape[0], x.shape[1], 8, x.shape[2] // 8),
        ((2, 12, 64), (3, 16, 64), (2, 24, 128), (5, 32, 128)),
        0,
    ),
    "merge of heads": Pattern(
        "b s h e",
        (4,),
        (Shard(2),),
        lambda x: x.reshape(x.shape[0], x.shape[1], -1),
        ((2, 12, 12, 16), (3, 16, 8, 16), (2, 24, 16, 16), (5, 32, 16, 32)),
        0,
    ),
    "repeat of grouped heads": Pattern(
        "b s h e",
        (4,),
        (Shard(2),),
        grouped_heads,
        ((2, 12, 12, 16), (3, 16, 8, 16), (2, 24, 16, 16), (5, 32, 16, 32)),
        0,
    ),
    "patchify, images sharded": Pattern(
        "b c h w",
        (4,),
        (Shard(0),),
        patchify,
        ((8, 3, 16, 20), (12, 3, 32, 16), (16, 3, 32, 32), (20, 3, 64, 32)),
        0,
    ),
    "patchify, rows sharded": Pattern(
        "b c h w",
        (4,),
        (Shard(2),),
        patchify,
        ((2, 3, 48, 20), (5, 3, 32, 16), (4, 3, 64, 32), (2, 3, 32, 32)),
        0,
    ),
    "mixture of experts": Pattern(
        "n d",
        (4,),
        (Shard(0),),
        lambda x: x.view(8, x.shape[0] // 8, x.shape[1]),
        ((24, 12), (32, 12), (48, 24), (64, 24)),
        0,
    ),
    "2-d mesh flatten": Pattern(
        "b s d",
        (2, 2),
        (Shard(0), Shard(1)),
        lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2]),
        ((4, 10, 16), (6, 16, 16), (4, 24, 16), (8, 32, 16)),
        3,
    ),
}


def make(shape: tuple[int, ...], pattern: Pattern) -> DTensor:
    """This rank's part of a tensor whose elements all differ."""
    mesh = DeviceMesh("cpu", torch.arange(DEVICES).reshape(pattern.mesh))
    return distribute_tensor(
        torch.arange(float(torch.Size(shape).numel())).reshape(shape),
        mesh,
        pattern.placements,
        src_data_rank=None,
    )


class Measured(NamedTuple):
    graphs: int
    guards: tuple[str, ...]
    error: str | None


class _Guards(logging.Handler):
    """The guards that propagation logs, with the dims of the input for torch's symbols."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.shape: tuple[int, ...] = ()
        self.dims: list[str] = []
        self.found: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if match := re.fullmatch(r"guard: (.*) \(now (.*)\)", record.getMessage()):
            fact = match[1]
            for name, value in re.findall(r"(\w+) = (\d+)", match[2]):
                fact = re.sub(
                    rf"\b{name}\b",
                    self.dims[self.shape.index(int(value))] if int(value) in self.shape else value,
                    fact,
                )
            self.found[fact] = None


def measure(pattern: Pattern, backend: str = "aot_eager", *, gradients: bool = False) -> Measured:
    """Graphs that one compiled function needs for all shapes, under the rules in force; it is
    checked against running eagerly.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def program(x: Any) -> Any:
        return pattern.run(x) * 2

    compiled = torch.compile(program, backend=counter, fullgraph=True, dynamic=True)
    guards = _Guards()
    guards.dims = pattern.dims.split()
    log = logging.getLogger("cute_sharding")
    level = log.level
    log.addHandler(guards)
    try:
        for shape in pattern.shapes:
            given, again = (
                make(shape, pattern).requires_grad_(gradients),
                make(shape, pattern).requires_grad_(gradients),
            )
            expected = program(given)
            guards.shape = shape
            log.setLevel(logging.DEBUG)
            try:
                actual = compiled(again)
            except Exception as error:
                kind = re.sub(r"^.*got RuntimeError\(\W*", "", str(error), flags=re.S)
                return Measured(
                    counter.frame_count,
                    tuple(guards.found),
                    f"{type(error).__name__}: {kind.strip().splitlines()[0][:90]}",
                )
            finally:
                log.setLevel(level)
            if gradients:
                (expected,) = torch.autograd.grad(expected, given, torch.ones_like(expected))
                (actual,) = torch.autograd.grad(actual, again, torch.ones_like(actual))
            if (
                actual.placements != expected.placements
                or actual.shape != expected.shape
                or not torch.equal(actual.to_local(), expected.to_local())
            ):
                return Measured(
                    counter.frame_count,
                    tuple(guards.found),
                    f"other than eager: {actual.placements} for {expected.placements}",
                )
    finally:
        log.removeHandler(guards)
        torch._dynamo.reset()
    return Measured(counter.frame_count, tuple(guards.found), None)


def line(name: str, torchs: Side, here: Side) -> str:
    pattern = PATTERNS[name]
    [stock], [ours] = torchs.call(_graphs, name), here.call(_graphs, name)
    cells = [
        name,
        f"({', '.join(pattern.dims.split())}) {list(pattern.placements)} on {pattern.mesh}",
        str(len(pattern.shapes)),
        _stock(stock),
        ours.error or str(ours.graphs),
        ", ".join(f"`{guard}`" for guard in ours.guards) or "none",
    ]
    return "| " + " | ".join(cells) + " |"


def _graphs(name: str) -> Measured | None:
    """What this process measures; None where the program raises without a compiler too."""
    warnings.filterwarnings("ignore")
    try:
        return measure(PATTERNS[name])
    except RuntimeError:
        return None


def _stock(found: Measured | None) -> str:
    if found is None:
        return "refused, eager too"
    return (
        f"error: {found.error.split(':')[0]}"
        if found.error and not found.error.startswith("other")
        else found.error or str(found.graphs)
    )


def page(names: Sequence[str], torchs: Side, here: Side) -> str:
    return "\n".join(
        [
            "# Views under torch.compile",
            "",
            "How many graphs a view needs for inputs of changing sizes, and which guards it adds. "
            "`python -m benchmarks.compiled --write` writes this page. Each function applies views "
            "to its input, multiplies the result by 2, and is compiled by",
            "",
            "```text",
            'torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")',
            "```",
            "",
            f"It is then called with several shapes on {DEVICES} ranks, and compared with the "
            "eager function in placements and values.",
            "",
            "| column | meaning |",
            "|---|---|",
            "| pattern | the views of the function |",
            "| input | dims, placements and mesh of the input |",
            "| shapes | number of input shapes |",
            "| PyTorch: graphs, or error | number of graphs that PyTorch alone compiles |",
            "| package: graphs | number of graphs with the package |",
            "| guards | guards that the package adds, on the dims in *input* |",
            "",
            "PyTorch's own guards, as on sizes of 0 and 1, are left out. More than one graph is "
            "needed where a function returns a `_StridedShard`: inside of a graph its split factor "
            "is a symbol, but placements of results are constants ([Compiled "
            "programs](../compiled.md)).",
            "",
            "| pattern | input | shapes | PyTorch: graphs, or error | package: graphs | guards |",
            "|---|---|---|---|---|---|",
            *(line(name, torchs, here) for name in names),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help=f"write {PAGE.name} instead of printing it"
    )
    parser.add_argument("--only", default="", help="patterns whose name has this in it")
    arguments = parser.parse_args()
    names = [name for name in PATTERNS if arguments.only in name]
    # Not above: the sides import this file, and PyTorch alone must not import the package.
    from cute_sharding.tools.progress import progress

    posed = (0, DEVICES)
    views = {"USE_CUTE_VIEW_PROPAGATION": "1"}
    with (
        progress(f"{len(names)} programs are compiled, with and without the flag"),
        torch_alone(poses_as=posed) as torchs,
        with_flags(views, poses_as=posed) as here,
    ):
        text = page(names, torchs, here)
    if arguments.write:
        PAGE.write_text(text)
        print(f"wrote {PAGE}")
    else:
        print(text)


if __name__ == "__main__":
    main()

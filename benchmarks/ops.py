"""Which ops are right on which placements: torch's own operator database, every rank against one
device, with torch's rules and with ours.

    python -m benchmarks.ops [--only NAME ...] [--samples 3] [--mesh 2]
                             [--kinds even uneven strided] [--seed 0] [--device cuda]
    python -m benchmarks.ops --mesh 2 2 --kinds nested pending
    python -m benchmarks.ops --write

For each op and each of its sample inputs, tensors are cut at random: evenly, unevenly, and as views
cut them (_StridedShard), one dim on several mesh dims (nested), or pending sums. Each is run

- on stock with _StridedShard and uneven shards replicated: what a program would have had,
- on stock as it is,
- with ops switched on,

forward and backward, all ranks in one process (LocalTensorMode), and compared with one device.
``--write`` measures them all, a process for each core, and writes docs/lists/measured-ops.json and
its page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

import cute_sharding
from benchmarks.op_database import (
    RAISES,
    RIGHT,
    WRONG,
    cut_of,
    database,
    distributed,
    drawn,
    dtype_of,
    is_drawn,
    leaves_of,
    limited,
    on_one_device,
    outcome,
    run,
    samples_of,
)

# On which mesh each kind of placements is measured for the table.
KINDS = {"even": (2,), "uneven": (2,), "strided": (2,), "nested": (2, 2), "pending": (2, 2)}

DATA = Path(__file__).parent.parent / "docs" / "lists" / "measured-ops.json"

# Of attention torch derives a rule from what it decomposes to: with a mask that takes an hour.
SECONDS = 60


def on_mesh(
    op: Any, args: Any, kwargs: Any, placements: list[Any], mesh: Any, gradients: bool
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of the op on tensors of those placements."""
    flat, tree = tree_flatten((args, kwargs))
    remaining = iter(placements)
    given = [
        distributed(x, mesh, next(remaining)) if isinstance(x, torch.Tensor) else x for x in flat
    ]
    new_args, new_kwargs = tree_unflatten(given, tree)
    with limited(SECONDS):
        return run(op, new_args, new_kwargs, gradients)


def answered() -> str:
    """Who has answered for an op's parts since the last reset: the gate, if any; else signatures,
    if any; else torch.
    """
    counts = cute_sharding.stats(reset=True).values()
    return next(
        (who for who in ("gate", "signature") if any(count[who] for count in counts)), "torch"
    )


def would_have_had(placements: list[Any], kind: str) -> list[Any]:
    """What a program without us has in the place of cuts that only our views make."""
    return [
        [
            Replicate()
            if kind != "even"
            and cut_of(p) is not None
            and (kind == "uneven" or isinstance(p, _StridedShard))
            else p
            for p in some
        ]
        for some in placements
    ]


def measured(
    info: Any, mesh: Any, samples: int, kinds: tuple[str, ...], seed: int
) -> tuple[dict[str, dict[str, Counter[str]]], dict[str, str]]:
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    notes: dict[str, str] = {}
    rng = random.Random(f"ops {seed} {info.name} {info.variant_test_name}")
    gradients = bool(info.supports_autograd and dtype_of(info).is_floating_point)
    sizes = tuple(mesh.shape)

    def fits(tensors: list[torch.Tensor]) -> bool:
        """Whether they are small and can be cut."""
        return all(x.numel() < 5000 for x in tensors) and any(
            drawn(rng, tuple(x.shape), sizes, "uneven") for x in tensors
        )

    with _disable_current_modes():
        given = samples_of(info, gradients, rng, fits, 40, mesh.device_type)
    for kind in kinds:
        done = 0
        for sample in given:
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            tensors = leaves_of((args, kwargs))
            placements = [drawn(rng, tuple(x.shape), sizes, kind, x.dtype) for x in tensors]
            if not any(map(is_drawn, placements)):
                continue
            with _disable_current_modes():
                expected = on_one_device(info, args, kwargs, gradients)
            if expected is None:
                continue
            ways = {
                "had": (nullcontext(), would_have_had(placements, kind)),
                "stock": (nullcontext(), placements),
                "ours": (cute_sharding.enabled(), placements),
            }
            for way, (switched, some) in ways.items():
                with switched:
                    if way == "ours":
                        cute_sharding.stats(reset=True)
                    said, why = outcome(
                        partial(on_mesh, info.op, args, kwargs, some, mesh, gradients), expected
                    )
                found[kind][way][said] += 1
                if way == "ours":
                    found[kind]["by"][answered()] += 1
                if said != RIGHT and f"{kind} {way} {said}" not in notes:
                    shapes = [tuple(x.shape) for x in tensors]
                    notes[f"{kind} {way} {said}"] = f"{shapes} {some} {why}"
            done += 1
            if done == samples:
                break
    return found, notes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--mesh", type=int, nargs="*", default=[2])
    parser.add_argument("--kinds", nargs="*", default=_kinds_on((2,)), choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--part", type=int, nargs=2, default=[0, 1], help="one part of so many, to run side by side"
    )
    parser.add_argument("--json", type=Path, help="where to put what was found")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write:
        return write(options.samples)
    warnings.simplefilter("ignore")
    totals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    records: dict[str, Any] = {}
    world = prod(options.mesh)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    for number, info in enumerate(database(options.only)):
        if number % options.part[1] != options.part[0]:
            continue
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        try:
            with LocalTensorMode(world):
                mesh = DeviceMesh(options.device, torch.arange(world).reshape(options.mesh))
                found, notes = measured(
                    info, mesh, options.samples, tuple(options.kinds), options.seed
                )
        except Exception as error:
            print(f"{name}: not measured: {type(error).__name__} {str(error)[:100]}", flush=True)
            continue
        records[name] = found
        for kind, ways in found.items():
            line = []
            for way, counts in ways.items():
                if way == "by":
                    continue
                totals[kind, way].update(counts)
                line.append(f"{way} {counts[RIGHT]}/{counts[WRONG]}/{counts[RAISES]}")
            worse = (
                ways["ours"][RIGHT] < ways["had"][RIGHT] or ways["ours"][WRONG] > ways["had"][WRONG]
            )
            print(f"{name}: {kind}: {', '.join(line)}{'  WORSE' if worse else ''}", flush=True)
            for key, note in notes.items():
                if key.startswith(kind) and (worse or "WRONG" in key.upper()):
                    print(f"    {key}: {note}"[:600].replace("\n", " "), flush=True)
    print("right/wrong/raises")
    for (kind, way), counts in totals.items():
        print(f"{kind}, {way}: {counts[RIGHT]}/{counts[WRONG]}/{counts[RAISES]}")
    if options.json:
        options.json.write_text(json.dumps(records))


def _kinds_on(mesh: tuple[int, ...]) -> list[str]:
    return [kind for kind, measured_on in KINDS.items() if measured_on == mesh]


def write(samples: int) -> None:
    """Measure all ops, and write docs/lists/measured-ops.json and docs/lists/measured-ops.md."""
    parts = os.cpu_count() or 1
    records: dict[str, Any] = defaultdict(dict)
    for mesh in sorted(set(KINDS.values())):
        for name, record in _of_parts(mesh, samples, parts).items():
            records[name].update(record)
    data = summary(records, samples)
    DATA.write_text(as_json(data))
    DATA.with_suffix(".md").write_text(page(data))


def _of_parts(mesh: tuple[int, ...], samples: int, parts: int) -> dict[str, Any]:
    """What is found on a mesh, op by op, by so many processes."""
    asked = ["--samples", str(samples), "--mesh", *map(str, mesh), "--kinds", *_kinds_on(mesh)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(parts)]
        command = [sys.executable, "-m", "benchmarks.ops", *asked]
        runs = [
            subprocess.Popen([*command, "--part", str(i), str(parts), "--json", str(file)])
            for i, file in enumerate(files)
        ]
        codes = [run.wait() for run in runs]
        if any(codes):
            raise SystemExit("a part failed: see above")
        found = [json.loads(file.read_text()) for file in files]
    return {name: record for part in found for name, record in part.items()}


def summary(records: dict[str, dict[str, dict[str, dict[str, int]]]], samples: int) -> Any:
    """What measured-ops.json has: totals by kind of placements, and each op that is not right on
    all that was drawn, with PyTorch alone or with the package. Counts are right, wrong, raises.
    """

    def counts(of: dict[str, int]) -> list[int]:
        return [of.get(said, 0) for said in (RIGHT, WRONG, RAISES)]

    measured = {name: record for name, record in sorted(records.items()) if record}
    totals: dict[str, dict[str, list[int]]] = {}
    for kind in KINDS:
        added = {way: Counter[str]() for way in ("had", "stock", "ours")}
        for record in measured.values():
            for way, of in added.items():
                of.update(record.get(kind, {}).get(way, {}))
        totals[kind] = {way: counts(of) for way, of in added.items()}
    ops = []
    for name, record in measured.items():
        row: dict[str, Any] = {"op": name, "by": _who(record)}
        for kind in KINDS:
            if kind in record:
                row[kind] = {way: counts(record[kind].get(way, {})) for way in ("stock", "ours")}
        if any(any(row[kind][way][1:]) for kind in row.keys() & KINDS for way in ("stock", "ours")):
            ops.append(row)
    return {
        "torch": torch.__version__.partition("+")[0],
        "samples": samples,
        "measured": len(measured),
        "by": dict(Counter(map(_who, measured.values()))),
        "totals": totals,
        "ops": ops,
    }


def as_json(data: Any) -> str:
    """A line for each op, so that a change of one is a change of one line."""
    ops = ",\n".join(f"  {json.dumps(row)}" for row in data["ops"])
    fields = [f' "{key}": {json.dumps(value)}' for key, value in data.items() if key != "ops"]
    return "{\n" + ",\n".join([*fields, f' "ops": [\n{ops}\n ]']) + "\n}\n"


def page(data: Any) -> str:
    """measured-ops.md: the totals, and the place where measured-ops.js puts the table."""
    order = ("stock", "ours", "had")
    rows = "\n".join(
        f"| {kind} | {' | '.join('/'.join(map(str, ways[way])) for way in order)} |"
        for kind, ways in data["totals"].items()
    )
    by = data["by"]
    return f"""# Measured: every op of PyTorch

`python -m benchmarks.ops --write` generates this page, here with PyTorch {data["torch"]}. The
benchmark runs {data["measured"]} ops with the sample inputs of PyTorch's own tests. For each kind
of placements, each op runs on {data["samples"]} inputs, forward and backward. The results of every
rank are compared with the results on one device.

A cell such as 893/8/210 means 893 correct runs, 8 runs with wrong results and 210 errors:

| placements | PyTorch | cute-sharding | replicated first |
|---|---|---|---|
{rows}

| placements | mesh | input |
|---|---|---|
| even | 2 | a `Shard` of a dim that divides evenly |
| uneven | 2 | a `Shard` of any dim |
| strided | 2 | a `_StridedShard` |
| nested | 2 x 2 | one tensor dim on both mesh dims, by `Shard` or `_StridedShard` |
| pending | 2 x 2 | a `Partial` on one mesh dim, a `_StridedShard` on the other mesh dim |

For the column *replicated first*, the benchmark replicates uneven and strided shards before each
PyTorch op.

If an input is a `_StridedShard`, the output placements come from the following sources ([Who
answers](../ops.md#who-answers)):

| number of ops | source of the output placements |
|---|---|
| {by.get("signature", 0)} | a signature |
| {by.get("gate", 0)} | the fallback, which replicates the input |
| {by.get("torch", 0)} | the package's rules for views, or PyTorch's rules |

## Ops that are not right everywhere

The following {len(data["ops"])} ops were wrong or raised an error at least once, with or without
cute-sharding. A click on an op shows the numbers of the op for each kind of placements.

<div id="measured-ops" data-source="../measured-ops.json">
A script reads the numbers of all ops from <a href="../measured-ops.json">measured-ops.json</a>.
</div>
<script src="../measured-ops.js" defer></script>
"""


def _who(record: dict[str, dict[str, dict[str, int]]]) -> str:
    by = record.get("strided", {}).get("by", {})
    return next((who for who in ("gate", "signature", "torch") if by.get(who)), "")


if __name__ == "__main__":
    main()

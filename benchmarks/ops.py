"""Which ops are right on which placements: torch's own operator database, every rank against one
device, with torch's rules and with ours.

    python -m benchmarks.ops [--only NAME ...] [--samples 3] [--mesh 2] [--kinds even uneven
    strided] [--seed 0] python -m benchmarks.ops --write

For each op and each of its sample inputs, tensors are cut at random: evenly, unevenly, and as views
cut them (_StridedShard). Each is run

- on stock with _StridedShard and uneven shards replicated: what a program would have had,
- on stock as it is,
- with ops switched on,

forward and backward, all ranks in one process (LocalTensorMode), and compared with one device.
``--write`` measures them all, a process for each core, and puts the table into docs/ops.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import cute_sharding
from cute_sharding.dtensor import ledger
from cute_sharding.sharding.deal import rows

KINDS = ("even", "uneven", "strided")
RIGHT, WRONG, RAISES = "right", "wrong", "raises"


def cut_of(p: Any) -> Any:
    return (p.dim, getattr(p, "split_factor", 1)) if isinstance(p, (Shard, _StridedShard)) else None


def local_of(
    full: torch.Tensor, placements: Any, sizes: tuple[int, ...], rank: int
) -> torch.Tensor:
    """What a rank holds of a tensor, by index arrays."""
    coordinate, rest = [], rank
    for n in reversed(sizes):
        coordinate.insert(0, rest % n)
        rest //= n
    for d in range(full.ndim):
        chain = [
            (cut_of(p)[1], n, k)
            for p, n, k in zip(placements, sizes, coordinate)
            if cut_of(p) is not None and cut_of(p)[0] == d
        ]
        if chain:
            index = [
                row for start, stop in rows(full.shape[d], chain) for row in range(start, stop)
            ]
            full = full.index_select(d, torch.tensor(index, dtype=torch.long))
    return full.contiguous()


def distributed(full: torch.Tensor, mesh: Any, placements: Any) -> Any:
    sizes = tuple(mesh.shape)
    with _disable_current_modes():
        plain = full.detach()
        parts = {
            rank: local_of(plain, placements, sizes, rank).clone() for rank in range(prod(sizes))
        }
    spec = DTensorSpec(
        mesh,
        tuple(placements),
        TensorMeta(full.shape, full.contiguous().stride(), full.dtype),
        use_strided_shard_as_shard_order=False,
    )
    return DTensor(LocalTensor(parts), spec, requires_grad=full.requires_grad)


def whole(tensor: DTensor) -> torch.Tensor:
    """The tensor that a DTensor stands for, on one device, put together row by row; ranks that hold
    the same rows must agree.
    """
    spec = tensor._spec
    if any(p.is_partial() for p in spec.placements):
        tensor = tensor.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in spec.placements]
        )
        spec = tensor._spec
    sizes = tuple(spec.mesh.shape)
    local = tensor._local_tensor
    if hasattr(local, "wait"):
        local = local.wait()
    with _disable_current_modes():
        index = torch.arange(max(prod(spec.shape), 0)).reshape(tuple(spec.shape))
        result = (
            torch.full((index.numel(),), -77, dtype=tensor.dtype)
            if tensor.dtype is not torch.bool
            else torch.zeros(index.numel(), dtype=torch.bool)
        )
        for rank in range(prod(sizes)):
            part = (
                local._local_tensors[rank].detach()
                if hasattr(local, "_local_tensors")
                else local.detach()
            )
            mine = local_of(index, spec.placements, sizes, rank)
            if tuple(mine.shape) != tuple(part.shape):
                raise AssertionError(
                    f"rank {rank} holds {tuple(part.shape)} for {tuple(mine.shape)} of "
                    f"{spec.placements}"
                )
            result[mine.reshape(-1)] = part.reshape(-1)
        for rank in range(prod(sizes)):
            part = (
                local._local_tensors[rank].detach()
                if hasattr(local, "_local_tensors")
                else local.detach()
            )
            mine = local_of(index, spec.placements, sizes, rank)
            if not same(result[mine.reshape(-1)], part.reshape(-1)):
                raise AssertionError("replicas differ")
        return result.reshape(tuple(spec.shape))


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    with _disable_current_modes():
        if hasattr(x, "_local_tensors"):
            return all(same(part, y) for part in x._local_tensors.values())
        return _same(x, y)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.is_floating_point() or x.is_complex():
        return torch.allclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
    return torch.equal(x, y)


def drawn(
    rng: random.Random, shape: tuple[int, ...], sizes: tuple[int, ...], kind: str
) -> list[Any] | None:
    """Placements of a kind for a tensor; None where there are none."""
    result: list[Any] = []
    for _ in sizes:
        fitting = [
            d
            for d, size in enumerate(shape)
            if kind != "even" or (size and size % prod(sizes) == 0)
        ]
        if not fitting or rng.random() < 0.15:
            result.append(Replicate())
            continue
        d = rng.choice(fitting)
        result.append(
            _StridedShard(d, split_factor=rng.choice((2, 2, 3, 5)))
            if kind == "strided"
            else Shard(d)
        )
    return result


def leaves_of(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def run(
    op: Callable[..., Any], args: Any, kwargs: Any, gradients: bool
) -> tuple[list[Any], list[Any]]:
    """The results, and the gradients of the floating inputs."""
    outputs = op(*args, **kwargs)
    results = leaves_of(outputs)
    if not gradients:
        return results, []
    roots = [y for y in results if y.requires_grad and y.numel()]
    leaves = [x for x in leaves_of((args, kwargs)) if x.requires_grad]
    if not roots or not leaves:
        return results, []
    return results, list(
        torch.autograd.grad(
            [y.sum() if not y.is_complex() else torch.view_as_real(y).sum() for y in roots],
            leaves,
            allow_unused=True,
        )
    )


# Of attention torch derives a rule from what it decomposes to: with a mask that takes an hour.
SECONDS = 60


class TooLong(BaseException):
    """Not an Exception: torch goes on after those."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(
    op: Any,
    args: Any,
    kwargs: Any,
    placements: list[Any],
    mesh: Any,
    expected: Any,
    gradients: bool,
) -> tuple[str, str]:
    flat, tree = tree_flatten((args, kwargs))
    remaining = iter(placements)
    try:
        given = [
            distributed(x, mesh, next(remaining)) if isinstance(x, torch.Tensor) else x
            for x in flat
        ]
        new_args, new_kwargs = tree_unflatten(given, tree)
        with limited(SECONDS):
            results, grads = run(op, new_args, new_kwargs, gradients)
    except (Exception, TooLong) as error:
        return RAISES, f"{type(error).__name__}: {str(error)[:400]}"
    try:
        for x, y in zip((*results, *grads), (*expected[0], *expected[1]), strict=True):
            if (x is None) != (y is None):
                return WRONG, "a gradient is missing"
            if x is not None and not same(
                whole(x) if isinstance(x, DTensor) else x.detach(), y.detach()
            ):
                return WRONG, f"{getattr(x, 'placements', None)}"
    except Exception as error:
        return WRONG, f"{type(error).__name__}: {str(error)[:200]}"
    return RIGHT, ""


# Results are drawn, or are memory that nobody has written.
DRAWN = (
    "rand",
    "normal",
    "dropout",
    "empty",
    "bernoulli",
    "multinomial",
    "uniform",
    "rrelu",
    "exponential",
    "cauchy",
    "geometric",
    "log_normal",
    "svd_lowrank",
    "pca_lowrank",
    "multi_head_attention",
)


def database(only: list[str]) -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if any(word in info.name for word in DRAWN) or (only and info.name not in only):
            continue
        yield info


def answered() -> str:
    """Who has answered for an op's parts since the last reset: the gate, if any; else signatures,
    if any; else torch.
    """
    counts = cute_sharding.stats(reset=True).values()
    return next(
        (who for who in ("gate", "signature") if any(count[who] for count in counts)), "torch"
    )


def measured(
    info: Any, mesh: Any, samples: int, kinds: tuple[str, ...], seed: int
) -> tuple[dict[str, dict[str, Counter[str]]], dict[str, str]]:
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    notes: dict[str, str] = {}
    rng = random.Random(f"ops {seed} {info.name} {info.variant_test_name}")
    dtype = next(
        dtype
        for dtype in (torch.float64, torch.float32, torch.int64, torch.bool)
        if dtype in info.dtypes or dtype is torch.bool
    )
    gradients = bool(info.supports_autograd and dtype.is_floating_point)
    sizes = tuple(mesh.shape)
    with _disable_current_modes():
        torch.manual_seed(0)
        given = []
        for i, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=gradients)):
            tensors = leaves_of((sample.input, sample.args, sample.kwargs))
            if (
                tensors
                and all(x.numel() < 5000 for x in tensors)
                and any(drawn(rng, tuple(x.shape), sizes, "uneven") for x in tensors)
            ):
                given.append(sample)
            if len(given) > 40 or i > 400:
                break
        rng.shuffle(given)
    for kind in kinds:
        done = 0
        for sample in given:
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            tensors = leaves_of((args, kwargs))
            placements = [drawn(rng, tuple(x.shape), sizes, kind) for x in tensors]
            if all(cut_of(p) is None for some in placements for p in some or ()):
                continue
            try:
                with _disable_current_modes():
                    expected, again = (run(info.op, args, kwargs, gradients) for _ in range(2))
                    if not all(
                        _same(x.detach(), y.detach())
                        for x, y in zip((*expected[0], *expected[1]), (*again[0], *again[1]))
                        if x is not None
                    ):
                        continue  # some results are drawn
            except Exception:
                continue
            plain = [
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
            ways = {
                "had": (nullcontext(), plain),
                "stock": (nullcontext(), placements),
                "ours": (cute_sharding.enabled(), placements),
            }
            for way, (switched, some) in ways.items():
                with switched:
                    if way == "ours":
                        cute_sharding.reset_stats()
                        ledger.note(
                            mesh, lambda: True
                        )  # as after a view that torch would have redistributed for
                    said, why = outcome(info.op, args, kwargs, some, mesh, expected, gradients)
                found[kind][way][said] += 1
                if way == "ours":
                    found[kind]["by"][answered()] += 1
                if said != RIGHT and f"{kind} {way} {said}" not in notes:
                    notes[f"{kind} {way} {said}"] = (
                        f"{[tuple(x.shape) for x in tensors]} {some} {why}"
                    )
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
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
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
                mesh = DeviceMesh("cpu", torch.arange(world).reshape(options.mesh))
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


MARK = "<!-- Below: python -m benchmarks.ops --write -->"


def write(samples: int) -> None:
    """Measure all ops and put the table at the end of docs/ops.md."""
    parts = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(parts)]
        runs = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.ops",
                    "--samples",
                    str(samples),
                    "--part",
                    str(i),
                    str(parts),
                    "--json",
                    str(file),
                ]
            )
            for i, file in enumerate(files)
        ]
        codes = [run.wait() for run in runs]
        if any(codes):
            raise SystemExit("a part failed: see above")
        records = {
            name: record for file in files for name, record in json.loads(file.read_text()).items()
        }
    page = Path(__file__).parent.parent / "docs" / "ops.md"
    page.write_text(
        page.read_text().partition(MARK)[0]
        + MARK
        + "\n"
        + "\n".join(table(records, samples))
        + "\n"
    )


def table(records: dict[str, dict[str, dict[str, dict[str, int]]]], samples: int) -> Iterator[str]:
    def cell(counts: dict[str, int]) -> str:
        return (
            "/".join(str(counts.get(said, 0)) for said in (RIGHT, WRONG, RAISES)) if counts else ""
        )

    measured = {name: record for name, record in sorted(records.items()) if record}
    who = Counter(_who(record) for record in measured.values())
    yield (
        f"\n## What was measured\n\ntorch {torch.__version__.partition('+')[0]}, a mesh of 2, "
        f"{samples} inputs of each kind for each of {len(measured)} ops, forward and backward: "
        "right/wrong/raises, on stock and with ours.\n"
    )
    yield "| placements | had | stock | ours |\n|---|---|---|---|"
    for kind in KINDS:
        totals = {way: Counter[str]() for way in ("had", "stock", "ours")}
        for record in measured.values():
            for way, counts in totals.items():
                counts.update(record.get(kind, {}).get(way, {}))
        yield f"| {kind} | {' | '.join(map(cell, totals.values()))} |"
    yield (
        f"\nOn `_StridedShard` {who['signature']} ops are answered by signatures, {who['gate']} by "
        f"the gate (or by both), and {who['torch']} by torch's own rules and by views.\n"
    )
    yield (
        "Ops that are not right on all that was drawn, on stock or with ours; all others are right "
        "everywhere:\n"
    )
    yield (
        "| op | by | "
        f"{' | '.join(f'{kind}, {way}' for kind in KINDS for way in ('stock', 'ours'))} "
        f"|\n|---|---|{'---|' * 2 * len(KINDS)}"
    )
    for name, record in measured.items():
        if any(
            record[kind][way].get(said)
            for kind in record
            for way in ("stock", "ours")
            for said in (WRONG, RAISES)
        ):
            cells = [
                cell(record.get(kind, {}).get(way, {}))
                for kind in KINDS
                for way in ("stock", "ours")
            ]
            yield f"| {name} | {_who(record)} | {' | '.join(cells)} |"


def _who(record: dict[str, dict[str, dict[str, int]]]) -> str:
    by = record.get("strided", {}).get("by", {})
    return next((who for who in ("gate", "signature", "torch") if by.get(who)), "")


if __name__ == "__main__":
    main()

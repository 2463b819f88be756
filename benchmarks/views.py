"""Time of rules, propagation and the algebra beside torch's, on real model shapes; and how many
free views each answers.

    python -m benchmarks.views            # ratios of time: ours / torch's
    python -m benchmarks.views --answers  # drawn cases: how many of those that can be free are
                                          # answered free, ours and torch's
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import torch.distributed._pycute as pycute
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._ops import _view_ops as torch_views
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import cute_sharding.layout as algebra
from benchmarks.timing import geometric_mean, ratio
from cute_sharding.dtensor import propagate_shape_and_sharding
from cute_sharding.relations import view
from cute_sharding.sharding.rows import local_size
from cute_sharding.tools.progress import progress

S, R = Shard, Replicate()


def SS(dim: int, split_factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=split_factor)


# (what, input shape, output shape, mesh, placements): views of well-known models, all free in
# torch's strict path.
MODEL_VIEWS = [
    ("llama-7b flatten tokens", (8, 4096, 4096), (32768, 4096), (8,), [S(0)]),
    ("llama-7b flatten tokens, sequence", (8, 4096, 4096), (32768, 4096), (8,), [S(1)]),
    ("llama-7b flatten tokens, hidden", (8, 4096, 4096), (32768, 4096), (8,), [S(2)]),
    ("llama-7b unflatten tokens", (32768, 4096), (8, 4096, 4096), (8,), [S(0)]),
    ("llama-7b split heads", (8, 4096, 4096), (8, 4096, 32, 128), (8,), [S(2)]),
    ("llama-7b merge heads", (8, 4096, 32, 128), (8, 4096, 4096), (8,), [S(2)]),
    ("llama-7b merge heads, sequence", (8, 4096, 32, 128), (8, 4096, 4096), (8,), [S(1)]),
    ("llama-70b split kv heads", (4, 8192, 1024), (4, 8192, 8, 128), (8,), [S(2)]),
    ("llama-70b dp x tp split heads", (16, 8192, 8192), (16, 8192, 64, 128), (8, 8), [S(0), S(2)]),
    ("llama-70b dp x tp merge heads", (16, 8192, 64, 128), (16, 8192, 8192), (8, 8), [S(0), S(2)]),
    ("llama-70b dp x sp flatten", (16, 8192, 8192), (131072, 8192), (8, 8), [S(0), S(1)]),
    ("llama-70b fsdp x tp flatten", (16, 8192, 8192), (131072, 8192), (8, 8), [S(0), S(2)]),
    ("llama-3 flatten logits", (8, 4096, 128256), (32768, 128256), (8,), [S(2)]),
    ("llama-3 flatten logits, batch", (8, 4096, 128256), (32768, 128256), (8,), [S(0)]),
    ("gpt-3 qkv split", (8, 2048, 36864), (8, 2048, 3, 96, 128), (3,), [S(2)]),
    ("gpt-3 flatten, pp x dp x tp", (16, 2048, 12288), (32768, 12288), (2, 4, 8), [R, S(0), S(2)]),
    ("gpt-3 attention scores", (8, 96, 2048, 2048), (768, 2048, 2048), (8,), [S(0)]),
    ("gpt-3 attention scores, heads", (8, 96, 2048, 2048), (768, 2048, 2048), (8,), [S(1)]),
    ("vit-l patches", (64, 3, 224, 224), (64, 3, 16, 14, 16, 14), (8,), [S(0)]),
    ("vit-l patches flat", (64, 16, 16, 3, 14, 14), (64, 256, 588), (8,), [S(0)]),
    ("vit-l tokens", (64, 256, 1024), (16384, 1024), (8,), [S(0)]),
    ("mixtral experts", (8, 4096, 4096), (8, 16, 256, 4096), (8,), [S(0)]),
    ("mixtral expert capacity", (8, 512, 4096), (4096, 4096), (8,), [S(0)]),
    ("mixtral expert weights", (8, 14336, 4096), (114688, 4096), (8,), [S(0)]),
    ("mixtral expert weights, tp", (8, 14336, 4096), (114688, 4096), (8,), [S(1)]),
    ("deepseek heads", (4, 4096, 16384), (4, 4096, 128, 128), (16,), [S(2)]),
    ("deepseek group router", (16384, 256), (16384, 8, 32), (8,), [S(1)]),
    ("deepseek group router, tokens", (16384, 256), (16384, 8, 32), (8,), [S(0)]),
    ("bert pooled", (32, 512, 768), (16384, 768), (4,), [S(0)]),
    ("whisper frames", (16, 1500, 1280), (24000, 1280), (4,), [S(0)]),
]


def rule_and_propagation() -> list[float]:
    ratios = []
    for what, shape, target, mesh, placements in MODEL_VIEWS:
        placements = tuple(placements)

        def ours(shape=shape, target=target, mesh=mesh, placements=placements):
            return propagate_shape_and_sharding(
                placements, shape, view.reshape(shape, target), mesh, True
            )

        def theirs(shape=shape, target=target, mesh=mesh, placements=placements):
            return torch_views.propagate_shape_and_sharding(
                placements, shape, torch_views.view_groups(shape, target), mesh, True
            )

        assert list(ours()[1]) == list(theirs()[1]), (what, ours(), theirs())
        ratios.append(ratio(ours, theirs))
        print(f"  {ratios[-1]:5.2f}  {what}")
    return ratios


def _drawn_layouts(count: int, seed: int = 0) -> list[algebra.Layout]:
    draw = random.Random(seed)
    result = []
    while len(result) < count:
        shape = tuple(draw.choice([2, 3, 4, 6, 8, 16]) for _ in range(draw.randint(1, 4)))
        strides = algebra.Layout(shape).stride
        order = draw.sample(range(len(shape)), len(shape))
        result.append(
            algebra.Layout(tuple(shape[i] for i in order), tuple(strides[i] for i in order))
        )
    return result


def algebra_operations() -> dict[str, float]:
    """Our time over _pycute's, on drawn layouts for which both answer."""
    layouts = _drawn_layouts(60)
    tiles = [algebra.Layout(n) for n in (2, 3, 4, 8)]
    operations = {
        "coalesce": [(a,) for a in layouts],
        "composition": list(product(layouts[:20], layouts[20:40])),
        "complement": [(a, a.size * 4) for a in layouts],
        "logical_divide": list(product(layouts, tiles)),
    }
    result = {}
    for name, cases in operations.items():
        ours, theirs = getattr(algebra, name), getattr(pycute, name)
        pairs = []
        for case in cases:
            twin = tuple(
                pycute.Layout(x.shape, x.stride) if isinstance(x, algebra.Layout) else x
                for x in case
            )
            try:
                theirs(*twin)
                ours(*case)
            except (AssertionError, algebra.LayoutError):
                continue
            pairs.append((case, twin))
        result[name] = ratio(
            lambda pairs=pairs, ours=ours: [ours(*case) for case, _ in pairs],
            lambda pairs=pairs, theirs=theirs: [theirs(*twin) for _, twin in pairs],
        )
    return result


# -- answers ---------------------------------------------------------------------------------------


def factorizations(n: int, rank: int) -> list[tuple[int, ...]]:
    if rank == 0:
        return [()] if n == 1 else []
    return [
        (d, *rest)
        for d in range(1, n + 1)
        if n % d == 0
        for rest in factorizations(n // d, rank - 1)
    ]


def held(shape, mesh, placements):  # type: ignore[no-untyped-def]
    """For each device, the flat indices it holds: written out element by element."""

    def chunk(rows, parts):  # type: ignore[no-untyped-def]
        size = -(-len(rows) // parts)
        return [rows[k * size : (k + 1) * size] for k in range(parts)]

    result = []
    for device in product(*map(range, mesh)):
        dims = [list(range(n)) for n in shape]
        for p, parts, k in zip(placements, mesh, device):
            if isinstance(p, (Shard, _StridedShard)):
                factor = getattr(p, "split_factor", 1)
                dims[p.dim] = [
                    row for piece in chunk(dims[p.dim], factor) for row in chunk(piece, parts)[k]
                ]
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        result.append(tuple(sum(i * d for i, d in zip(index, strides)) for index in product(*dims)))
    return tuple(result)


KINDS = ("Shard, even", "Shard, uneven", "_StridedShard, even", "_StridedShard, uneven")
MESHES = [(2,), (3,), (4,), (8,), (2, 2), (2, 3), (2, 4), (2, 2, 2)]

# name -> (propagation, whether strict, rules), as the table's columns.
PROPAGATIONS = {
    "ours": (propagate_shape_and_sharding, True, view.reshape),
    "strict": (torch_views.propagate_shape_and_sharding, True, torch_views.view_groups),
    "non-strict": (torch_views.propagate_shape_and_sharding, False, torch_views.view_groups),
}


class Case(NamedTuple):
    """A drawn view."""

    shape: tuple[int, ...]
    target: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def cuts(self) -> list[tuple[int, int, int]]:
        """(dim, split factor, devices) of each mesh dim that cuts."""
        return [
            (p.dim, getattr(p, "split_factor", 1), parts)
            for p, parts in zip(self.placements, self.mesh)
            if isinstance(p, (Shard, _StridedShard))
        ]

    @property
    def kind(self) -> str:
        local, even = list(self.shape), True
        for dim, factor, parts in self.cuts:
            even = even and local[dim] % (factor * parts) == 0
            local[dim] = local_size(local[dim], factor, parts, 0)
        strided = any(isinstance(p, _StridedShard) for p in self.placements)
        return f"{'_StridedShard' if strided else 'Shard'}, {'even' if even else 'uneven'}"


def drawn_case(draw: random.Random) -> Case | None:
    """None where what was drawn is no view, or cuts nothing."""
    n = draw.choice([12, 16, 18, 20, 24, 30, 32, 36, 48, 60, 64])
    shapes = [s for rank in range(1, 5) for s in factorizations(n, rank)]
    shape, target, mesh = draw.choice(shapes), draw.choice(shapes), draw.choice(MESHES)
    if shape == target:
        return None
    strided = draw.random() < 0.5
    placements = tuple([_drawn_placement(draw, shape, strided) for _ in mesh])
    case = Case(shape, target, mesh, placements)
    return case if case.cuts else None


def _drawn_placement(draw: random.Random, shape: tuple[int, ...], strided: bool) -> Placement:
    d = draw.randrange(len(shape))
    factor = 1
    if strided and draw.random() < 0.8:
        factors = range(2, shape[d] + 1)
        factor = draw.choice(
            [f for f in factors if draw.random() < 0.3 or shape[d] % f == 0] or [1]
        )
    return R if draw.random() < 0.2 else SS(d, factor) if factor > 1 else S(d)


def said_of(case: Case) -> Iterator[str]:
    """The columns in which the case counts."""
    yield "cases"
    truth = held(case.shape, case.mesh, case.placements)
    options = [R] + [
        SS(d, f) if f > 1 else S(d) for d, m in enumerate(case.target) for f in range(1, m + 1)
    ]
    if _possible(case.target, case.mesh, options, truth):
        yield "possible"
    for name, (propagate, strict, rules) in PROPAGATIONS.items():
        try:
            rule = rules(case.shape, case.target)
            source, output = propagate(case.placements, case.shape, rule, case.mesh, strict)
        except Exception:  # raises, or crashes: not answered
            continue
        if tuple(source) == case.placements:
            right = held(case.target, case.mesh, output) == truth
            yield name if right else f"{name} wrong"


def answers(cases: int, seed: int) -> None:
    """Draw views of small shapes; count, of those that some placements can answer free, how many
    ours and torch's do.
    """
    draw = random.Random(seed)
    table: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    each = cases // len(KINDS)  # as many of each kind
    with progress(f"{cases} views are drawn, and answered by both"):
        while any(row["cases"] < each for row in table.values()):
            case = drawn_case(draw)
            if case is not None and table[case.kind]["cases"] < each:
                table[case.kind].update(said_of(case))
    print(
        f"{'':24}{'cases':>8}{'can be free':>13}{'ours':>9}{'wrong':>7}"
        f"{'torch strict':>14}{'wrong':>7}{'non-strict':>12}{'wrong':>7}"
    )
    for kind, row in table.items():
        of = max(row["possible"], 1)
        print(
            f"{kind:24}{row['cases']:>8}{row['possible']:>13}"
            f"{row['ours'] / of:>9.1%}{row['ours wrong']:>7}"
            f"{row['strict'] / of:>14.1%}{row['strict wrong']:>7}"
            f"{row['non-strict'] / of:>12.1%}{row['non-strict wrong']:>7}"
        )


def _possible(target, mesh, options, truth):  # type: ignore[no-untyped-def]
    """Whether any placements of the output hold ``truth``: all of them are tried, mesh dim by mesh
    dim.
    """
    prefixes = [()]
    for t in range(len(mesh)):
        # What the devices that share t + 1 coordinates hold together.
        tail = prod(mesh[t + 1 :])
        wanted = [
            frozenset().union(*truth[i * tail : (i + 1) * tail]) for i in range(prod(mesh[: t + 1]))
        ]
        found = []
        for prefix in prefixes:
            for option in options:
                sets = held(target, mesh[: t + 1], (*prefix, option))
                if list(map(frozenset, sets)) == wanted:
                    found.append((*prefix, option))
        if not found:
            return False
        prefixes = found[:1]  # whichever: the sets are the same, and so is all that follows
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--answers", action="store_true", help="count answered cases instead of measuring time"
    )
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.answers:
        answers(arguments.cases, arguments.seed)
        return
    print("cold rule + propagation, ours / torch (below 1 is faster):")
    ratios = rule_and_propagation()
    print(f"  {geometric_mean(ratios):5.2f}  geometric mean of {len(ratios)}")
    print("algebra, ours / torch.distributed._pycute (below 0.5 is more than 2x faster):")
    for name, value in algebra_operations().items():
        print(f"  {value:5.2f}  {name} ({1 / value:.1f}x faster)")


if __name__ == "__main__":
    main()

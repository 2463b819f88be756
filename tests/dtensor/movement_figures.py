"""The figures of drawn movement programs:

    PYTHONPATH=tests python tests/dtensor/movement_figures.py [--seed 0] [--count 500]

Each program runs with movement on, forward and backward, and forward on torch alone, all ranks in
one process. Printed are how many are right, what is received beside the elements that the results'
placements ask for and a device lacks (single ops alone), and beside what torch receives.
"""

import argparse
import random
import warnings
from collections import Counter
from math import exp, log, prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside_one_device import compare
from beside_torch import LEFT_OUT, is_right, ran
from drawing import draw_placements
from movement_programs import MESHES, PROGRAMS, draw, listed
from op_programs import assert_close, values
from simulation import distribute, plain, ranks_of
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import cute_sharding
from benchmarks.received import Received

SHAPES = [0, 1, 2, 3, 5, 7, 8, 12, 13, 16, 31, 32, 48]
ALL_MESHES = [mesh for meshes in MESHES.values() for mesh in meshes]


# Ops that are one movement: for a shape and a dim of it, the program (None: not of such a shape).
def _slice(rng, shape, d):
    n = shape[d]
    ends = [rng.choice([None, rng.randint(-n - 1, n + 1)]) for _ in range(2)]
    which = (slice(None),) * d + (slice(*ends, rng.choice([1, 1, 2, 3])),)
    return lambda x: x[which]


def _pad(rng, shape, d):
    pads = []
    for n in shape[::-1][: rng.randint(1, len(shape))]:
        low = rng.randint(-min(n, 2), 4)
        pads += [low, rng.randint(-min(n + min(low, 0), 2), 4)]
    return lambda x, pads=pads: F.pad(x, pads)


def _select(rng, shape, d):
    if shape[d]:
        at = rng.randrange(-shape[d], shape[d])
        return lambda x: x.select(d, at)


def _unfold(rng, shape, d):
    if shape[d]:
        size = rng.randint(1, shape[d])
        step = rng.choice([1, 2, 3, size])
        return lambda x: x.unfold(d, size, step)


def _narrow(rng, shape, d):
    start = rng.randint(0, shape[d])
    length = rng.randint(0, shape[d] - start)
    return lambda x: x.narrow(d, start, length)


def _diagonal(rng, shape, d):
    if len(shape) > 1:
        offset, dims = rng.randint(-4, 4), rng.sample(range(len(shape)), 2)
        return lambda x, of=(offset, *dims): x.diagonal(*of)


def _rot90(rng, shape, d):
    if len(shape) > 1:
        turns, dims = rng.randint(-1, 5), rng.sample(range(len(shape)), 2)
        return lambda x, of=(turns, dims): torch.rot90(x, *of)


def _narrow_copy(rng, shape, d):
    start = rng.randint(0, shape[d])
    length = rng.randint(0, shape[d] - start)
    return lambda x, of=(d, start, length): torch.narrow_copy(x, *of)


def _of(op, *draws):
    """An op whose argument is drawn and then its dim."""

    def drawn(rng, shape, d):
        arg = rng.choice(draws)
        return lambda x, arg=arg: op(x, arg, d)

    return drawn


def _roll_all(rng, shape, d):
    by = [rng.randint(-3, 3) for _ in shape]
    return lambda x, by=by: x.roll(by, [*range(len(by))])


SINGLE = {
    "slice": _slice,
    "select": _select,
    "narrow": _narrow,
    "split": _of(torch.split, 1, 2, 3, 5, 8, 16),
    "chunk": _of(torch.chunk, 1, 2, 3, 4, 6),
    "tensor_split": _of(torch.tensor_split, 1, 2, 3, 4),
    "unbind": lambda rng, shape, d: shape[d] and (lambda x: x.unbind(d)),
    "roll": _of(torch.roll, -9, -3, -1, 1, 2, 5),
    "roll of all": _roll_all,
    "flip": lambda rng, shape, d: lambda x: x.flip(d),
    "flip of all": lambda rng, shape, d: lambda x: x.flip([*range(len(shape))]),
    "cat": lambda rng, shape, d: lambda x: torch.cat([x, -x], d),
    "pad": _pad,
    "unfold": _unfold,
    "diagonal": _diagonal,
    "rot90": _rot90,
    "narrow_copy": _narrow_copy,
    "stack": lambda rng, shape, d: lambda x: torch.stack([x, -x], d),
    "tril": lambda rng, shape, d: len(shape) > 1 and (lambda x: x.tril()),
    "triu": lambda rng, shape, d: len(shape) > 1 and (lambda x: x.triu(1)),
}


def lacked(results, held, ranks):
    """Of each rank, the elements of its parts that it does not hold before; all differ, 0 is what
    is filled in.
    """
    with plain():
        counts = Counter()
        for rank in range(ranks):
            have = held._local_tensor._local_tensors[rank].detach().reshape(-1)
            have = torch.cat([have, -have])  # what is put together is x and -x
            for result in results:
                need = result._local_tensor._local_tensors[rank].detach().reshape(-1).unique()
                counts[rank] += int((~torch.isin(need, have) & (need != 0)).sum())
        return counts


def single(rng, totals, ratios):
    name, mesh = rng.choice([*SINGLE]), rng.choice(ALL_MESHES)
    shape = tuple(rng.choice(SHAPES) for _ in range(rng.choice([1, 2, 2, 3])))
    d = rng.randrange(len(shape))
    program = SINGLE[name](rng, shape, d)
    if not program or prod(shape) > 4000:
        return
    placements = draw_placements(rng, mesh, shape)
    drawn = getattr(program, "__defaults__", None)
    case = f"{name} {d} {drawn} of {shape} on {mesh}: {placements}"
    with plain():
        full = torch.arange(1.0, prod(shape) + 1).reshape(shape)
        wanted = listed(program(full))
    with ranks_of(mesh):
        stock, most = ran(program, full, mesh, placements)
        stock_right = not isinstance(stock, Exception) and is_right(stock, wanted)
        x = distribute(full, mesh, placements)
        with cute_sharding.enabled(movement=True):
            try:
                with CommDebugMode() as communicated, Received() as received:
                    results = listed(program(x))
            except Exception as error:
                totals["single: raises, " + ("WORSE" if stock_right else "as stock")] += 1
                print("raises:", case, repr(error)[:150])
                return
        try:
            for result, want in zip(results, wanted, strict=True):
                assert_close(result, want, case)
        except AssertionError as error:
            totals["single: WRONG"] += 1
            print("WRONG:", str(error)[:300])
            return
    totals["single: right"] += 1
    needed = lacked(results, x, prod(mesh))
    totals["single: collectives, most"] = max(
        totals["single: collectives, most"], communicated.get_total_counts()
    )
    if communicated.get_total_counts() > 1:
        print("more than one collective:", case)
    got = {rank: received.by_rank[rank] for rank in range(prod(mesh))}
    if got == {rank: needed[rank] for rank in got}:
        totals["single: received as the bound"] += 1
    else:
        totals["single: received OTHER than the bound"] += 1
        print("received:", case, got, dict(needed))
    if stock_right:
        beside(totals, ratios, max(got.values()), most, case)


def beside(totals, ratios, ours, stock, case):
    totals["beside torch: cases"] += 1
    if ours > stock:
        totals["beside torch: MORE received"] += 1
        print("more than torch:", case, ours, stock)
    if stock:
        ratios.append((ours + 1) / (stock + 1))


def whole(rng, totals, ratios):
    name, mesh = rng.choice([n for n in PROGRAMS if n != LEFT_OUT]), rng.choice(ALL_MESHES)
    drawn, shape, program = draw(rng, name)
    placements = draw_placements(rng, mesh, shape, pending="sum", chance=0.1)
    case = f"{name} {drawn} of {shape} on {mesh}: {placements}"
    full = values(*shape)
    with ranks_of(mesh):
        try:
            compare(program, full, mesh, placements, case)
            totals["forward and backward: right"] += 1
        except AssertionError as error:
            totals["forward and backward: WRONG"] += 1
            print("WRONG:", str(error)[:300])
        except Exception as error:
            try:
                stock_compare(program, full, mesh, placements, case)
                totals["forward and backward: raises, WORSE"] += 1
                print("WORSE:", case, repr(error)[:200])
            except Exception:
                totals["forward and backward: raises, as stock"] += 1


def stock_compare(*args):
    """The same without the package."""
    enabled = cute_sharding.enabled
    from contextlib import nullcontext

    cute_sharding.enabled = lambda **_: nullcontext()
    try:
        compare(*args)
    finally:
        cute_sharding.enabled = enabled


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500, help="of programs of each kind")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    rng = random.Random(f"figures {options.seed}")
    totals, ratios = Counter(), []
    for _ in range(options.count):
        single(rng, totals, ratios)
    for _ in range(options.count):
        whole(rng, totals, ratios)
    for name in sorted(totals):
        print(f"{name:45} {totals[name]}")
    mean = exp(sum(map(log, ratios)) / len(ratios))
    print(
        f"received here / torch, where torch receives    geometric mean {mean:.3f}, {len(ratios)}"
    )


if __name__ == "__main__":
    main()

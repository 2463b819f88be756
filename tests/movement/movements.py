"""Movement ops on drawn cases, counted out: what each device is to hold by index arrays that torch
makes of the op on one device, what it holds by ``enumeration``, and the movement run on all devices
at once with numpy. Only the movement is the package's.
"""

import random
from typing import NamedTuple

import numpy as np
import torch
from enumeration import cuts_on, devices, rows_of
from torch.nn import functional as F

from cute_sharding.movement import BY_OP, chosen
from cute_sharding.movement.rows import beginnings
from cute_sharding.redistribution.chains import chain_of
from cute_sharding.redistribution.meeting import rows_held

MESHES = [(2,), (4,), (2, 2), (2, 3), (2, 2, 2), (8,), (1, 3)]
SIZES = [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 24]
NOWHERE = -1


class Case(NamedTuple):
    op: str
    shapes: list
    args: tuple
    mesh: tuple
    cuts: tuple

    @property
    def move(self):
        given = self.shapes if self.op in TOGETHER else self.shapes[0]
        return BY_OP[self.op].move(given, *self.args)


def _sizes(rng, n):
    """Sizes of parts that add up to n."""
    marks = sorted(rng.randint(0, n) for _ in range(rng.randint(0, 3)))
    return [b - a for a, b in zip([0, *marks], [*marks, n])]


def _pads(rng, shape):
    dims = rng.randint(1, len(shape))
    pads = []
    for n in shape[::-1][:dims]:
        low = rng.randint(-min(n, 3), 5)
        pads += [low, rng.randint(-min(n + min(low, 0), 3), 5)]
    return tuple(pads)


def _window(rng, n):
    size = rng.randint(1, n)
    return size, rng.choice([1, 2, 3, size])


def _slice(rng, n):
    some = [None, rng.randint(-n - 1, n + 1)]
    return rng.choice(some), rng.choice(some), rng.choice([1, 1, 2, 3, 5])


# How arguments are drawn, for a tensor of that shape and one of its dims; None: not for such a one.
DRAWN = {
    "Tensor.__getitem__": lambda rng, x, d: (d, *_slice(rng, x[d])),
    "slice's gradient": lambda rng, x, d: (d, *_slice(rng, x[d])),
    "torch.select": lambda rng, x, d: (d, rng.randrange(-x[d], x[d])) if x[d] else None,
    "select's gradient": lambda rng, x, d: (d, rng.randrange(x[d])) if x[d] else None,
    "torch.unbind": lambda rng, x, d: (d,) if x[d] else None,
    "torch.split": lambda rng, x, d: (rng.randint(1, x[d] + 1), d),
    "torch.split, by sizes": lambda rng, x, d: (_sizes(rng, x[d]), d),
    "torch.cat": lambda rng, x, d: (d,),
    "torch.roll": lambda rng, x, d: (
        ([rng.randint(-9, 9)], [d])
        if rng.random() < 0.7
        else ([rng.randint(-9, 9) for _ in x], [*range(len(x))])
    ),
    "torch.flip": lambda rng, x, d: ([d] if rng.random() < 0.6 else [*range(len(x))],),
    "torch.nn.functional.pad": lambda rng, x, d: (_pads(rng, x),),
    "torch.tril": lambda rng, x, d: (rng.randint(-3, 3),) if len(x) > 1 else None,
    "torch.triu": lambda rng, x, d: (rng.randint(-3, 3),) if len(x) > 1 else None,
    "Tensor.unfold": lambda rng, x, d: (d, *_window(rng, x[d])) if x[d] else None,
    "unfold's gradient": lambda rng, x, d: (d, *_window(rng, x[d])) if x[d] else None,
}
TOGETHER = {"torch.cat"}

# What the op makes of index arrays; -1 is a row that comes from nowhere.
DONE = {
    "Tensor.__getitem__": lambda x, d, a, b, s: x[(slice(None),) * d + (slice(a, b, s),)],
    "torch.select": lambda x, d, i: x.select(d, i),
    "torch.unbind": lambda x, d: x.unbind(d),
    "torch.split": lambda x, n, d: x.split(n, d),
    "torch.split, by sizes": lambda x, n, d: x.split(n, d),
    "torch.cat": lambda *given: torch.cat(given[:-1], given[-1]),
    "torch.roll": torch.roll,
    "torch.flip": torch.flip,
    "torch.nn.functional.pad": lambda x, pads: F.pad(x, pads, value=NOWHERE),
    "Tensor.unfold": lambda x, d, size, step: x.unfold(d, size, step),
}


def draw(rng, ops=tuple(DRAWN), meshes=MESHES, sizes=SIZES, most=900):
    while True:
        op, mesh = rng.choice(ops), rng.choice(meshes)
        shape = tuple(rng.choice(sizes) for _ in range(rng.choice([1, 2, 2, 3])))
        d = rng.randrange(len(shape))
        args = DRAWN[op](rng, shape, d)
        if args is None or np.prod(shape) > most:
            continue
        shapes = [shape]
        if op == "torch.cat":
            shapes = [
                (*shape[:d], rng.choice(sizes), *shape[d + 1 :]) for _ in range(rng.randint(1, 3))
            ]
        if op == "slice's gradient":
            a, b, _ = slice(args[1], args[2]).indices(shape[d])
            b = max(a, b)
            args = (shape, d, a, b, args[3])
            shapes = [(*shape[:d], len(range(a, b, args[4])), *shape[d + 1 :])]
        if op == "select's gradient":
            shapes, args = [(*shape[:d], *shape[d + 1 :])], (shape, *args)
        if op == "unfold's gradient":
            count = (shape[d] - args[1]) // args[2] + 1
            shapes, args = [(*shape[:d], count, *shape[d + 1 :], args[1])], (shape, *args)
        cuts = tuple(
            tuple(drawn_cut(rng, x, d if op in ("torch.cat",) else None) for _ in mesh)
            for x in shapes
        )
        if op == "torch.cat" and rng.random() < 0.6:
            cuts = (cuts[0],) * len(cuts)
        if op == "unfold's gradient":  # windows themselves are never cut
            last = len(shapes[0]) - 1
            cuts = tuple(tuple(None if c and c[0] == last else c for c in some) for some in cuts)
        return Case(op, shapes, args, mesh, cuts)


def drawn_cut(rng, shape, dim=None):
    if not shape or rng.random() < 0.2:
        return None
    d = dim if dim is not None and rng.random() < 0.6 else rng.randrange(len(shape))
    return d, rng.choice([1, 1, 1, 2, 3, rng.randint(1, max(shape[d], 1) + 1)])


def elements(case):
    """Index arrays of the operands: no number stands twice."""
    first, found = 0, []
    for shape in case.shapes:
        n = int(np.prod(shape))
        found.append(torch.arange(first, first + n).reshape(shape))
        first += n
    return found


def results(case, given):
    """The op on one device."""
    if case.op in ("slice's gradient", "select's gradient"):
        whole = torch.full(tuple(case.args[0]), NOWHERE)
        if case.op == "select's gradient":
            whole.select(case.args[1], case.args[2]).copy_(given[0])
        else:
            _, d, a, b, step = case.args
            whole[(slice(None),) * d + (slice(a, b, step),)] = given[0]
        return [whole]
    done = DONE[case.op](*given, *case.args)
    return list(done) if isinstance(done, (tuple, list)) else [done]


def locals_of(array, mesh, cuts):
    """What each device holds of an array, which may have dims that are not cut behind."""
    return {
        device: array[np.ix_(*rows_of(array.shape, mesh, cuts, device))] if array.ndim else array
        for device in devices(mesh)
    }


# -- run -------------------------------------------------------------------------------------------


def places(sizes, start, steps):
    index = []
    for dim, first in enumerate(start):
        rows = np.array(first)
        for count, step in zip(sizes, steps, strict=True):
            assert step[dim] >= 0, "torch has no negative strides"
            rows = np.add.outer(rows, np.arange(count) * step[dim])
        index.append(rows)
    return tuple(index)


def run(movement, operands, add=False):
    """Every device's part in the movement, on the local arrays of all; and what each received."""
    everywhere = devices(movement.mesh)
    groups = {d: movement.slice_of(d, movement.mesh_dims) for d in everywhere}
    parts = {d: movement.transfer(d, groups[d]) for d in everywhere}
    sent = {}
    for d in everywhere:
        buffer = np.full(sum(parts[d].sends), -7)
        for i, copies in enumerate(parts[d].packs):
            for copy in copies:
                into = places(copy.sizes, copy.y, copy.dy)
                assert (buffer[into] == -7).all()
                buffer[into] = operands[i][d][places(copy.sizes, copy.x, copy.dx)]
        at = np.cumsum([0, *parts[d].sends])
        sent[d] = {q: buffer[at[j] : at[j + 1]] for j, q in enumerate(groups[d])}
        assert len(sent[d][d]) == 0
    result, received = {}, {}
    for d in everywhere:
        messages = [sent[p][d] for p in groups[d]]
        assert tuple(map(len, messages)) == parts[d].receives
        buffer = np.concatenate(messages) if messages else np.zeros(0, int)
        received[d] = len(buffer)
        outs = [np.full(shape, 0 if add else NOWHERE) for shape in parts[d].target_shapes]
        for i, k, copies in parts[d].own:
            for copy in copies:
                write(outs[k], copy, operands[i][d], add)
        for k, copies in enumerate(parts[d].unpacks):
            for copy in copies:
                write(outs[k], copy, buffer, add)
        for k, out in enumerate(outs):
            assert add or parts[d].filled[k] == bool((out == NOWHERE).any())
        result[d] = [finished(movement, k, d, out) for k, out in enumerate(outs)]
    return result, received


def write(out, copy, x, add):
    into = places(copy.sizes, copy.y, copy.dy)
    taken = x[places(copy.sizes, copy.x, copy.dx)]
    if add:
        out[into] += taken
    else:
        assert (out[into] == NOWHERE).all(), "written twice"
        out[into] = taken


def finished(movement, k, device, out):
    """What the device does by itself: rows that lie backward are turned, windows are taken."""
    for link in movement.move.links:
        for _, target in link.pairs:
            if link.target == k and target.backward:
                out = np.flip(out, target.dim)
            if target.window is not None:
                n = movement.move.outputs[k][target.dim]
                chain = chain_of(movement.targets[k][target.dim], movement.mesh, device)
                begin = {}
                for r in beginnings(rows_held(n, chain), target.window):
                    at = np.stack(
                        places(
                            [c for c, _, _ in r.loops] + [r.length],
                            (r.x, r.y),
                            [(a, b) for _, a, b in r.loops] + [(1, 1)],
                        )
                    )
                    begin |= dict(at.reshape(2, -1).T.tolist())
                rows = [begin[w] + np.arange(target.window.size) for w in sorted(begin)]
                assert sorted(begin) == list(range(len(begin)))
                rows = np.array(rows, int).reshape(len(begin), target.window.size)
                out = np.moveaxis(np.take(out, rows, axis=target.dim), target.dim + 1, -1)
    return out


def windows_of_gradient(case, gradient):
    """Of the gradient of windows: what a device has of the rows that its windows are made of, added
    up; each row once, in ascending order.
    """
    _, d, size, step = case.args
    found = {}
    for device in devices(case.mesh):
        numbers = rows_of(case.shapes[0], case.mesh, case.cuts[0], device)
        rows = sorted({w * step + i for w in numbers[d] for i in range(size)})
        local = np.moveaxis(gradient[np.ix_(*numbers)], d, 0)
        out = np.zeros((len(rows), *local.shape[1:-1]), int)
        for at, w in enumerate(numbers[d]):
            for i in range(size):
                out[rows.index(w * step + i)] += local[at, ..., i]
        found[device] = np.moveaxis(out, 0, d)
    return found


def lacking(operands, wanted):
    """The elements that each device needs of all results and holds of no operand, those of each
    result by themselves.
    """
    counts = {}
    for device in operands[0]:
        have = np.concatenate([of[device].reshape(-1) for of in operands])
        counts[device] = sum(
            np.setdiff1d(np.setdiff1d(want[device], [NOWHERE]), have).size for want in wanted
        )
    return counts


def is_ever_free(mesh, arrays, operands):
    """Whether there are placements of each result for which nothing is missing, by trying all."""
    return all(_is_free(mesh, array, operands) for array in arrays)


def _is_free(mesh, array, operands):
    shape = array.shape
    everywhere = devices(mesh)
    have = [np.concatenate([of[d].reshape(-1) for of in operands]) for d in everywhere]

    def search(cuts):
        if len(cuts) == len(mesh):
            return all(
                np.isin(
                    array[np.ix_(*rows_of(shape, mesh, cuts, d))] if array.ndim else array,
                    [*have[i], NOWHERE],
                ).all()
                for i, d in enumerate(everywhere)
            )
        return any(search((*cuts, cut)) for cut in cuts_on(shape))

    return search(())


def cases(seed, count, **options):
    rng = random.Random(seed)
    found = 0
    while found < count:
        case = draw(rng, **options)
        if case.move is None:
            continue
        choice = chosen(case.move, case.cuts, case.mesh)
        if choice is None:
            continue
        found += 1
        yield case, choice

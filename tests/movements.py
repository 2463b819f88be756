"""Movement ops on drawn cases, counted out: what each device is to hold by index arrays that torch
makes of the op on one device, what it holds by ``enumeration``, and the movement run on all devices
at once with numpy. Only the movement is the package's.
"""

import random
from typing import NamedTuple

import numpy as np
import torch
from enumeration import cuts_on, devices, rows_after, rows_of
from torch.nn import functional as F

from cute_sharding.exchange.flow import side_of
from cute_sharding.propagation.movements import chosen
from cute_sharding.relations.moves import Diagonal, Fold, Window, held_rows
from cute_sharding.relations.table import BY_OP

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


def _beyond(rng, shape, most):
    """Rows before and after each of some dims."""
    pads = []
    for n in shape[::-1][: rng.randint(1, len(shape))]:
        if n == 0:
            return None
        low = rng.randint(-min(n - 1, 2), most(n))
        pads += [low, rng.randint(-min(n - 1 + min(low, 0), 2), most(n))]
    return (tuple(pads),)


def _reflected(rng, x, d):
    return _beyond(rng, x, lambda n: min(n - 1, 4))


def _replicated(rng, x, d):
    return _beyond(rng, x, lambda n: 4)


def _diagonal(rng, x, d):
    if len(x) < 2:
        return None
    return rng.randint(-4, 4), *rng.sample(range(len(x)), 2)


def _narrow(rng, x, d):
    start = rng.randint(0, x[d])
    return d, start, rng.randint(0, x[d] - start)


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
    "torch.block_diag": lambda rng, x, d: () if len(x) < 3 else None,
    "torch.roll": lambda rng, x, d: (
        ([rng.randint(-9, 9)], [d])
        if rng.random() < 0.7
        else ([rng.randint(-9, 9) for _ in x], [*range(len(x))])
    ),
    "torch.narrow_copy": _narrow,
    "torch.rot90": lambda rng, x, d: (
        (rng.randint(-5, 5), rng.sample(range(len(x)), 2)) if len(x) > 1 else None
    ),
    "torch.flip": lambda rng, x, d: ([d] if rng.random() < 0.6 else [*range(len(x))],),
    "torch.nn.functional.pad": lambda rng, x, d: (_pads(rng, x),),
    "torch.tril": lambda rng, x, d: (rng.randint(-3, 3),) if len(x) > 1 else None,
    "torch.triu": lambda rng, x, d: (rng.randint(-3, 3),) if len(x) > 1 else None,
    "Tensor.unfold": lambda rng, x, d: (d, *_window(rng, x[d])) if x[d] else None,
    "unfold's gradient": lambda rng, x, d: (d, *_window(rng, x[d])) if x[d] else None,
    "torch.nn.functional.pad, reflect": _reflected,
    "reflection_pad's gradient": _reflected,
    "torch.nn.functional.pad, replicate": _replicated,
    "replication_pad's gradient": _replicated,
    "torch.diagonal": _diagonal,
    "diagonal's gradient": _diagonal,
    "torch.diag_embed": lambda rng, x, d: (
        rng.randint(-3, 3),
        *rng.sample(range(-len(x) - 1, 0), 2),
    ),
}


def _beside(rng, x, d, sizes):
    return [(*x[:d], rng.choice(sizes), *x[d + 1 :]) for _ in range(rng.randint(1, 3))]


def _any_matrices(rng, x, d, sizes):
    more = [[rng.choice(sizes) for _ in "ab"][: rng.randint(0, 2)] for _ in "ab"]
    return [x, *map(tuple, more[: rng.randint(0, 2)])]


# Of ops of several operands, which are a list, their shapes, of the first and one of its dims.
TOGETHER = {"torch.cat": _beside, "torch.block_diag": _any_matrices}

# What the op makes of index arrays; -1 is a row that comes from nowhere.
DONE = {
    "Tensor.__getitem__": lambda x, d, a, b, s: x[(slice(None),) * d + (slice(a, b, s),)],
    "torch.select": lambda x, d, i: x.select(d, i),
    "torch.unbind": lambda x, d: x.unbind(d),
    "torch.split": lambda x, n, d: x.split(n, d),
    "torch.split, by sizes": lambda x, n, d: x.split(n, d),
    "torch.cat": lambda *given: torch.cat(given[:-1], given[-1]),
    "torch.block_diag": lambda *given: torch.block_diag(*[x + 1 for x in given]) - 1,
    "torch.roll": torch.roll,
    "torch.flip": torch.flip,
    "torch.narrow_copy": torch.narrow_copy,
    "torch.rot90": torch.rot90,
    "torch.nn.functional.pad": lambda x, pads: F.pad(x, pads, value=NOWHERE),
    "Tensor.unfold": lambda x, d, size, step: x.unfold(d, size, step),
    "torch.nn.functional.pad, reflect": lambda x, pads: _padded(x, pads, "reflect"),
    "torch.nn.functional.pad, replicate": lambda x, pads: _padded(x, pads, "edge"),
    "torch.diagonal": torch.diagonal,
    "torch.diag_embed": lambda x, *dims: torch.diag_embed(x + 1, *dims) - 1,
}
# Gradients: of which op, where what is lacking are sums.
SUMS = {
    "unfold's gradient": "Tensor.unfold",
    "reflection_pad's gradient": "torch.nn.functional.pad, reflect",
    "replication_pad's gradient": "torch.nn.functional.pad, replicate",
}


def _padded(x, pads, mode):
    widths = [(0, 0)] * (x.ndim - len(pads) // 2) + [*zip(pads[::2], pads[1::2])][::-1]
    more = np.pad(x.numpy(), [(max(a, 0), max(b, 0)) for a, b in widths], mode)
    kept = [slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, more.shape)]
    return torch.from_numpy(more[tuple(kept)].copy())


def draw(rng, ops=tuple(DRAWN), meshes=MESHES, sizes=SIZES, most=900):
    while True:
        op, mesh = rng.choice(ops), rng.choice(meshes)
        shape = tuple(rng.choice(sizes) for _ in range(rng.choice([1, 2, 2, 3])))
        d = rng.randrange(len(shape))
        args = DRAWN[op](rng, shape, d)
        if args is None or np.prod(shape) > most:
            continue
        shapes = TOGETHER[op](rng, shape, d, sizes) if op in TOGETHER else [shape]
        if op == "slice's gradient":
            a, b, _ = slice(args[1], args[2]).indices(shape[d])
            b = max(a, b)
            args = (shape, d, a, b, args[3])
            shapes = [(*shape[:d], len(range(a, b, args[4])), *shape[d + 1 :])]
        if op == "select's gradient":
            shapes, args = [(*shape[:d], *shape[d + 1 :])], (shape, *args)
        if op in SUMS or op == "diagonal's gradient":
            of = torch.zeros(shape, dtype=torch.int64)
            shapes = [tuple(DONE[SUMS.get(op, "torch.diagonal")](of, *args).shape)]
            args = (shape, *args)
        cuts = tuple(
            tuple(drawn_cut(rng, x, d if op in ("torch.cat",) else None) for _ in mesh)
            for x in shapes
        )
        if op == "torch.cat" and rng.random() < 0.6:
            cuts = (cuts[0],) * len(cuts)
        if op in SUMS and "pad" in op:  # which is also given what was padded
            cuts = (*cuts, tuple(drawn_cut(rng, shape) for _ in mesh))
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
    if case.op in ("slice's gradient", "select's gradient", "diagonal's gradient"):
        whole = torch.full(tuple(case.args[0]), NOWHERE)
        if case.op == "diagonal's gradient":
            whole.diagonal(*case.args[1:]).copy_(given[0])
        elif case.op == "select's gradient":
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


def run(exchange, operands, add=False):
    """Every device's part in the exchange, on the local arrays of all; and what each received."""
    mesh = exchange.mesh
    everywhere = devices(mesh.sizes)
    groups = {d: mesh.slice_of(d, exchange.mesh_dims) for d in everywhere}
    parts = {d: exchange.part(mesh.rank(d), groups[d]) for d in everywhere}
    sent = {}
    for d in everywhere:
        buffer = np.full(sum(parts[d].sends), -7)
        for i, copies in enumerate(parts[d].packs):
            for copy in copies:
                into = places(copy.sizes, copy.y, copy.dy)
                assert (buffer[into] == -7).all()
                buffer[into] = operands[i][d][places(copy.sizes, copy.x, copy.dx)]
        at = np.cumsum([0, *parts[d].sends])
        sent[d] = {mesh.coordinates(q): buffer[at[j] : at[j + 1]] for j, q in enumerate(groups[d])}
        assert len(sent[d][d]) == 0
    result, received = {}, {}
    for d in everywhere:
        messages = [sent[mesh.coordinates(p)][d] for p in groups[d]]
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
        result[d] = [finished(exchange, k, d, out) for k, out in enumerate(outs)]
    return result, received


def write(out, copy, x, add):
    into = places(copy.sizes, copy.y, copy.dy)
    taken = x[places(copy.sizes, copy.x, copy.dx)]
    if add:
        out[into] += taken
    else:
        assert (out[into] == NOWHERE).all(), "written twice"
        out[into] = taken


def finished(exchange, k, device, out):
    """What the device does by itself: rows that lie backward are turned, those that stand for
    others are made of them.
    """
    for link in exchange.move.links:
        for _, target in link.pairs:
            if link.target == k and target.backward:
                out = np.flip(out, target.dim)
            if link.target == k and target.form is not None:
                where, numbers = by_number(exchange, k, device, target, of_result=True)
                out = EXPANDED[type(target.form)](out, target, where, *numbers)
    return out


def by_number(exchange, k, device, rows, of_result):
    """Where the rows of an exchange lie on a device; and the rows of the dims that it holds."""
    placed = (exchange.targets if of_result else exchange.sources)[k]
    sizes, chains = side_of(placed, rows, device)
    where = {}
    for r in held_rows(rows, sizes, chains):
        steps = [(a, b) for _, a, b in r.loops] + [(1, 1)]
        at = places([c for c, _, _ in r.loops] + [r.length], (r.x, r.y), steps)
        where |= dict(np.stack(at).reshape(2, -1).T.tolist())
    assert sorted(where.values()) == list(range(len(where)))
    return where, [rows_after(n, chain) for n, chain in zip(sizes, chains)]


def folded(form, j):
    return next(a * j + b for start, stop, a, b in form.pieces if start <= j < stop)


def windows_of(out, rows, where, windows, within):
    index = [[where[w * rows.form.step + i] for i in within] for w in windows]
    index = np.array(index, int).reshape(len(windows), len(within))
    assert set(index.reshape(-1)) == set(where.values())
    return np.moveaxis(np.take(out, index, axis=rows.dim), rows.dim + 1, -1)


def fold_of(out, rows, where, numbers):
    index = np.array([where[folded(rows.form, j)] for j in numbers], int)
    assert set(index) == set(where.values())
    return np.take(out, index, axis=rows.dim)


def with_diagonal(out, rows, where, down, right):
    d, e, form = rows.dim, rows.form.across, rows.form
    out = np.moveaxis(out, d - (e < d), -1)
    whole = np.full((*out.shape[:-1], len(down), len(right)), NOWHERE)
    for j, at in where.items():
        whole[..., down.index(j + form.down), right.index(j + form.right)] = out[..., at]
    return np.moveaxis(whole, (-2, -1), (d, e))


EXPANDED = {Window: windows_of, Fold: fold_of, Diagonal: with_diagonal}


def collapsed(case, exchange, locals_):
    """Operands as the exchange numbers their rows: what stands for a row is added up."""
    result = dict(locals_)
    for source, _ in exchange.move.links[0].pairs:
        for device in devices(case.mesh) if source.form is not None else ():
            where, numbers = by_number(exchange, 0, device, source, of_result=False)
            x = result[device]
            d, form = source.dim, source.form
            if isinstance(form, Diagonal):
                x = np.moveaxis(x, (d, form.across), (0, 1))
                at = sorted(where, key=where.get)
                x = [
                    x[numbers[0].index(j + form.down), numbers[1].index(j + form.right)] for j in at
                ]
                shape = [n for k, n in enumerate(result[device].shape) if k not in source.dims]
                x = np.array(x, int).reshape(len(at), *shape)
                result[device] = np.moveaxis(x, 0, d - (form.across < d))
                continue
            x = np.moveaxis(x, d, 0)
            out = np.zeros((len(where), *x.shape[1 : x.ndim - isinstance(form, Window)]), int)
            for at, j in enumerate(numbers[0]):
                if isinstance(form, Fold):
                    out[where[folded(form, j)]] += x[at]
                    continue
                for i, within in enumerate(numbers[1]):
                    out[where[j * form.step + within]] += x[at, ..., i]
            result[device] = np.moveaxis(out, 0, d)
    return result


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

"""Small programs of movement ops, drawn for a shape: the same for the same seed in every
process.
"""

import torch
import torch.nn.functional as F

MESHES = {4: [(4,), (2, 2)], 6: [(2, 3)], 8: [(8,), (2, 2, 2)]}
SIZES = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13]


def draw_shape(rng):
    return tuple(rng.choice(SIZES) for _ in range(rng.choice([1, 2, 2, 3])))


def weighted(parts):
    """Each part by another factor, so that none can be taken for another."""
    return [part * (i + 1) for i, part in enumerate(parts)]


def _slice(rng, shape, d):
    n = shape[d]
    ends = [rng.choice([None, rng.randint(-n - 1, n + 1)]) for _ in range(2)]
    which = (slice(None),) * d + (slice(*ends, rng.choice([1, 1, 2, 3])),)
    return which, lambda x: x[which]


def _select(rng, shape, d):
    index = rng.randrange(-shape[d], shape[d]) if shape[d] else None
    return index, index is not None and (lambda x: x.select(d, index))


def _narrow(rng, shape, d):
    start = rng.randint(0, shape[d])
    length = rng.randint(0, shape[d] - start)
    return (start, length), lambda x: x.narrow(d, start, length)


def _split(rng, shape, d):
    size = rng.randint(1, shape[d] + 1)
    return size, lambda x: torch.cat(weighted(x.split(size, d)), d)


def _sizes(rng, shape, d):
    first = rng.randint(0, shape[d])
    return first, lambda x: weighted(x.split([first, shape[d] - first], d))


def _chunk(rng, shape, d):
    parts = rng.randint(1, 4)
    return parts, lambda x: weighted(x.chunk(parts, d))


def _tensor_split(rng, shape, d):
    parts = rng.randint(1, 4)
    return parts, lambda x: weighted(x.tensor_split(parts, d))


def _unbind(rng, shape, d):
    return None, shape[d] > 0 and (lambda x: weighted(x.unbind(d)))


def _cat(rng, shape, d):
    first = (slice(None),) * d + (slice(0, 1),)
    return None, lambda x: torch.cat([x, x * 2, x[first]], d)


def _roll(rng, shape, d):
    shift = rng.randint(-9, 9)
    return shift, lambda x: x.roll(shift, d)


def _roll_all(rng, shape, d):
    shifts = [rng.randint(-3, 3) for _ in shape]
    return shifts, lambda x: x.roll(shifts, [*range(x.ndim)])


def _flip(rng, shape, d):
    dims = [d] if rng.random() < 0.6 else [*range(len(shape))]
    return dims, lambda x: x.flip(dims)


def _pad(rng, shape, d):
    pads = []
    for n in shape[::-1][: rng.randint(1, len(shape))]:
        low = rng.randint(-min(n, 2), 4)
        pads += [low, rng.randint(-min(n + min(low, 0), 2), 4)]
    value = rng.choice([0.0, 1.5])
    return (pads, value), lambda x: F.pad(x, pads, value=value)


def _unfold(rng, shape, d):
    size = rng.randint(1, max(shape[d], 1))
    step = rng.choice([1, 2, 3, size])
    return (size, step), shape[d] > 0 and (lambda x: x.unfold(d, size, step))


def _tril(rng, shape, d):
    diagonal = rng.randint(-4, 4)
    return diagonal, len(shape) > 1 and (lambda x: x.tril(diagonal))


def _triu(rng, shape, d):
    diagonal = rng.randint(-4, 4)
    return diagonal, len(shape) > 1 and (lambda x: x.triu(diagonal))


def _next_token(rng, shape, d):
    length = max(shape[d] - 1, 0)
    return None, lambda x: (x.narrow(d, 0, length) * 2, x.narrow(d, shape[d] - length, length))


def _rotated_halves(rng, shape, d):
    def rotated(x):
        one, other = x.chunk(2, d)
        return torch.cat([-other, one], d)

    return None, shape[d] > 1 and rotated


def _causal(rng, shape, d):
    """The windows of a causal convolution."""
    size = rng.randint(1, 4)
    last = [0, 0] * (len(shape) - 1 - d)
    pads = (*last, size - 1, 0)
    return size, shape[d] > 0 and (lambda x: F.pad(x, pads).unfold(d, size, 1))


# By name: (rng, shape, dim) -> (what was drawn, the program; False: none on such a shape).
PROGRAMS = {
    "slice": _slice,
    "select": _select,
    "narrow": _narrow,
    "split": _split,
    "split by sizes": _sizes,
    "chunk": _chunk,
    "tensor_split": _tensor_split,
    "unbind": _unbind,
    "cat": _cat,
    "roll": _roll,
    "roll of all dims": _roll_all,
    "flip": _flip,
    "pad": _pad,
    "unfold": _unfold,
    "tril": _tril,
    "triu": _triu,
    "next token": _next_token,
    "rotated halves": _rotated_halves,
    "causal windows": _causal,
}


def draw(rng, name):
    """(what was drawn, shape, program)"""
    while True:
        shape = draw_shape(rng)
        drawn, program = PROGRAMS[name](rng, shape, rng.randrange(len(shape)))
        # Of tensors of shape (0,) autograd gives cat plain zeros as gradients, whatever they are.
        if program and shape != (0,):
            return drawn, shape, program


def listed(results):
    return list(results) if isinstance(results, (list, tuple)) else [results]

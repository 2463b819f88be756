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


def _block_diag(rng, shape, d):
    first = (slice(0, 1),) * len(shape)
    return None, len(shape) < 3 and (lambda x: torch.block_diag(x, x * 2, x[first]))


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


def _diagonal(rng, shape, d):
    if len(shape) < 2:
        return None, None
    offset, dims = rng.randint(-3, 3), rng.sample(range(len(shape)), 2)
    return (offset, dims), lambda x: x.diagonal(offset, *dims)


def _rot90(rng, shape, d):
    if len(shape) < 2:
        return None, None
    turns, dims = rng.randint(-1, 5), rng.sample(range(len(shape)), 2)
    return (turns, dims), lambda x: torch.rot90(x, turns, dims)


def _beyond(mode, dims=None):
    """Padding with rows that the tensor has, of images of one to three dims in batches."""

    def program(rng, shape, d):
        spatial = len(shape) - 1
        if spatial < 1 or 0 in shape:
            return None, None
        pads = []
        for n in shape[::-1][:spatial]:
            most = {"reflect": min(n - 1, 3), "circular": min(n, 3), "replicate": 3}[mode]
            pads += [rng.randint(0, most), rng.randint(0, most)]
        return pads, lambda x: F.pad(x[None], pads, mode=mode)[0]

    return program


def _repeat_interleave(rng, shape, d):
    times = rng.randint(0, 3)
    return times, lambda x: x.repeat_interleave(times, d)


def _pixel_shuffle(rng, shape, d):
    factor = rng.randint(1, 3)
    fits = len(shape) == 3 and shape[0] and shape[0] % factor**2 == 0
    return factor, fits and (lambda x: F.pixel_shuffle(x, factor))


def _pixel_unshuffle(rng, shape, d):
    factor = rng.randint(1, 3)
    fits = len(shape) == 3 and not (shape[1] % factor or shape[2] % factor)
    return factor, fits and (lambda x: F.pixel_unshuffle(x, factor))


def _columns(rng, shape, d):
    """torch.nn.functional.unfold"""
    size, step, pad = rng.randint(1, 3), rng.randint(1, 2), rng.randint(0, 1)
    fits = len(shape) == 3 and shape[0] and min(shape[1:]) + 2 * pad >= size and 0 not in shape
    return (size, step, pad), fits and (lambda x: F.unfold(x[None], size, 1, pad, step)[0])


def _stack(rng, shape, d):
    place = rng.randint(0, len(shape))
    return place, lambda x: torch.stack([x, x * 2], place)


def _stacks(rng, shape, d):
    which = rng.choice([torch.hstack, torch.vstack, torch.dstack])
    return which.__name__, lambda x: which([x, x * 2])


def _split_at(rng, shape, d):
    at = sorted(rng.randint(0, shape[d]) for _ in range(2))
    return at, lambda x: weighted(x.tensor_split(at, d))


def _index(rng, shape, d):
    which = [rng.choice([slice(None), slice(1, None), slice(None, -1), -1, None]) for _ in shape]
    lacks = any(k == -1 and n == 0 for k, n in zip([k for k in which if k is not None], shape))
    which = (*which, ...)
    return which, not lacks and (lambda x: x[which])


def _narrow_copy(rng, shape, d):
    start = rng.randint(0, shape[d])
    length = rng.randint(0, shape[d] - start)
    return (start, length), lambda x: torch.narrow_copy(x, d, start, length)


def _select_scatter(rng, shape, d):
    index = rng.randrange(shape[d]) if shape[d] else None
    return index, index is not None and (
        lambda x: torch.select_scatter(x * 2, x.select(d, index), d, index)
    )


def _slice_scatter(rng, shape, d):
    start = rng.randint(0, shape[d])
    stop = rng.randint(start, shape[d])
    return (start, stop), lambda x: torch.slice_scatter(
        x * 2, x.narrow(d, start, stop - start), d, start, stop
    )


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
    "block_diag": _block_diag,
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
    "diagonal": _diagonal,
    "rot90": _rot90,
    "reflect": _beyond("reflect"),
    "replicate": _beyond("replicate"),
    "circular": _beyond("circular"),
    "repeat_interleave": _repeat_interleave,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "columns": _columns,
    "stack": _stack,
    "hstack and others": _stacks,
    "tensor_split at": _split_at,
    "index": _index,
    "narrow_copy": _narrow_copy,
}

# Of these autograd makes gradients of DTensors and plain tensors together.
FORWARD = {"select_scatter": _select_scatter, "slice_scatter": _slice_scatter}


def draw(rng, name):
    """(what was drawn, shape, program)"""
    while True:
        shape = draw_shape(rng)
        drawn, program = {**PROGRAMS, **FORWARD}[name](rng, shape, rng.randrange(len(shape)))
        # Of tensors of shape (0,) autograd gives cat plain zeros as gradients, whatever they are.
        if program and shape != (0,):
            return drawn, shape, program


def listed(results):
    return list(results) if isinstance(results, (list, tuple)) else [results]

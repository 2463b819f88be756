"""The rules of movement ops: from the arguments to a map of rows. Each is called with the op's
arguments, where tensors are their shapes, and gives None for arguments of which none is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from sys import maxsize
from typing import Any

from cute_sharding.ops.rules.parts import is_whole
from cute_sharding.relations.forms import Diagonal, Fold, Window
from cute_sharding.relations.moves import Link, Move, Pairs, Shape
from cute_sharding.relations.rows import Rows
from cute_sharding.sharding.meeting import Run, Runs

Rule = Callable[..., "Move | None"]


def line(x: int, y: int, count: int, dx: int = 1, dy: int = 1) -> Runs:
    """``count`` rows from (x, y) on, the steps dx and dy apart."""
    if count <= 0:
        return ()
    if dx == dy == 1 or count == 1:
        return (Run(x, y, (), count),)
    return (Run(x, y, ((count, dx, dy),), 1),)


def alike(ndim: int, **other: tuple[Rows, Rows]) -> Pairs:
    """Pairs of the dims of tensors of as many dims, all as they are but for those named ``d0``,
    ``d1`` and so on.
    """
    return tuple([other.get(f"d{d}", (Rows(d), Rows(d))) for d in range(ndim)])


def at(shape: Shape, dim: int) -> int:
    """The dim counted from 0.

    Raises:
        IndexError: there is no such dim.
    """
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"dim {dim} of a tensor of {len(shape)} dims")
    return dim % len(shape)


def put(shape: Shape, dim: int, *sizes: int) -> Shape:
    """The shape with other sizes in the place of the dim's."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


# -- parts of a dim --------------------------------------------------------------------------------


def _bounds(n: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Of a slice, as torch takes them: from the end where negative, and within the dim."""
    first, stop = 0 if start is None else start, maxsize if end is None else end
    first, stop = (min(max(k + n if k < 0 else k, 0), n) for k in (first, stop))
    return first, max(first, stop)


def sliced(
    x: Shape, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Move | None:
    """Rows ``start + j·step``."""
    if not x or step < 1:
        return None
    d = at(x, dim)
    first, stop = _bounds(x[d], start, end)
    count = -(-(stop - first) // step)
    if count == x[d]:
        named, every = frozenset({d}), is_whole(start, end, step)
        unchanged = named if every else frozenset()
        links = (Link(0, 0, alike(len(x))),)
        return Move((x,), (x,), links, is_view=True, named=named, unchanged=unchanged)
    rows = Rows(d, line(0, first, count, 1, step)), Rows(d)
    return Move(
        (x,), (put(x, d, count),), (Link(0, 0, alike(len(x), **{f"d{d}": rows})),), is_view=True
    )


def sliced_backward(
    gradient: Shape, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Move:
    """Row j of the gradient becomes row ``start + j·step``, among zeros."""
    d = at(gradient, dim)
    if is_whole(start, end, step):
        links, named = (Link(0, 0, alike(len(sizes))),), frozenset({d})
        return Move((gradient,), (tuple(sizes),), links, named=named, unchanged=named)
    first, _ = _bounds(sizes[d], start, end)
    rows = Rows(d), Rows(d, line(0, first, gradient[d], 1, step))
    return Move((gradient,), (tuple(sizes),), (Link(0, 0, alike(len(sizes), **{f"d{d}": rows})),))


def _one_row(ndim: int, d: int, index: int) -> Pairs:
    """The row of that number of ``ndim`` dims, and a tensor that has no such dim."""
    return (
        *[(Rows(k), Rows(k)) for k in range(d)],
        (Rows(d, line(0, index, 1)), Rows(None)),
        *[(Rows(k), Rows(k - 1)) for k in range(d + 1, ndim)],
    )


def _turned(pairs: Pairs) -> Pairs:
    return tuple([(target, source) for source, target in pairs])


def selected(x: Shape, dim: int, index: int) -> Move | None:
    """One row, and the dim is gone."""
    d = at(x, dim)
    if not -x[d] <= index < x[d]:
        return None
    pairs = _one_row(len(x), d, index % x[d])
    return Move((x,), (put(x, d),), (Link(0, 0, pairs),), is_view=True)


def selected_backward(gradient: Shape, sizes: Sequence[int], dim: int, index: int) -> Move | None:
    """The gradient becomes one row, among zeros."""
    shape = tuple(sizes)
    d = at(shape, dim)
    pairs = _turned(_one_row(len(shape), d, index % shape[d]))
    return Move((gradient,), (shape,), (Link(0, 0, pairs),))


def unbound(x: Shape, dim: int = 0) -> Move | None:
    """Each row by itself."""
    d = at(x, dim)
    links = [Link(0, k, _one_row(len(x), d, k)) for k in range(x[d])]
    return Move((x,), (put(x, d),) * x[d], tuple(links), is_view=True) if links else None


def split_with_sizes(x: Shape, sizes: Sequence[int], dim: int = 0) -> Move | None:
    """Parts of those sizes, one after the other."""
    d = at(x, dim)
    if sum(sizes) != x[d]:
        return None
    links, first = [], 0
    for k, size in enumerate(sizes):
        rows = Rows(d, line(0, first, size)), Rows(d)
        links.append(Link(0, k, alike(len(x), **{f"d{d}": rows})))
        first += size
    return Move((x,), tuple([put(x, d, n) for n in sizes]), tuple(links), is_view=True)


def split(x: Shape, size: int, dim: int = 0) -> Move | None:
    """Parts of ``size`` rows, of which the last may have fewer."""
    n = x[at(x, dim)]
    if size < 1 and (size or n):
        return None
    parts = max(-(-n // max(size, 1)), 1)
    return split_with_sizes(x, [min(size, n - k * size) for k in range(parts)], dim)


def tensor_split_bounds(n: int, parts: int | Sequence[int]) -> list[tuple[int, int | None]]:
    """The slices that ``torch.tensor_split`` takes of a dim of ``n`` rows: as many as it is to have
    parts, the first of which have a row more; or up to each index, and from the last one on.
    """
    if not isinstance(parts, int):
        return [*zip([0, *parts], [*parts, None])]
    size, more = divmod(n, max(parts, 1))
    firsts = [k * size + min(k, more) for k in range(parts + 1)]
    return [*pairwise(firsts)]


# -- together --------------------------------------------------------------------------------------


def concatenated(tensors: Sequence[Shape], dim: int = 0) -> Move | None:
    """One after the other. Where some are of shape (0,), which torch leaves out: None."""
    ndim = max(map(len, tensors))
    if any(len(x) != ndim for x in tensors) or not ndim:
        return None
    d = at(tensors[0], dim)
    links, first = [], 0
    for i, x in enumerate(tensors):
        rows = Rows(d), Rows(d, line(0, first, x[d]))
        links.append(Link(i, 0, alike(ndim, **{f"d{d}": rows})))
        first += x[d]
    return Move(tuple(tensors), (put(tensors[0], d, first),), tuple(links))


# -- the same rows in another order ----------------------------------------------------------------


def rolled(x: Shape, shifts: Any, dims: Any = ()) -> Move | None:
    """Row j is row j - shift, around the end."""
    shifts, dims = ([k] if isinstance(k, int) else list(k) for k in (shifts, dims))
    if not dims and len(x) == 1 and len(shifts) == 1:
        dims = [0]
    if len(shifts) != len(dims) or not dims:
        return None
    amounts: dict[int, int] = {}
    for shift, dim in zip(shifts, dims):
        amounts[at(x, dim)] = amounts.get(at(x, dim), 0) + shift
    pairs = {}
    for d, shift in amounts.items():
        n, k = x[d], shift % x[d] if x[d] else 0
        if k:
            pairs[f"d{d}"] = Rows(d, line(0, n - k, k) + line(k, 0, n - k)), Rows(d)
    return Move((x,), (x,), (Link(0, 0, alike(len(x), **pairs)),), named=frozenset(amounts))


def flipped(x: Shape, dims: Sequence[int]) -> Move | None:
    """Row j is row n - 1 - j."""
    turned = {at(x, dim) for dim in dims}
    pairs = {f"d{d}": (Rows(d), Rows(d, None, True)) for d in turned if x[d] > 1}
    return Move((x,), (x,), (Link(0, 0, alike(len(x), **pairs)),), named=frozenset(turned))


# -- with rows that come from nowhere --------------------------------------------------------------


def padded(x: Shape, pad: Sequence[int], value: Any = 0) -> Move | None:
    """Rows of ``value`` before and after; fewer rows where ``pad`` is negative."""
    if len(pad) % 2 or len(pad) > 2 * len(x):
        return None
    shape, pairs, named, unchanged = list(x), {}, set(), set()
    for k in range(len(pad) // 2):
        d, (low, high) = len(x) - 1 - k, pad[2 * k : 2 * k + 2]
        named.add(d)
        if not low and not high:
            unchanged |= {d} if type(low) is type(high) is int else set()
            continue
        shape[d] = x[d] + low + high
        first, stop = max(low, 0), min(x[d] + low, shape[d])
        pairs[f"d{d}"] = Rows(d, line(first, first - low, stop - first)), Rows(d)
    if min(shape, default=0) < 0:
        return None
    return Move(
        (x,),
        (tuple(shape),),
        (Link(0, 0, alike(len(x), **pairs)),),
        value,
        named=frozenset(named),
        unchanged=frozenset(unchanged),
    )


def triangle(is_lower: bool) -> Rule:
    """All rows stay where they are, and elements beyond a diagonal become 0."""

    def rule(x: Shape, diagonal: int = 0) -> Move | None:
        if len(x) < 2:
            return None
        links = (Link(0, 0, alike(len(x))),)
        return Move((x,), (x,), links, triangle=(is_lower, diagonal))

    return rule


# -- windows, folds and diagonals ------------------------------------------------------------------


def unfolded(x: Shape, dim: int, size: int, step: int) -> Move | None:
    """Windows of ``size`` rows, ``step`` apart, whose rows are a last dim."""
    if not x:
        return None
    d, ndim = at(x, dim), len(x)
    if not 0 < size <= x[d] or step < 1:
        return None
    pair = Rows(d), Rows(d, form=Window(ndim, size, step))
    onto = (*put(x, d, (x[d] - size) // step + 1), size)
    return Move((x,), (onto,), (Link(0, 0, alike(ndim, **{f"d{d}": pair})),), is_view=True)


def unfolded_backward(
    gradient: Shape, sizes: Sequence[int], dim: int, size: int, step: int
) -> Move | None:
    """Each row has the sum of what the windows that it is in have of it."""
    shape = tuple(sizes)
    if not shape or size < 1:
        return None
    d = at(shape, dim)
    pair = Rows(d, form=Window(len(shape), size, step)), Rows(d)
    links = (Link(0, 0, alike(len(shape), **{f"d{d}": pair})),)
    return Move((gradient,), (shape,), links, adds=True)


# How rows before the first and after the last of n are made, by pieces: (start, stop, a, b).
_BEYOND: dict[str, Callable[[int], tuple[tuple[int, int, int, int], ...]]] = {
    "reflect": lambda n: ((-n, 0, -1, 0), (0, n, 1, 0), (n, 2 * n, -1, 2 * n - 2)),
    "replicate": lambda n: ((-maxsize, 0, 0, 0), (0, n, 1, 0), (n, maxsize, 0, n - 1)),
}

# The most rows on one side.
_MOST: dict[str, Callable[[int], int]] = {
    "reflect": lambda n: n - 1,
    "replicate": lambda n: maxsize,
}


def _folds(x: Shape, pad: Sequence[int], mode: str) -> tuple[Shape, dict[int, Fold]] | None:
    """The padded shape, and of each padded dim which rows it is made of."""
    if len(pad) % 2 or len(pad) > 2 * len(x):
        return None
    shape, folds = list(x), {}
    for k in range(len(pad) // 2):
        d, (low, high) = len(x) - 1 - k, pad[2 * k : 2 * k + 2]
        shape[d] = n = x[d] + low + high
        if x[d] < 1 or n < 1 or max(low, high) > _MOST[mode](x[d]):
            return None
        pieces = [
            (max(start + low, 0), min(stop + low, n), a, b - a * low)
            for start, stop, a, b in _BEYOND[mode](x[d])
        ]
        folds[d] = Fold(tuple([piece for piece in pieces if piece[0] < piece[1]]))
    return tuple(shape), folds


def folded(mode: str) -> Rule:
    """Padding with rows that the tensor has."""

    def rule(x: Shape, pad: Sequence[int]) -> Move | None:
        found = _folds(x, pad, mode)
        if found is None:
            return None
        pairs = {f"d{d}": (Rows(d), Rows(d, form=fold)) for d, fold in found[1].items()}
        return Move((x,), (found[0],), (Link(0, 0, alike(len(x), **pairs)),))

    return rule


def folded_backward(mode: str) -> Rule:
    """Each row has the sum of the gradients of the rows that were made of it."""

    def rule(gradient: Shape, x: Shape, pad: Sequence[int]) -> Move | None:
        found = _folds(x, pad, mode)
        if found is None or found[0] != tuple(gradient):
            return None
        pairs = {f"d{d}": (Rows(d, form=fold), Rows(d)) for d, fold in found[1].items()}
        links = (Link(0, 0, alike(len(x), **pairs)),)
        return Move((gradient, x), (x,), links, adds=True)

    return rule


def _diagonal(
    shape: Shape, offset: int, dim1: int, dim2: int
) -> tuple[Shape, tuple[tuple[Rows, Rows], ...]] | None:
    """The shape of a diagonal, and which of its rows are those of a tensor of ``shape``."""
    if len(shape) < 2:
        return None
    one, other = at(shape, dim1), at(shape, dim2)
    if one == other:
        return None
    down, right = max(-offset, 0), max(offset, 0)
    count = max(min(shape[one] - down, shape[other] - right), 0)
    kept = [d for d in range(len(shape)) if d not in (one, other)]
    crossing = Rows(one, form=Diagonal(other, down, right, count)), Rows(len(kept))
    pairs = [(Rows(d), Rows(k)) for k, d in enumerate(kept)]
    in_order = sorted([*pairs, crossing], key=lambda pair: pair[0].dims)
    return (*[shape[d] for d in kept], count), tuple(in_order)


def diagonal(x: Shape, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Move | None:
    """Element j of both dims, which becomes row j of a last dim."""
    found = _diagonal(x, offset, dim1, dim2)
    return found and Move((x,), (found[0],), (Link(0, 0, found[1]),), is_view=True)


def diagonal_backward(
    gradient: Shape, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Move | None:
    """The gradient becomes the diagonal, among zeros."""
    found = _diagonal(tuple(sizes), offset, dim1, dim2)
    return found and Move((gradient,), (tuple(sizes),), (Link(0, 0, _turned(found[1])),))

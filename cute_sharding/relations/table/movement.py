"""Movement ops, by rows: the operands' rows that the rows of each result are made of.

Each rule gives a :class:`Move`. Result rows that it does not name come from no operand row. Ops
that torch composes of others (narrow, chunk, tensor_split, hstack) reach the dispatcher as those.

Sources: the ops' definitions in PyTorch's documentation and in
aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize
from typing import Any

from cute_sharding.relations.dim_map import normalize_dim
from cute_sharding.relations.moves import Link, Move, Pairs, Shape
from cute_sharding.relations.rows import Rows
from cute_sharding.relations.signature import COPIES, COPIES_ALL
from cute_sharding.relations.table.by_rows import gradient, line, moved, pairs_but, with_sizes
from cute_sharding.relations.table.names import is_whole
from cute_sharding.relations.table.pads import ROWS as PADS
from cute_sharding.relations.table.row import ByRows as Row

# -- parts of a dim --------------------------------------------------------------------------------


def _bounds(n: int, start: int | None, end: int | None) -> tuple[int, int]:
    """A slice's bounds as in torch: counted from the end if negative, clipped to the dim."""
    first, stop = 0 if start is None else start, maxsize if end is None else end
    first, stop = (min(max(k + n if k < 0 else k, 0), n) for k in (first, stop))
    return first, max(first, stop)


def sliced(
    x: Shape, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Move | None:
    """Rows ``start + j·step``."""
    if not x or step < 1:
        return None
    d = normalize_dim(dim, len(x))
    first, stop = _bounds(x[d], start, end)
    count = -(-(stop - first) // step)
    if count == x[d]:
        named = frozenset({d})
        unchanged = named if is_whole(start, end, step) else frozenset()
        return moved(x, x, {}, is_view=True, named=named, unchanged=unchanged)
    rows = Rows(d, line(0, first, count, 1, step)), Rows(d)
    return moved(x, with_sizes(x, d, count), {d: rows}, is_view=True)


def narrowed(x: Shape, dim: int, start: int, length: int) -> Move | None:
    """A slice with a given length."""
    if not x or not -x[dim] <= start <= x[dim]:
        return None
    first = start % x[dim] if start < 0 else start
    return sliced(x, dim, first, first + length)


def _one_row(ndim: int, d: int, index: int) -> Pairs:
    """The pairs of dims of a tensor with ``ndim`` dims and of row ``index`` of dim ``d``."""
    return (
        *[(Rows(k), Rows(k)) for k in range(d)],
        (Rows(d, line(0, index, 1)), Rows(None)),
        *[(Rows(k), Rows(k - 1)) for k in range(d + 1, ndim)],
    )


def selected(x: Shape, dim: int, index: int) -> Move | None:
    """One row, without the dim."""
    d = normalize_dim(dim, len(x))
    if not -x[d] <= index < x[d]:
        return None
    return moved(x, with_sizes(x, d), _one_row(len(x), d, index % x[d]), is_view=True)


def unbound(x: Shape, dim: int = 0) -> Move | None:
    """Each row as a result of its own."""
    d = normalize_dim(dim, len(x))
    links = [Link(0, k, _one_row(len(x), d, k)) for k in range(x[d])]
    return Move((x,), (with_sizes(x, d),) * x[d], tuple(links), is_view=True) if links else None


def split_with_sizes(x: Shape, sizes: Sequence[int], dim: int = 0) -> Move | None:
    """Parts of the given sizes, one after the other."""
    d = normalize_dim(dim, len(x))
    if sum(sizes) != x[d]:
        return None
    links, first = [], 0
    for k, size in enumerate(sizes):
        rows = Rows(d, line(0, first, size)), Rows(d)
        links.append(Link(0, k, pairs_but(len(x), {d: rows})))
        first += size
    return Move((x,), tuple([with_sizes(x, d, n) for n in sizes]), tuple(links), is_view=True)


def split(x: Shape, size: int, dim: int = 0) -> Move | None:
    """Parts of ``size`` rows; the last may have fewer."""
    n = x[normalize_dim(dim, len(x))]
    if size < 1 and (size or n):
        return None
    parts = max(-(-n // max(size, 1)), 1)
    return split_with_sizes(x, [min(size, n - k * size) for k in range(parts)], dim)


# -- joining ---------------------------------------------------------------------------------------


def concatenated(tensors: Sequence[Shape], dim: int = 0) -> Move | None:
    """The tensors, one after the other; those of shape (0,) are left out, as in torch."""
    some = {i: x for i, x in enumerate(tensors) if x != (0,)} or dict(enumerate(tensors))
    ndim = max(map(len, some.values()))
    if any(len(x) != ndim for x in some.values()) or not ndim:
        return None
    d = normalize_dim(dim, ndim)
    links, first = [], 0
    for i, x in some.items():
        rows = Rows(d), Rows(d, line(0, first, x[d]))
        links.append(Link(i, 0, pairs_but(ndim, {d: rows})))
        first += x[d]
    return Move(tuple(tensors), (with_sizes(next(iter(some.values())), d, first),), tuple(links))


def blocks(tensors: Sequence[Shape]) -> Move:
    """A block-diagonal matrix; a vector counts as one row, a scalar as one element."""
    links, row, column = [], 0, 0
    for i, x in enumerate(tensors):
        height, width = (1,) * (2 - len(x)) + x
        down, right = Rows(0, line(0, row, height)), Rows(1, line(0, column, width))
        one, other = map(Rows, (None, None, 0, 1)[len(x) : len(x) + 2])
        links.append(Link(i, 0, ((one, down), (other, right))))
        row, column = row + height, column + width
    return Move(tuple(tensors), ((row, column),), tuple(links))


# -- the same rows in another order ----------------------------------------------------------------


def rolled(x: Shape, shifts: Any, dims: Any = ()) -> Move | None:
    """Row j is row j - shift, modulo the size."""
    shifts, dims = ([k] if isinstance(k, int) else list(k) for k in (shifts, dims))
    if not dims and len(x) == 1 and len(shifts) == 1:
        dims = [0]
    if len(shifts) != len(dims) or not dims:
        return None
    amounts: dict[int, int] = {}
    for shift, dim in zip(shifts, dims):
        amounts[normalize_dim(dim, len(x))] = amounts.get(normalize_dim(dim, len(x)), 0) + shift
    changed = {}
    for d, shift in amounts.items():
        n, k = x[d], shift % x[d] if x[d] else 0
        if k:
            changed[d] = Rows(d, line(0, n - k, k) + line(k, 0, n - k)), Rows(d)
    return moved(x, x, changed, named=frozenset(amounts))


def flipped(x: Shape, dims: Sequence[int]) -> Move | None:
    """Row j is row n - 1 - j."""
    turned = {normalize_dim(dim, len(x)) for dim in dims}
    changed = {d: (Rows(d), Rows(d, None, True)) for d in turned if x[d] > 1}
    return moved(x, x, changed, named=frozenset(turned))


def rotated(x: Shape, turns: int = 1, dims: Sequence[int] = (0, 1)) -> Move | None:
    """Quarter turns: an odd number of them flips one of the dims and swaps the two."""
    if len(dims) != 2 or len(x) < 2:
        return None
    a, b = (normalize_dim(d, len(x)) for d in dims)
    if a == b:
        return None
    if turns % 2 == 0:
        return flipped(x, (a, b) if turns % 4 else ())
    onto = list(x)
    onto[a], onto[b] = x[b], x[a]
    is_first = turns % 4 == 3  # whether the first of the two is flipped
    changed = {
        a: (Rows(a), Rows(b, None, is_first and x[a] > 1)),
        b: (Rows(b), Rows(a, None, not is_first and x[b] > 1)),
    }
    return moved(x, tuple(onto), changed, named=frozenset({a if is_first else b}))


# -- the rows --------------------------------------------------------------------------------------


ROWS: tuple[Row, ...] = (
    Row(
        ("slice.Tensor",),
        sliced,
        op="Tensor.__getitem__",
        linear=COPIES,
        by_names=("slice_copy.Tensor",),
        note="slices only; also torch.narrow and torch.tensor_split",
    ),
    Row(("slice_backward.default",), gradient(sliced), op="slice's gradient", linear=COPIES),
    Row(("narrow_copy.default",), narrowed, op="torch.narrow_copy"),
    Row(
        ("select.int",),
        selected,
        op="torch.select",
        linear=COPIES,
        by_names=("select_copy.int",),
        note="also for indexing by an int",
    ),
    Row(("select_backward.default",), gradient(selected), op="select's gradient", linear=COPIES),
    Row(
        ("unbind.int",),
        unbound,
        op="torch.unbind",
        linear=COPIES,
        by_names=("unbind_copy.int",),
        otherwise="... ->",
    ),
    Row(
        ("split.Tensor",),
        split,
        op="torch.split",
        linear=COPIES,
        by_names=("unsafe_split.Tensor", "split_copy.Tensor"),
        note="also for torch.chunk",
    ),
    Row(
        ("split_with_sizes.default", "split_with_sizes_copy.default"),
        split_with_sizes,
        op="torch.split, by sizes",
        linear=COPIES,
        by_names=("unsafe_split_with_sizes.default",),
    ),
    Row(
        ("cat.default",),
        concatenated,
        op="torch.cat",
        linear=COPIES_ALL,
        note="also for torch.hstack, torch.vstack and torch.dstack",
    ),
    Row(("block_diag.default",), blocks, op="torch.block_diag"),
    Row(("roll.default",), rolled, op="torch.roll", linear=COPIES, otherwise="[...] -> [...]"),
    Row(
        ("flip.default",),
        flipped,
        op="torch.flip",
        linear=COPIES,
        note="also for torch.fliplr and torch.flipud",
    ),
    Row(("rot90.default",), rotated, op="torch.rot90", made_of="flip.default"),
    *PADS,
)

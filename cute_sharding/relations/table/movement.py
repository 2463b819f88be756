"""Movement ops, by rows: the operands' rows that the rows of each result are made of. First the
parts that rules are written with, then pads, windows and diagonals, then all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import maxsize
from typing import Any

from cute_sharding.relations.moves import Diagonal, Fold, Link, Move, Pairs, Rows, Shape, Window
from cute_sharding.relations.signature import COPIES, COPIES_ALL
from cute_sharding.relations.table.kernels import SizesBeside
from cute_sharding.relations.table.names import is_whole
from cute_sharding.relations.table.row import ByRows as Row
from cute_sharding.relations.view import normalize_dim
from cute_sharding.sharding.rows import Run, Runs

# -- by rows ---------------------------------------------------------------------------------------
# The parts of movement rules: runs of rows, pairs of dims, moves, and the map of an op's gradient,
# which is the op's map turned around.

Rule = Callable[..., "Move | None"]
# For the dims that change: the rows of the operand, and those of the result.
Changed = Mapping[int, tuple[Rows, Rows]]


def line(x: int, y: int, count: int, dx: int = 1, dy: int = 1) -> Runs:
    """``count`` rows from (x, y) on, in steps of dx and dy."""
    if count <= 0:
        return ()
    if dx == dy == 1 or count == 1:
        return (Run(x, y, (), count),)
    return (Run(x, y, ((count, dx, dy),), 1),)


def pairs_but(ndim: int, changed: Changed) -> Pairs:
    """The pairs of dims of two tensors with ``ndim`` dims, unchanged except for ``changed``."""
    return tuple([changed.get(d, (Rows(d), Rows(d))) for d in range(ndim)])


def with_sizes(shape: Shape, dim: int, *sizes: int) -> Shape:
    """The shape with other sizes in place of the dim's."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def moved(x: Shape, onto: Shape, changed: Changed | Pairs, **more: Any) -> Move:
    """The move from one operand to one result whose dims are unchanged except for ``changed``."""
    pairs = changed if isinstance(changed, tuple) else pairs_but(len(x), changed)
    return Move((x,), (onto,), (Link(0, 0, pairs),), **more)


def gradient(rule: Rule, *, adds: bool = False, given: bool = False) -> Rule:
    """The rule of an op's gradient: the op's map turned around. Its arguments are the gradient, the
    operand's sizes, and the op's further arguments. Rows that the op did not read are zeros.

    Args:
        adds: the op reads rows several times, and their gradients are added up.
        given: the gradient op gets the operand itself and not its sizes.
    """

    def turned(received: Shape, sizes: Sequence[int], *args: Any) -> Move | None:
        x = tuple(sizes)
        move = rule(x, *args)
        if move is None or move.outputs != (tuple(received),):
            return None
        pairs = tuple([(target, source) for source, target in move.links[0].pairs])
        links = (Link(0, 0, pairs),)
        inputs = (*move.outputs, x) if given else move.outputs
        return move._replace(inputs=inputs, outputs=(x,), links=links, adds=adds, is_view=False)

    return turned


# -- pads ------------------------------------------------------------------------------------------
# Movement with more rows than the tensor has: pads, triangles, windows and diagonals, and their
# gradients; by rows, as in movement.py.

# -- rows that come from no row --------------------------------------------------------------------


def padded(x: Shape, pad: Sequence[int], value: Any = 0) -> Move | None:
    """Rows of ``value`` before and after; where ``pad`` is negative rows are dropped."""
    if len(pad) % 2 or len(pad) > 2 * len(x):
        return None
    shape, changed, named, unchanged = list(x), {}, set(), set()
    for k in range(len(pad) // 2):
        d, (low, high) = len(x) - 1 - k, pad[2 * k : 2 * k + 2]
        named.add(d)
        if not low and not high:
            unchanged |= {d} if type(low) is type(high) is int else set()
            continue
        shape[d] = x[d] + low + high
        first, stop = max(low, 0), min(x[d] + low, shape[d])
        changed[d] = Rows(d, line(first, first - low, stop - first)), Rows(d)
    if min(shape, default=0) < 0:
        return None
    about = {"named": frozenset(named), "unchanged": frozenset(unchanged)}
    return moved(x, tuple(shape), changed, fill=value, **about)


def triangle(is_lower: bool) -> Rule:
    """The rule of a triangle: all rows stay in place; elements beyond a diagonal become 0."""

    def rule(x: Shape, diagonal: int = 0) -> Move | None:
        return moved(x, x, {}, triangle=(is_lower, diagonal)) if len(x) > 1 else None

    return rule


# -- windows, folds and diagonals ------------------------------------------------------------------


def unfolded(x: Shape, dim: int, size: int, step: int) -> Move | None:
    """Windows of ``size`` rows, ``step`` apart; a new last dim has the rows of a window."""
    if not x:
        return None
    d, ndim = normalize_dim(dim, len(x)), len(x)
    if not 0 < size <= x[d] or step < 1:
        return None
    onto = (*with_sizes(x, d, (x[d] - size) // step + 1), size)
    return moved(x, onto, {d: (Rows(d), Rows(d, form=Window(ndim, size, step)))}, is_view=True)


# The maps of the rows before the first and after the last of n, by pieces (start, stop, a, b); and
# the most rows on one side.
_BEYOND: dict[str, Callable[[int], tuple[tuple[int, int, int, int], ...]]] = {
    "reflect": lambda n: ((-n, 0, -1, 0), (0, n, 1, 0), (n, 2 * n, -1, 2 * n - 2)),
    "replicate": lambda n: ((-maxsize, 0, 0, 0), (0, n, 1, 0), (n, maxsize, 0, n - 1)),
}
_MOST: dict[str, Callable[[int], int]] = {
    "reflect": lambda n: n - 1,
    "replicate": lambda n: maxsize,
}


def folded(mode: str) -> Rule:
    """The rule of padding with the tensor's own rows."""

    def rule(x: Shape, pad: Sequence[int]) -> Move | None:
        if len(pad) % 2 or len(pad) > 2 * len(x):
            return None
        shape, changed = list(x), {}
        for k in range(len(pad) // 2):
            d, (low, high) = len(x) - 1 - k, pad[2 * k : 2 * k + 2]
            shape[d] = n = x[d] + low + high
            if x[d] < 1 or n < 1 or max(low, high) > _MOST[mode](x[d]):
                return None
            pieces = [
                (max(start + low, 0), min(stop + low, n), a, b - a * low)
                for start, stop, a, b in _BEYOND[mode](x[d])
            ]
            fold = Fold(tuple([piece for piece in pieces if piece[0] < piece[1]]))
            changed[d] = Rows(d), Rows(d, form=fold)
        return moved(x, tuple(shape), changed)

    return rule


def diagonal(x: Shape, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Move | None:
    """Row j of a new last dim is element j of both dims."""
    if len(x) < 2 or normalize_dim(dim1, len(x)) == normalize_dim(dim2, len(x)):
        return None
    one, other = normalize_dim(dim1, len(x)), normalize_dim(dim2, len(x))
    down, right = max(-offset, 0), max(offset, 0)
    count = max(min(x[one] - down, x[other] - right), 0)
    kept = [d for d in range(len(x)) if d not in (one, other)]
    crossing = Rows(one, form=Diagonal(other, down, right, count)), Rows(len(kept))
    pairs = [(Rows(d), Rows(k)) for k, d in enumerate(kept)]
    in_order = tuple(sorted([*pairs, crossing], key=lambda pair: pair[0].dims))
    return moved(x, (*[x[d] for d in kept], count), in_order, is_view=True)


def embedded(x: Shape, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Move | None:
    """The last dim becomes a diagonal of two dims, among zeros."""
    if not x:
        return None
    shape, n = x[:-1], x[-1] + abs(offset)
    one, other = (dim % (len(x) + 1) for dim in (dim1, dim2))
    for d in sorted((one, other)):
        shape = (*shape[:d], n, *shape[d:])
    return gradient(diagonal)(x, shape, offset, one, other)


# -- the rows --------------------------------------------------------------------------------------


def _pads(mode: str) -> tuple[Row, Row]:
    """A pad with the tensor's own rows, by a mode, and its gradient."""
    name = {"reflect": "reflection_pad", "replicate": "replication_pad"}[mode]
    pads, gradients = (
        tuple([f"{name}{n}d{of}.default" for n in (1, 2, 3)]) for of in ("", "_backward")
    )
    rule = folded(mode)
    return (
        Row(pads, rule, op=f"torch.nn.functional.pad, {mode}", filled=True),
        Row(
            gradients,
            gradient(rule, adds=True, given=True),
            op=f"{name}'s gradient",
            reads=1,
            filled=True,
        ),
    )


PADS: tuple[Row, ...] = (
    Row(
        ("constant_pad_nd.default",),
        padded,
        op="torch.nn.functional.pad",
        linear=COPIES,
        note="only for padding with a constant",
    ),
    Row(
        ("tril.default",),
        triangle(True),
        op="torch.tril",
        gathers=True,
        note="no communication, for any placements",
    ),
    Row(
        ("triu.default",),
        triangle(False),
        op="torch.triu",
        gathers=True,
        note="no communication, for any placements",
    ),
    *_pads("reflect"),
    *_pads("replicate"),
    Row(
        ("diagonal.default",),
        diagonal,
        op="torch.diagonal",
        gathers=True,
        by_names=("diagonal_copy.default",),
    ),
    # These have no signature: the map answers for any placements. Gradients are given global sizes;
    # torch converts them to local sizes only for slices and selections.
    Row(
        ("diagonal_backward.default",),
        gradient(diagonal),
        op="diagonal's gradient",
        is_signed=False,
    ),
    Row(("diag_embed.default",), embedded, op="torch.diag_embed"),
    Row(
        ("unfold.default",),
        unfolded,
        op="Tensor.unfold",
        linear=COPIES,
        by_names=("unfold_copy.default",),
    ),
    Row(
        ("unfold_backward.default",),
        gradient(unfolded, adds=True),
        op="unfold's gradient",
        kernel=SizesBeside(0, 1, 2),
    ),
)


# -- movement --------------------------------------------------------------------------------------
# Movement ops, by rows: the operands' rows that the rows of each result are made of.
#
# Each rule gives a ``Move``. Result rows that it does not name come from no operand row. Ops that
# torch composes of others (narrow, chunk, tensor_split, hstack) reach the dispatcher as those.
#
# Sources: the ops' definitions in PyTorch's documentation and in
# aten/src/ATen/native/native_functions.yaml.

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

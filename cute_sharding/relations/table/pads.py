"""Movement with more rows than the tensor has: pads, triangles, windows and diagonals, and their
gradients; by rows, as in movement.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import maxsize
from typing import Any

from cute_sharding.relations.dim_map import normalize_dim
from cute_sharding.relations.forms import Diagonal, Fold, Window
from cute_sharding.relations.moves import Move, Shape
from cute_sharding.relations.rows import Rows
from cute_sharding.relations.signature import COPIES
from cute_sharding.relations.table.by_rows import Rule, gradient, line, moved, with_sizes
from cute_sharding.relations.table.kernels import SizesBeside
from cute_sharding.relations.table.row import ByRows as Row

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


ROWS: tuple[Row, ...] = (
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

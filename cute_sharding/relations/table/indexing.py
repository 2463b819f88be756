"""Ops that take or write rows of a tensor by index, by names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cute_sharding.relations.signature import Folding
from cute_sharding.relations.table.along import along
from cute_sharding.relations.table.names import Rule, Shape, named, text, with_name
from cute_sharding.relations.table.row import Row


def gather(x: Shape, dim: int, index: Shape, *_: Any, **__: Any) -> str | None:
    """The index picks rows of ``dim``, and may be sharded. Other dims in which the index has fewer
    rows than x are whole.

    >>> gather((6, 5, 4), 0, (3, 5, 2))
    '{d0} d1 [d2], k d1 [i2] -> k d1 [i2]'
    """
    if len(x) != len(index) or not x:
        return None
    dim = dim % len(x)
    shorter = [d for d in range(len(x)) if d != dim and x[d] != index[d]]
    names = named(x, shorter)
    picked = ["k" if d == dim else f"[i{d}]" if d in shorter else n for d, n in enumerate(names)]
    return f"{with_name(names, dim, f'{{d{dim}}}')}, {text(picked)} -> {text(picked)}"


def scatter(x: Shape, dim: int, index: Shape, source: Any = None, *_: Any, **__: Any) -> str | None:
    """The index names the rows of ``dim`` to write. Index and source are whole in ``dim``, and all
    tensors in dims in which the index has fewer rows than x.

    >>> scatter((6, 5, 4), 0, (3, 5, 2), (3, 5, 4))
    '{d0} d1 [d2], [i0] d1 [i2], [s0] d1 [s2] -> {d0} d1 [d2]'
    """
    tensors = [x, index, *([source] if isinstance(source, tuple) else [])]
    if not x or len({len(shape) for shape in tensors}) > 1:
        return None
    dim = dim % len(x)
    whole = [d for d in range(len(x)) if d == dim or len({s[d] for s in tensors}) > 1]
    names = named(x, whole)
    operands = [
        [name if d not in whole else f"[{of}{d}]" for d, name in enumerate(names)]
        for of, _ in zip("dis", tensors)
    ]
    operands[0][dim] = f"{{d{dim}}}"
    return f"{', '.join(map(text, operands))} -> {text(operands[0])}"


def sought(x: Shape, among: Shape, *, invert: bool = False, **_: bool) -> str:
    """The second tensor, in which the op searches, is contracted; with ``invert`` it is whole."""
    others = named(among, range(len(among)) if invert else (), "other")
    return f"{text(named(x))}, {text(others)} -> {text(named(x))}"


def searched(rows: Shape, x: Any, *, sorter: Shape | None = None, **_: Any) -> str | None:
    """The sorted rows, in which the op searches, are contracted: how many of all rows come before
    is the sum of how many of each device's do. With a sorter they are whole. There is one list of
    rows for all elements, or one for each row of x.
    """
    names = named(x) if isinstance(x, tuple) else []
    if len(rows) != 1 and (not names or rows[:-1] != x[:-1]):
        return None
    row = "[row]" if sorter else "row"
    among = text([*names[:-1], row]) if len(rows) > 1 else row
    operands = [among, text(names)] if isinstance(x, tuple) else [among]
    return f"{', '.join([*operands, *([among] if sorter else [])])} -> {text(names)}"


def in_their_order(tensors: int, dims: Callable[..., int]) -> Rule:
    """The rule of an op that reads all elements in their order: its first ``tensors`` arguments are
    whole, and so is its result, of ``dims(*arguments)`` dims.
    """

    def rule(*args: Any, **_: Any) -> str:
        given = [text(named(x, range(len(x)), of)) for x, of in zip(args[:tensors], "abc")]
        return f"{', '.join(given)} -> {text([f'[r{d}]' for d in range(dims(*args))])}"

    rule.__doc__ = "All dims are whole, because the result depends on the order of all elements."
    return rule


def filled_in_order(x: Shape, mask: Shape, source: Shape) -> str | None:
    """The mask and the elements that it takes in their order are whole: so each device knows which
    of them are its own. An x that is broadcast is whole too.

    >>> filled_in_order((6, 4), (4,), (30,))
    'd0 d1, [m0], [s0] -> d0 d1'
    """
    fits = len(mask) <= len(x) and all(m in (1, n) for m, n in zip(reversed(mask), reversed(x)))
    if not fits:
        return in_their_order(3, lambda *_: max(len(x), len(mask)))(x, mask, source)
    others = [text(named(each, range(len(each)), of)) for each, of in ((mask, "m"), (source, "s"))]
    return f"{text(named(x))}, {', '.join(others)} -> {text(named(x))}"


def taken(x: Shape, index: Shape) -> str:
    """All dims of x are whole, and the index may be sharded."""
    chosen = text(named(index, letter="k"))
    return f"{text(named(x, range(len(x))))}, {chosen} -> {chosen}"


def _indexed(
    x: Shape, indices: Sequence[Shape | None]
) -> tuple[list[str], list[list[str]], list[str]] | None:
    """The names of x, of the index tensors and of the rows that they pick. None if the index
    tensors cannot be broadcast.
    """
    at = [d for d, index in enumerate(indices) if index is not None]
    shapes = [index for index in indices if index is not None]
    if not at:
        return None
    sizes: list[int] = []
    for k in range(1, max(map(len, shapes)) + 1):
        found = {shape[-k] for shape in shapes if len(shape) >= k} - {1}
        if len(found) > 1:
            return None
        sizes.insert(0, found.pop() if found else 1)
    picks = named(tuple(sizes), letter="k")
    of_each = [
        [
            name if n == size else "1"
            for name, size, n in zip(
                picks[len(sizes) - len(shape) :], sizes[len(sizes) - len(shape) :], shape
            )
        ]
        for shape in shapes
    ]
    names = named(x, at, signs="{}")
    first = at[0] if at[-1] - at[0] == len(at) - 1 else 0  # in front if they are not adjacent
    others = [name for d, name in enumerate(names) if d not in at]
    return names, of_each, [*others[:first], *picks, *others[first:]]


def indexed(x: Shape, indices: Sequence[Shape | None]) -> str | None:
    """Index tensors pick rows of the indexed dims, and may be sharded.

    >>> indexed((6, 5, 4), [(2, 1), None, (3,)])
    '{d0} d1 {d2}, k0 1, k1 -> k0 k1 d1'
    """
    found = _indexed(x, indices)
    if found is None:
        return None
    names, of_each, picked = found
    return f"{text(names)}, {', '.join(map(text, of_each))} -> {text(picked)}"


def index_put(x: Shape, indices: Sequence[Shape | None], values: Shape, *_: Any) -> str | None:
    """The index tensors name the rows to write; they and the values are whole in their dims.

    >>> index_put((6, 5), [(3,)], (5,))
    '{d0} d1, [k0], d1 -> {d0} d1'
    """
    found = _indexed(x, indices)
    if found is None:
        return None
    names, of_each, picked = found
    if len(values) > len(picked):
        return None
    sizes = dict(zip(names, x))

    def of(name: str, n: int) -> str:
        return f"[w{name}]" if name[0] == "k" else name if n == sizes[name] else "1"

    written = [of(name, n) for name, n in zip(picked[len(picked) - len(values) :], values)]
    whole = [text(["1" if name == "1" else f"[{name}]" for name in index]) for index in of_each]
    return f"{text(names)}, {', '.join(whole)}, {text(written)} -> {text(names)}"


def written_by_mask(
    x: Shape, indices: Sequence[Shape | None], values: Shape, *_: Any
) -> str | None:
    """Write by a mask, which has the names of the dims that it stands for. If all elements get the
    same value, each device writes to its own. If each element gets a value of its own, a device
    would have to count the elements before its own: so the mask and the values are whole.

    >>> written_by_mask((6, 4), [(6, 4)], ())
    'd0 d1, d0 d1,  -> d0 d1'
    >>> written_by_mask((6, 4, 5), [(6, 4)], (9, 1))
    '[d0] [d1] d2, [d0] [d1], [k] 1 -> [d0] [d1] d2'
    """
    at = [d for d, index in enumerate(indices) if index is not None]
    mask = indices[at[0]] if len(at) == 1 else None
    if not mask or mask != x[at[0] : at[0] + len(mask)]:
        return None
    first, last = at[0], at[0] + len(mask)
    counted = len(x) - last  # the position, from the end, of the values' dim of masked elements
    one_by_one = len(values) > counted and values[-counted - 1] != 1
    names = named(x, range(first, last) if one_by_one else ())
    picked = [*names[:first], "[k]" if one_by_one else "1", *names[last:]]
    sizes = [*x[:first], None, *x[last:]]
    if len(values) > len(picked):
        return None
    written: list[str] = []
    for n, size, name in zip(reversed(values), reversed(sizes), reversed(picked)):
        if n not in (1, size) and size is not None:
            return None
        written.insert(0, name if size in (None, n) else "1")
    return f"{text(names)}, {text(names[first:last])}, {text(written)} -> {text(names)}"


def embedding_backward(
    gradient: Shape, index: Shape, rows: int, padding: int, by_frequency: bool = False
) -> str:
    """``... e, ... -> [v] e``, or ``[...] e, [...] -> [v] e`` with scale_grad_by_freq."""
    return "[...] e, [...] -> [v] e" if by_frequency else "... e, ... -> [v] e"


_MAX = 2  # torch's number for maxima of bags


def _most(mode: int) -> str:
    """The index of each element's maximum in a bag; sums and means leave it unused."""
    return "[most] e" if mode == _MAX else "[most]"


def bags(table: Shape, index: Shape, offsets: Shape, *given: Any) -> str | None:
    """The columns of the table and of the first result are free; its rows are folded, and of maxima
    whole. What is kept for the gradient has the indices' dims. If gradients are sparse there is no
    signature.
    """
    _, mode, sparse, weights = (*given, *(False, 0, False, None)[len(given) :])[:4]
    of_each = "" if weights is None else ", [i]"
    rows = "[v]" if mode == _MAX else "(v)"
    found = f"{rows} e, [i], [o]{of_each} -> [b] e, [bag], [size], {_most(mode)}"
    return None if sparse else found


def bags_backward(gradient: Shape, *given: Any) -> str | None:
    """Only the columns are free; sparse gradients have no signature."""
    mode, sparse, weights = given[7:10]
    of_each = "" if weights is None else ", [i]"
    return None if sparse else f"[b] e, [i], [o], [bag], [size], {_most(mode)}{of_each} -> [v] e"


ROWS: tuple[Row, ...] = (
    Row(("gather.default",), gather, "sum"),
    Row(
        (
            *("scatter.src", "scatter_.src", "scatter.value", "scatter_.value"),
            *("scatter_add.default", "scatter_add_.default"),
            *("scatter_reduce.two", "scatter_reduce_.two"),
            *("scatter.reduce", "scatter.value_reduce"),
            *("scatter_.reduce", "scatter_.value_reduce"),
        ),
        scatter,
    ),
    # When rows are read the index may be cut; when they are written the index is whole.
    Row(("index_select.default",), along("x, ... -> x/...", signs="{}"), "sum", linear=(0,)),
    Row(
        (
            *("index_add.default", "index_add_.default"),
            *("index_copy.default", "index_copy_.default"),
        ),
        along("x, [k], x/[k] -> x", signs="{}"),
    ),
    Row(("index_fill.int_Scalar", "index_fill_.int_Scalar"), along("x, [...] -> x", signs="{}")),
    Row(("index_fill.int_Tensor", "index_fill_.int_Tensor"), along("x, [...],  -> x", signs="{}")),
    Row(("isin.Tensor_Tensor",), sought, "max"),
    Row(("take.default",), taken),
    Row(("index.Tensor",), indexed, "sum", linear=(0,), counts_back=True),
    Row(("index_put.default", "index_put_.default"), index_put, counts_back=True),
    Row(("bucketize.Tensor",), "..., boundary -> ...", "sum"),
    Row(("bucketize.Scalar",), "boundary ->", "sum"),
    Row(("searchsorted.Tensor", "searchsorted.Scalar"), searched, "sum"),
    Row(
        ("masked_scatter.default", "masked_scatter_.default"),
        filled_in_order,
        fold=Folding("masked_scatter", exact=True, rows=frozenset(named((1,) * 64))),
    ),
    Row(
        ("masked_scatter_backward.default",),
        in_their_order(2, lambda gradient, mask, sizes: len(sizes)),
    ),
    Row(("put.default", "put_.default"), in_their_order(3, lambda x, *_: len(x))),
    Row(("nonzero_static.default",), in_their_order(1, lambda *_: 2)),
    Row(("repeat_interleave.Tensor",), in_their_order(1, lambda *_: 1)),
    Row(("embedding.default",), "{v} e, ... -> ... e", "sum", picks_as_torch=True),
    Row(("embedding_renorm_.default",), "[v] [e], [...] -> [v] [e]", note="of max_norm"),
    Row(("embedding_dense_backward.default",), embedding_backward, "sum"),
    Row(
        ("_embedding_bag.default", "_embedding_bag_forward_only.default"),
        bags,
        fold=Folding("bags", (("sum", 0),)),
    ),
    Row(("_embedding_bag_backward.default",), bags_backward),
    Row(
        ("_embedding_bag_per_sample_weights_backward.default",),
        "[b] e, [v] e, [i], [o], [bag] -> [i]",
        "sum",
    ),
)

# Ops that read by index, and so by a mask too: then they read the rows whose numbers it has.
READ_BY_MASK = ("index.Tensor", "_unsafe_index.Tensor")

# Ops that write by index, if the index is a mask: it stands for as many dims as it has.
BY_MASK = {
    name: Row((name,), written_by_mask)
    for name in (
        *("index_put.default", "index_put_.default"),
        *("_unsafe_index_put.default", "_index_put_impl_.default"),
    )
}

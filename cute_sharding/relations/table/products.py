"""Products, convolutions, and ops on matrices, by names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.relations.signature import Folding, Reads
from cute_sharding.relations.table.kernels import Matrices, Sizes
from cute_sharding.relations.table.names import Rule, Shape, text, without_missing
from cute_sharding.relations.table.row import Row, Windowing
from cute_sharding.relations.table.windows import in_windows


def sum_and_product(product: str) -> Rule:
    """The rule of a term plus a product, such as a bias. The term may lack leading dims, even all,
    and have dims of size 1.
    """
    factors, _, result = product.partition("->")
    names = [factor.split() for factor in factors.split(",")]

    def rule(term: Shape, *given: Any, **_: Any) -> str:
        sizes = {name: n for one, shape in zip(names, given) for name, n in zip(one, shape)}
        of_term = result.split()[-len(term) :] if term else []
        broadcast = ["1" if n == 1 != sizes.get(name) else name for n, name in zip(term, of_term)]
        return f"+{text(broadcast)}, {product}"

    rule.__doc__ = f"``+term, {product}``; the term may lack leading dims of the result."
    return rule


def rows_of_matrix_vector(term: Shape, matrix: Shape, *_: Any, **__: Any) -> frozenset[str]:
    """The names of which every device needs rows. With no rows, or none to sum over, torch gives
    the product of a matrix and a vector the shape of the term, which must then have all rows.
    """
    return frozenset() if tuple(term) == tuple(matrix[:1]) else frozenset("mk")


def sum_and_outer_product(term: Shape, *_: Any, **__: Any) -> str:
    """``m n, m, n -> m n``; the first operand may lack leading dims of the result."""
    return f"{text(['m', 'n'][2 - len(term) :])}, m, n -> m n"


def trilinear(first: Shape, second: Shape, third: Shape, *given: Any) -> str | None:
    """The summed dims are contracted; a tensor lacks the dims along which the op repeats it.

    >>> trilinear((8, 3), (5, 3, 4), (8, 4), [1, 3], [0], [1, 2], [2, 3])  # of F.bilinear
    'd0 d2, d1 d2 d3, d0 d3 -> d0 d1'
    """
    *repeated, summed = given[:4]
    ndim = len(first) + len(repeated[0])
    own = [[d for d in range(ndim) if d not in lacking] for lacking in repeated]
    sizes: dict[int, int] = {}
    for dims, shape in zip(own, (first, second, third)):
        if any(sizes.setdefault(d, n) != n for d, n in zip(dims, shape)):
            return None
    names = [f"d{d}" if d in sizes else "1" for d in range(ndim)]
    operands = [text([names[d] for d in dims]) for dims in own]
    return f"{', '.join(operands)} -> {text([n for d, n in enumerate(names) if d not in summed])}"


def solved_with_triangles(triangles: Shape, sides: Shape, *, left: bool = True, **_: Any) -> str:
    """The triangles are whole, and the columns of the right-hand sides are free (with left=False,
    their rows). Batch dims are broadcast.
    """
    matrix = ["[k]", "n"] if left else ["m", "[k]"]
    given = [["[i]", "[j]"], [*matrix]]
    result = [*matrix]
    for d in range(3, max(len(triangles), len(sides)) + 1):
        sizes = [x[-d] if d <= len(x) else None for x in (triangles, sides)]
        is_one = all(n in (None, 1) for n in sizes)
        for names, n in zip(given, sizes):
            if n is not None:
                names.insert(0, f"b{d}" if n != 1 or is_one else "1")
        result.insert(0, f"b{d}")
    return f"{', '.join(map(text, given))} -> {text(result)}"


def solved_with_factors(
    factors: Shape, pivots: Shape, sides: Shape, *, left: bool = True, **_: Any
) -> str:
    """The factors are whole, and the columns of the right-hand sides are free (with left=False,
    their rows).
    """
    matrix = "[k] n" if left else "m [k]"
    return f"... [i] [j], ... [p], ... {matrix} -> ... {matrix}"


def solved(matrices: Shape, sides: Shape, **_: Any) -> str | None:
    """Only batch dims are free. A matrix has one right-hand side or several. The op tells the two
    apart by shapes: no signature if local shapes could mean the other.
    """
    if len(sides) == len(matrices) - 1 and sides != matrices[:-1]:
        return None
    given = "... [k]" if sides == matrices[:-1] else "... [k] [n]"
    return f"... [i] [j], {given} -> {given}, ... [i] [j], ... [p], ..."


# -- convolutions ----------------------------------------------------------------------------------


def _of_convolution(
    x: Shape,
    weight: Shape,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[list[str], list[str], list[str]]:
    """The names of an input, a weight and a result. A place of the result reads a window of places
    of the image (transposed: a place of the image adds to a window of the result). With several
    groups a channel depends only on channels of its group.
    """
    c, o = ("c", "o") if groups == 1 else ("[c]", "[o]")
    places = range(len(x) - 2)
    among = c if groups == 1 else "[i]"
    kernel = [c, o if groups == 1 else "[i]"] if transposed else [o, among]
    large, small = [], []
    every = in_windows(len(places), weight[2:], stride, padding, dilation)
    for i in places:
        reads = every and every[i]
        large.append(f"y{i}{'' if reads == Reads(1, 1) else reads}" if reads else f"[x{i}]")
        small.append(f"y{i}" if reads else f"[y{i}]")
    given, result = (small, large) if transposed else (large, small)
    return (
        ["n", c, *given],
        [*kernel, *(f"[k{i}]" for i in places)],
        ["n", o, *result],
    )


def convolution(x: Shape, weight: Shape, bias: Any, *options: Any) -> str:
    """The input channels are contracted (with one group), and the bias is added."""
    given, kernel, result = _of_convolution(x, weight, *options)
    pattern = f"{text(given)}, {text(kernel)}, +{result[1]}? -> {text(result)}"
    return without_missing(pattern, [x, weight, bias])


def convolution_backward(gradient: Shape, x: Shape, weight: Shape, bias: Any, *options: Any) -> str:
    """If the program needs the gradient of the bias, the input channels are whole. (It is no sum
    over them.) A gradient that is not wanted gets all names, so that it restricts nothing.
    """
    *how, wanted = options
    given, kernel, result = _of_convolution(x, weight, *how)
    if wanted[2]:
        given, kernel = (
            ["[c]" if name == "c" else name for name in names] for names in (given, kernel)
        )
    everything = [*result, given[1], *kernel[2:], *[name for name in given[2:] if name[0] == "["]]
    results = [
        names if is_wanted else everything
        for names, is_wanted in zip((given, kernel, [result[1]]), wanted)
    ]
    sign = "" if wanted[1] else "="  # of the input only the sizes are read
    return f"{text(result)}, {sign}{text(given)}, {text(kernel)} -> {', '.join(map(text, results))}"


# Of these, kernels lay out results row by row, whatever the strides of the operands are.
MADE_BY_ROWS = (
    *("mm.default", "bmm.default", "mv.default", "linear.default"),
    *("addmm.default", "addmv.default", "baddbmm.default", "addbmm.default"),
)

ROWS: tuple[Row, ...] = (
    Row(("mm.default",), "m k, k n -> m n", "sum", (0, 1)),
    Row(("bmm.default",), "b m k, b k n -> b m n", "sum", (0, 1)),
    Row(("mv.default",), "m k, k -> m", "sum", (0, 1)),
    Row(("dot.default", "vdot.default"), "k, k ->", "sum", (0, 1)),
    Row(("_trilinear.default",), trilinear, "sum", (0, 1, 2)),
    Row(("addmm.default",), sum_and_product("m k, k n -> m n"), "sum"),
    Row(
        ("addmv.default",),
        sum_and_product("m k, k -> m"),
        "sum",
        filled=rows_of_matrix_vector,
    ),
    Row(("addr.default",), sum_and_outer_product),
    Row(("baddbmm.default",), sum_and_product("b m k, b k n -> b m n"), "sum"),
    Row(("addbmm.default",), sum_and_product("b m k, b k n -> m n"), "sum"),
    Row(("linalg_solve_triangular.default",), solved_with_triangles, linear=(1,)),
    Row(
        ("linalg_lu_solve.default", "linalg_ldl_solve.default"),
        solved_with_factors,
        linear=(2,),
        filled=True,
    ),
    Row(("_linalg_solve_ex.default",), solved, linear=(1,), filled=True, kernel=Matrices()),
    Row(
        ("cholesky_solve.default",),
        "... [k] n, ... [i] [j] -> ... [k] n",
        linear=(0,),
        filled=True,
    ),
    Row(
        ("triangular_solve.default",),
        "... [k] [n], ... [i] [j] -> ... [k] [n], ... [i] [j]",
        filled=True,
    ),
    Row(
        ("_cdist_forward.default", "_euclidean_dist.default"),
        "... p (m), ... r (m) -> ... p r",
        fold=Folding("distances", (("sum", 0),)),
    ),
    Row(("_cdist_backward.default",), "... p r, ... p m, ... r m, ... p r -> ... p m", "sum"),
    # Over pairs of rows of one matrix: each device needs all rows.
    Row(("_pdist_forward.default",), "[p] [m] -> [pairs]"),
    Row(("_pdist_backward.default",), "[pairs], [p] [m], [pairs] -> [p] [m]"),
    Row(
        ("convolution.default",),
        convolution,
        "sum",
        filled=True,
        windows=Windowing("convolution", leading=2, tiles=True),
        has_function=True,
    ),
    Row(
        ("convolution_backward.default",),
        convolution_backward,
        "sum",
        filled=True,
        windows=Windowing("convolution_gradient", leading=2, tiles=True),
        kernel=Sizes(0, 3, (1,)),
        has_function=True,
    ),
    # matrices, each independent of the others
    Row(
        ("_linalg_det.default",),
        "... [m] [n] -> ..., ... [p] [q], ... [k]",
        filled=True,
        kernel=Matrices(),
    ),
    Row(
        ("_linalg_slogdet.default",),
        "... [m] [n] -> ..., ..., ... [p] [q], ... [k]",
        filled=True,
        kernel=Matrices(),
    ),
    *(
        Row(tuple(f"{name}.default" for name in names), pattern, filled=True)
        for pattern, names in (
            ("... [m] [n] -> ... [p] [q]", ("linalg_matrix_exp", "cholesky_inverse")),
            ("... [m] [n] -> ... [k]", ("_linalg_eigvals", "linalg_eigvals")),
            ("... [m] [n] -> ... [m] [n], ...", ("linalg_inv_ex", "linalg_cholesky_ex")),
            ("... [m] [n] -> ... [k], ... [p] [q]", ("_linalg_eigh", "linalg_eig")),
            ("... [m] [n] -> ... [m] [k], ... [r], ... [p] [q]", ("_linalg_svd",)),
            ("... [m] [n] -> ... [m] [k], ... [p] [q]", ("linalg_qr",)),
            ("... [m] [n] -> ... [m] [n], ... [k]", ("geqrf",)),
            ("... [m] [n] -> ... [m] [n], ... [k], ...", ("linalg_lu_factor_ex",)),
            ("... [m] [n] -> ... [p] [q], ... [r] [s], ... [t] [u]", ("linalg_lu",)),
            ("... [m] [n], ... [k] -> ... [p] [q], ... [r] [s], ... [t] [u]", ("lu_unpack",)),
            ("... [m] [n], ... [k] -> ... [m] [n]", ("linalg_householder_product",)),
        )
    ),
)

"""Rules of products that need more than a pattern: with a term, convolutions, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.ops.rules.names import Rule, Shape, text


def sum_and_product(product: str) -> Rule:
    """A term and a product, such as a bias; the term may lack leading dims, also all, and have dims
    of size 1.
    """
    factors, _, result = product.partition("->")
    names = [factor.split() for factor in factors.split(",")]

    def rule(term: Shape, *given: Any, **_: Any) -> str:
        sizes = {name: n for one, shape in zip(names, given) for name, n in zip(one, shape)}
        of_term = result.split()[-len(term) :] if term else []
        broadcast = ["1" if n == 1 != sizes.get(name) else name for n, name in zip(term, of_term)]
        return f"+{text(broadcast)}, {product}"

    return rule


def rows_of_matrix_vector(term: Shape, matrix: Shape, *_: Any, **__: Any) -> frozenset[str]:
    """Where a device has no rows, or none to sum over, torch gives a product of a matrix and a
    vector the shape of the term: which then has to have all rows.
    """
    return frozenset() if tuple(term) == tuple(matrix[:1]) else frozenset("mk")


def sum_and_outer_product(term: Shape, *_: Any, **__: Any) -> str:
    """A term, broadcast, and the product of all rows of one vector and all of another."""
    return f"{text(['m', 'n'][2 - len(term) :])}, m, n -> m n"


def solved_with_triangles(triangles: Shape, sides: Shape, *, left: bool = True, **_: Any) -> str:
    """The solutions of equations with triangles, of which each takes all of its own; their columns
    are solved by themselves, or their rows, where the triangles stand at the right. Batch dims are
    broadcast.
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
    """The solutions of equations whose matrices are factorized: column by column, or row by row
    where these stand at the right.
    """
    matrix = "[k] n" if left else "m [k]"
    return f"... [i] [j], ... [p], ... {matrix} -> ... {matrix}"


def solved(matrices: Shape, sides: Shape, **_: Any) -> str | None:
    """The solutions of equations, of one side for each matrix or several, and the factors. Which of
    these it is the op tells by the shapes: not where those of parts could say the other.
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
    """The names of an input, of a weight and of a result. Each place of an image matters to its
    neighbours, but where windows lie side by side: then a place of the result is made of a window,
    or, transposed, makes one. With several groups each channel matters to the others of its group
    alone.
    """
    c, o = ("c", "o") if groups == 1 else ("[c]", "[o]")
    places = range(len(x) - 2)
    among = c if groups == 1 else "[i]"
    kernel = [c, o if groups == 1 else "[i]"] if transposed else [o, among]
    large, small = [], []
    for i, (rows, n) in enumerate(zip(weight[2:], x[2:])):
        step, pad, apart, more = (
            option[i % len(option)] for option in (stride, padding, dilation, output_padding)
        )
        is_tiled = (step, pad, more) == (rows, 0, 0) and (apart == 1 or rows == 1)
        if is_tiled and (transposed or n % rows == 0):
            large.append(f"y{i}*{rows}")
            small.append(f"y{i}")
        else:
            large.append(f"[x{i}]")
            small.append(f"[y{i}]")
    given, result = (small, large) if transposed else (large, small)
    return (
        ["n", c, *given],
        [*kernel, *(f"[k{i}]" for i in places)],
        ["n", o, *result],
    )


def convolution(
    x: Shape,
    weight: Shape,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> str:
    """Of images and kernels; the bias is a term of the sum."""
    given, kernel, result = _of_convolution(
        x, weight, stride, padding, dilation, transposed, output_padding, groups
    )
    operands = [
        text(given),
        text(kernel),
        *[f"+{result[1]}" for some in (bias,) if some is not None],
    ]
    return f"{', '.join(operands)} -> {text(result)}"


def convolution_backward(
    gradient: Shape,
    x: Shape,
    weight: Shape,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
) -> str:
    """The bias has a gradient that knows no input channels, and is not a sum over them: where it is
    wanted, these are whole. What is not wanted has all names, and takes nothing away.
    """
    given, kernel, result = _of_convolution(
        x, weight, stride, padding, dilation, transposed, output_padding, groups
    )
    if wanted[2]:
        given, kernel = (
            ["[c]" if name == "c" else name for name in names] for names in (given, kernel)
        )
    everything = [*result, given[1], *kernel[2:], *[name for name in given[2:] if name[0] == "["]]
    results = [
        names if is_wanted else everything
        for names, is_wanted in zip((given, kernel, [result[1]]), wanted)
    ]
    return f"{text(result)}, {text(given)}, {text(kernel)} -> {', '.join(map(text, results))}"


# -- attention -------------------------------------------------------------------------------------

_QUERIES, _KEYS, _VALUES = "b h [s] [e]", "b h [t] [e]", "b h [t] [f]"
_GIVEN, _STATISTICS = "b h [s] [f]", "b h [s]"
_STATE = "_"  # of a random generator, or of sequences of several lengths, which are not these


def _mask(queries: Shape, mask: Shape | None) -> list[str]:
    """A mask may lack leading dims, and have dims of size 1."""
    if mask is None:
        return []
    names = ["b", "h", "[s]", "[t]"]
    given = zip(names[4 - len(mask) :], mask, queries[4 - len(mask) :])
    return [text(["1" if name in "bh" and n == 1 != of else name for name, n, of in given])]


def _states(*given: Shape | None) -> list[str]:
    return [_STATE for shape in given if shape is not None]


def _pattern(operands: Sequence[str], results: Sequence[str]) -> str:
    return f"{', '.join(operands)} -> {', '.join(results)}"


def attention(queries: Shape, *_: Any, attn_mask: Any = None, **__: Any) -> str:
    """Each query against all keys: the sequences, and what is multiplied, are whole."""
    operands = [_QUERIES, _KEYS, _VALUES, *_mask(queries, attn_mask)]
    return _pattern(operands, [_GIVEN, _STATISTICS])


def attention_backward(
    gradient: Shape, queries: Shape, *_: Any, attn_mask: Any = None, **__: Any
) -> str:
    """The gradients of queries, keys and values, cut as these may be."""
    operands = [_GIVEN, _QUERIES, _KEYS, _VALUES, _GIVEN, _STATISTICS]
    operands += _mask(queries, attn_mask)
    return _pattern(operands, [_QUERIES, _KEYS, _VALUES])


# The kernels of accelerators. Of what they drop each device would draw by itself, and where several
# heads of queries share one of keys, heads that are cut elsewhere would meet others.


def flash_attention(
    queries: Shape,
    keys: Shape,
    values: Shape,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    **_: Any,
) -> str | None:
    if dropout or return_debug_mask or queries[:2] != keys[:2]:
        return None
    results = [_GIVEN, _STATISTICS, *[_STATE] * 6, "0"]
    return _pattern([_QUERIES, _KEYS, _VALUES], results)


def flash_attention_backward(
    gradient: Shape,
    queries: Shape,
    keys: Shape,
    values: Shape,
    result: Shape,
    statistics: Shape,
    begins: Shape | None,
    begins_of_keys: Shape | None,
    longest: int,
    longest_of_keys: int,
    dropout: float,
    is_causal: bool,
    seed: Shape | None,
    offset: Shape | None,
    **_: Any,
) -> str | None:
    if dropout or queries[:2] != keys[:2]:
        return None
    operands = [_GIVEN, _QUERIES, _KEYS, _VALUES, _GIVEN, _STATISTICS]
    operands += _states(begins, begins_of_keys, seed, offset)
    return _pattern(operands, [_QUERIES, _KEYS, _VALUES])


def efficient_attention(
    queries: Shape,
    keys: Shape,
    values: Shape,
    mask: Shape | None,
    compute_statistics: bool,
    dropout: float = 0.0,
    *_: Any,
    **__: Any,
) -> str | None:
    """The statistics have room for more queries than there are."""
    if dropout or queries[:2] != keys[:2]:
        return None
    operands = [_QUERIES, _KEYS, _VALUES, *_mask(queries, mask)]
    return _pattern(operands, [_GIVEN, "b h [u]", _STATE, _STATE])


def efficient_attention_backward(
    gradient: Shape,
    queries: Shape,
    keys: Shape,
    values: Shape,
    mask: Shape | None,
    result: Shape,
    statistics: Shape,
    seed: Shape | None,
    offset: Shape | None,
    dropout: float,
    wanted: Sequence[bool],
    *_: Any,
    **__: Any,
) -> str | None:
    if dropout or queries[:2] != keys[:2]:
        return None
    of_mask = _mask(queries, mask)
    operands = [_GIVEN, _QUERIES, _KEYS, _VALUES, *of_mask, _GIVEN, "b h [u]"]
    operands += _states(seed, offset)
    return _pattern(operands, [_QUERIES, _KEYS, _VALUES, *(of_mask or [_STATE])])


def cudnn_attention(
    queries: Shape,
    keys: Shape,
    values: Shape,
    mask: Shape | None,
    compute_statistics: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    **_: Any,
) -> str | None:
    if dropout or return_debug_mask or queries[:2] != keys[:2]:
        return None
    operands = [_QUERIES, _KEYS, _VALUES, *_mask(queries, mask)]
    return _pattern(operands, [_GIVEN, "b h [s] [u]", *[_STATE] * 7])


def cudnn_attention_backward(
    gradient: Shape,
    queries: Shape,
    keys: Shape,
    values: Shape,
    result: Shape,
    statistics: Shape,
    seed: Shape | None,
    offset: Shape | None,
    mask: Shape | None,
    begins: Shape | None,
    begins_of_keys: Shape | None,
    longest: int,
    longest_of_keys: int,
    dropout: float,
    *_: Any,
    **__: Any,
) -> str | None:
    if dropout or queries[:2] != keys[:2]:
        return None
    operands = [_GIVEN, _QUERIES, _KEYS, _VALUES, _GIVEN, "b h [s] [u]", *_states(seed, offset)]
    operands += [*_mask(queries, mask), *_states(begins, begins_of_keys)]
    return _pattern(operands, [_QUERIES, _KEYS, _VALUES])

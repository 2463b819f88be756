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


# -- convolutions ----------------------------------------------------------------------------------


def _of_convolution(
    x: Shape, transposed: bool, groups: int
) -> tuple[list[str], list[str], list[str]]:
    """The names of an input, of a weight and of a result. Each place of an image matters to its
    neighbours; with several groups so does each channel to the others of its group alone.
    """
    c, o = ("c", "o") if groups == 1 else ("[c]", "[o]")
    places = range(len(x) - 2)
    among = c if groups == 1 else "[i]"
    weight = [c, o if groups == 1 else "[i]"] if transposed else [o, among]
    return (
        ["n", c, *(f"[x{i}]" for i in places)],
        [*weight, *(f"[k{i}]" for i in places)],
        ["n", o, *(f"[y{i}]" for i in places)],
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
    given, kernel, result = _of_convolution(x, transposed, groups)
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
    given, kernel, result = _of_convolution(x, transposed, groups)
    if wanted[2]:
        given, kernel = (
            ["[c]" if name == "c" else name for name in names] for names in (given, kernel)
        )
    everything = [*result, *given[1:], *kernel[2:]]
    results = [
        names if is_wanted else everything
        for names, is_wanted in zip((given, kernel, [result[1]]), wanted)
    ]
    return f"{text(result)}, {text(given)}, {text(kernel)} -> {', '.join(map(text, results))}"


# -- attention -------------------------------------------------------------------------------------

_QUERIES, _KEYS, _VALUES, _STATISTICS = "b h [s] [e]", "b h [t] [e]", "b h [t] [e]", "b h [s]"


def _mask(queries: Shape, mask: Shape | None) -> list[str]:
    """A mask may lack leading dims, and have dims of size 1."""
    if mask is None:
        return []
    names = ["b", "h", "[s]", "[t]"]
    given = zip(names[4 - len(mask) :], mask, queries[4 - len(mask) :])
    return [text(["1" if name in "bh" and n == 1 != of else name for name, n, of in given])]


def attention(queries: Shape, *_: Any, attn_mask: Any = None, **__: Any) -> str:
    """Each query against all keys: the sequences, and what is multiplied, are whole."""
    operands = [_QUERIES, _KEYS, _VALUES, *_mask(queries, attn_mask)]
    return f"{', '.join(operands)} -> {_QUERIES}, {_STATISTICS}"


def attention_backward(
    gradient: Shape, queries: Shape, *_: Any, attn_mask: Any = None, **__: Any
) -> str:
    """The gradients of queries, keys and values, cut as these may be."""
    operands = [_QUERIES, _QUERIES, _KEYS, _VALUES, _QUERIES, _STATISTICS]
    operands += _mask(queries, attn_mask)
    return f"{', '.join(operands)} -> {_QUERIES}, {_KEYS}, {_VALUES}"

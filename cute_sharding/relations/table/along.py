"""Ops on tensors of any number of dims, by names: pointwise, along some dims, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from re import sub
from typing import Any

from cute_sharding.relations.signature import COPIED, COPIES_ALL, Folding, Linear
from cute_sharding.relations.table.names import Rule, Shape, is_whole, named, text, with_name
from cute_sharding.relations.table.row import Row


def pointwise(*args: Any, **kwargs: Any) -> str | None:
    """``..., ... -> ...``, with an operand for each tensor argument; the operands are broadcast."""
    given = (*args, *kwargs.values())
    if any(
        isinstance(arg, list) or (isinstance(arg, tuple) and any(isinstance(n, tuple) for n in arg))
        for arg in given
    ):
        return None
    return f"{', '.join(['...' for arg in given if isinstance(arg, tuple)])} -> ..."


def terms(*args: Any, **kwargs: Any) -> str | None:
    """As :func:`pointwise`; the operands are terms of a sum."""
    pattern = pointwise(*args, **kwargs)
    return None if pattern is None else pattern.replace("...", "+...").replace("-> +", "-> ")


# How a pattern writes the dims along which an op runs.
_KINDS = {"[]": "whole", "()": "folded", "{}": "those whose rows an index picks", "": "contracted"}


def along(template: str, where: int = 1, default: Any = None, *, signs: str = "[]") -> Rule:
    """The rule of an op along the dim or dims that argument ``where``, or ``dim``, names: each row
    there affects every other row.

    In the template ``x`` stands for the first operand's dims; ``x/[k]`` for these with ``[k]`` in
    the place of the dim; ``x/`` for these without the dim; ``x/?`` for these without it, or with 1
    in its place if the next argument, ``keepdim``, is true.

    Args:
        default: the dims if none are named; None: then no signature is known.
        signs: ``[]`` if the dims are whole, ``()`` if they are folded, ``{}`` if an index picks
            their rows, and else contracted.

    >>> along("x -> x/?")((2, 3, 4), 1)
    'd0 [d1] d2 -> d0 d2'
    >>> along("x -> x/?", signs="")((2, 3, 4), [0, 1], True)
    'd0 d1 d2 -> 1 1 d2'
    """

    def rule(*args: Any, **kwargs: Any) -> str | None:
        dims = args[where] if len(args) > where else kwargs.get("dim", default)
        keeps = args[where + 1] if len(args) > where + 1 else kwargs.get("keepdim", False)
        return None if dims is None else written(template, args[0], dims, keeps, signs)

    rule.__doc__ = f"``{template}``; the dims along which the op runs are {_KINDS[signs]}."
    return rule


def written(
    template: str,
    x: Shape,
    dims: int | Sequence[int],
    keeps: Any = False,
    signs: str = "[]",
) -> str | None:
    """The template of :func:`along` filled in for a tensor and some of its dims, which are written
    between ``signs``; None if a dim is named by text.
    """
    dims = [dims] if isinstance(dims, int) else dims
    if any(not isinstance(d, int) for d in dims):
        return None
    names = named(x, dims, signs=signs)

    def with_other(other: str) -> str:
        found = list(names)
        for d in dims if x else ():
            found[d % len(x)] = other
        return text([name for name in found if name])

    found = template.replace("x/?", "x/1" if keeps else "x/")
    found = sub(r"x/([^\s,]*)", lambda other: with_other(other[1]), found)
    return sub(r"\bx\b", text(names), found)


def reduced(template: str = "x -> x/?", where: int = 1, keep: int = 2, *, signs: str = "") -> Rule:
    """The rule of a reduction over the dims in argument ``where``, or all; they may stay as 1."""

    def rule(x: Shape, *args: Any, **kwargs: Any) -> str | None:
        given = (x, *args)
        dims = given[where] if len(given) > where else kwargs.get("dim")
        keeps = given[keep] if len(given) > keep else kwargs.get("keepdim", False)
        if dims is None or dims == [] or dims == ():
            dims = range(len(x))
        return written(template, x, dims, keeps, signs)

    rule.__doc__ = f"``{template}``; the reduced dims are {_KINDS[signs]}."
    return rule


def transformed(x: Shape, over: Sequence[int], *_: Any) -> str | None:
    """The dims of the Fourier transform are whole, and the last of them changes its size."""
    if not over:
        return None
    names = named(x, over)
    return f"{text(names)} -> {with_name(names, over[-1], '[frequencies]')}"


def across(x: Shape, y: Shape, *, dim: int = -1) -> str | None:
    """``dim`` is whole; the other dims are broadcast if ``dim`` is the last dim."""
    if x == y:
        return written("x, x -> x", x, dim)
    return "... [d], ... [d] -> ... [d]" if dim % max(len(x), 1) == len(x) - 1 else None


def each_row(x: Shape, _: Any, dim: int, *__: Any) -> str | None:
    """The op computes each row of ``dim`` from this row alone, so all other dims are folded."""
    others = [d for d in range(len(x)) if d != dim % len(x)]
    return written("x -> x", x, others, signs="()") if others else "x -> x"


# -- joining and writing ---------------------------------------------------------------------------


def stack(tensors: Sequence[Shape], dim: int = 0) -> str:
    """All operands have the same dims, and the new dim of the result is whole."""
    names = named(tensors[0])
    at = dim % (len(names) + 1)
    operands = ", ".join([text(names)] * len(tensors))
    return f"{operands} -> {text([*names[:at], '[to]', *names[at:]])}"


def slice_scatter(x: Shape, source: Shape, dim: int = 0, *which: Any, **named_: Any) -> str | None:
    """If the source replaces all rows of ``dim``, this dim is free, and otherwise whole."""
    if named_:
        return None
    return written("x, x/[part] -> x", x, [] if is_whole(*which) else dim)


def diagonal_scatter(
    x: Shape, source: Shape, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> str | None:
    """The two dims of the diagonal are whole, and so is the last dim of the source."""
    return written("x, x/ [diagonal] -> x", x, [dim1, dim2])


# Pointwise ops that are missing in torch's own list: gradients, which are linear in the first
# operand, and others.
GRADIENTS = (
    "elu_backward.default",
    "leaky_relu_backward.default",
    "softplus_backward.default",
    "rrelu_with_noise_backward.default",
    "hardtanh_backward.default",
    "hardswish_backward.default",
    "mish_backward.default",
    "hardsigmoid_backward.default",
    "hardshrink_backward.default",
    "softshrink_backward.default",
)
OTHERS = (
    "log_sigmoid_backward.default",
    "_prelu_kernel.default",
    "_prelu_kernel_backward.default",
    "hardswish.default",
    "rsub.Tensor",
    "floor_divide.default",
    "isin.Tensor_Scalar",
    "fill.Scalar",
    "fill.Tensor",
    "fill_.Tensor",
    "masked_fill.Tensor",
    "complex.default",
    "polar.default",
)

ROWS: tuple[Row, ...] = (
    # along dims
    Row(
        ("_softmax.default",),
        along("x -> x", signs="()"),
        fold=Folding("softmax", ("max", "sum")),
    ),
    Row(
        ("_log_softmax.default",),
        along("x -> x", signs="()"),
        fold=Folding("log_softmax", ("max", "sum")),
    ),
    Row(
        ("_softmax_backward_data.default",),
        along("x, x -> x", 2, signs="()"),
        linear=(0,),
        fold=Folding("softmax_backward", ("sum",)),
    ),
    Row(
        ("_log_softmax_backward_data.default",),
        along("x, x -> x", 2, signs="()"),
        linear=(0,),
        fold=Folding("log_softmax_backward", ("sum",)),
    ),
    Row(
        ("_safe_softmax.default",),
        along("x -> x", signs="()"),
        fold=Folding("safe_softmax", ("max", "sum")),
    ),
    Row(("cumprod.default",), along("x -> x")),
    Row(
        ("cumsum.default",),
        along("x -> x", signs="()"),
        linear=(0,),
        fold=Folding("cumsum", ("gather",), exact=True, least=8, turns=2),
    ),
    Row(
        ("logcumsumexp.default",),
        along("x -> x", signs="()"),
        fold=Folding("logcumsumexp", ("gather",), turns=4),
    ),
    Row(("cummax.default", "cummin.default"), along("x -> x, x")),
    Row(("sort.default", "sort.stable"), along("x -> x, x", default=-1)),
    Row(
        ("topk.default",),
        along("x -> x/[k], x/[k]", 2, -1, signs="()"),
        fold=Folding("topk", (("gather", 0),), indexed=True, exact=True),
    ),
    Row(
        ("median.dim", "nanmedian.dim", "mode.default"),
        along("x -> x/?, x/?", default=-1),
    ),
    *[
        Row(
            (f"{name}.dim",),
            along("x -> x/?, x/?", default=-1, signs="()"),
            fold=Folding(name, ("max",), indexed=True, exact=True),
            has_function=True,
        )
        for name in ("max", "min")
    ],
    Row(("kthvalue.default",), along("x -> x/?, x/?", 2, -1)),
    Row(("linalg_cross.default",), across),
    Row(("renorm.default",), each_row, fold=Folding("renorm", ("sum",))),
    Row(("trace.default",), "[n] [m] ->", linear=(0,)),
    Row(("glu.default",), along("x -> x/[half]", default=-1)),
    Row(("glu_backward.default",), along("x/[half], x -> x", 2)),
    Row(("_fft_c2c.default",), along("x -> x"), linear=(0,), filled=True),
    Row(("_fft_r2c.default", "_fft_c2r.default"), transformed, linear=(0,), filled=True),
    # reductions
    Row(("sum.default",), "... ->", "sum", (0,)),
    Row(("sum.dim_IntList",), reduced(), "sum", (0,)),
    Row(("nansum.default",), reduced(), "sum"),
    Row(("mean.default",), "... ->", "avg", (0,), shares="elements"),
    Row(("mean.dim",), reduced(), "avg", (0,), shares="elements"),
    Row(("amax.default",), reduced(), "max"),
    Row(("amin.default",), reduced(), "min"),
    Row(("max.default",), "... ->", "max"),
    Row(("min.default",), "... ->", "min"),
    Row(("prod.default",), "... ->", "product", empty=True),
    Row(("prod.dim_int",), reduced(), "product", empty=True),
    Row(("any.dim", "any.dims"), reduced(), "max", empty=True),
    Row(("any.default",), "... ->", "max", empty=True),
    Row(("all.dim", "all.dims"), reduced(), "min", empty=True),
    Row(("all.default",), "... ->", "min", empty=True),
    Row(
        ("logsumexp.default",),
        reduced(signs="()"),
        fold=Folding("logsumexp", ("max", "sum")),
    ),
    *[
        Row(
            (f"{name}.default",),
            reduced(signs="()"),
            fold=Folding(name, ("max",), indexed=True, exact=True),
            has_function=True,
        )
        for name in ("argmax", "argmin")
    ],
    Row(("count_nonzero.dim_IntList", "count_nonzero.default"), reduced(keep=9), "sum"),
    *[
        Row(
            (f"{name}.correction",),
            reduced(template, keep=9, signs="()"),
            fold=Folding(name, ("sum", "sum")),
        )
        for name, template in (
            ("var", "x -> x/?"),
            ("std", "x -> x/?"),
            ("var_mean", "x -> x/?, x/?"),
            ("std_mean", "x -> x/?, x/?"),
        )
    ],
    Row(
        ("aminmax.default",),
        reduced("x -> x/?, x/?", 9, 9, signs="()"),
        fold=Folding("aminmax", ("max", "max"), exact=True),
    ),
    # joining and writing
    Row(("stack.default",), stack, linear=COPIES_ALL),
    Row(("slice_scatter.default",), slice_scatter),
    Row(("select_scatter.default",), along("x, x/ -> x", 2)),
    Row(("diagonal_scatter.default",), diagonal_scatter),
    # pointwise ops that are missing in torch's own list
    Row(GRADIENTS, pointwise, linear=(0,)),
    Row(OTHERS, pointwise),
    Row(("log_sigmoid_forward.default",), "... -> ..., ..."),
)

# For all ops in torch's list of pointwise ops; torch answers those on lists of tensors.
POINTWISE = Row((), pointwise)

# Functions of one number that do not decrease, on all numbers, and are NaN of NaN.
INCREASING = (
    *("asinh.default", "atan.default", "ceil.default", "deg2rad.default", "erf.default"),
    *("exp.default", "exp2.default", "expm1.default", "floor.default", "hardshrink.default"),
    *("rad2deg.default", "relu.default", "round.decimals", "round.default", "sigmoid.default"),
    *("sinh.default", "special_modified_bessel_i1.default", "tanh.default", "trunc.default"),
)

# Pointwise ops for operands with pending reductions: those that commute with some.
COMMUTING: dict[str, Row] = {
    overload: row
    for row in (
        Row(("mul.Tensor", "mul.Scalar"), pointwise, linear=(0, 1)),
        Row(("div.Tensor", "div.Scalar", "neg.default"), pointwise, linear=(0,)),
        Row(("special_xlog1py.default", "special_xlog1py.other_scalar"), pointwise, linear=(0,)),
        Row(("positive.default",), pointwise, linear=Linear((0,), COPIED)),
        Row(INCREASING, pointwise, linear=Linear((0,), ("max", "min"))),
        Row(
            ("maximum.default", "minimum.default"),
            pointwise,
            linear=Linear((0, 1), ("max", "min")),
        ),
        Row(
            ("clamp_min.Tensor", "clamp_max.Tensor"),
            pointwise,
            linear=Linear((0, 1), ("max", "min")),
        ),
        Row(
            ("logaddexp.default", "logaddexp2.default"),
            pointwise,
            linear=Linear((0, 1), ("max", "min")),
        ),
    )
    for overload in row.overloads
}
# The same by the number of tensors: the sum of two sums is a sum; and a number is added to each
# part of an average, or of the greatest numbers. (Only in place, where the result has to stay
# pending: elsewhere it is finished once, and not by each of its readers.)
ADDITIONS: dict[tuple[str, int], Row] = {
    **dict.fromkeys((("add.Tensor", 2), ("sub.Tensor", 2)), Row((), terms, linear=(0, 1))),
    **dict.fromkeys(
        [(f"{name}_.{kind}", 1) for name in ("add", "sub") for kind in ("Tensor", "Scalar")],
        Row((), pointwise, linear=Linear((0,), ("avg", "max", "min"))),
    ),
}

"""Norms, by names: over the last dims of each row, or over the images of a batch."""

from __future__ import annotations

from collections.abc import Callable
from re import sub
from typing import Any

from cute_sharding.relations.signature import Folding
from cute_sharding.relations.table.kernels import Images
from cute_sharding.relations.table.names import Rule, Shape, named, text, without_missing
from cute_sharding.relations.table.row import Row


def over_last(template: str, where: int) -> Rule:
    """The rule of a norm over the last dims of each row, as many as argument ``where`` has sizes;
    these are folded.

    The template's operands are the other arguments. In it ``x`` stands for the first one's dims,
    ``last`` for the folded ones, and ``each`` for the others: the dims of the statistics.

    >>> over_last("x, last? -> x, each", 1)((2, 3, 4), [4], None)
    'd0 d1 (d2) -> d0 d1 (d2), d0 d1 1'
    """

    def rule(*args: Any, **_: Any) -> str:
        x, count = args[0], len(args[where])
        names = named(x, range(len(x) - count, len(x)), signs="()")
        of = {
            "x": text(names),
            "last": text(names[len(x) - count :]),
            "each": text([*names[: len(x) - count], *["1"] * count]),
        }
        pattern = without_missing(template, [*args[:where], *args[where + 1 :]])
        return sub(r"\w+", lambda name: of[name[0]], pattern)

    rule.__doc__ = f"``{template}``; the normalized dims are folded."
    return rule


def batch_norm(training: int | bool, kept: int = 2, more: str = "") -> Rule:
    """The rule of a batch norm, whose statistics in training are those of the whole batch: images
    and their elements are folded. Otherwise they are given, and all is free.

    Args:
        training: the argument that says so, or whether.
        kept: how many results are kept for the gradient; they exist only in training.
        more: further results.

    >>> batch_norm(5)((4, 3, 8), (3,), None, None, None, True)
    '(n) c (...), c -> (n) c (...), c, c'
    """

    def rule(x: Shape, *given: Any) -> str:
        trains = training if isinstance(training, bool) else given[training - 1]
        images = "(n) c (...)" if trains else "n c ..."
        results = [images, *(["c" if trains else "0"] * kept), *more.split()]
        operands = f"{images}, {', '.join(['c' for shape in given if isinstance(shape, tuple)])}"
        return f"{operands.rstrip(', ')} -> {', '.join(results)}"

    rule.__doc__ = "In training, images and their elements are folded."
    return rule


def batch_norm_backward(training: int | bool, more: str = "") -> Rule:
    """The rule of a batch norm's gradient. Without training, those of weights are pending.

    Args:
        training: the argument that says so, or whether.
        more: what a backend has saved beside the statistics.
    """

    def rule(*args: Any) -> str:
        trains = training if isinstance(training, bool) else args[training]
        images = "(n) c (...)" if trains else "n c ..."
        others = [
            "c" if shape == args[0][1:2] else "[e]" for shape in args[2:7] if shape is not None
        ]
        return f"{', '.join([images, images, *others])}{more} -> {images}, c, c"

    rule.__doc__ = "In training, images and their elements are folded."
    return rule


def rows_of(training: int | bool) -> Callable[..., bool | frozenset[str]]:
    """The names of which each device must have rows: torch's kernels divide by the number of rows,
    folds do not.
    """

    def filled(*args: Any) -> bool | frozenset[str]:
        trains = training if isinstance(training, bool) else args[training]
        return frozenset("c") if trains else True

    return filled


def group_norm(x: Shape, weight: Any, bias: Any, *given: Any) -> str:
    """The channels of a group and their elements are folded; a state has a row for each group.

    >>> group_norm((2, 8, 5), (8,), None, 2, 8, 5, 4, 1e-5)
    'n (g*2) (...), (g*2) -> n (g*2) (...), n g, n g'
    """
    channels = f"(g*{given[1] // given[3]})"
    images = f"n {channels} (...)"
    others = [channels for shape in (weight, bias) if shape is not None]
    return f"{', '.join([images, *others])} -> {images}, n g, n g"


def group_norm_backward(
    gradient: Shape, x: Shape, mean: Shape, scale: Shape, weight: Any, *given: Any
) -> str:
    """As of :func:`group_norm`; gradients of weights are pending over the images."""
    channels = f"(g*{given[1] // given[3]})"
    images, others = f"n {channels} (...)", "" if weight is None else f", {channels}"
    return f"{images}, {images}, n g, n g{others} -> {images}, {channels}, {channels}"


def scaled(template: str) -> Rule:
    """The rule of weights with given norms, each over all dims except the last argument. In the
    template ``x`` stands for the weights' dims, of which only that one may be cut, ``each`` for the
    norms' dims.

    >>> scaled("x, each -> x, each")((4, 3, 2), (4, 1, 1), 0)
    'd0 [d1] [d2], d0 1 1 -> d0 [d1] [d2], d0 1 1'
    """

    def rule(*args: Any) -> str:
        x, by = args[0], args[-1] if type(args[-1]) is int else 0
        own = by % len(x)
        each = [f"d{d}" if d == own else "1" for d in range(len(x))]
        names = named(x, [d for d in range(len(x)) if d != own])
        of = {"x": text(names), "each": text(each)}
        return sub(r"\w+", lambda name: of[name[0]], template)

    rule.__doc__ = f"``{template}``; the dim that ``each`` has is free, and the others are whole."
    return rule


_STATISTICS = ("running_mean", "running_var")

ROWS: tuple[Row, ...] = (
    Row(
        ("native_layer_norm.default",),
        over_last("x, last?, last? -> x, each, each", 1),
        fold=Folding("layer_norm", ("sum", "sum")),
    ),
    Row(
        ("native_layer_norm_backward.default",),
        over_last("x, x, each, each, last?, last? -> x, last, last", 2),
        "sum",
        fold=Folding("layer_norm_backward", ("sum", "sum")),
    ),
    Row(
        ("_fused_rms_norm.default",),
        over_last("x, last? -> x, each", 1),
        fold=Folding("rms_norm", ("sum",)),
    ),
    Row(
        ("_fused_rms_norm_backward.default",),
        over_last("x, x, each, last? -> x, last", 2),
        "sum",
        fold=Folding("rms_norm_backward", ("sum",)),
    ),
    *[
        Row(
            overloads,
            rule,
            filled=rows_of(training),
            fold=Folding(name, ("sum", "sum")),
            writes=writes,
        )
        for name, overloads, training, rule, writes in (
            (
                "batch_norm",
                ("native_batch_norm.default", "_native_batch_norm_legit.default"),
                5,
                batch_norm(5),
                _STATISTICS,
            ),
            ("batch_norm_alone", ("_native_batch_norm_legit.no_stats",), 3, batch_norm(3), ()),
            (
                "batch_norm_anew",
                ("_native_batch_norm_legit_functional.default",),
                5,
                batch_norm(5, more="c c"),
                (),
            ),
            (
                "batch_norm_updating",
                ("_batch_norm_with_update.default",),
                True,
                batch_norm(True, more="0"),
                _STATISTICS,
            ),
            (
                "batch_norm_of_cudnn",
                ("cudnn_batch_norm.default",),
                5,
                batch_norm(5, more="0"),
                _STATISTICS,
            ),
        )
    ],
    *[
        Row(
            (overload,),
            rule,
            "sum",
            filled=rows_of(training),
            fold=Folding(name, ("sum", "sum")),
        )
        for name, overload, training, rule in (
            (
                "batch_norm_backward",
                "native_batch_norm_backward.default",
                7,
                batch_norm_backward(7),
            ),
            (
                "batch_norm_backward",
                "batch_norm_backward.default",
                True,
                batch_norm_backward(True, ", [r]"),
            ),
            (
                "batch_norm_backward_of_cudnn",
                "cudnn_batch_norm_backward.default",
                True,
                batch_norm_backward(True, ", [r]"),
            ),
        )
    ],
    # on no weights torch's kernel divides by 0
    Row(("_weight_norm_interface.default",), scaled("x, each -> x, each"), filled=True),
    Row(
        ("_weight_norm_interface_backward.default",),
        scaled("x, x, each, each -> x, each"),
        filled=True,
    ),
    # over groups of channels, each image by itself
    Row(
        ("native_group_norm.default",),
        group_norm,
        filled=frozenset("n"),
        fold=Folding("group_norm", ("sum", "sum")),
        kernel=Images(1, 3),
    ),
    Row(
        ("native_group_norm_backward.default",),
        group_norm_backward,
        "sum",
        filled=frozenset("n"),
        fold=Folding("group_norm_backward", ("sum", "sum")),
        kernel=Images(2, 5),
    ),
)

"""Norms, by names: over the last dims of each row, or over the images of a batch."""

from __future__ import annotations

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


def batch_norm(x: Shape, *given: Any) -> str:
    """Only the channels are free. If the statistics, which the op writes to, are sharded, all
    tensors are. The values kept for the gradient exist only in training.
    """
    kept = "c" if given[4] else "0"
    pattern = f"[n] c [...], c?, c?, c?, c? -> [n] c [...], {kept}, {kept}"
    return without_missing(pattern, [x, *given])


def batch_norm_backward(gradient: Shape, x: Shape, *given: Any) -> str:
    """Only the channels are free.

    ``given``: weight, mean, variance, both as they were kept, others.
    """
    images = "[n] c [...]"
    others = ["c" if shape == x[1:2] else "[e]" for shape in given[:5] if shape is not None]
    return f"{', '.join([images, images, *others])} -> {images}, c, c"


def batch_norm_backward_with_reserve(gradient: Shape, x: Shape, *given: Any) -> str:
    """Only the channels are free; the last operand, which a backend has saved, is whole."""
    return batch_norm_backward(gradient, x, *given).replace(" ->", ", [r] ->")


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
    Row(
        ("native_batch_norm.default", "_native_batch_norm_legit.default"),
        batch_norm,
        filled=True,
        writes=_STATISTICS,
    ),
    Row(
        ("_batch_norm_with_update.default",),
        "[n] c [...], c?, c?, c?, c? -> [n] c [...], c, c, 0",
        filled=True,
        writes=_STATISTICS,
    ),
    Row(("native_batch_norm_backward.default",), batch_norm_backward, filled=True),
    Row(
        ("batch_norm_backward.default",),
        batch_norm_backward_with_reserve,
        filled=True,
    ),
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
        "n [...], [c]?, [c]? -> n [...], n [g], n [g]",
        filled=True,
        kernel=Images(1, 3),
    ),
    Row(
        ("native_group_norm_backward.default",),
        "n [...], n [...], n [g], n [g], [c]? -> n [...], [c], [c]",
        "sum",
        filled=True,
        kernel=Images(2, 5),
    ),
)

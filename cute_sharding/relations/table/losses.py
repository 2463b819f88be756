"""Losses, by names: element by element, and over classes."""

from __future__ import annotations

from typing import Any

from cute_sharding.relations.signature import Folding
from cute_sharding.relations.table.kernels import MeanGradient
from cute_sharding.relations.table.names import Shape, named, text
from cute_sharding.relations.table.row import Row


def loss(x: Shape, target: Shape, *args: Any, **kwargs: Any) -> str:
    """``..., ... -> ...``, or ``..., ... ->`` for a mean or a sum; a weight is one more operand."""
    tensors = ["...", "...", *["..." for arg in args if isinstance(arg, tuple)]]
    return f"{', '.join(tensors)} -> {'...' if _reduction(*args, **kwargs) == 0 else ''}"


def _reduction(*args: Any, reduction: int | None = None, **_: Any) -> int:
    """The number of the reduction in torch: 0 none, 1 mean, 2 sum."""
    return (
        reduction if reduction is not None else next((arg for arg in args if type(arg) is int), 1)
    )


def reduction_of_loss(x: Shape, target: Shape, *args: Any, **kwargs: Any) -> str | None:
    """The reduction that a cut leaves pending: the loss's own; None if it has none."""
    return {0: None, 1: "avg", 2: "sum"}[_reduction(*args, **kwargs)]


def loss_backward(gradient: Shape, x: Shape, target: Shape, *args: Any, **kwargs: Any) -> str:
    """All operands are broadcast, and no dim is whole. For a mean, the op is told to divide by the
    number of all elements (dtensor/decide/local.py).
    """
    operands = [
        "..." if gradient else "",
        *["..."] * 2,
        *["..." for arg in args if isinstance(arg, tuple)],
    ]
    return f"{', '.join(operands)} -> ..."


def _of_classes(x: Shape, signs: str = "[]") -> tuple[list[str], list[str], str]:
    """The names of the scores (classes are dim 1, or the only dim, and whole, or as ``signs`` say),
    those of a tensor with one element for each row, and that of the classes.
    """
    dim = min(len(x) - 1, 1)
    names = named(x, [dim], signs=signs)
    return names, [*names[:dim], *names[dim + 1 :]], names[dim]


def nll_loss(x: Shape, target: Shape, weight: Any, reduction: int, *_: Any) -> str:
    """The classes are folded; the second result is the sum of the weights of all rows."""
    names, rows, classes = _of_classes(x, "()")
    operands = [text(names), text(rows), *[classes for given in (weight,) if given is not None]]
    return f"{', '.join(operands)} -> {text(rows) if reduction == 0 else ''},"


def reduction_of_classes(x: Shape, target: Shape, weight: Any, reduction: int, *_: Any) -> str:
    """The reduction that a cut leaves pending: a mean, a sum, or else the sum of the weights."""
    return "avg" if reduction == 1 else "sum"


def nll_loss_backward(
    gradient: Shape, x: Shape, target: Shape, weight: Any, reduction: int, *_: Any
) -> str:
    """The classes are folded; the op reads the sum of the weights only if the loss is a mean."""
    names, rows, classes = _of_classes(x, "()")
    operands = [
        text(rows) if reduction == 0 else "",
        f"={text(names)}",
        text(rows),
        *[classes for given in (weight,) if given is not None],
        "" if reduction == 1 else "_",
    ]
    return f"{', '.join(operands)} -> {text(names)}"


def margins(x: Shape, target: Shape, *given: Any) -> str:
    """The classes are whole, and there may be a weight for each class."""
    names, rows, _ = _of_classes(x)
    *_, weight, reduction = (*given, *(1, 1, None, 1)[len(given) :])[:4]
    operands = [text(names), text(rows), *["[c]" for shape in (weight,) if shape is not None]]
    return f"{', '.join(operands)} -> {text(rows) if reduction == 0 else ''}"


def reduction_of_margins(x: Shape, target: Shape, *given: Any) -> str | None:
    """The reduction that a cut leaves pending: the loss's own."""
    return {0: None, 1: "avg", 2: "sum"}[given[3] if len(given) > 3 else 1]


def margins_backward(gradient: Shape, x: Shape, target: Shape, *given: Any) -> str:
    """The classes are whole."""
    names, rows, _ = _of_classes(x)
    *_, weight, reduction = (*given, *(1, 1, None, 1)[len(given) :])[:4]
    of_each = text(rows) if reduction == 0 else ""
    operands = [of_each, text(names), text(rows), *["[c]" for w in (weight,) if w is not None]]
    return f"{', '.join(operands)} -> {text(names)}"


ROWS: tuple[Row, ...] = (
    Row(
        (
            "mse_loss.default",
            "smooth_l1_loss.default",
            "huber_loss.default",
            "soft_margin_loss.default",
            "binary_cross_entropy.default",
            "binary_cross_entropy_with_logits.default",
        ),
        loss,
        reduction_of_loss,
        shares="elements",
    ),
    Row(
        (
            "mse_loss_backward.default",
            "smooth_l1_loss_backward.default",
            "huber_loss_backward.default",
            "soft_margin_loss_backward.default",
        ),
        loss_backward,
        kernel=MeanGradient(3),
    ),
    Row(("binary_cross_entropy_backward.default",), loss_backward, kernel=MeanGradient(4)),
    Row(  # on no rows torch's kernel returns uninitialized memory
        ("multi_margin_loss.default",),
        margins,
        reduction_of_margins,
        shares="elements",
        filled=True,
    ),
    Row(("multi_margin_loss_backward.default",), margins_backward, kernel=MeanGradient(6)),
    Row(
        ("nll_loss_forward.default", "nll_loss2d_forward.default"),
        nll_loss,
        reduction_of_classes,
        shares="rows",
        fold=Folding("nll_loss", ("sum",)),
    ),
    Row(
        ("nll_loss_backward.default", "nll_loss2d_backward.default"),
        nll_loss_backward,
        fold=Folding("nll_loss_backward"),
    ),
)

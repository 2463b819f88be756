"""Rules of norms: over the last dims of each row, and over the images of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.ops.rules.names import Shape, named, text


def _trailing(x: Shape, normalized: Sequence[int]) -> tuple[list[str], str, str]:
    """The names of ``x``, of its trailing dims, which are whole, and of statistics, of which there
    is one for each of the others.
    """
    k = len(normalized)
    names = named(x, range(len(x) - k, len(x)))
    return names, text(names[len(x) - k :]), text([*names[: len(x) - k], *["1"] * k])


def _for_each(names: str, *tensors: Any) -> list[str]:
    """These names for each of the tensors that is given."""
    return [names for given in tensors if given is not None]


def layer_norm(
    x: Shape, normalized: Sequence[int], weight: Any = None, bias: Any = None, *_: Any
) -> str:
    """Over the trailing dims, which are whole; mean and rstd are of the others."""
    names, trailing, statistics = _trailing(x, normalized)
    operands = [text(names), *_for_each(trailing, weight, bias)]
    return f"{', '.join(operands)} -> {text(names)}, {statistics}, {statistics}"


def layer_norm_backward(
    gradient: Shape,
    x: Shape,
    normalized: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any = None,
    bias: Any = None,
    *_: Any,
    **__: Any,
) -> str:
    """The gradients of weight and bias are sums over the dims that are not normalized."""
    names, trailing, statistics = _trailing(x, normalized)
    whole = text(names)
    operands = [whole, whole, statistics, statistics, *_for_each(trailing, weight, bias)]
    return f"{', '.join(operands)} -> {whole}, {trailing}, {trailing}"


def group_norm(x: Shape, weight: Any = None, bias: Any = None, *_: Any) -> str:
    """Over groups of the channels, each image by itself."""
    operands = ["n [...]", *_for_each("[c]", weight, bias)]
    return f"{', '.join(operands)} -> n [...], n [g], n [g]"


def group_norm_backward(
    gradient: Shape, x: Shape, mean: Shape, rstd: Shape, weight: Any = None, *_: Any, **__: Any
) -> str:
    """The gradients of weight and bias are sums over the images."""
    operands = ["n [...]", "n [...]", "n [g]", "n [g]", *_for_each("[c]", weight)]
    return f"{', '.join(operands)} -> n [...], [c], [c]"


def rms_norm(x: Shape, normalized: Sequence[int], weight: Any = None, *_: Any) -> str:
    """As :func:`layer_norm`, without bias and mean."""
    names, trailing, statistics = _trailing(x, normalized)
    operands = [text(names), *_for_each(trailing, weight)]
    return f"{', '.join(operands)} -> {text(names)}, {statistics}"


def rms_norm_backward(
    gradient: Shape,
    x: Shape,
    normalized: Sequence[int],
    rstd: Any,
    weight: Any = None,
    *_: Any,
    **__: Any,
) -> str:
    """As :func:`layer_norm_backward`, without bias and mean."""
    names, trailing, statistics = _trailing(x, normalized)
    whole = text(names)
    operands = [whole, whole, statistics, *_for_each(trailing, weight)]
    return f"{', '.join(operands)} -> {whole}, {trailing}"


def batch_norm(
    x: Shape, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any
) -> str | None:
    """Each channel is by itself: statistics that are cut, and written to, cut all else. What is
    kept for the gradient is there only in training.
    """
    if len(x) < 2:
        return None
    images = text(["[n]", "c", *(f"[x{i}]" for i in range(len(x) - 2))])
    kept = "c" if training else "0"
    operands = [images, *_for_each("c", weight, bias, mean, variance)]
    return f"{', '.join(operands)} -> {images}, {kept}, {kept}"


def batch_norm_with_update(
    x: Shape, weight: Any, bias: Any, mean: Any, variance: Any, *_: Any
) -> str | None:
    """And room for what a backend keeps, of which there is none on CPUs."""
    pattern = batch_norm(x, weight, bias, mean, variance, True)
    return None if pattern is None else f"{pattern}, 0"


def batch_norm_backward(gradient: Shape, x: Shape, *given: Any) -> str | None:
    """Of (weight, mean, variance, what was kept of both, ...)."""
    if len(x) < 2:
        return None
    images = text(["[n]", "c", *(f"[x{i}]" for i in range(len(x) - 2))])
    operands = [
        images,
        images,
        *["c" if shape == x[1:2] else "[e]" for shape in given[:5] if shape is not None],
    ]
    return f"{', '.join(operands)} -> {images}, c, c"


def batch_norm_backward_with_reserve(gradient: Shape, x: Shape, *given: Any) -> str | None:
    """As :func:`batch_norm_backward`, and what a backend kept, which comes last."""
    pattern = batch_norm_backward(gradient, x, *given)
    return None if pattern is None else pattern.replace(" ->", ", [r] ->")

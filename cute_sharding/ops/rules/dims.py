"""Rules of ops that do the same to any tensor: pointwise, along some dims, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.ops.rules.names import Rule, Shape, named, put, text


def pointwise(*args: Any, **kwargs: Any) -> str | None:
    """As many operands as there are tensors, each broadcast; all results alike."""
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


def along(where: int, default: Any = None, *, alike: int = 1, results: int = 1) -> Rule:
    """``alike`` operands of one shape, of which each row along the dim that is argument ``where``
    matters to every other; as many results of that shape.
    """

    def rule(*args: Any, **kwargs: Any) -> str | None:
        dim = args[where] if len(args) > where else kwargs.get("dim", default)
        if dim is None:
            return None
        names = text(named(args[0], [dim] if isinstance(dim, int) else dim))
        return f"{', '.join([names] * alike)} -> {', '.join([names] * results)}"

    return rule


def picked(where: int, default: int = -1, *, results: int = 2) -> Rule:
    """Along a dim, which the results do not have, or have with another size: argument ``where``;
    whether they keep it is the next, if there is one.
    """

    def rule(x: Shape, *args: Any, **kwargs: Any) -> str | None:
        given = (x, *args)
        dim = given[where] if len(given) > where else kwargs.get("dim", default)
        keep = given[where + 1] if len(given) > where + 1 else kwargs.get("keepdim", False)
        if not isinstance(dim, int):
            return None
        names = named(x, [dim])
        return f"{text(names)} -> {', '.join([put(names, dim, '1' if keep else '')] * results)}"

    return rule


def topk(x: Shape, k: int, dim: int = -1, *_: Any, **__: Any) -> str:
    """Along ``dim``, which the results have with k rows."""
    names = named(x, [dim])
    out = put(names, dim, "[k]")
    return f"{text(names)} -> {out}, {out}"


def stable_sort(
    x: Shape, *_: Any, stable: Any = None, dim: int = -1, descending: bool = False
) -> str:
    """Along ``dim``; values and indices."""
    names = text(named(x, [dim]))
    return f"{names} -> {names}, {names}"


def halved(x: Shape, dim: int = -1) -> str:
    """A gated unit: the halves of a dim, the last or argument 1, make one of half its size."""
    names = named(x, [dim])
    return f"{text(names)} -> {put(names, dim, '[half]')}"


def doubled(gradient: Shape, x: Shape, dim: int) -> str:
    """The gradient of :func:`halved`."""
    names = named(x, [dim])
    return f"{put(names, dim, '[half]')}, {text(names)} -> {text(names)}"


def reduced(where: int = 1, *, keep: int = 2, results: int = 1) -> Rule:
    """Some dims are reduced, argument ``where``, or all; they may be kept with size 1."""

    def rule(x: Shape, *args: Any, **kwargs: Any) -> str:
        given = (x, *args)
        dims = given[where] if len(given) > where else kwargs.get("dim")
        keeps = given[keep] if len(given) > keep else kwargs.get("keepdim", False)
        if dims is None or dims == [] or dims == ():
            dims = range(len(x))
        gone = [d % len(x) for d in ([dims] if isinstance(dims, int) else dims)] if x else []
        names = named(x)
        left = "1" if keeps else ""
        result = text([left if d in gone else name for d, name in enumerate(names)])
        return f"{text(names)} -> {', '.join([result] * results)}"

    return rule


def across(x: Shape, y: Shape, *, dim: int = -1) -> str | None:
    """Two tensors along ``dim``; the others are broadcast, where that is the last."""
    if x == y:
        names = text(named(x, [dim]))
        return f"{names}, {names} -> {names}"
    return "... [d], ... [d] -> ... [d]" if dim % max(len(x), 1) == len(x) - 1 else None


def each_of(where: int) -> Rule:
    """For each row of the dim that is argument ``where``, by all that is in it."""

    def rule(*args: Any) -> str:
        x, dim = args[0], args[where] % max(len(args[0]), 1)
        names = text(named(x, [d for d in range(len(x)) if d != dim]))
        return f"{names} -> {names}"

    return rule


def put_on_diagonals(x: Shape, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    """The last dim becomes two; all three are whole."""
    names = named(x, [-1])
    result, ndim = names[:-1], len(x) + 1
    for d, name in sorted([(dim1 % ndim, "[row]"), (dim2 % ndim, "[column]")]):
        result.insert(d, name)
    return f"{text(names)} -> {text(result)}"


def to_scalar(x: Shape, *_: Any, **__: Any) -> str:
    """All dims are reduced."""
    return f"{text(named(x))} ->"


def transformed(x: Shape, over: Sequence[int], *_: Any) -> str | None:
    """A Fourier transform between real and complex numbers: the last of its dims changes its
    size.
    """
    if not over:
        return None
    names = named(x, over)
    return f"{text(names)} -> {put(names, over[-1], '[frequencies]')}"


# Pointwise ops that torch's own list has not: gradients, which are linear in the first operand,
# and others.
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
POINTWISE = (
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

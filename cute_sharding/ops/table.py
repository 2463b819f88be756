"""The table of ops beside views: one row for each, op -> signature.

A row is all that is known of an op: its aten overloads, how its arguments make a signature
(signature.py), what a contracted dim leaves pending, and of which operands the result is a sum. A
rule is called with the op's arguments, where tensors are their shapes; it gives a pattern for the
tensors among them in their order, those in lists and options too. Where it gives None, no signature
is known for such arguments.

Sources: the ops' definitions in PyTorch's documentation and in
aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Any, TypeAlias

Shape: TypeAlias = "tuple[int, ...]"
Rule: TypeAlias = "Callable[..., str | None]"


@dataclass(frozen=True)
class Row:
    """One op, or several that do the same to dims.

    Attributes:
        overloads: its aten overloads.
        rule: a pattern, or arguments -> pattern.
        reduce: what a contracted dim leaves pending: "sum", "avg", "max", "min"; or, of arguments;
            None: such dims are whole.
        linear: the operands of which the result is linear, each by itself: what is pending of one
            may stay so.
        filled: no device may be left without rows of a name that is cut: the op refuses to compute
            of nothing.
    """

    overloads: tuple[str, ...]
    rule: str | Rule
    reduce: str | Rule | None = None
    linear: tuple[int, ...] = ()
    filled: bool = False

    def pattern(self, *args: Any, **kwargs: Any) -> str | None:
        return self.rule if isinstance(self.rule, str) else self.rule(*args, **kwargs)

    def reduction(self, *args: Any, **kwargs: Any) -> str | None:
        return self.reduce(*args, **kwargs) if callable(self.reduce) else self.reduce


def _names(x: Shape, whole: Sequence[int] = (), letter: str = "d") -> list[str]:
    """A name for each dim, in brackets for those that are whole."""
    whole = [d % len(x) for d in whole] if x else []
    return [f"[{letter}{d}]" if d in whole else f"{letter}{d}" for d in range(len(x))]


def _text(names: Sequence[str]) -> str:
    return " ".join(names)


def _put(names: Sequence[str], d: int, name: str) -> str:
    """The names with another in place ``d``; none where it is empty."""
    found = list(names)
    if found:
        found[d % len(found)] = name
    return _text([n for n in found if n])


# -- products --------------------------------------------------------------------------------------


def _sum_and_product(product: str) -> Rule:
    """A term and a product, such as a bias; the term may lack leading dims, but not all: torch
    gives a product of no rows the shape of the term.
    """
    result = product.partition("->")[2].split()

    def rule(term: Shape, *_: Any, **__: Any) -> str | None:
        return None if not term else f"+{_text(result[len(result) - len(term) :])}, {product}"

    return rule


# -- along dims ------------------------------------------------------------------------------------


def _along(where: int, default: Any = None, *, alike: int = 1, results: int = 1) -> Rule:
    """``alike`` operands of one shape, of which each row along the dim that is argument ``where``
    matters to every other; as many results of that shape.
    """

    def rule(*args: Any, **kwargs: Any) -> str | None:
        dim = args[where] if len(args) > where else kwargs.get("dim", default)
        if dim is None:
            return None
        names = _text(_names(args[0], [dim] if isinstance(dim, int) else dim))
        return f"{', '.join([names] * alike)} -> {', '.join([names] * results)}"

    return rule


def _picked(where: int, default: int = -1, *, results: int = 2) -> Rule:
    """Along a dim, which the results do not have, or have with another size: argument ``where``;
    whether they keep it is the next, if there is one.
    """

    def rule(x: Shape, *args: Any, **kwargs: Any) -> str | None:
        given = (x, *args)
        dim = given[where] if len(given) > where else kwargs.get("dim", default)
        keep = given[where + 1] if len(given) > where + 1 else kwargs.get("keepdim", False)
        if not isinstance(dim, int):
            return None
        names = _names(x, [dim])
        return f"{_text(names)} -> {', '.join([_put(names, dim, '1' if keep else '')] * results)}"

    return rule


def _topk(x: Shape, k: int, dim: int = -1, *_: Any, **__: Any) -> str:
    names = _names(x, [dim])
    out = _put(names, dim, "[k]")
    return f"{_text(names)} -> {out}, {out}"


def _stable_sort(
    x: Shape, *_: Any, stable: Any = None, dim: int = -1, descending: bool = False
) -> str:
    names = _text(_names(x, [dim]))
    return f"{names} -> {names}, {names}"


def _turned(x: Shape) -> str:
    names = _names(x)
    return f"{_text(names)} -> {_text(names[::-1])}"


def _rolled(x: Shape, shifts: Any, dims: Any = ()) -> str:
    names = _text(_names(x, dims if dims else range(len(x))))
    return f"{names} -> {names}"


def _diagonal(x: Shape, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    gone = [dim1 % len(x), dim2 % len(x)]
    names = _names(x, gone)
    return (
        f"{_text(names)} -> "
        f"{_text([*(name for d, name in enumerate(names) if d not in gone), '[diagonal]'])}"
    )


def _triangle(x: Shape, *_: Any) -> str:
    names = _text(_names(x, [-2, -1]))
    return f"{names} -> {names}"


def _reduced(where: int = 1, *, keep: int = 2) -> Rule:
    """Some dims are reduced, argument ``where``, or all; they may be kept with size 1."""

    def rule(x: Shape, *args: Any, **kwargs: Any) -> str:
        given = (x, *args)
        dims = given[where] if len(given) > where else kwargs.get("dim")
        keeps = given[keep] if len(given) > keep else kwargs.get("keepdim", False)
        if dims is None or dims == [] or dims == ():
            dims = range(len(x))
        gone = [d % len(x) for d in ([dims] if isinstance(dims, int) else dims)] if x else []
        names = _names(x)
        left = "1" if keeps else ""
        result = [left if d in gone else name for d, name in enumerate(names)]
        return f"{_text(names)} -> {_text(result)}"

    return rule


def _all(x: Shape, *_: Any, **__: Any) -> str:
    return f"{_text(_names(x))} ->"


# -- normalization ---------------------------------------------------------------------------------


def _trailing(x: Shape, normalized: Sequence[int]) -> tuple[list[str], str, str]:
    """The names of ``x``, of its trailing dims, which are whole, and of statistics, of which there
    is one for each of the others.
    """
    k = len(normalized)
    names = _names(x, range(len(x) - k, len(x)))
    return names, _text(names[len(x) - k :]), _text([*names[: len(x) - k], *["1"] * k])


def _for_each(names: str, *tensors: Any) -> list[str]:
    """These names for each of the tensors that is given."""
    return [names for given in tensors if given is not None]


def _layer_norm(
    x: Shape, normalized: Sequence[int], weight: Any = None, bias: Any = None, *_: Any
) -> str:
    names, trailing, statistics = _trailing(x, normalized)
    operands = [_text(names), *_for_each(trailing, weight, bias)]
    return f"{', '.join(operands)} -> {_text(names)}, {statistics}, {statistics}"


def _layer_norm_backward(
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
    names, trailing, statistics = _trailing(x, normalized)
    whole = _text(names)
    operands = [whole, whole, statistics, statistics, *_for_each(trailing, weight, bias)]
    return f"{', '.join(operands)} -> {whole}, {trailing}, {trailing}"


def _rms_norm(x: Shape, normalized: Sequence[int], weight: Any = None, *_: Any) -> str:
    names, trailing, statistics = _trailing(x, normalized)
    operands = [_text(names), *_for_each(trailing, weight)]
    return f"{', '.join(operands)} -> {_text(names)}, {statistics}"


def _rms_norm_backward(
    gradient: Shape,
    x: Shape,
    normalized: Sequence[int],
    rstd: Any,
    weight: Any = None,
    *_: Any,
    **__: Any,
) -> str:
    names, trailing, statistics = _trailing(x, normalized)
    whole = _text(names)
    operands = [whole, whole, statistics, *_for_each(trailing, weight)]
    return f"{', '.join(operands)} -> {whole}, {trailing}"


def _batch_norm(
    x: Shape, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any
) -> str | None:
    """Each channel is by itself: statistics that are cut, and written to, cut all else. What is
    kept for the gradient is there only in training.
    """
    if len(x) < 2:
        return None
    images = _text(["[n]", "c", *(f"[x{i}]" for i in range(len(x) - 2))])
    kept = "c" if training else "0"
    operands = [images, *_for_each("c", weight, bias, mean, variance)]
    return f"{', '.join(operands)} -> {images}, {kept}, {kept}"


def _batch_norm_with_update(
    x: Shape, weight: Any, bias: Any, mean: Any, variance: Any, *_: Any
) -> str | None:
    """And room for what a backend keeps, of which there is none on CPUs."""
    pattern = _batch_norm(x, weight, bias, mean, variance, True)
    return None if pattern is None else f"{pattern}, 0"


def _batch_norm_backward(gradient: Shape, x: Shape, *given: Any) -> str | None:
    """Of (weight, mean, variance, what was kept of both, ...)."""
    if len(x) < 2:
        return None
    images = _text(["[n]", "c", *(f"[x{i}]" for i in range(len(x) - 2))])
    operands = [
        images,
        images,
        *["c" if shape == x[1:2] else "[e]" for shape in given[:5] if shape is not None],
    ]
    return f"{', '.join(operands)} -> {images}, c, c"


# -- by index --------------------------------------------------------------------------------------


def _gather(x: Shape, dim: int, index: Shape, *_: Any, **__: Any) -> str | None:
    if len(x) != len(index) or not x:
        return None
    names = _names(x, [dim])
    chosen = _put(names, dim, "k")
    return f"{_text(names)}, {chosen} -> {chosen}"


def _scatter(
    x: Shape, dim: int, index: Shape, source: Any = None, *_: Any, **__: Any
) -> str | None:
    if len(x) != len(index) or not x:
        return None
    names = _names(x, [dim])
    operands = [_text(names), _put(names, dim, "[k]")]
    if isinstance(source, tuple):
        if len(source) != len(x) or source != index:
            return None
        operands.append(operands[1])
    return f"{', '.join(operands)} -> {operands[0]}"


def _index_select(x: Shape, dim: int, index: Shape) -> str | None:
    if not x or len(index) != 1:
        return None
    names = _names(x, [dim])
    return f"{_text(names)}, k -> {_put(names, dim, 'k')}"


def _embedding(weight: Shape, index: Shape, *_: Any, **__: Any) -> str:
    names = _text(_names(index, letter="i"))
    return f"[v] e, {names} -> {names} e"


def _embedding_backward(
    gradient: Shape, index: Shape, rows: int, padding: int, by_frequency: bool = False
) -> str | None:
    names = _text(_names(index, letter="i"))
    return None if by_frequency else f"{names} e, {names} -> [v] e"


# -- together and apart ----------------------------------------------------------------------------


def _cat(tensors: Sequence[Shape], dim: int = 0) -> str | None:
    if any(len(x) != len(tensors[0]) for x in tensors) or not tensors[0]:
        return None
    names = _names(tensors[0], [dim])
    return (
        f"{', '.join(_put(names, dim, f'[from{i}]') for i in range(len(tensors)))} -> "
        f"{_put(names, dim, '[to]')}"
    )


def _stack(tensors: Sequence[Shape], dim: int = 0) -> str:
    names = _names(tensors[0])
    at = dim % (len(names) + 1)
    return (
        f"{', '.join([_text(names)] * len(tensors))} -> {_text([*names[:at], '[to]', *names[at:]])}"
    )


def _apart(where: int, name: str) -> Rule:
    """A dim is taken apart: the results have it with other sizes, or, where ``name`` is empty, do
    not have it.
    """

    def rule(x: Shape, *args: Any, **kwargs: Any) -> str:
        given = (x, *args)
        dim = given[where] if len(given) > where else kwargs.get("dim", 0)
        names = _names(x, [dim])
        return f"{_text(names)} -> {_put(names, dim, name)}"

    return rule


def _is_whole(start: Any = None, end: Any = None, step: Any = 1) -> bool:
    """Whether a slice takes all there is, however long the dim is: what compilers write for the `:`
    of `x[:, None]`.
    """
    return (
        (start is None or (type(start) is int and start == 0))
        and (end is None or (type(end) is int and end >= maxsize))
        and type(step) is int
        and step == 1
    )


def _slice(x: Shape, dim: int = 0, *which: Any) -> str:
    names = _names(x, [] if _is_whole(*which) else [dim])
    return f"{_text(names)} -> {_text(names) if _is_whole(*which) else _put(names, dim, '[part]')}"


def _select_backward(gradient: Shape, sizes: Sequence[int], dim: int, index: int) -> str:
    names = _names(tuple(sizes), [dim])
    return f"{_put(names, dim, '')} -> {_text(names)}"


def _slice_backward(gradient: Shape, sizes: Sequence[int], dim: int, *which: Any) -> str:
    if _is_whole(*which):
        return f"{_text(_names(gradient))} -> {_text(_names(gradient))}"
    names = _names(tuple(sizes), [dim])
    return f"{_put(names, dim, '[part]')} -> {_text(names)}"


# -- losses ----------------------------------------------------------------------------------------


def _loss(x: Shape, target: Shape, *args: Any, **kwargs: Any) -> str:
    """With a weight, if there is one; as many results as elements, or one."""
    tensors = ["...", "...", *["..." for arg in args if isinstance(arg, tuple)]]
    return f"{', '.join(tensors)} -> {'...' if _reduction(*args, **kwargs) == 0 else ''}"


def _reduction(*args: Any, reduction: int | None = None, **_: Any) -> int:
    """torch's number: 0 none, 1 mean, 2 sum."""
    return (
        reduction if reduction is not None else next((arg for arg in args if type(arg) is int), 1)
    )


def _reduction_of_loss(x: Shape, target: Shape, *args: Any, **kwargs: Any) -> str | None:
    return {0: None, 1: "avg", 2: "sum"}[_reduction(*args, **kwargs)]


def _loss_backward(gradient: Shape, x: Shape, target: Shape, *args: Any, **kwargs: Any) -> str:
    """Of a mean: the op divides by the number of elements that it sees, so it is to see all."""
    reduction = _reduction(*args, **kwargs)
    names = "[...]" if reduction == 1 else "..."
    operands = [
        "..." if gradient else "",
        names,
        names,
        *[names for arg in args if isinstance(arg, tuple)],
    ]
    return f"{', '.join(operands)} -> {names}"


def _of_classes(x: Shape) -> tuple[list[str], list[str]]:
    """The names of scores for classes, which are dim 1, or the only one, and whole; and of what
    there is one of for each row.
    """
    names = _names(x, [min(len(x) - 1, 1)])
    return names, [name for name in names if not name.startswith("[")]


def _nll_loss(x: Shape, target: Shape, weight: Any, reduction: int, *_: Any) -> str:
    """A mean is divided by the weights of all rows, so the op is to see them all; the weights' sum
    is its second result.
    """
    names, rows = _of_classes(x)
    if reduction == 1:
        names, rows = (
            [name if name.startswith("[") else f"[{name}]" for name in names],
            [f"[{name}]" for name in rows],
        )
    operands = [_text(names), _text(rows), *["[c]" for given in (weight,) if given is not None]]
    return f"{', '.join(operands)} -> {_text(rows) if reduction == 0 else ''},"


def _nll_loss_backward(
    gradient: Shape, x: Shape, target: Shape, weight: Any, reduction: int, *_: Any
) -> str:
    """The weights' sum is given: each row's gradient is its own."""
    names, rows = _of_classes(x)
    operands = [
        _text(rows) if reduction == 0 else "",
        _text(names),
        _text(rows),
        *["[c]" for given in (weight,) if given is not None],
        "",
    ]
    return f"{', '.join(operands)} -> {_text(names)}"


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


def _convolution(
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
    given, kernel, result = _of_convolution(x, transposed, groups)
    operands = [
        _text(given),
        _text(kernel),
        *[f"+{result[1]}" for some in (bias,) if some is not None],
    ]
    return f"{', '.join(operands)} -> {_text(result)}"


def _convolution_backward(
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
    return f"{_text(result)}, {_text(given)}, {_text(kernel)} -> {', '.join(map(_text, results))}"


# -- attention -------------------------------------------------------------------------------------

_QUERIES, _KEYS, _VALUES, _STATISTICS = "b h [s] [e]", "b h [t] [e]", "b h [t] [e]", "b h [s]"


def _mask(queries: Shape, mask: Shape | None) -> list[str]:
    """A mask may lack leading dims, and have dims of size 1."""
    if mask is None:
        return []
    names = ["b", "h", "[s]", "[t]"]
    given = zip(names[4 - len(mask) :], mask, queries[4 - len(mask) :])
    return [_text(["1" if name in "bh" and n == 1 != of else name for name, n, of in given])]


def _attention(queries: Shape, *_: Any, attn_mask: Any = None, **__: Any) -> str:
    operands = [_QUERIES, _KEYS, _VALUES, *_mask(queries, attn_mask)]
    return f"{', '.join(operands)} -> {_QUERIES}, {_STATISTICS}"


def _attention_backward(
    gradient: Shape, queries: Shape, *_: Any, attn_mask: Any = None, **__: Any
) -> str:
    operands = [_QUERIES, _QUERIES, _KEYS, _VALUES, _QUERIES, _STATISTICS]
    operands += _mask(queries, attn_mask)
    return f"{', '.join(operands)} -> {_QUERIES}, {_KEYS}, {_VALUES}"


# -- pointwise -------------------------------------------------------------------------------------


def _pointwise(*args: Any, **kwargs: Any) -> str | None:
    """As many operands as there are tensors, each broadcast; all results alike."""
    given = (*args, *kwargs.values())
    if any(
        isinstance(arg, list) or (isinstance(arg, tuple) and any(isinstance(n, tuple) for n in arg))
        for arg in given
    ):
        return None
    return f"{', '.join(['...' for arg in given if isinstance(arg, tuple)])} -> ..."


TABLE: tuple[Row, ...] = (
    # products
    Row(("mm.default",), "m k, k n -> m n", "sum", (0, 1)),
    Row(("bmm.default",), "b m k, b k n -> b m n", "sum", (0, 1)),
    Row(("mv.default",), "m k, k -> m", "sum", (0, 1)),
    Row(("dot.default", "vdot.default"), "k, k ->", "sum", (0, 1)),
    Row(("addmm.default",), _sum_and_product("m k, k n -> m n"), "sum"),
    Row(("addmv.default",), _sum_and_product("m k, k -> m"), "sum"),
    Row(("baddbmm.default",), _sum_and_product("b m k, b k n -> b m n"), "sum"),
    # along dims
    Row(
        (
            "_softmax.default",
            "_log_softmax.default",
            "_safe_softmax.default",
            "cumsum.default",
            "cumprod.default",
            "logcumsumexp.default",
        ),
        _along(1),
    ),
    Row(
        ("_softmax_backward_data.default", "_log_softmax_backward_data.default"), _along(2, alike=2)
    ),
    Row(("cummax.default", "cummin.default"), _along(1, results=2)),
    Row(("sort.default",), _along(1, -1, results=2)),
    Row(("sort.stable",), _stable_sort),
    Row(("topk.default",), _topk),
    Row(("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode.default"), _picked(1)),
    Row(("kthvalue.default",), _picked(2)),
    Row(("tril.default", "triu.default"), _triangle),
    Row(("t.default",), _turned),
    Row(("flip.default",), _along(1)),
    Row(("roll.default",), _rolled),
    Row(("diagonal.default",), _diagonal),
    # reductions
    Row(("sum.default",), _all, "sum", (0,)),
    Row(("sum.dim_IntList",), _reduced(), "sum", (0,)),
    Row(("nansum.default",), _reduced(), "sum"),
    Row(("mean.default",), _all, "avg", (0,)),
    Row(("mean.dim",), _reduced(), "avg", (0,)),
    Row(("amax.default",), _reduced(), "max"),
    Row(("amin.default",), _reduced(), "min"),
    Row(("max.default",), _all, "max"),
    Row(("min.default",), _all, "min"),
    Row(("prod.default",), _all),
    Row(
        ("prod.dim_int", "all.dim", "all.dims", "any.dim", "any.dims", "logsumexp.default"),
        _reduced(),
    ),
    Row(("all.default", "any.default"), _all),
    Row(("var.correction", "std.correction"), _reduced(keep=9)),
    # normalization
    Row(("native_layer_norm.default",), _layer_norm),
    Row(("native_layer_norm_backward.default",), _layer_norm_backward, "sum"),
    Row(
        ("native_batch_norm.default", "_native_batch_norm_legit.default"), _batch_norm, filled=True
    ),
    Row(("_batch_norm_with_update.default",), _batch_norm_with_update, filled=True),
    Row(("native_batch_norm_backward.default",), _batch_norm_backward, filled=True),
    Row(("_fused_rms_norm.default",), _rms_norm),
    Row(("_fused_rms_norm_backward.default",), _rms_norm_backward, "sum"),
    # by index
    Row(("gather.default",), _gather),
    Row(("scatter.src", "scatter.value", "scatter_add.default"), _scatter),
    Row(("index_select.default",), _index_select),
    Row(("embedding.default",), _embedding),
    Row(("embedding_dense_backward.default",), _embedding_backward, "sum"),
    # together and apart
    Row(("cat.default",), _cat),
    Row(("stack.default",), _stack),
    Row(
        ("split.Tensor", "split_with_sizes.default", "split_with_sizes_copy.default"),
        _apart(2, "[part]"),
    ),
    Row(("unbind.int", "select.int"), _apart(1, "")),
    Row(("slice.Tensor",), _slice),
    Row(("select_backward.default",), _select_backward),
    Row(("slice_backward.default",), _slice_backward),
    # losses
    Row(
        (
            "mse_loss.default",
            "smooth_l1_loss.default",
            "huber_loss.default",
            "soft_margin_loss.default",
            "binary_cross_entropy.default",
            "binary_cross_entropy_with_logits.default",
        ),
        _loss,
        _reduction_of_loss,
    ),
    Row(
        (
            "mse_loss_backward.default",
            "smooth_l1_loss_backward.default",
            "huber_loss_backward.default",
            "soft_margin_loss_backward.default",
            "binary_cross_entropy_backward.default",
        ),
        _loss_backward,
    ),
    Row(("nll_loss_forward.default", "nll_loss2d_forward.default"), _nll_loss, "sum"),
    Row(("nll_loss_backward.default", "nll_loss2d_backward.default"), _nll_loss_backward),
    # convolutions
    Row(("convolution.default",), _convolution, "sum", filled=True),
    Row(("convolution_backward.default",), _convolution_backward, "sum", filled=True),
    # gradients of pointwise ops, of which torch's own list has not all
    Row(
        (
            "hardtanh_backward.default",
            "hardswish_backward.default",
            "hardsigmoid_backward.default",
            "hardshrink_backward.default",
            "softshrink_backward.default",
        ),
        _pointwise,
        linear=(0,),
    ),
    Row(("log_sigmoid_backward.default", "_prelu_kernel_backward.default"), _pointwise),
    # attention
    Row(("_scaled_dot_product_flash_attention_for_cpu.default",), _attention),
    Row(("_scaled_dot_product_flash_attention_for_cpu_backward.default",), _attention_backward),
)

# Of all ops that are pointwise, of which torch has the list; those of lists of tensors are torch's.
POINTWISE = Row((), _pointwise)

BY_OVERLOAD: dict[str, Row] = {name: row for row in TABLE for name in row.overloads}

"""Ops on windows of the last dims, such as pools, and their gradients, by names: the dims before
these, images and channels, are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import floor, inf
from re import findall
from typing import Any

from cute_sharding.relations.signature import Reads
from cute_sharding.relations.table.kernels import Sizes
from cute_sharding.relations.table.names import Rule, Shape, named, text
from cute_sharding.relations.table.row import Row, Windowing

# For an op's arguments, which rows of each image dim a result row reads; None: it may be any.
ReadsOf = Callable[..., "list[Reads] | None"]


def windowed(
    spatial: int, operands: str = "x", results: str = "y", reads_of: ReadsOf | None = None
) -> Rule:
    """The rule of an op over the last ``spatial`` dims. The first form is the first operand's.

    Args:
        operands: for each operand, "x" if its last dims are those of the image, and "y" if they
            have one row for each window; "=x" if the op reads only the sizes.
        results: the same for the results.
        reads_of: called with the number of these dims and the op's arguments.
    """

    def rule(first: Shape, *args: Any, **kwargs: Any) -> str | None:
        leading = len(first) - spatial
        if leading < 1:
            return None
        before = named(first)[:leading]
        every = None if kwargs or reads_of is None else reads_of(spatial, first, *args)
        dims = {
            "x": [f"y{i}{reads}" for i, reads in enumerate(every or ())],
            "y": [f"y{i}" for i in range(spatial)],
        }
        if not every:
            dims = {form: [f"[{form}{i}]" for i in range(spatial)] for form in "xy"}
        names = {form: text([*before, *of]) for form, of in dims.items()}
        come_in = [sign + names[form] for sign, form in findall("(=?)([xy])", operands)]
        come_out = [names[form] for form in results]
        return f"{', '.join(come_in)} -> {', '.join(come_out)}"

    last = "dim is" if spatial == 1 else f"{spatial} dims are"
    rule.__doc__ = f"``{operands} -> {results}``; the last {last} " + (
        "whole." if reads_of is None else "read in windows."
    )
    return rule


def each(option: Any, spatial: int) -> list[int]:
    """An option of the last ``spatial`` dims, for each of them."""
    some = list(option) if isinstance(option, (list, tuple)) else [option]
    return some if len(some) == spatial else some * spatial


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(n, int) for n in values)


def in_windows(
    spatial: int,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
) -> list[Reads] | None:
    """The rows that a kernel reads, also those between dilated ones; None if that depends on
    symbols.

    >>> print(*in_windows(2, [3, 2], [2, 2], [1, 0]))
    *2-1:3 *2
    """
    options = [each(option, spatial) for option in (kernel, stride or kernel, padding, dilation)]
    if not all(map(_are_numbers, options)):
        return None
    return [Reads(apart * (size - 1) + 1, step, -pad) for size, step, pad, apart in zip(*options)]


def of_average(at: int) -> ReadsOf:
    """The windows of an average, whose kernel is argument ``at``."""
    return lambda spatial, *args: in_windows(spatial, *args[at : at + 3])


def of_maximum(at: int) -> ReadsOf:
    """The windows of a maximum, whose kernel is argument ``at``."""
    return lambda spatial, *args: in_windows(spatial, *args[at : at + 4])


def _aligned(rows: Sequence[int], windows: Sequence[int]) -> list[Reads] | None:
    """Windows that lie side by side, as those of an adaptive pool do if they divide the rows."""
    if not (_are_numbers(rows) and _are_numbers(windows)):
        return None
    if not all(0 < count <= n and n % count == 0 for n, count in zip(rows, windows)):
        return None
    return [Reads(n // count, n // count) for n, count in zip(rows, windows)]


def adaptive(spatial: int, x: Shape, sizes: Any) -> list[Reads] | None:
    """The windows of an adaptive pool, if they align."""
    return _aligned(x[-spatial:], each(sizes, spatial))


def adaptive_gradient(spatial: int, gradient: Shape, x: Shape, *_: Any) -> list[Reads] | None:
    """Those of its gradient."""
    return _aligned(x[-spatial:], gradient[-spatial:])


# The ops of one dim that say which rows are the nearest.
NEAREST = {
    "nearest": "upsample_nearest1d.default",
    "nearest_exact": "_upsample_nearest_exact1d.default",
}
# For each mode of interpolation: the rows that a row is made of, from the one before where it is.
_TAPS = {"nearest": 1, "nearest_exact": 1, "linear": 2, "cubic": 4}


def _between(mode: str, rows: int, count: int, align: bool, scale: float | None) -> Reads | None:
    """The rows of which ``count`` rows are interpolated. PyTorch computes in floating point where a
    row is, and may round the nearest one up or down.

    >>> print(_between("linear", 8, 16, False, None), _between("nearest", 8, 16, False, None))
    *1/2-1/4:2 *1/2:1
    """
    if rows < 1 or count < 1:
        return None
    step = Fraction(rows, count)
    if scale:
        step = Fraction(1 / scale).limit_denominator(1 << 12)
        step = step if abs(step - 1 / scale) * count < 1e-9 else Fraction(1 / scale)
    if align:
        step = Fraction(rows - 1, count - 1) if count > 1 else Fraction(0)
    first = Fraction(0) if align else (step - 1) / 2
    if mode in ("nearest", "nearest_exact"):
        first = step / 2 if mode == "nearest_exact" else Fraction(0)
        is_exact = (step.denominator & (step.denominator - 1)) == 0 and step.denominator <= 1 << 8
        more = 0 if is_exact else 1  # rows on either side
    else:
        more = 0
    if floor(step * (count - 1) + first) >= rows:
        return None  # such a scale does not fit the sizes
    first -= more + (mode == "cubic")
    return Reads(_TAPS[mode] + 2 * more, step, first)


def _every(
    mode: str, before: Sequence[Any], after: Sequence[Any], options: Sequence[Any]
) -> list[Reads] | None:
    if not (_are_numbers(before) and _are_numbers(after)):
        return None
    aligns = mode in ("linear", "cubic")
    align = bool(aligns and options and options[0])
    scales = [*options[int(aligns) :], *[None] * len(before)]
    found = [
        _between(mode, n, count, align, scale) for n, count, scale in zip(before, after, scales)
    ]
    every = [reads for reads in found if reads is not None]
    return every if len(every) == len(found) else None


def interpolated(mode: str) -> ReadsOf:
    """The rows of which those of an interpolation are made."""

    def reads_of(spatial: int, x: Shape, sizes: Any, *options: Any) -> list[Reads] | None:
        return _every(mode, x[-spatial:], each(sizes, spatial), options)

    return reads_of


def interpolated_gradient(mode: str) -> ReadsOf:
    """Those of its gradient."""

    def reads_of(
        spatial: int, gradient: Shape, sizes: Any, before: Any, *options: Any
    ) -> list[Reads] | None:
        return _every(mode, before[-spatial:], gradient[-spatial:], options)

    return reads_of


ROWS: tuple[Row, ...] = (
    *(
        Row(
            (f"{name.format(n)}.default",),
            windowed(n, operands, results, reads_of),
            linear=(0,) if (operands, results) in (("x", "y"), ("y=x", "x")) else (),  # averages
            filled=True,
            windows=windows,
        )
        for n in (2, 3)
        for name, operands, results, reads_of, windows in (
            ("avg_pool{}d", "x", "y", of_average(1), Windowing("average")),
            ("avg_pool{}d_backward", "y=x", "x", of_average(2), Windowing("average_gradient")),
            ("_adaptive_avg_pool{}d", "x", "y", adaptive, Windowing("adaptive")),
            (
                "_adaptive_avg_pool{}d_backward",
                "y=x",
                "x",
                adaptive_gradient,
                Windowing("as_it_is"),
            ),
            ("max_pool{}d_with_indices", "x", "yy", of_maximum(1), Windowing("maximum", -inf)),
            (
                "max_pool{}d_with_indices_backward",
                "y=xy",
                "x",
                of_maximum(2),
                Windowing("maximum_gradient"),
            ),
            ("adaptive_max_pool{}d", "x", "yy", adaptive, Windowing("adaptive_maximum", -inf)),
            (
                "adaptive_max_pool{}d_backward",
                "y=xy",
                "x",
                adaptive_gradient,
                Windowing("adaptive_maximum_gradient"),
            ),
        )
    ),
    *(Row((f"max_unpool{n}d.default",), windowed(n, "yy", "x"), filled=True) for n in (2, 3)),
    *(
        row
        for name, n, mode in (
            *((f"upsample_nearest{n}d", n, "nearest") for n in (1, 2, 3)),
            *((f"_upsample_nearest_exact{n}d", n, "nearest_exact") for n in (1, 2, 3)),
            *zip(("upsample_linear1d", "upsample_bilinear2d"), (1, 2), ("linear", "linear")),
            ("upsample_trilinear3d", 3, "linear"),
            ("upsample_bicubic2d", 2, "cubic"),
        )
        for row in (
            Row(
                (f"{name}.default",),
                windowed(n, reads_of=interpolated(mode)),
                linear=(0,),
                filled=True,
                windows=Windowing(mode),
            ),
            Row(
                (f"{name}_backward.default",),
                windowed(n, "y", "x", interpolated_gradient(mode)),
                linear=(0,),
                filled=True,
                windows=Windowing(f"{mode}_gradient"),
                kernel=Sizes(0, 2, (0, 1)),
            ),
        )
    ),
    *(
        row
        for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
        for row in (
            Row((f"{name}.default",), windowed(2), linear=(0,), filled=True),
            Row(
                (f"{name}_backward.default",),
                windowed(2, "y", "x"),
                linear=(0,),
                filled=True,
                kernel=Sizes(0, 2, (0, 1)),
            ),
        )
    ),
    Row(
        ("grid_sampler_2d.default",),
        "n c [x0] [x1], n p q [two] -> n c p q",
        linear=(0,),
        filled=True,
    ),
    Row(
        ("grid_sampler_3d.default",),
        "n c [x0] [x1] [x2], n p q r [three] -> n c p q r",
        linear=(0,),
        filled=True,
    ),
    Row(
        ("grid_sampler_2d_backward.default",),
        "n c p q, n c [x0] [x1], n p q [two] -> n c [x0] [x1], n p q [two]",
        "sum",
        filled=True,
    ),
    Row(
        ("grid_sampler_3d_backward.default",),
        "n c p q r, n c [x0] [x1] [x2], n p q r [three] -> n c [x0] [x1] [x2], n p q r [three]",
        "sum",
        filled=True,
    ),
)

# Interpolations by scales: PyTorch replaces each by the op that takes sizes as well; in a program
# that it traces by other ops, of which some make tensors of numbers.
BY_SCALES: dict[str, str] = {
    f"{name}.vec": f"{name}.default"
    for row in ROWS
    for name, _, overload in (each.partition(".") for each in row.overloads)
    if "upsample" in name and "backward" not in name
}

"""Ops on windows of the last dims, such as pools, and their gradients, by names: the dims before
these, images and channels, are free.
"""

from __future__ import annotations

from re import findall
from typing import Any

from cute_sharding.relations.table.kernels import Sizes
from cute_sharding.relations.table.names import Rule, Shape, named, text
from cute_sharding.relations.table.row import Row


def windowed(spatial: int, operands: str = "x", results: str = "y") -> Rule:
    """The rule of an op over the last ``spatial`` dims. The first form is the first operand's.

    Args:
        operands: for each operand, "x" if its last dims are those of the image, and "y" if they
            have one row for each window; "=x" if the op reads only the sizes.
        results: the same for the results.
    """

    def rule(first: Shape, *_: Any, **__: Any) -> str | None:
        leading = len(first) - spatial
        if leading < 1:
            return None
        before = named(first)[:leading]
        names = {form: text([*before, *(f"[{form}{i}]" for i in range(spatial))]) for form in "xy"}
        come_in = [sign + names[form] for sign, form in findall("(=?)([xy])", operands)]
        come_out = [names[form] for form in results]
        return f"{', '.join(come_in)} -> {', '.join(come_out)}"

    last = "dim is" if spatial == 1 else f"{spatial} dims are"
    rule.__doc__ = f"``{operands} -> {results}``; the last {last} whole."
    return rule


ROWS: tuple[Row, ...] = (
    *(
        Row(
            tuple(name.format(n) for name in names),
            windowed(n, *forms),
            linear=(0,) if forms in (("x", "y"), ("y=x", "x")) else (),  # averages
            filled=True,
        )
        for n in (2, 3)
        for forms, names in (
            (("x", "y"), ("avg_pool{}d.default", "_adaptive_avg_pool{}d.default")),
            (
                ("y=x", "x"),
                ("avg_pool{}d_backward.default", "_adaptive_avg_pool{}d_backward.default"),
            ),
            (
                ("x", "yy"),
                ("max_pool{}d_with_indices.default", "adaptive_max_pool{}d.default"),
            ),
            (
                ("y=xy", "x"),
                (
                    "max_pool{}d_with_indices_backward.default",
                    "adaptive_max_pool{}d_backward.default",
                ),
            ),
            (("yy", "x"), ("max_unpool{}d.default",)),
        )
    ),
    *(
        row
        for n, kinds in (
            (1, ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d")),
            (
                2,
                (
                    *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d"),
                    *("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
                ),
            ),
            (3, ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d")),
        )
        for row in (
            Row(tuple(f"{kind}.default" for kind in kinds), windowed(n), linear=(0,), filled=True),
            Row(
                tuple(f"{kind}_backward.default" for kind in kinds),
                windowed(n, "y", "x"),
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

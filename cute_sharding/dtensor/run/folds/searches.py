"""The greatest number of each row and where it is: of equal ones the first, and no number (NaN)
before all. A device finds its own as the op does. Those of devices are compared as integers in
the same order, so that backends agree on all of them. A number of up to 32 bits and its place
travel as one integer; of wider ones, first the numbers, then the first place of those that are
equal.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.run.folds.states import States
from cute_sharding.dtensor.run.groups import all_on_all_ranks, all_on_each_rank, on_all_ranks, place
from cute_sharding.dtensor.run.numbered import (
    as_number,
    chain_of_dim,
    numbers_of,
)
from cute_sharding.layout.layout import row_major

_PLACES = 31  # bits of a place beside a number
_NO_NUMBER = {torch.int32: (1 << 31) - 1, torch.int64: (1 << 63) - 1}  # after all numbers


def _in_order(x: torch.Tensor, *, least: bool = False) -> torch.Tensor:
    """Integers in the order of the numbers, or in the reverse order: of 32 bits, or of 64."""
    bits = torch.int64 if x.dtype.itemsize == 8 else torch.int32
    if not x.dtype.is_floating_point:
        found = x.to(bits)
        return ~found if least else found
    x = x.to(torch.float64 if bits is torch.int64 else torch.float32) + 0.0  # -0. is 0.
    found = x.view(bits)
    found = torch.where(found < 0, found ^ _NO_NUMBER[bits], found)
    return (~found if least else found).masked_fill(x.isnan(), _NO_NUMBER[bits])


def _out_of_order(found: torch.Tensor, dtype: torch.dtype, *, least: bool = False) -> torch.Tensor:
    """The numbers that :func:`_in_order` has made integers of."""
    if not dtype.is_floating_point:
        return (~found if least else found).to(dtype)
    no_number = found == _NO_NUMBER[found.dtype]
    found = ~found if least else found
    found = torch.where(found < 0, found ^ _NO_NUMBER[found.dtype], found)
    floats = torch.float64 if found.dtype is torch.int64 else torch.float32
    return found.view(floats).masked_fill(no_number, torch.nan).to(dtype)


def _search(fold: States, x: torch.Tensor, *, least: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest or least numbers, as ordered integers, and their places: all folded dims have
    one row.
    """
    shape = tuple(map(as_number, fold.shape))
    chains = {d: chain_of_dim(d, fold.placements, fold.mesh) for d in fold.dims}
    steps = dict(zip(fold.dims, row_major(tuple([shape[d] for d in fold.dims]))))
    rows = prod([shape[d] for d in fold.dims])
    is_wide = x.dtype.itemsize == 8 or rows > 1 << _PLACES
    outer = [d for d in range(len(shape)) if d not in fold.dims]

    def own(rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        sizes = [1 if d in fold.dims else n for d, n in enumerate(x.shape)]
        count = prod([x.shape[d] for d in fold.dims])
        if count == 0:
            none = x.new_full(sizes, -1 << (63 if is_wide else 62), dtype=torch.int64)
            return [none, torch.full_like(none, rows)]
        flat = x.permute(*outer, *fold.dims).reshape(*[x.shape[d] for d in outer], count)
        flat = flat.to(torch.uint8) if x.dtype == torch.bool else flat
        at = flat.argmin(-1) if least else flat.argmax(-1)
        top = _in_order(flat.gather(-1, at.unsqueeze(-1)), least=least).to(torch.int64)
        placed = torch.zeros_like(at)
        for d in reversed(fold.dims):
            numbers = numbers_of(at % x.shape[d], shape[d], chains[d], place(fold.mesh, rank))
            placed, at = placed + numbers * steps[d], at // x.shape[d]
        top, placed = top.reshape(sizes), placed.reshape(sizes)
        if is_wide:
            return [top, placed]
        return [(top << _PLACES) + ((1 << _PLACES) - 1 - placed), placed]

    top, at = all_on_each_rank(own, x)
    (greatest,) = fold.all("max", top)
    if is_wide:
        at = on_all_ranks(
            lambda top, at, greatest: at.masked_fill(top != greatest, rows), top, at, greatest
        )
        return greatest, fold.all("min", at)[0]
    at = on_all_ranks(lambda x: (1 << _PLACES) - 1 - (x & ((1 << _PLACES) - 1)), greatest)
    narrow = torch.int64 if x.dtype.itemsize == 8 else torch.int32
    return on_all_ranks(lambda x: (x >> _PLACES).to(narrow), greatest), at


def _with_place(*, least: bool) -> Callable[..., Any]:
    """``max`` or ``min`` along a dim: the numbers and their places."""

    def greatest(
        fold: States, x: torch.Tensor, dim: Any, keepdim: bool = False
    ) -> tuple[torch.Tensor, ...]:
        found, at = _search(fold, x, least=least)
        numbers = on_all_ranks(lambda found: _out_of_order(found, x.dtype, least=least), found)
        return fold.without(numbers, keepdim), fold.without(at, keepdim)

    return greatest


def _place(*, least: bool) -> Callable[..., Any]:
    """``argmax`` or ``argmin``."""

    def search(
        fold: States, x: torch.Tensor, dim: Any = None, keepdim: bool = False
    ) -> torch.Tensor:
        return fold.without(_search(fold, x, least=least)[1], keepdim)

    return search


def aminmax(
    fold: States, x: torch.Tensor, *, dim: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, ...]:
    def own(x: torch.Tensor) -> list[torch.Tensor]:
        both = []
        for least in (True, False):
            if any(x.shape[d] == 0 for d in fold.dims):
                sizes = [1 if d in fold.dims else n for d, n in enumerate(x.shape)]
                none = _in_order(x.new_empty(0))
                both.append(none.new_full(sizes, torch.iinfo(none.dtype).min))
            else:
                found = (x.amin if least else x.amax)(fold.dims, keepdim=True)
                both.append(_in_order(found, least=least))
        return both

    found = zip((True, False), fold.all("max", *all_on_all_ranks(own, x)))
    return tuple(
        [
            fold.without(
                on_all_ranks(
                    lambda each, least=least: _out_of_order(each, x.dtype, least=least), each
                ),
                keepdim,
            )
            for least, each in found
        ]
    )


# By the names in the rows of the table.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": _with_place(least=False),
    "min": _with_place(least=True),
    "argmax": _place(least=False),
    "argmin": _place(least=True),
    "aminmax": aminmax,
}

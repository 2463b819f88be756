"""Folds: ops along a sharded dim that gather no rows. Each device folds its rows to a small state,
the devices combine their states, and each finishes its own rows.

A state has the shape of the op's operand, with one row of each folded dim. It is a tensor with a
pending reduction, and combining it is a redistribution of that tensor (:mod:`.redistribute`): one
all-reduce, or what is cheaper, eager and in graphs. A device without rows has the neutral state and
takes part. Numbers of 16 bits are folded in 32, as PyTorch's kernels do; squares are summed about
the mean, and exponentials below the maximum.

The states and their gradients are well known: of a softmax (Milakov and Gimelshein 2018), of a
variance in two passes (Chan, Golub and LeVeque 1983).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    TensorMeta,
    cut_of,
)
from cute_sharding.dtensor.run.groups import all_on_each_rank, on_each_rank, place
from cute_sharding.dtensor.run.numbered import (
    as_number,
    chain_of_dim,
    checked,
    is_at_hand,
    numbers_of,
    own_rows,
)
from cute_sharding.dtensor.run.placements import placement_of
from cute_sharding.dtensor.run.redistribute import combined, redistribute_local_tensor
from cute_sharding.layout.layout import row_major

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class States:
    """How the states of one op lie.

    Attributes:
        mesh: the DeviceMesh.
        shape: of the first operand.
        dims: its dims that are folded.
        placements: those of the first operand.
        over: the mesh dims whose devices combine states.
        of_state: the shape of a state.
        op: the op.
        operands: how its operands lie when it runs.
        results: how its results lie; None for one that is no tensor.
    """

    mesh: Any
    shape: tuple[Any, ...]
    dims: tuple[int, ...]
    placements: tuple[Placement, ...]
    over: tuple[int, ...]
    of_state: tuple[Any, ...]
    op: Any
    operands: tuple[DTensorSpec, ...]
    results: Sequence[DTensorSpec | None]

    def of_result(self, result: int, columns: int = 0) -> States:
        """Those of states that have the shape of a result, with so many more columns."""
        spec: Any = self.results[result]
        *others, last = spec.shape
        shape = (*others, last + columns)
        return replace(
            self, shape=shape, dims=(), placements=tuple(spec.placements), of_state=shape
        )

    @property
    def rows(self) -> Any:
        """The number of rows that are folded to one state."""
        return prod([self.shape[d] for d in self.dims])

    @cached_property
    def _ends(self) -> dict[tuple[str, torch.dtype, int, int], list[DTensorSpec]]:
        """What :meth:`ends` has given: each call of an op asks again, and specs keep their hash."""
        return {}

    def ends(
        self, op: str, dtype: torch.dtype, together: int = 1, columns: int = 0
    ) -> list[DTensorSpec]:
        """How a state lies that ``op`` combines, and how it lies then; ``together``: several. For
        "gather", how the states of all devices lie, one behind the other, and where they are
        needed; ``together``: of one device; ``columns``: of a last dim that is theirs alone.
        """
        key = op, dtype, together, columns
        found = self._ends.get(key)
        if found is None:
            found = self._ends[key] = self._made_ends(*key)
        return found

    def _made_ends(
        self, op: str, dtype: torch.dtype, together: int, columns: int
    ) -> list[DTensorSpec]:
        is_gathered = op == "gather"
        parts = together * prod([self.mesh.size(m) for m in self.over if is_gathered])
        in_front = (parts,) if is_gathered or together > 1 else ()
        shape = (*in_front, *self.of_state, *((columns,) if columns else ()))
        meta = TensorMeta(torch.Size(shape), row_major(shape), dtype)
        rows = [_behind(p, len(in_front)) for p in self.placements]
        before = Shard(0) if is_gathered else Partial(op)
        return [
            DTensorSpec(
                self.mesh,
                tuple([of if m in self.over else p for m, p in enumerate(rows)]),
                meta,
            )
            for of in (before, Replicate())
        ]

    def all(self, op: str, *states: torch.Tensor) -> list[torch.Tensor]:
        """The states of all devices together, combined by ``op``; several travel in one."""
        together, state = len(states), states[0]
        if together > 1:
            state = on_each_rank(lambda _, *xs: torch.stack(xs), *states)
        state = combined(state, *self.ends(op, state.dtype, together))
        return list(state.unbind()) if together > 1 else [state]

    def of_each(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """The states of all devices, one device behind the other in a dim in front, in which each
        device has as many. They travel in one, as bytes.
        """
        dtypes, count = [state.dtype for state in states], states[0].shape[0]
        if len(states) == 1:
            ends = self.ends("gather", dtypes[0], count)
            return [redistribute_local_tensor(states[0], *ends, counted=False)]

        def bytes_of(_: int, *states: torch.Tensor) -> torch.Tensor:
            parts = [each.contiguous().unsqueeze(-1).view(torch.uint8) for each in states]
            return torch.cat(parts, -1)

        width = sum([dtype.itemsize for dtype in dtypes])
        ends = self.ends("gather", torch.uint8, count, width)
        given = redistribute_local_tensor(on_each_rank(bytes_of, *states), *ends, counted=False)

        def apart(_: int, given: torch.Tensor) -> list[torch.Tensor]:
            parts = given.split([dtype.itemsize for dtype in dtypes], -1)
            copies = [each.clone(memory_format=torch.contiguous_format) for each in parts]
            return [each.view(dtype).squeeze(-1) for each, dtype in zip(copies, dtypes)]

        return all_on_each_rank(apart, given)

    def folded(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """The local state: the sum of the function's values over the folded dims, in a wider dtype
        where these have 16 bits.
        """

        def of_rank(_: int, *xs: torch.Tensor) -> torch.Tensor:
            found = function(*xs)
            return found.sum(self.dims, keepdim=True, dtype=wider(found.dtype))

        return on_each_rank(of_rank, *tensors)

    def greatest(self, x: torch.Tensor) -> torch.Tensor:
        """The greatest number of each row; without rows minus infinity."""

        def of_rank(_: int, x: torch.Tensor) -> torch.Tensor:
            if x.numel() or all(x.shape[d] for d in self.dims):
                return wide(x.amax(self.dims, keepdim=True))
            shape = [1 if d in self.dims else n for d, n in enumerate(x.shape)]
            return x.new_full(shape, -torch.inf, dtype=wider(x.dtype))

        return on_each_rank(of_rank, x)

    def finish(
        self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor, result: int = 0
    ) -> torch.Tensor:
        """A result of this device's own rows, from operands and combined states."""
        dtype = self.dtype(result)
        return on_each_rank(lambda _, *xs: _of_dtype(function(*xs), dtype), *tensors)

    def dtype(self, result: int) -> torch.dtype:
        """The dtype of a result."""
        spec: Any = self.results[result]
        dtype: torch.dtype = spec.tensor_meta.dtype
        return dtype

    def without(self, x: torch.Tensor, keepdim: bool) -> torch.Tensor:
        """A result that has the folded dims only with ``keepdim``."""
        return x if keepdim else x.squeeze(self.dims)


def _behind(placement: Placement, dims: int) -> Placement:
    """The placement of a tensor with so many more dims in front."""
    cut = cut_of(placement)
    return placement if cut is None or not dims else placement_of((cut[0] + dims, cut[1]))


def wider(dtype: torch.dtype) -> torch.dtype:
    """A dtype of at least 32 bits."""
    return _WIDER.get(dtype, dtype)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor with at least 32 bits a number. (An operand that meets a state, which has as many,
    needs no copy of its own: the result of the two has them.)
    """
    return _of_dtype(x, wider(x.dtype))


def _of_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)


# -- along dims ------------------------------------------------------------------------------------


def _exponentials(fold: States, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row, and the sum of exponentials below it."""
    (top,) = fold.all("max", fold.greatest(x))
    (total,) = fold.all("sum", fold.folded(lambda x, top: (x - top).exp_(), x, top))
    return top, total


def softmax(fold: States, x: torch.Tensor, *_: Any) -> torch.Tensor:
    states = _exponentials(fold, x)
    return fold.finish(lambda x, top, total: (x - top).exp_().div_(total), x, *states)


def safe_softmax(
    fold: States, x: torch.Tensor, _: Any, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """0 in rows that are all minus infinity."""
    x = x if dtype is None else x.to(dtype)
    (top,) = fold.all("max", fold.greatest(x))
    base = on_each_rank(lambda _, top: top.masked_fill(top == -torch.inf, 0), top)
    (total,) = fold.all("sum", fold.folded(lambda x, base: (x - base).exp_(), x, base))

    def finish(x: Any, base: Any, total: Any) -> torch.Tensor:
        return (x - base).exp_().div_(total).masked_fill_(total == 0, 0)

    return fold.finish(finish, x, base, total)


def log_softmax(fold: States, x: torch.Tensor, *_: Any) -> torch.Tensor:
    states = _exponentials(fold, x)
    return fold.finish(lambda x, top, total: (x - top).sub_(total.log()), x, *states)


def softmax_backward(fold: States, grad: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    (total,) = fold.all("sum", fold.folded(lambda grad, y: wide(grad).mul(y), grad, y))
    return fold.finish(lambda grad, y, total: (grad - total).mul_(y), grad, y, total)


def log_softmax_backward(
    fold: States, grad: torch.Tensor, y: torch.Tensor, *_: Any
) -> torch.Tensor:
    (total,) = fold.all("sum", fold.folded(lambda grad: grad, grad))
    return fold.finish(
        lambda grad, y, total: wide(y).exp().mul_(total).neg_().add_(grad), grad, y, total
    )


def logsumexp(fold: States, x: torch.Tensor, dims: Any, keepdim: bool = False) -> torch.Tensor:
    def base(top: torch.Tensor) -> torch.Tensor:
        return top.masked_fill(top.isinf(), 0)  # infinity less infinity is no number

    (top,) = fold.all("max", fold.greatest(x))
    (total,) = fold.all("sum", fold.folded(lambda x, top: (x - base(top)).exp_(), x, top))
    return fold.without(
        fold.finish(lambda top, total: total.log() + base(top), top, total), keepdim
    )


def _moments(fold: States, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of each row, and the sum of squares about it."""
    (total,) = fold.all("sum", fold.folded(lambda x: x, x))
    mean = total / fold.rows
    (squares,) = fold.all("sum", fold.folded(lambda x, mean: (x - mean).square_(), x, mean))
    return mean, squares


def _spread(*, root: bool, mean: bool) -> Callable[..., Any]:
    """A variance or a standard deviation, alone or with the mean."""

    def spread(
        fold: States,
        x: torch.Tensor,
        dim: Any = None,
        *,
        correction: Any = 1,
        keepdim: bool = False,
    ) -> Any:
        centre, squares = _moments(fold, x)
        freedom = max(fold.rows - (1 if correction is None else correction), 0)

        def finish(squares: torch.Tensor) -> torch.Tensor:
            found = squares / freedom
            return found.sqrt() if root else found

        found = fold.without(fold.finish(finish, squares), keepdim)
        if not mean:
            return found
        return found, fold.without(fold.finish(lambda mean: mean, centre, result=1), keepdim)

    return spread


def _powers(x: torch.Tensor, p: float) -> torch.Tensor:
    """What is added up for a norm of this order; of order infinity what is compared."""
    x = wide(x).abs()
    return x if p in (1, torch.inf) else (x != 0).to(x.dtype) if p == 0 else x.pow(p)


def _root(total: torch.Tensor, p: float) -> torch.Tensor:
    return total if p in (0, 1, torch.inf) else total.pow(1 / p)


def renorm(fold: States, x: torch.Tensor, p: float, _: int, most: float) -> torch.Tensor:
    """Rows of which the norm is greater than ``most`` get that norm."""

    def of_rank(_: int, x: torch.Tensor) -> torch.Tensor:
        found = _powers(x, p)
        if p != torch.inf:
            return found.sum(fold.dims, keepdim=True)
        sizes = [1 if d in fold.dims else n for d, n in enumerate(x.shape)]
        return found.amax(fold.dims, keepdim=True) if x.numel() else found.new_zeros(sizes)

    (total,) = fold.all("max" if p == torch.inf else "sum", on_each_rank(of_rank, x))

    def finish(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        norm = _root(total, p)
        return x * torch.where(norm > most, most / (norm + 1e-7), 1)

    return fold.finish(finish, x, total)


def distances(
    fold: States, x: torch.Tensor, y: torch.Tensor, p: float = 2, *given: Any
) -> torch.Tensor:
    """Of each pair of rows, of which each device has some columns."""

    def of_rank(_: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        options = (p, *given) if fold.op._schema.name == "aten::_cdist_forward" else ()
        found = fold.op(x, y, *options)
        return found if p == 0 else _powers(found, p)

    of_pairs = fold.of_result(0)
    (total,) = of_pairs.all("max" if p == torch.inf else "sum", on_each_rank(of_rank, x, y))
    return fold.finish(lambda total: _root(total, p), total)


# -- searches --------------------------------------------------------------------------------------
# The greatest number of each row and where it is: of equal ones the first, and no number (NaN)
# before all. A device finds its own as the op does. Those of devices are compared as integers in
# the same order, so that backends agree on all of them. A number of up to 32 bits and its place
# travel as one integer; of wider ones, first the numbers, then the first place of those that are
# equal.

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
        at = on_each_rank(
            lambda _, top, at, greatest: at.masked_fill(top != greatest, rows), top, at, greatest
        )
        return greatest, fold.all("min", at)[0]
    at = on_each_rank(lambda _, x: (1 << _PLACES) - 1 - (x & ((1 << _PLACES) - 1)), greatest)
    narrow = torch.int64 if x.dtype.itemsize == 8 else torch.int32
    return on_each_rank(lambda _, x: (x >> _PLACES).to(narrow), greatest), at


def _with_place(*, least: bool) -> Callable[..., Any]:
    """``max`` or ``min`` along a dim: the numbers and their places."""

    def greatest(
        fold: States, x: torch.Tensor, dim: Any, keepdim: bool = False
    ) -> tuple[torch.Tensor, ...]:
        found, at = _search(fold, x, least=least)
        numbers = on_each_rank(lambda _, found: _out_of_order(found, x.dtype, least=least), found)
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
    def own(_: int, x: torch.Tensor) -> list[torch.Tensor]:
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

    found = zip((True, False), fold.all("max", *all_on_each_rank(own, x)))
    return tuple(
        [
            fold.without(
                on_each_rank(
                    lambda _, each, least=least: _out_of_order(each, x.dtype, least=least), each
                ),
                keepdim,
            )
            for least, each in found
        ]
    )


# -- norms -----------------------------------------------------------------------------------------


def layer_norm(
    fold: States,
    x: torch.Tensor,
    _: Any,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    mean, squares = _moments(fold, x)
    scale = on_each_rank(lambda _, squares: (squares / fold.rows + eps).rsqrt(), squares)

    def finish(x: Any, mean: Any, scale: Any, *others: Any) -> torch.Tensor:
        found, given = (x - mean).mul_(scale), list(others)
        found = found if weight is None else found.mul_(given.pop(0))
        return found if bias is None else found.add_(given.pop(0))

    others = [each for each in (weight, bias) if each is not None]
    return (
        fold.finish(finish, x, mean, scale, *others),
        fold.finish(lambda mean: mean, mean, result=1),
        fold.finish(lambda scale: scale, scale, result=2),
    )


def layer_norm_backward(
    fold: States,
    grad: torch.Tensor,
    x: torch.Tensor,
    _: Any,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    weights = () if weight is None else (weight,)
    given = grad, x, mean, scale, *weights

    def of_row(grad: Any, x: Any, mean: Any, scale: Any, *weight: Any) -> Any:
        grad = wide(grad)
        return grad * weight[0] if weight else grad, (x - wide(mean)).mul_(scale)

    dx = None
    if mask[0]:
        sums = fold.all(
            "sum",
            fold.folded(lambda *given: of_row(*given)[0], *given),
            fold.folded(lambda *given: prod(of_row(*given)), *given),
        )

        def finish(one: Any, other: Any, *given: Any) -> torch.Tensor:
            of, row = of_row(*given)
            return (of - one / fold.rows - row * (other / fold.rows)) * given[3]

        dx = fold.finish(finish, *sums, *given)
    outer = [d for d in range(len(fold.shape)) if d not in fold.dims]

    def over_rows(x: torch.Tensor) -> torch.Tensor:
        return x.sum(outer, dtype=wider(x.dtype)) if outer else x

    return (
        dx,
        fold.finish(
            lambda grad, x, mean, scale: over_rows((x - wide(mean)).mul_(scale).mul_(grad)),
            *given[:4],
            result=1,
        )
        if mask[1]
        else None,
        fold.finish(over_rows, grad, result=2) if mask[2] else None,
    )


def rms_norm(
    fold: States, x: torch.Tensor, _: Any, weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, ...]:
    (squares,) = fold.all("sum", fold.folded(lambda x: wide(x).square(), x))
    least = torch.finfo(squares.dtype).eps if eps is None else eps
    scale = on_each_rank(lambda _, squares: (squares / fold.rows + least).rsqrt(), squares)

    def finish(x: Any, scale: Any, *weight: Any) -> torch.Tensor:
        return (x * scale).mul_(weight[0]) if weight else x * scale

    weights = () if weight is None else (weight,)
    return (
        fold.finish(finish, x, scale, *weights),
        fold.finish(lambda scale: scale, scale, result=1),
    )


def rms_norm_backward(
    fold: States,
    grad: torch.Tensor,
    x: torch.Tensor,
    _: Any,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    weights = () if weight is None else (weight,)
    given = grad, x, scale, *weights

    def of_row(grad: Any, x: Any, scale: Any, *weight: Any) -> Any:
        grad = wide(grad)
        return grad * weight[0] if weight else grad, x * wide(scale)

    dx = None
    if mask[0]:
        (total,) = fold.all("sum", fold.folded(lambda *given: prod(of_row(*given)), *given))

        def finish(total: Any, *given: Any) -> torch.Tensor:
            of, row = of_row(*given)
            return (of - row * (total / fold.rows)) * given[2]

        dx = fold.finish(finish, total, *given)
    outer = [d for d in range(len(fold.shape)) if d not in fold.dims]

    def over_rows(grad: Any, x: Any, scale: Any) -> torch.Tensor:
        found = (x * wide(scale)).mul_(grad)
        return found.sum(outer) if outer else found

    return dx, fold.finish(over_rows, *given[:3], result=1) if mask[1] else None


def _of_channels(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Numbers of channels, as the dim 1 of images."""
    return x.reshape(-1, *[1] * (like.ndim - 2))


def _batch_norm(
    fold: States,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the mean of each channel, one over the deviation, and the sum of squares."""
    mean, squares = _moments(fold, x)
    scale = on_each_rank(lambda _, squares: (squares / fold.rows + eps).rsqrt(), squares)

    def finish(x: Any, mean: Any, scale: Any, *others: Any) -> torch.Tensor:
        given = [_of_channels(each, x) for each in others]
        found = (x - mean).mul_(scale)
        found = found if weight is None else found.mul_(given.pop(0))
        return found if bias is None else found.add_(given.pop(0))

    others = [each for each in (weight, bias) if each is not None]
    flat = on_each_rank(lambda _, mean: mean.reshape(-1), mean)
    return (
        fold.finish(finish, x, mean, scale, *others),
        flat,
        on_each_rank(lambda _, scale: scale.reshape(-1), scale),
        on_each_rank(lambda _, squares: squares.reshape(-1), squares),
    )


def _running(
    fold: States,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    momentum: float,
    own: torch.Tensor,
    squares: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The running statistics after a batch."""
    freedom = fold.rows - 1

    def moved(before: torch.Tensor | None, now: torch.Tensor) -> torch.Tensor | None:
        if before is None:
            return None
        return on_each_rank(
            lambda _, before, now: now.to(before.dtype) * momentum + before * (1 - momentum),
            before,
            now,
        )

    unbiased = on_each_rank(lambda _, squares: squares / freedom, squares)
    return moved(mean, own), moved(variance, unbiased)


def _update(before: torch.Tensor | None, after: torch.Tensor | None) -> None:
    if before is not None and after is not None:
        on_each_rank(lambda _, before, after: before.copy_(after), before, after)


def batch_norm(
    fold: States,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    _: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    y, mean, scale, squares = _batch_norm(fold, x, weight, bias, eps)
    after = _running(fold, running_mean, running_variance, momentum, mean, squares)
    _update(running_mean, after[0])
    _update(running_variance, after[1])
    return y, mean, scale


def batch_norm_alone(
    fold: States, x: Any, weight: Any, bias: Any, _: bool, __: float, eps: float
) -> tuple[torch.Tensor, ...]:
    return _batch_norm(fold, x, weight, bias, eps)[:3]


def batch_norm_anew(
    fold: States, x: Any, weight: Any, bias: Any, *given: Any
) -> tuple[torch.Tensor | None, ...]:
    running_mean, running_variance, _, momentum, eps = given
    y, mean, scale, squares = _batch_norm(fold, x, weight, bias, eps)
    after = _running(fold, running_mean, running_variance, momentum, mean, squares)
    return y, mean, scale, *after


def _with_nothing_saved(fold: States, *given: Any) -> tuple[torch.Tensor, ...]:
    """As :func:`batch_norm`, with a last result that is empty: what a backend would save."""
    found = batch_norm(fold, *given)
    return *found, on_each_rank(lambda _, x: x.new_empty(0, dtype=torch.uint8), given[0])


def batch_norm_updating(fold: States, *given: Any) -> tuple[torch.Tensor, ...]:
    return _with_nothing_saved(fold, *given[:5], True, *given[5:])


def batch_norm_backward(
    fold: States,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *given: Any,
) -> tuple[torch.Tensor | None, ...]:
    _, _, mean, scale, _, _, mask, *_ = given
    weights = () if weight is None else (weight,)
    operands = grad, x, mean, scale

    def of_row(grad: Any, x: Any, mean: Any, scale: Any) -> Any:
        centred = (x - wide(_of_channels(mean, x))).mul_(_of_channels(scale, x))
        return wide(grad), centred

    one, other = fold.all(
        "sum",
        fold.folded(lambda grad: grad, grad),
        fold.folded(lambda *given: prod(of_row(*given)), *operands),
    )

    def finish(one: Any, other: Any, *given: Any) -> torch.Tensor:
        own, row = of_row(*given[:4])
        found = own - one / fold.rows - row * (other / fold.rows)
        found = found * _of_channels(given[3], given[1])
        return found * _of_channels(given[4], given[1]) if weights else found

    flat = [
        on_each_rank(lambda _, x, k=k: x.reshape(-1).to(fold.dtype(k)), x) if mask[k] else None
        for k, x in ((1, other), (2, one))
    ]
    return fold.finish(finish, one, other, *operands, *weights) if mask[0] else None, *flat


def batch_norm_backward_of_cudnn(
    fold: States, x: Any, grad: Any, weight: Any, *given: Any
) -> tuple[torch.Tensor | None, ...]:
    *statistics, eps, _ = given
    return batch_norm_backward(fold, grad, x, weight, *statistics, True, eps, [True] * 3)


# Of groups of channels: a channel's group is a row of the state. A device adds up what it has of
# each group; it has all groups, or, if none is on several devices, its own.


def _groups(fold: States, x: torch.Tensor) -> torch.Tensor:
    """For each of the device's channels its group among those of its states."""
    channels, groups = as_number(fold.shape[1]), as_number(fold.of_state[1])
    chain = chain_of_dim(1, fold.placements, fold.mesh)

    def of_rank(rank: int, x: torch.Tensor) -> torch.Tensor:
        own = torch.arange(x.shape[1], device=x.device)
        if _are_all_here(fold):
            own = numbers_of(own, channels, chain, place(fold.mesh, rank))
        return own // (channels // groups)

    return on_each_rank(of_rank, x)


def _are_all_here(fold: States) -> bool:
    """Whether a device has states of all groups; otherwise only of those of its own channels."""
    return all(m in fold.over for *_, m in chain_of_dim(1, fold.placements, fold.mesh))


def _sum_of_groups(
    fold: States, at: torch.Tensor, function: Callable[..., Any], *tensors: Any
) -> torch.Tensor:
    """The local state: for each image and group the sum of the function's values, which gets the
    channels' groups, and these tensors.
    """
    channels, groups = as_number(fold.shape[1]), as_number(fold.of_state[1])

    def of_rank(_: int, at: Any, *xs: Any) -> torch.Tensor:
        found = function(at, *xs)
        inner = tuple(range(2, found.ndim))
        found = found.sum(inner, dtype=wider(found.dtype)) if inner else wide(found)
        count = groups if _are_all_here(fold) else found.shape[1] * groups // channels
        sums = found.new_zeros(found.shape[0], count).index_add_(1, at, found)
        return sums.reshape(*sums.shape, *[1] * (len(fold.shape) - 2))

    return on_each_rank(of_rank, at, *tensors)


def _of_its_group(state: Any, x: Any, at: torch.Tensor) -> torch.Tensor:
    """For each channel of x the state of its group."""
    shape = [*state.shape[:2], *[1] * (x.ndim - 2)]
    return state.reshape(shape)[:, at]


def group_norm(
    fold: States, x: torch.Tensor, weight: Any, bias: Any, *given: Any
) -> tuple[torch.Tensor, ...]:
    rows, eps, at = prod(fold.shape[1:]) / fold.of_state[1], given[-1], _groups(fold, x)
    (total,) = fold.all("sum", _sum_of_groups(fold, at, lambda _, x: x, x))
    mean = total / rows

    def deviation(at: Any, x: Any, mean: Any) -> torch.Tensor:
        return (x - _of_its_group(mean, x, at)).square_()

    (squares,) = fold.all("sum", _sum_of_groups(fold, at, deviation, x, mean))
    scale = on_each_rank(lambda _, squares: (squares / rows + eps).rsqrt(), squares)

    def finish(at: Any, x: Any, mean: Any, scale: Any, *others: Any) -> torch.Tensor:
        given = [_of_channels(each, x) for each in others]
        found = x - _of_its_group(mean, x, at)
        found = found.mul_(_of_its_group(scale, x, at))
        found = found if weight is None else found.mul_(given.pop(0))
        return found if bias is None else found.add_(given.pop(0))

    others = [each for each in (weight, bias) if each is not None]

    def flat(k: int, state: torch.Tensor) -> torch.Tensor:
        return on_each_rank(lambda _, s: s.reshape(s.shape[:2]).to(fold.dtype(k)), state)

    return fold.finish(finish, at, x, mean, scale, *others), flat(1, mean), flat(2, scale)


def group_norm_backward(
    fold: States, grad: Any, x: Any, mean: Any, scale: Any, weight: Any, *given: Any
) -> tuple[torch.Tensor | None, ...]:
    mask, rows = given[-1], prod(fold.shape[1:]) / fold.of_state[1]
    weights = () if weight is None else (weight,)
    at = _groups(fold, x)
    operands = grad, x, mean, scale, *weights

    def centred(at: Any, x: Any, mean: Any, scale: Any) -> torch.Tensor:
        found = x - wide(_of_its_group(mean, x, at))
        return found.mul_(_of_its_group(scale, x, at))

    def own(grad: Any, *weight: Any) -> torch.Tensor:
        return wide(grad) * _of_channels(weight[0], grad) if weight else wide(grad)

    dx = None
    if mask[0]:
        sums = fold.all(
            "sum",
            _sum_of_groups(fold, at, lambda _, grad, *weight: own(grad, *weight), grad, *weights),
            _sum_of_groups(
                fold,
                at,
                lambda at, grad, x, mean, scale, *weight: (
                    own(grad, *weight) * centred(at, x, mean, scale)
                ),
                *operands,
            ),
        )

        def finish(at: Any, one: Any, other: Any, grad: Any, x: Any, *given: Any) -> Any:
            mean, scale, *weight = given
            one, other = (_of_its_group(each, x, at) / rows for each in (one, other))
            found = own(grad, *weight) - one - centred(at, x, mean, scale) * other
            return found * _of_its_group(scale, x, at)

        dx = fold.finish(finish, at, *sums, *operands)

    def over_images(x: torch.Tensor) -> torch.Tensor:
        return x.sum([d for d in range(x.ndim) if d != 1], dtype=wider(x.dtype))

    return (
        dx,
        _of_weights(
            fold,
            1,
            lambda at, grad, x, mean, scale: over_images(grad * centred(at, x, mean, scale)),
            at,
            *operands[:4],
        )
        if mask[1]
        else None,
        _of_weights(fold, 2, over_images, grad) if mask[2] else None,
    )


def _of_weights(
    fold: States, k: int, function: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """The gradient of weights of channels: the sum of the function's values, of all elements of an
    image; over images it is left pending.
    """
    sums = on_each_rank(lambda _, *xs: function(*xs), *tensors)
    cuts = list(map(cut_of, fold.placements))
    ends = [
        [
            Replicate() if cut is None else placement_of((0, cut[1])) if cut[0] == 1 else of(cut[0])
            for cut in cuts
        ]
        for of in (lambda _: Partial("sum"), lambda d: Replicate() if d else Partial("sum"))
    ]
    if ends[0] != ends[1]:
        shape = (fold.shape[1],)
        meta = TensorMeta(torch.Size(shape), row_major(shape), sums.dtype)
        before, after = (DTensorSpec(fold.mesh, tuple(end), meta) for end in ends)
        sums = combined(sums, before, after)
    return on_each_rank(lambda _, sums: sums.to(fold.dtype(k)), sums)


# -- classes ---------------------------------------------------------------------------------------
# The class of a row is on one device, which gives what it picks; the others give nothing.


def _of_classes(fold: States, target: torch.Tensor, ignore: int) -> tuple[torch.Tensor, ...]:
    """For each row, the number of its class among this device's own classes, with a dim for them,
    and whether the row counts here.
    """
    (dim,), n = fold.dims, as_number(fold.shape[fold.dims[0]])
    chain = chain_of_dim(dim, fold.placements, fold.mesh)

    def of_rank(rank: int, target: torch.Tensor) -> list[torch.Tensor]:
        counted = target != ignore
        classes = checked(target.masked_fill(~counted, 0), n, "Target")
        own, _, is_own = own_rows(classes, n, chain, place(fold.mesh, rank))
        counts = (is_own & counted).unsqueeze(dim)
        return [own.unsqueeze(dim).masked_fill(~counts, 0), counts]

    return tuple(all_on_each_rank(of_rank, target))


def _pick(x: torch.Tensor, at: torch.Tensor, counts: torch.Tensor, dim: int) -> torch.Tensor:
    """The numbers of the rows' own classes, and 0 of other rows."""
    if x.shape[dim] == 0:
        return torch.zeros_like(counts, dtype=x.dtype)
    return x.gather(dim, at).masked_fill(~counts, 0)


def _weights(
    weight: torch.Tensor, at: torch.Tensor, counts: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """The weights of the rows' own classes, and 0 of other rows."""
    if weight.shape[0] == 0:
        return torch.zeros_like(counts, dtype=like.dtype)
    return weight[at].to(like.dtype).masked_fill(~counts, 0)


def nll_loss(
    fold: States,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    (dim,) = fold.dims
    at, counts = _of_classes(fold, target, ignore)
    weights = () if weight is None else (weight,)

    def picked(_: int, x: Any, at: Any, counts: Any, *weight: Any) -> list[torch.Tensor]:
        found = -wide(_pick(x, at, counts, dim))
        if not weight:
            return [found]
        of_rows = _weights(weight[0], at, counts, found)
        return [found * of_rows, of_rows]

    states = fold.all("sum", *all_on_each_rank(picked, x, at, counts, *weights))

    def finish(_: int, target: Any, loss: Any, *of_rows: Any) -> list[torch.Tensor]:
        loss = loss.squeeze(dim)
        one = of_rows[0].squeeze(dim) if of_rows else (target != ignore).to(loss.dtype)
        total = one.sum()
        if reduction == 0:
            loss, total = loss, total.new_zeros(())
        else:
            loss = loss.sum() / total if reduction == 1 else loss.sum()
        return [loss.to(fold.dtype(0)), total.to(fold.dtype(1))]

    loss, total = all_on_each_rank(finish, target, *states)
    return loss, total


def nll_loss_backward(
    fold: States,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore: int,
    total: torch.Tensor,
) -> torch.Tensor:
    (dim,) = fold.dims
    at, counts = _of_classes(fold, target, ignore)
    weights = () if weight is None else (weight,)

    def of_rank(
        _: int, grad: Any, x: Any, total: Any, at: Any, counts: Any, *weight: Any
    ) -> torch.Tensor:
        zeros = torch.zeros_like(x)
        if x.shape[dim] == 0:
            return zeros
        of_rows = wide(grad.unsqueeze(dim) if reduction == 0 else grad).expand(counts.shape)
        if weight:
            of_rows = of_rows * _weights(weight[0], at, counts, of_rows)
        if reduction == 1:
            of_rows = of_rows / wide(total)
        return zeros.scatter(dim, at, -of_rows.masked_fill(~counts, 0).to(x.dtype))

    return on_each_rank(of_rank, grad, x, total, at, counts, *weights)


# -- rows by number --------------------------------------------------------------------------------


def bags(
    fold: States,
    table: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: torch.Tensor | None = None,
    with_last: bool = False,
    padding: int = -1,
) -> tuple[torch.Tensor, ...]:
    """Sums or means of bags of rows. A device takes the rows that it has, in the order of the
    indices, and zeros for others, and the op runs on these.
    """
    n = as_number(fold.shape[0])
    chain = chain_of_dim(0, fold.placements, fold.mesh)
    padding = padding + n if padding < -1 else padding
    given = () if weights is None else (weights,)

    def of_rank(rank: int, table: Any, indices: Any, offsets: Any, *weights: Any) -> Any:
        own, count, is_own = own_rows(
            checked(indices, n, "index"), n, chain, place(fold.mesh, rank)
        )
        rows = table if count else table.new_zeros(1, *table.shape[1:])
        rows = rows.index_select(0, own.masked_fill(~is_own, 0))
        rows = rows.masked_fill(~is_own.unsqueeze(1), 0)
        at = torch.arange(indices.shape[0], dtype=indices.dtype, device=indices.device)
        if padding >= 0:  # a row that no bag counts
            rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
            at = torch.where(indices == padding, indices.shape[0], at)
        return fold.op(
            rows,
            at,
            offsets,
            by_frequency,
            mode,
            sparse,
            weights[0] if weights else None,
            with_last,
            indices.shape[0] if padding >= 0 else -1,
        )

    summed, *others = all_on_each_rank(of_rank, table, indices, offsets, *given)
    (total,) = fold.of_result(0).all("sum", summed)
    return total, *others


def masked_scatter(
    fold: States, x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """A device counts the elements that come before its own in the whole mask."""
    shape = tuple(map(as_number, fold.shape))
    chains = [chain_of_dim(d, fold.placements, fold.mesh) for d in range(len(shape))]

    def of_rank(rank: int, x: Any, mask: Any, source: Any) -> torch.Tensor:
        mask = mask.expand(shape)
        at = mask.reshape(-1).cumsum(0).reshape(shape) - 1
        if is_at_hand(mask) and mask.sum() > source.numel():
            return fold.op(x.new_zeros(shape), mask, source)  # which raises
        for d, chain in enumerate(chains):
            if chain:
                own = torch.arange(x.shape[d], device=x.device)
                numbers = numbers_of(own, shape[d], chain, place(fold.mesh, rank))
                mask, at = mask.index_select(d, numbers), at.index_select(d, numbers)
        if source.numel() == 0:
            return x.clone()
        return torch.where(mask, source.reshape(-1)[at.clamp_min(0)], x)

    found = on_each_rank(of_rank, x, mask, source)
    if fold.op._schema.is_mutable:
        on_each_rank(lambda _, x, found: x.copy_(found), x, found)
        return x
    return found


# By the names in the rows of the table.
FOLDS: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "safe_softmax": safe_softmax,
    "log_softmax": log_softmax,
    "softmax_backward": softmax_backward,
    "log_softmax_backward": log_softmax_backward,
    "logsumexp": logsumexp,
    "renorm": renorm,
    "distances": distances,
    "var": _spread(root=False, mean=False),
    "std": _spread(root=True, mean=False),
    "var_mean": _spread(root=False, mean=True),
    "std_mean": _spread(root=True, mean=True),
    "max": _with_place(least=False),
    "min": _with_place(least=True),
    "argmax": _place(least=False),
    "argmin": _place(least=True),
    "aminmax": aminmax,
    "layer_norm": layer_norm,
    "layer_norm_backward": layer_norm_backward,
    "rms_norm": rms_norm,
    "rms_norm_backward": rms_norm_backward,
    "batch_norm": batch_norm,
    "batch_norm_alone": batch_norm_alone,
    "batch_norm_anew": batch_norm_anew,
    "batch_norm_updating": batch_norm_updating,
    "batch_norm_of_cudnn": _with_nothing_saved,
    "batch_norm_backward": batch_norm_backward,
    "batch_norm_backward_of_cudnn": batch_norm_backward_of_cudnn,
    "group_norm": group_norm,
    "group_norm_backward": group_norm_backward,
    "bags": bags,
    "masked_scatter": masked_scatter,
    "nll_loss": nll_loss,
    "nll_loss_backward": nll_loss_backward,
}

"""Attention over a sharded sequence, by torch's own kernels.

A kernel gives, beside the result of its queries on its keys, the logarithm of their sum of
exponentials. That is enough to put results on parts of the keys together: each counts by its share
of the sum (the states of :mod:`.folds`; Milakov and Gimelshein 2018). So

- queries may be sharded: a device attends with its own to all keys,
- keys may be sharded: a device attends to its own keys, and the devices combine a maximum, a sum
  and a weighted result of each query,
- gradients need nothing more: given the whole result and the whole logarithm, a kernel's gradients
  on some queries and some keys are the terms that these add to the gradients of all.

A causal kernel takes its first query and its first key for row 0. The rows of a device are others,
and may be several runs, so its queries and keys meet in blocks, by their numbers in the sequence:
blocks where all keys come first, which need no mask, and squares on the diagonal, which are causal
by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from cute_sharding.dtensor.replaced import symints
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec
from cute_sharding.dtensor.run.folds.states import States, wide, wider
from cute_sharding.dtensor.run.groups import all_on_all_ranks, all_on_each_rank, place
from cute_sharding.dtensor.run.numbered import as_number, chain_of_dim
from cute_sharding.sharding.rows import Run, each_turn, rows_held

_SEQUENCE = 2  # the dim of queries and keys

# A kernel: queries, keys, values, whether it is causal, mask -> result, logarithm, others. And its
# gradients: the result's gradient, queries, keys, values, result, logarithm, whether it is causal,
# mask -> gradients of queries, keys and values.
_Kernel = Callable[..., Sequence[Any]]


# -- rows ------------------------------------------------------------------------------------------
# Which rows of the sequence a device has, and where queries and keys meet.


class KeyBlock(NamedTuple):
    """Some consecutive queries of a device and some consecutive keys, counted on the device:
    [start, stop). If it is causal, they are the same rows of the sequence.
    """

    queries: tuple[Any, Any]
    keys: tuple[Any, Any]
    is_causal: bool = False


# More pairs of runs than this meet under a mask in one kernel, if the kernel takes one.
_MANY = 32


def _held(spec: DTensorSpec, rank: int, own: Any) -> tuple[Run, ...] | list[tuple[Any, Any]]:
    """The rows of the sequence that a rank holds, ``own`` rows: in runs, or, for a symbol, as the
    one interval [start, stop) that an even shard is.
    """
    n, mesh = spec.shape[_SEQUENCE], spec.mesh
    cuts = chain_of_dim(_SEQUENCE, spec.placements, mesh)
    device = place(mesh, rank)
    if symints.is_symbolic(n):
        is_plain = all(factor == 1 for factor, *_ in cuts)
        if is_plain and symints.is_truly(n % prod([parts for _, parts, _ in cuts]) == 0):
            number = 0
            for _, parts, m in cuts:
                number = number * parts + device[m]
            return [(number * own, (number + 1) * own)]
    chain = tuple([(factor, parts, device[m]) for factor, parts, m in cuts])
    return rows_held(as_number(n), chain)


def _intervals(held: Any) -> list[tuple[Any, Any]]:
    """The rows as intervals [start, stop), in the order in which the device holds them."""
    if isinstance(held, list):
        return held
    turns = sorted([turn for run in held for turn in each_turn(run)], key=lambda turn: turn.y)
    return [(turn.x, turn.x + turn.length) for turn in turns]


def _count(held: Any) -> int:
    """The number of intervals."""
    if isinstance(held, list):
        return len(held)
    return sum(prod([count for count, *_ in run.loops]) for run in held)


def meeting(queries: Sequence[tuple[Any, Any]], keys: Sequence[tuple[Any, Any]]) -> list[KeyBlock]:
    """The blocks in which queries meet the keys that do not come after them; both are rows of the
    sequence, as intervals.

    >>> for block in meeting([(4, 6)], [(0, 8)]):  # the rows 4 and 5
    ...     print(block)
    KeyBlock(queries=(0, 2), keys=(0, 4), is_causal=False)
    KeyBlock(queries=(0, 2), keys=(4, 6), is_causal=True)
    """
    found: list[KeyBlock] = []
    at: Any = 0
    for first, stop in queries:
        of: Any = 0
        for start, end in keys:
            shift, back = at - first, of - start  # from the sequence to the device
            before, low, high = min(end, first), max(start, first), min(end, stop)
            if start < before:
                found.append(KeyBlock((at, stop + shift), (of, before + back)))
            if low < high:
                same = (low + shift, high + shift), (low + back, high + back)
                found.append(KeyBlock(*same, is_causal=True))
                if high < stop:
                    found.append(KeyBlock((high + shift, stop + shift), same[1]))
            of += end - start
        at += stop - first
    return found


def _numbers(held: Any, own: Any, device: torch.device) -> torch.Tensor:
    """The numbers of the rows in the sequence."""
    intervals = _intervals(held)
    parts = [torch.arange(start, stop, device=device) for start, stop in intervals]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def _causal_mask(queries: Any, keys: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask by which queries meet the keys that do not come after them."""
    rows = _numbers(queries, q.shape[_SEQUENCE], q.device)
    columns = _numbers(keys, k.shape[_SEQUENCE], q.device)
    mask = q.new_zeros(rows.shape[0], columns.shape[0])
    return mask.masked_fill(columns > rows.unsqueeze(1), -torch.inf)


def _blocks(
    specs: tuple[DTensorSpec, DTensorSpec],
    rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    takes_mask: bool,
) -> tuple[list[KeyBlock], torch.Tensor | None]:
    """The blocks of a device's queries and keys, and the mask that they meet under."""
    rows, columns = q.shape[_SEQUENCE], k.shape[_SEQUENCE]
    if any(x.shape[d] == 0 for x in (q, k) for d in range(_SEQUENCE + 1)):
        return [], None
    if is_causal:
        queries, keys = (_held(spec, rank, n) for spec, n in zip(specs, (rows, columns)))
        if not takes_mask or _count(queries) * _count(keys) <= _MANY:
            return meeting(_intervals(queries), _intervals(keys)), mask
        causal = _causal_mask(queries, keys, q, k)
        mask = causal if mask is None else mask + causal
    return [KeyBlock((0, rows), (0, columns))], mask


def _is_all(block: KeyBlock, q: torch.Tensor, k: torch.Tensor) -> bool:
    ends = (block.queries, q), (block.keys, k)
    return all(symints.is_truly(stop - start == x.shape[_SEQUENCE]) for (start, stop), x in ends)


def _rows(x: torch.Tensor, interval: tuple[Any, Any], dim: int = _SEQUENCE) -> torch.Tensor:
    start, stop = interval
    return x.narrow(dim, start, stop - start)


def _of_mask(mask: torch.Tensor | None, block: KeyBlock) -> torch.Tensor | None:
    """The mask of a block; a dim of size 1 is that of all rows."""
    for dim, (start, stop) in ((-2, block.queries), (-1, block.keys)):
        if mask is not None and mask.shape[dim] > 1:
            mask = mask.narrow(dim, start, stop - start)
    return mask


# -- results ---------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What queries find on some keys: the result, and the logarithm of the sum of exponentials,
    which is minus infinity if there is no key for a query.
    """

    result: torch.Tensor
    logarithm: torch.Tensor


def _base(logarithm: torch.Tensor) -> torch.Tensor:
    """What exponentials are taken below: minus infinity less itself is no number."""
    return logarithm.masked_fill(logarithm == -torch.inf, 0)


def _sound(result: torch.Tensor, logarithm: torch.Tensor, mask: torch.Tensor | None) -> _Found:
    """What a kernel has found, in a wide dtype. Of queries without keys a kernel on CPUs gives the
    logarithm 0.
    """
    if mask is not None:
        logarithm = logarithm.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
    return _Found(wide(result), logarithm)


def _both(one: _Found, other: _Found) -> _Found:
    """What queries find on the keys of both."""
    base = _base(torch.maximum(one.logarithm, other.logarithm))
    shares = [(each.logarithm - base).exp() for each in (one, other)]
    total = shares[0] + shares[1]
    results = [each.result * share.unsqueeze(-1) for each, share in zip((one, other), shares)]
    return _Found(_over(results[0] + results[1], total), base + total.log())


def _over(weighted: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The weighted result over the sum of weights; 0 where there are none."""
    total = total.unsqueeze(-1)
    return (weighted / total).masked_fill(total == 0, 0)


def _padded(found: _Found, before: Any, after: Any) -> _Found:
    """With queries before and after these, which have found nothing."""

    def pad(x: torch.Tensor, value: float) -> torch.Tensor:
        sizes = [
            [n if d == _SEQUENCE else m for d, m in enumerate(x.shape)] for n in (before, after)
        ]
        return torch.cat([x.new_full(sizes[0], value), x, x.new_full(sizes[1], value)], _SEQUENCE)

    return _Found(pad(found.result, 0), pad(found.logarithm, -torch.inf))


def _attend(
    kernel: _Kernel,
    blocks: Sequence[KeyBlock],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[_Found, Sequence[torch.Tensor]]:
    """What the queries of a device find on its keys, and what the kernel gives beside it."""
    rows = q.shape[_SEQUENCE]
    found: _Found | None = None
    others: Sequence[torch.Tensor] = ()
    for block in blocks:
        of_block = _of_mask(mask, block)
        given = [_rows(x, of) for x, of in ((q, block.queries), (k, block.keys), (v, block.keys))]
        result, logarithm, *others = kernel(*given, is_causal=block.is_causal, mask=of_block)
        start, stop = block.queries
        this = _sound(result, logarithm, of_block)
        if not symints.is_truly(stop - start == rows):
            this = _padded(this, start, rows - stop)
        found = this if found is None else _both(found, this)
    if found is None:
        none = q.new_zeros([*q.shape[:-1], v.shape[-1]], dtype=wider(q.dtype))
        found = _Found(none, none.new_full(q.shape[:-1], -torch.inf))
        some = [x.new_zeros(1, 1, 1, x.shape[-1]) for x in (q, k, v)]
        _, _, *others = kernel(*some, is_causal=False, mask=None)
    return found, others


def _combined(fold: States, result: torch.Tensor, logarithm: torch.Tensor) -> list[torch.Tensor]:
    """What queries find on the keys of all devices: the weighted result and the sum of weights,
    and the logarithm below which weights were taken.
    """
    of_result, of_rows = fold.of_result(0, columns=1), fold.of_result(1)
    (top,) = of_rows.all("max", logarithm)

    def weighted(result: Any, logarithm: Any, top: Any) -> list[torch.Tensor]:
        weight = (logarithm - _base(top)).exp().unsqueeze(-1)
        return [torch.cat([result * weight, weight], -1)]

    (state,) = all_on_all_ranks(weighted, result, logarithm, top)
    (total,) = of_result.all("sum", state)
    return [total, top]


def _attended(
    fold: States,
    kernel: _Kernel,
    tensors: Sequence[torch.Tensor],
    *,
    is_causal: bool,
    takes_mask: bool,
) -> list[torch.Tensor]:
    """The result, the logarithm, and what the kernel gives beside them, of queries, keys, values
    and perhaps a mask.
    """
    specs = fold.operands[0], fold.operands[1]
    dtypes = fold.dtype(0), fold.dtype(1)

    def of_rank(rank: int, q: Any, k: Any, v: Any, mask: Any = None) -> list[torch.Tensor]:
        blocks, mask = _blocks(specs, rank, q, k, mask, is_causal=is_causal, takes_mask=takes_mask)
        if not fold.over and len(blocks) == 1 and _is_all(blocks[0], q, k):
            return list(kernel(q, k, v, is_causal=blocks[0].is_causal, mask=mask))
        (result, logarithm), others = _attend(kernel, blocks, q, k, v, mask)
        if fold.over:
            return [result, logarithm.contiguous(), *others]
        return [result.to(dtypes[0]), _base(logarithm).to(dtypes[1]), *others]

    result, logarithm, *others = all_on_each_rank(of_rank, *tensors)
    if fold.over:

        def finish(total: Any, top: Any) -> list[torch.Tensor]:
            weight = total[..., -1]
            result = _over(total[..., :-1], weight)
            logarithm = _base(_base(top) + weight.log())
            return [result.to(dtypes[0]), logarithm.to(dtypes[1])]

        result, logarithm = all_on_all_ranks(finish, *_combined(fold, result, logarithm))
    return [result, logarithm, *others]


def attention(
    fold: States,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **how: Any,
) -> tuple[Any, ...]:
    """By the kernel of CPUs."""

    def kernel(*given: Any, is_causal: bool, mask: Any) -> Any:
        return fold.op(*given, dropout_p, is_causal, attn_mask=mask, **how)

    tensors = [q, k, v, *([] if attn_mask is None else [attn_mask])]
    return tuple(_attended(fold, kernel, tensors, is_causal=is_causal, takes_mask=True))


def flash_attention(
    fold: States,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *debug: bool,
    **how: Any,
) -> tuple[Any, ...]:
    """By the flash kernel of accelerators, which gives sizes and the state of a random generator
    too.
    """

    def kernel(*given: Any, is_causal: bool, mask: Any) -> Any:
        found = fold.op(*given, dropout_p, is_causal, *debug, **how)
        return *found[:2], *found[6:]

    found = _attended(fold, kernel, [q, k, v], is_causal=is_causal, takes_mask=False)
    sizes = [spec.shape[_SEQUENCE] for spec in fold.operands[:2]]
    return *found[:2], None, None, *sizes, *found[2:]


# -- gradients -------------------------------------------------------------------------------------


def _gradients(
    kernel: _Kernel,
    blocks: Sequence[KeyBlock],
    tensors: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
) -> list[torch.Tensor]:
    """What the queries of a device and its keys add to the gradients of these."""
    g, q, k, v, result, logarithm = tensors
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=wider(x.dtype)) for x in (q, k, v))
    for block in blocks:
        queries, keys = block.queries, block.keys
        found = kernel(
            *(_rows(x, queries) for x in (g, q)),
            *(_rows(x, keys) for x in (k, v)),
            _rows(result, queries),
            _rows(logarithm, queries).contiguous(),  # as kernels of accelerators read it
            is_causal=block.is_causal,
            mask=_of_mask(mask, block),
        )
        for total, rows, term in zip((of_q, of_k, of_v), (queries, keys, keys), found):
            _rows(total, rows).add_(term)
    return [total.to(x.dtype) for total, x in zip((of_q, of_k, of_v), (q, k, v))]


def _added(
    fold: States,
    kernel: _Kernel,
    tensors: Sequence[torch.Tensor],
    *others: torch.Tensor,
    is_causal: bool,
    takes_mask: bool,
) -> tuple[torch.Tensor, ...]:
    """The gradients of queries, keys and values, from the tensors that a kernel takes, in order.
    ``others``: those that a kernel takes at the end, or a mask.
    """
    specs = fold.operands[1], fold.operands[2]

    def of_rank(rank: int, *given: Any) -> list[torch.Tensor]:
        tensors, others = given[:6], given[6:]
        mask = others[0] if takes_mask and others else None
        q, k = tensors[1:3]
        blocks, mask = _blocks(specs, rank, q, k, mask, is_causal=is_causal, takes_mask=takes_mask)
        of_this = kernel if takes_mask else partial(kernel, others=others)
        if len(blocks) == 1 and _is_all(blocks[0], q, k):
            return list(of_this(*tensors, is_causal=blocks[0].is_causal, mask=mask))
        return _gradients(of_this, blocks, tensors, mask)

    return tuple(all_on_each_rank(of_rank, *tensors, *others))


def attention_backward(
    fold: States, *given: Any, attn_mask: torch.Tensor | None = None, **how: Any
) -> tuple[torch.Tensor, ...]:
    *tensors, dropout_p, is_causal = given

    def kernel(*given: Any, is_causal: bool, mask: Any) -> Any:
        return fold.op(*given, dropout_p, is_causal, attn_mask=mask, **how)

    masks = () if attn_mask is None else (attn_mask,)
    return _added(fold, kernel, tensors, *masks, is_causal=is_causal, takes_mask=True)


def flash_attention_backward(fold: States, *given: Any, **how: Any) -> tuple[torch.Tensor, ...]:
    tensors, (dropout_p, is_causal, *seeds) = given[:6], given[10:]

    def kernel(*given: Any, is_causal: bool, mask: Any, others: Any) -> Any:
        sizes = [x.shape[_SEQUENCE] for x in given[1:3]]
        return fold.op(*given, None, None, *sizes, dropout_p, is_causal, *others, **how)

    return _added(fold, kernel, tensors, *seeds, is_causal=is_causal, takes_mask=False)


# By the names in the rows of the table.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "flash_attention_for_cpu": attention,
    "flash_attention_for_cpu_backward": attention_backward,
    "flash_attention": flash_attention,
    "flash_attention_backward": flash_attention_backward,
}

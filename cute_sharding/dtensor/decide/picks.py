"""Rows of a sharded dim that an index picks: each device gives the picked rows that it has and
zeros for others, and a sum is left pending.

torch does the same for an embedding and ``gather``, but applies the mask only when it reduces the
result, and most later ops raise. Here the mask ends with the op. The placement is torch's own
(``_MaskPartial``): the next op that computes reduces it, as on torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cute_sharding.dtensor.replaced import symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    cut_of,
    picked_rows,
)
from cute_sharding.dtensor.run.op_plan import OpPlan
from cute_sharding.dtensor.run.ranks import on_each_rank, place
from cute_sharding.relations.signature import Signature
from cute_sharding.sharding.deal import local_size, piece_and_block

# (split factor, devices, mesh dim) of each mesh dim that cuts the dim, in order.
_Chain = tuple[tuple[int, int, int], ...]


def by_picks(
    plan: OpPlan,
    schema: OpSchema,
    specs: Sequence[DTensorSpec],
    signature: Signature,
    wanted: Sequence[tuple[Placement, ...]],
) -> OpPlan:
    """The plan for an op that picks rows. If a mesh dim shards these rows, each device gives those
    that it has. ``wanted``: the placements to which the operands are redistributed.
    """
    found = [
        (i, d)
        for i, names in enumerate(signature.operands)
        for d, name in enumerate(names)
        if name in signature.picked
    ]
    for i, d in found:
        mesh = specs[0].mesh
        chain = tuple(
            [
                (_number(cut[1]), mesh.size(m), m)
                for m, cut in enumerate(map(cut_of, wanted[i]))
                if cut is not None and cut[0] == d
            ]
        )
        if chain:
            arguments = enumerate(schema.args_schema)
            places = [k for k, arg in arguments if isinstance(arg, DTensorSpec)]
            rows = places[i], d, places[i + 1]
            run = partial(_pick_rows, schema.op, mesh, chain, _number(specs[i].shape[d]), rows)
            rows_of = tuple(map(_number, specs[i].shape)), d
            return replace(plan.placed(partial(_placed, chain, rows_of)), kernel=run)
    return plan


def _placed(
    chain: _Chain, rows_of: tuple[tuple[int, ...], int], spec: DTensorSpec
) -> list[Placement]:
    """The result's placements: what is pending since mesh dims shard the rows is of picked rows."""
    dims = [m for *_, m in chain]
    return [
        picked_rows(p.reduce_op, *rows_of) if m in dims and isinstance(p, Partial) else p
        for m, p in enumerate(spec.placements)
    ]


def _number(size: Any) -> int:
    """The size as a number (in a graph with a guard): a device's rows are computed in numbers."""
    return size if isinstance(size, int) else symints.number_of(size)


def _pick_rows(
    op: Callable[..., torch.Tensor],
    mesh: Any,
    chain: _Chain,
    n: int,
    at: tuple[int, int, int],
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """The op's result on this device's rows. ``at``: (argument with the rows, dim, index)."""
    source, dim, index = at

    def of_rank(rank: int, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        own, count, is_own = _own_rows(numbers, n, chain, place(mesh, rank))
        if count == 0:  # any row does: all results are masked below
            rows = rows.new_zeros([1 if d == dim else size for d, size in enumerate(rows.shape)])
        given = list(args)
        given[source], given[index] = rows, own.masked_fill(~is_own, 0)
        result = op(*given, **kwargs)
        # The dims of the index come first, then the other dims of a picked row.
        others = ~is_own.reshape(*is_own.shape, *[1] * (result.ndim - is_own.ndim))
        return result.masked_fill(others, 0)

    return on_each_rank(of_rank, args[source], args[index])


def _own_rows(
    numbers: torch.Tensor, n: int, chain: _Chain, device: Sequence[int]
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """For rows with these ``numbers`` of ``n``: their numbers among the device's own rows, how many
    rows the device has, and a mask of the numbers that it has. (A mesh dim deals ``n`` rows in
    pieces, and each device gets one block of each piece: :mod:`cute_sharding.sharding.deal`.)
    """
    is_own = torch.ones_like(numbers, dtype=torch.bool)
    for factor, parts, m in chain:
        if n == 0:
            break
        piece, block = piece_and_block(n, factor, parts)
        full, rest = divmod(n, piece)
        last = -(-rest // parts)  # the block size of the rows that are left after whole pieces
        number = numbers // piece
        own = min(max(piece - device[m] * block, 0), block)
        size = torch.where(number < full, block, last) if rest else block
        first = size * device[m]
        within = numbers - number * piece - first
        is_own &= (within >= 0) & (within < size)
        numbers = number * own + within
        n = local_size(n, factor, parts, device[m])
    return numbers, n, is_own

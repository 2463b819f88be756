"""Movement ops in a compiled program whose sizes are symbolic.

If only dims that the op does not touch are symbolic, the map of rows is known in numbers. The op is
then decided as in an eager program, and is a slice of the local tensor where it is free. Otherwise
the result keeps the operand's placements, because any other decision would depend on sizes that
another call does not have; and the exchange is planned in each call (run/in_graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from cute_sharding.dtensor.compiled.local_sizes import local_shape_of
from cute_sharding.dtensor.replaced import op_schemas, registry, symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial
from cute_sharding.dtensor.run.groups import dims_of_group
from cute_sharding.dtensor.run.in_graphs import MovementOfAnySize, move_of
from cute_sharding.dtensor.run.moving import Movement
from cute_sharding.dtensor.run.op_plan import shapes_of_results
from cute_sharding.dtensor.run.placements import cut_of, placement_of
from cute_sharding.dtensor.run.reading import agree
from cute_sharding.exchange import Exchange
from cute_sharding.exchange.slices import is_view
from cute_sharding.layout import Undecided
from cute_sharding.propagation.choose import ShardedMove, chosen
from cute_sharding.propagation.steps import Way
from cute_sharding.relations import Move
from cute_sharding.relations.table import MOVEMENTS


def way_for_any_size(
    name: str, schema: OpSchema, specs: Sequence[DTensorSpec]
) -> tuple[Way, Movement | MovementOfAnySize, Any] | None:
    """The op as a movement for any sizes: the way for the sizes at hand, its step, and the results'
    TensorMetas. None if no such movement is known.
    """
    given = op_schemas.arguments_with(schema, [tuple(spec.shape) for spec in specs])
    mesh, row = specs[0].mesh, MOVEMENTS[name]
    if any(isinstance(p, Partial) for spec in specs for p in spec.placements):
        return None
    now = symints.numbers_at_hand(given)
    move = None if now is None else move_of(name, *now)
    if move is None or not any(map(move.bound, range(len(specs)))):
        return None
    cuts = tuple([tuple([cut_of(p) for p in spec.placements]) for spec in specs])
    sizes = tuple(mesh.shape)
    # Also ops without any other rule, and ops for which torch gathers whatever is sharded.
    anyway = not row.is_signed or (row.gathers and any(map(any, cuts)))
    sharded = ShardedMove(move, cuts, sizes)
    if not sharded.open and not anyway:
        return None
    metas = registry.output_metas(schema)
    if _goes_by_numbers(move, schema, specs):
        choice = chosen(move, cuts, sizes, anyway=True)
        assert choice is not None
        if not all(
            agree(shape, specs[0], [placement_of(cut) for cut in some])
            for shape, some in zip(move.outputs, choice.cuts)
        ):
            return None  # torch would read these placements as an order of shards
        is_free = is_view(choice.exchange) and schema.op._schema._is_view_op()
    elif all(cut is None or cut[1] == 1 for some in cuts for cut in some):
        choice, is_free = sharded.to(sharded.own), False
    else:
        return None
    step: Movement | MovementOfAnySize
    if is_free:
        step = Movement(choice.exchange, mesh, ())
    else:
        onto = [shape for shape in shapes_of_results(metas) if shape is not None]
        if not (_have_groups(sharded.open, mesh) and _are_known(onto, choice.exchange, mesh)):
            return None
        step = MovementOfAnySize(name, given, choice.exchange, onto, mesh)
    return Way(cuts, move.outputs, choice.cuts, (choice.exchange,)), step, metas


def _goes_by_numbers(move: Move, schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    """Whether the op does the same to the dims that it touches whatever values the symbols have.

    Symbolic sizes among its arguments are allowed if they are sizes of dims that it does not touch.
    """
    others: set[str] = set()
    for i, spec in enumerate(specs):
        touched = move.touched(i)
        if move.triangle is not None:
            touched |= {len(spec.shape) - 2, len(spec.shape) - 1}
        if symints.is_symbolic(*(spec.shape[d] for d in touched)):
            return False
        others.update(symints.size_text(n) for d, n in enumerate(spec.shape) if d not in touched)
    for given in (*schema.args_schema, *schema.kwargs_schema.values()):
        if isinstance(given, torch.SymInt):
            return False
        some = given if isinstance(given, (list, tuple)) else ()
        if any(isinstance(n, torch.SymInt) and symints.size_text(n) not in others for n in some):
            return False
    return True


def _have_groups(dims: Sequence[int], mesh: Any) -> bool:
    """Whether every set of ranks that differ on some of ``dims``, and for some sizes have to
    exchange rows, has a group.
    """
    return all(
        dims_of_group(mesh, some) is not None
        for count in range(2, len(dims) + 1)
        for some in combinations(dims, count)
    )


def _are_known(onto: Sequence[tuple[Any, ...]], exchange: Exchange, mesh: Any) -> bool:
    """Whether the local shapes of this rank's results can be computed."""
    try:
        for shape, placed in zip(onto, exchange.targets):
            local_shape_of(shape, placed.chains, mesh)
    except Undecided:
        return False
    return True

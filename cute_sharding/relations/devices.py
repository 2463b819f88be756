"""The part of a relation's results that a device holds, and the operands that it needs for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from cute_sharding._memory import remembered
from cute_sharding.layout.layout import row_major
from cute_sharding.relations.piece import Piece, join_pieces, piece, through
from cute_sharding.relations.relation import Relation, with_results
from cute_sharding.sharding import Partial, Sharding
from cute_sharding.sharding.chains import chain_of, chains_of
from cute_sharding.sharding.meeting import Chain, rows_held


@remembered
def local(shape: tuple[int, ...], chains: tuple[Chain, ...]) -> tuple[Piece, ...]:
    """The part of a tensor that a device holds: pieces from its local tensor (0) to the tensor (0).

    Args:
        shape: the tensor's global shape.
        chains: for each dim, (split factor, devices, the device's coordinate) of each mesh dim that
            cuts it, in order.

    >>> [str(each) for each in local((4, 6), ((), ((1, 2, 1),)))]  # the last three columns
    ['operand 0 (4,3):(3,1) -> result 0 3 + (4,3):(6,1)']
    """
    held = [rows_held(n, chain) for n, chain in zip(shape, chains, strict=True)]
    below = row_major(shape)
    beside = row_major(tuple([sum(run.size for run in runs) for runs in held]))
    found = []
    for box in product(*held):
        modes = [
            (n, dy * step, dx * stride)
            for run, stride, step in zip(box, below, beside)
            for n, dx, dy in (*run.loops, (run.length, 1, 1))
        ]
        x = sum(run.y * step for run, step in zip(box, beside))
        y = sum(run.x * stride for run, stride in zip(box, below))
        found.append(piece(0, 0, x, y, modes))
    return join_pieces(found)


def held(
    relation: Relation, sharding: Sharding, device: Sequence[int], operand: int = 0
) -> Relation:
    """The relation from a device's local tensor of one operand, which lies as ``sharding`` says, to
    the results. Only the result elements that the device has are in it.

    Raises:
        ValueError: the sharding is of another shape, or has something pending.

    >>> from cute_sharding.relations.table import relation_of
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> flat = relation_of("Tensor.view", (4, 6), (24,))
    >>> print(held(flat, Sharding((4, 6), (2,), (Shard(1),)), (1,)))
    (4, 3) -> (24,)
      operand 0 (4,3):(3,1) -> result 0 3 + (4,3):(6,1)
    """
    shape = relation.inputs[operand]
    mine = _of_device(sharding, device, shape, f"operand {operand}")
    pieces = [each._replace(source=0) for each in relation.pieces if each.source == operand]
    return Relation((sharding.local_shape(device),), relation.outputs, through(mine, pieces))


def needed(
    relation: Relation, sharding: Sharding, device: Sequence[int], result: int = 0
) -> Relation:
    """The relation from the operands to a device's local tensor of one result, which is to lie as
    ``sharding`` says.

    Raises:
        ValueError: the sharding is of another shape, or has something pending.

    >>> from cute_sharding.relations.table import relation_of
    >>> from cute_sharding.sharding import Shard, Sharding
    >>> turned = relation_of("torch.transpose", (4, 6), 0, 1)
    >>> print(needed(turned, Sharding((6, 4), (2,), (Shard(0),)), (1,)))
    (4, 6) -> (3, 4)
      operand 0 3 + (3,4):(1,6) -> result 0 (3,4):(4,1)
    """
    shape = relation.outputs[result]
    mine = _of_device(sharding, device, shape, f"result {result}")
    wanted = [each.turned for each in mine]
    return with_results(relation.of(result), (sharding.local_shape(device),), wanted)


def _of_device(
    sharding: Sharding, device: Sequence[int], shape: tuple[int, ...], name: str
) -> tuple[Piece, ...]:
    if sharding.shape != shape:
        raise ValueError(
            f"{name} has shape {shape}, but the sharding is for shape {sharding.shape}"
        )
    if any(isinstance(p, Partial) for p in sharding.placements):
        raise ValueError(f"{sharding} has a Partial: reduce the Partial first")
    chains = chains_of(sharding.cuts, len(shape), sharding.mesh)
    return local(shape, tuple([chain_of(chain, sharding.mesh, device) for chain in chains]))

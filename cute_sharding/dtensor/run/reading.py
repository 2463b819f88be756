"""The order in which the mesh dims of a DTensor shard its tensor dims, by its spec, and as torch
redistributes it.

View propagation assumes left to right: each mesh dim shards what the ones before it left. But a
spec may name another order. And ``_StridedShard`` placements that a program made (as fully_shard
over tensor parallelism does) encode one for torch's redistribution: ``[_StridedShard(0,
split_factor=2), Shard(0)]`` on mesh dims of 4 and 2 means that the second mesh dim shards first.
If sizes divide, left to right gives the same rows. If not, devices have other rows, and no view
makes placements for which the two differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding._memory import remembered
from cute_sharding.dtensor.replaced import tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.run.placements import cut_of
from cute_sharding.exchange.cost import holds_all
from cute_sharding.sharding.chains import Chains, chains_of


@remembered
def left_to_right(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> Chains:
    return chains_of([cut_of(p) for p in placements], len(shape), mesh)


def chains_of_spec(spec: DTensorSpec) -> Chains:
    """The chains of cuts of a tensor with this spec; left to right if that gives the same rows."""
    order = tensor_specs.shard_order(spec)
    return _chains(tuple(spec.shape), tuple(spec.mesh.shape), tuple(spec.placements), order)


def chains_of_placements(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> Chains:
    """The chains of cuts of a tensor with these placements on a mesh of these sizes, in a spec made
    by a program.
    """
    return _chains(shape, mesh, placements, tensor_specs.decoded_order(placements, mesh))


def agree(shape: Sequence[int], spec: DTensorSpec, placements: Sequence[Placement]) -> bool:
    """Whether placements on the mesh of ``spec`` give the same rows left to right, and as the order
    that torch decodes from them.
    """
    given = tuple(shape), tuple(spec.mesh.shape), tuple(placements)
    order = tensor_specs.decoded_order(given[2], given[1])
    return order is None or _chains(*given, order) == left_to_right(*given)


def _chains(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    order: tensor_specs.Order | None,
) -> Chains:
    plain = left_to_right(shape, mesh, placements)
    if order is None:
        return plain
    ordered = _ordered(order, len(shape), mesh)
    if any(map(tensor_specs.is_last, placements)):  # it has no meaning left to right
        return ordered
    return plain if hold_the_same(shape, mesh, plain, ordered) else ordered


def _ordered(order: tensor_specs.Order, ndim: int, mesh: Sequence[int]) -> Chains:
    chains: list[tuple[tuple[int, int], ...]] = [()] * ndim
    for m, p in order:
        cut = cut_of(p)
        if cut is not None and mesh[m] > 1:
            chains[cut[0]] += ((m, cut[1]),)
    return tuple(chains)


@remembered
def hold_the_same(
    shape: tuple[int, ...], mesh: tuple[int, ...], one: Chains, other: Chains
) -> bool:
    """Whether every device of a mesh holds the same rows of a tensor under both chains."""
    return one == other or (
        holds_all(shape, mesh, one, other) and holds_all(shape, mesh, other, one)
    )

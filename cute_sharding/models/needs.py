"""How much of each chunk of a tensor each rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

from cute_sharding.exchange.by_pieces import Wants
from cute_sharding.exchange.placed import Placed
from cute_sharding.models.stored import Chunk, Stored
from cute_sharding.relations.relation import Piece, Relation, identity_pieces, read_once, through
from cute_sharding.sharding.rows import Run, count_rows, meet_on_x, rows_held

# Of the ranks that need something, how many elements.
Needs: TypeAlias = "dict[int, int]"


def needs_of(
    stored: Stored, pieces: Sequence[Piece], targets: Sequence[Placed]
) -> tuple[Needs, ...]:
    """Of each chunk of a tensor, of which ``pieces`` are results that lie as ``targets`` say.

    >>> from cute_sharding.sharding import Shard, Sharding
    >>> stored = Stored("w", (4, 6), "float32", 4, (Chunk((0, 0), (3, 6)), Chunk((3, 0), (1, 6))))
    >>> columns = Placed.of(Sharding((4, 6), (2,), (Shard(1),)))
    >>> needs_of(stored, identity_pieces(0, 0, 24), [columns])
    ({0: 9, 1: 9}, {0: 3, 1: 3})
    """
    ranks = [rank for target in targets for rank in target.mesh.ranks]
    as_they_are = {*pieces} == {each for t in range(len(targets)) for each in _whole(stored, t)}
    as_they_are &= all(target.shape == stored.shape for target in targets)  # and are no views
    if as_they_are and len({*ranks}) == len(ranks):
        return _of_boxes(stored.shape, stored.chunks, tuple(targets))
    return _of_pieces(stored.shape, stored.chunks, tuple(pieces), tuple(targets))


def _whole(stored: Stored, target: int) -> tuple[Piece, ...]:
    return identity_pieces(0, target, prod(stored.shape))


@lru_cache(maxsize=1 << 8)
def _of_boxes(
    shape: tuple[int, ...], chunks: tuple[Chunk, ...], targets: tuple[Placed, ...]
) -> tuple[Needs, ...]:
    """Of tensors as they are: in each dim the rows of the chunk that a rank has."""
    counts: dict[tuple[int, tuple[tuple[int, int, int], ...], int, int], int] = {}
    found: list[Needs] = [{} for _ in chunks]
    for target in targets:
        for rank, device in zip(target.mesh.ranks, product(*map(range, target.mesh.sizes))):
            chains = target.held_on(device)
            for needs, chunk in zip(found, chunks):
                needed = 1
                for d, (chain, first, rows) in enumerate(zip(chains, *chunk)):
                    key = d, chain, first, rows
                    if key not in counts:
                        some = [Run(first, first, (), rows)]
                        counts[key] = count_rows(meet_on_x(some, rows_held(shape[d], chain)))
                    needed *= counts[key]
                if needed:
                    needs[rank] = needed
    return tuple(found)


@lru_cache(maxsize=1 << 8)
def _of_pieces(
    shape: tuple[int, ...],
    chunks: tuple[Chunk, ...],
    pieces: tuple[Piece, ...],
    targets: tuple[Placed, ...],
) -> tuple[Needs, ...]:
    """Through any relation."""
    stored = Stored("", shape, "", 1, chunks)
    boxes = [next(stored.pieces((i,))) for i in range(len(chunks))]
    wants = Wants(Relation((shape,), tuple([t.shape for t in targets]), pieces), targets)
    found: list[Needs] = [{} for _ in chunks]
    for wanting, takers in wants.takers.items():
        wanted = wants.of(wanting, 0)
        for needs, box in zip(found, boxes):
            needed = count_rows(read_once(through([box], wanted)))
            if needed:
                needs.update(dict.fromkeys(takers, needed))
    return tuple(found)

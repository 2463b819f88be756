"""The elements that a rank sends and receives in one collective: one rule for all collectives, ours
and torch's.

Reductions and gathers count as in rings, which is the least for each rank (Chan, Heimlich,
Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", 2007):

- all-gather: each rank receives the blocks of all others, padding included;
- reduce-scatter: each rank receives a contribution to its block from each other rank;
- all-reduce: a reduce-scatter and an all-gather: 2 (n - 1) / n of the elements;
- all-to-all: what the others send to this rank; its own block stays;
- broadcast, reduce: every rank but one receives (but one sends) all elements once, as in a chain;
- scatter, gather: one block for each rank but the root, sent or received by the root.
"""

from __future__ import annotations

from typing import NamedTuple


class Amount(NamedTuple):
    """The elements of one collective, for a rank.

    Attributes:
        received: by this rank, from others.
        sent: by this rank, to others.
        busiest: received by the rank that receives the most; None if this rank cannot know.
    """

    received: int
    sent: int
    busiest: int | None


def all_reduced(parts: int, elements: int) -> int:
    """The elements that a rank receives, and sends, in an all-reduce of ``elements``.

    >>> all_reduced(4, 10)
    15
    """
    return -(-2 * (parts - 1) * elements // parts)


def of_blocks(parts: int, block: int) -> int:
    """The elements that a rank receives, and sends, if it gets a block from each other rank.

    >>> of_blocks(4, 10)
    30
    """
    return (parts - 1) * block


def all_reduce(parts: int, elements: int) -> Amount:
    """An all-reduce of ``elements`` among ``parts`` ranks."""
    n = all_reduced(parts, elements)
    return Amount(n, n, n)


def reduce_scatter(parts: int, block: int) -> Amount:
    """A reduce-scatter that leaves ``block`` elements on each rank."""
    n = of_blocks(parts, block)
    return Amount(n, n, n)


def all_gather(parts: int, blocks: list[int], own: int) -> Amount:
    """An all-gather of these blocks; this rank's has ``own`` elements, others may differ."""
    return Amount(sum(blocks) - own, of_blocks(parts, own), sum(blocks) - min(blocks, default=0))


def all_to_all(receives: list[int], sends: list[int], at: int) -> Amount:
    """An all-to-all in which this rank, at place ``at`` of the group, receives and sends these
    numbers of elements. What other ranks receive is known only if all messages are equal.
    """
    received, sent = (sum(each) - each[at] for each in (receives, sends))
    is_even = len({*receives, *sends}) == 1
    return Amount(received, sent, received if is_even else None)


def from_root(elements: int, *, is_root: bool) -> Amount:
    """A broadcast."""
    return Amount(0 if is_root else elements, elements if is_root else 0, elements)


def to_root(elements: int, *, is_root: bool) -> Amount:
    """A reduction to one rank."""
    return Amount(elements if is_root else 0, 0 if is_root else elements, elements)


def scatter(parts: int, block: int, *, is_root: bool) -> Amount:
    """A scatter of one block for each rank."""
    return Amount(0 if is_root else block, of_blocks(parts, block) if is_root else 0, block)


def gather(parts: int, block: int, *, is_root: bool) -> Amount:
    """A gather of one block from each rank."""
    at_root = of_blocks(parts, block)
    return Amount(at_root if is_root else 0, 0 if is_root else block, at_root)

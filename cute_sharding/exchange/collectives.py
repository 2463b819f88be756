"""What a rank sends and receives in one collective, in elements: the rule for all of them, ours and
torch's.

Reductions and gathers count as rings do, which is the least for each rank (Chan, Heimlich,
Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", 2007):

- all-gather: each rank receives the blocks of all others, padding included;
- reduce-scatter: each rank receives a contribution to its block from each other;
- all-reduce: one after the other, 2 (n - 1) / n of the elements;
- all-to-all: what the others send to this rank; its own block stays;
- broadcast, reduce: every rank but one receives (but one sends) all elements once, as in a chain;
- scatter, gather: a block a rank, by all but the root, or by the root.
"""

from __future__ import annotations

from typing import NamedTuple


class Amount(NamedTuple):
    """Elements that a rank has of one collective.

    Attributes:
        received: by this rank, of others.
        sent: by this rank, to others.
        busiest: received by the rank that receives the most; None where this rank cannot know.
    """

    received: int
    sent: int
    busiest: int | None


def all_reduced(parts: int, elements: int) -> int:
    """What a rank receives, and sends, of an all-reduce of so many elements.

    >>> all_reduced(4, 10)
    15
    """
    return -(-2 * (parts - 1) * elements // parts)


def of_blocks(parts: int, block: int) -> int:
    """What a rank receives, and sends, where it gets a block from each other one.

    >>> of_blocks(4, 10)
    30
    """
    return (parts - 1) * block


def all_reduce(parts: int, elements: int) -> Amount:
    """Of an all-reduce of ``elements`` among ``parts`` ranks."""
    n = all_reduced(parts, elements)
    return Amount(n, n, n)


def reduce_scatter(parts: int, block: int) -> Amount:
    """Of a reduce-scatter that leaves ``block`` elements on each rank."""
    n = of_blocks(parts, block)
    return Amount(n, n, n)


def all_gather(parts: int, blocks: list[int], own: int) -> Amount:
    """Of an all-gather of those blocks; a block may be ``own`` long and others not."""
    return Amount(sum(blocks) - own, of_blocks(parts, own), sum(blocks) - min(blocks, default=0))


def all_to_all(receives: list[int], sends: list[int], at: int) -> Amount:
    """Of an all-to-all in which this rank, ``at`` that place of the group, receives and sends so
    much from and to each. What others receive shows where all messages are alike.
    """
    received, sent = (sum(each) - each[at] for each in (receives, sends))
    is_even = len({*receives, *sends}) == 1
    return Amount(received, sent, received if is_even else None)


def from_root(elements: int, *, is_root: bool) -> Amount:
    """Of a broadcast."""
    return Amount(0 if is_root else elements, elements if is_root else 0, elements)


def to_root(elements: int, *, is_root: bool) -> Amount:
    """Of a reduction to one rank."""
    return Amount(elements if is_root else 0, 0 if is_root else elements, elements)


def scatter(parts: int, block: int, *, is_root: bool) -> Amount:
    """Of a scatter of a block for each rank."""
    return Amount(0 if is_root else block, of_blocks(parts, block) if is_root else 0, block)


def gather(parts: int, block: int, *, is_root: bool) -> Amount:
    """Of a gather of a block of each rank."""
    at_root = of_blocks(parts, block)
    return Amount(at_root if is_root else 0, 0 if is_root else block, at_root)

"""The parts of a call that have nothing to do with each other: an op on lists of weights does with
each what it would do with that one alone, and each may lie otherwise.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.replaced.asked import Ask
from cute_sharding.dtensor.replaced.local_tensors import leaves, tree_map
from cute_sharding.dtensor.replaced.op_schemas import is_of_lists


class CallPart(NamedTuple):
    """A part of a call that does nothing with the other parts.

    Attributes:
        number: of the part.
        args, kwargs, result: its own.
        places: of its operands among those of the call.
        shared: positions of its operands that other parts have too.
    """

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    places: tuple[int, ...]
    shared: frozenset[int] = frozenset()


class _Place(int):
    """The position of an operand."""


def parts_of(func: Any, args: Any, kwargs: Any, result: Any) -> list[CallPart]:
    """The parts of a call: one for each place of the lists of an op that runs on each of their
    tensors by itself.
    """
    positions = count()
    at = tree_map(
        lambda leaf: _Place(next(positions)) if isinstance(leaf, DTensor) else leaf,
        (tuple(args), dict(kwargs)),
    )
    every = tuple(range(next(positions)))
    whole = CallPart(0, tuple(args), dict(kwargs), result, every)
    if isinstance(func, Ask) or not is_of_lists(func):
        return [whole]
    long = max([len(arg) for arg in args if isinstance(arg, (list, tuple))], default=0)

    def sliced(tree: Any, i: int) -> Any:
        if isinstance(tree, dict):
            return {name: sliced(each, i) for name, each in tree.items()}
        is_list = isinstance(tree, (list, tuple)) and len(tree) == long
        return tree[i : i + 1] if is_list else tree

    if long < 2 or not (result is None or len(result) == long == _many(result)):
        return [whole]
    sliced_at = [leaves([sliced(x, i) for x in at[0]], sliced(at[1], i)) for i in range(long)]
    placed = [[leaf for leaf in each if isinstance(leaf, _Place)] for each in sliced_at]
    uses = Counter(place for places in placed for place in places)
    return [
        CallPart(
            i,
            tuple([sliced(arg, i) for arg in args]),
            sliced(dict(kwargs), i),
            result and result[i : i + 1],
            tuple(map(int, places)),
            frozenset([k for k, place in enumerate(places) if uses[place] > 1]),
        )
        for i, places in enumerate(placed)
    ]


def _many(result: Any) -> int:
    return sum(isinstance(x, DTensor) for x in result)

"""Placements: what a mesh dim does to a tensor. One class covers Shard and _StridedShard, which
differ only in stride.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Shard:
    """The mesh dim deals out tensor dim ``dim`` in blocks.

    The local part of the dim is cut into ``split_factor`` pieces of equal length (the last may be
    shorter, or absent), and each piece into one block for each device (again, trailing blocks may
    be shorter or empty). A split factor of 1 is DTensor's ``Shard``, another its ``_StridedShard``
    (torch/distributed/tensor/placement_types.py).

    Attributes:
        dim: the tensor dim, counted from 0.
        split_factor: the number of pieces that the local part is cut into, 1 or more.

    Raises:
        ValueError: a dim below 0, or a split factor below 1.

    >>> Sharding((12,), (2,), (Shard(0),)).rows(0, (1,))
    [(6, 12)]
    >>> Sharding((12,), (2,), (Shard(0, split_factor=3),)).rows(0, (1,))
    [(2, 4), (6, 8), (10, 12)]
    """

    dim: int
    split_factor: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"the dim {self.dim} of Shard is negative: count tensor dims from 0")
        if self.split_factor < 1:
            raise ValueError(
                f"the split factor {self.split_factor} of Shard({self.dim}) must be 1 or more"
            )

    def __str__(self) -> str:
        return f"S({self.dim})" if self.split_factor == 1 else f"_S({self.dim},{self.split_factor})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device of the mesh dim holds the same elements: a device mode of stride 0.

    >>> Sharding((4,), (2,), (Replicate(),)).layout
    ((2,),(4,)):((0,),(1,))
    """

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device holds a term of a pending reduction. A view leaves it pending.

    Attributes:
        reduce_op: the reduction's name, as torch has it.

    >>> print(Sharding((4,), (2,), (Partial("max"),)))
    (4,) on mesh (2,) as [P(max)]
    """

    reduce_op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


Placement: TypeAlias = "Shard | Replicate | Partial"
"""The placement of a tensor on one mesh dim.

>>> placement: Placement = Shard(0)
>>> print(placement)
S(0)
"""

_DIM = r"(?:dim=)?(-?\d+)"
_PATTERNS: dict[re.Pattern[str], Callable[[re.Match[str]], tuple[int, int] | Placement]] = {
    re.compile(rf"(?:S|Shard)\({_DIM}\)"): lambda m: (int(m[1]), 1),
    re.compile(rf"(?:_S|_?StridedShard)\({_DIM},(?:(?:sf|split_factor)=)?(\d+)\)"): lambda m: (
        int(m[1]),
        int(m[2]),
    ),
    re.compile(r"R|Replicate(?:\(\))?"): lambda m: Replicate(),
    re.compile(r"(?:P|Partial)(?:\(['\"]?(\w*)['\"]?\))?"): lambda m: Partial(m[1] or "sum"),
}


def parse_placements(text: str, ndim: int | None = None) -> tuple[Placement, ...]:
    """The placements, one for each mesh dim, in a text as DTensor prints it, with brackets or not.

    Args:
        ndim: the number of tensor dims, for dims that count from the end.

    Raises:
        ValueError: a part of the text is no placement; a dim counts from the end and there are
            fewer dims, or ``ndim`` is not given.

    >>> parse_placements("S(0), _S(1, sf=2), R")
    (Shard(dim=0, split_factor=1), Shard(dim=1, split_factor=2), Replicate())
    >>> parse_placements("P(sum)")
    (Partial(reduce_op='sum'),)
    >>> parse_placements("(Shard(dim=-1),)", ndim=3) == parse_placements("[S(2)]")
    True
    """
    compact = re.sub(r"\s", "", text)
    if compact[:1] + compact[-1:] in ("[]", "()"):
        compact = compact[1:-1].removesuffix(",")
    items = re.split(r",(?![^(]*\))", compact) if compact else []
    return tuple([_parsed(item, ndim) for item in items])


def _parsed(item: str, ndim: int | None) -> Placement:
    found = next(
        (
            build(match)
            for pattern, build in _PATTERNS.items()
            if (match := pattern.fullmatch(item))
        ),
        None,
    )
    if found is None:
        raise ValueError(
            f"cannot read the placement {item!r}: write S(dim), _S(dim,split_factor), R or "
            "P(op), separated by commas"
        )
    if not isinstance(found, tuple):
        return found
    dim, split_factor = found
    if dim < 0 and (ndim is None or dim < -ndim):
        of = "an unknown number of dims" if ndim is None else f"{ndim} dims"
        raise ValueError(
            f"cannot read the placement {item!r}: a negative dim counts from the last dim, but "
            f"the tensor has {of}"
        )
    return Shard(dim % ndim if dim < 0 and ndim else dim, split_factor)


def format_placements(placements: tuple[Placement, ...]) -> str:
    """Placements as text, the inverse of :func:`parse_placements`.

    >>> format_placements((Shard(0), Shard(1, split_factor=2), Replicate()))
    '[S(0), _S(1,2), R]'
    """
    return f"[{', '.join(map(str, placements))}]"

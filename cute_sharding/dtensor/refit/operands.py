"""What elements are: of a source, constants, casts of others, bits of others, or computed. No
tensor is looked at here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch

from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.relations.relation import Piece, join_pieces


@dataclass(frozen=True)
class OfSource:
    """A tensor that is given, by its number."""

    number: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Constant:
    """One value."""

    value: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Cast:
    """Another operand, by its number, as another dtype has its values."""

    of: int
    dtype: torch.dtype


@dataclass(frozen=True)
class AsBits:
    """Another operand, by its number, whose memory is seen as another dtype."""

    of: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Held:
    """What a tensor holds that is written to, before the first write."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Taken:
    """A tensor that an op takes: from operands to its row-major positions, and how it lies."""

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """An op that computes.

    Attributes:
        op, args, kwargs: as the program calls it, with a :class:`Taken` for each tensor that is
            made of operands.
        line: where.
        default: the dtype of numbers there.
    """

    op: Any
    args: Any
    kwargs: Any
    line: str
    default: torch.dtype


@dataclass(frozen=True, eq=False)
class Computed:
    """What is no element of another operand.

    Attributes:
        why: what made it, and in what it is no movement.
        operands: the numbers of what it is made of.
        line: where the program does that; empty if that is not known.
        call: what computes it, if that can be done again; None: it cannot.
        result: which of the tensors that the call gives, whose elements are numbered row-major.
    """

    why: str
    operands: frozenset[int]
    dtype: torch.dtype
    line: str = ""
    call: RecordedCall | None = None
    result: int = 0


class NotMoved(NamedTuple):
    """What is no element of a source: the names of the sources that it is made of, and why."""

    sources: str
    why: str


Operand: TypeAlias = "OfSource | Constant | Cast | AsBits | Held | Computed"


class Operands:
    """Operands by their numbers, each once.

    Args:
        names: of the sources.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._every: list[Operand] = []
        self._numbers: dict[Any, int] = {}

    def __getitem__(self, number: int) -> Operand:
        return self._every[number]

    def __len__(self) -> int:
        return len(self._every)

    def number(self, operand: Operand) -> int:
        """The number of an operand."""
        is_value = isinstance(operand, Constant)  # of which 0.0 and -0.0 are two
        key = (operand, repr(operand)) if is_value else operand
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._every)
            self._every.append(operand)
        return found

    def computed_here(self, why: str, operands: Sequence[int], dtype: torch.dtype) -> int:
        """The number of what the program computes where it is."""
        return self.number(Computed(why, frozenset(operands), dtype, calling_line()))

    def cast(self, pieces: Sequence[Piece], dtype: torch.dtype) -> list[Piece]:
        """The pieces as a tensor of that dtype has their values."""
        numbers = {}
        for each in pieces:
            if each.source not in numbers:
                numbers[each.source] = self.cast_one(each.source, dtype)
        return [each._replace(source=numbers[each.source]) for each in pieces]

    def cast_one(self, number: int, dtype: torch.dtype) -> int:
        """An operand as a tensor of that dtype has its values."""
        operand = self[number]
        if operand.dtype == dtype:
            return number
        if isinstance(operand, Constant):
            return self.number(Constant(_cast(operand.value, operand.dtype, dtype), dtype))
        if operand.dtype.is_complex and not dtype.is_complex:
            return self.computed_here("the program takes complex numbers apart", [number], dtype)
        if isinstance(operand, Cast) and holds(operand.dtype, self[operand.of].dtype):
            return self.cast_one(operand.of, dtype)
        return self.number(Cast(number, dtype))

    def final(self, number: int) -> OfSource | Constant | Held | Computed:
        """What arrives where an operand does: with one cast at the most, to the dtype there."""
        operand = self[number]
        if isinstance(operand, (OfSource, Constant, Held, Computed)):
            return operand
        of = self.final(operand.of)
        inner = self[operand.of]
        if isinstance(of, Computed):
            return of
        whose = self.names_of([number])
        if isinstance(operand, AsBits):
            why = f"the bits of {whose} are read as {operand.dtype}, but not as {inner.dtype} again"
        elif isinstance(inner, Cast):
            why = f"{whose} is cast twice, to {inner.dtype} and then to {operand.dtype}"
        else:
            return of
        return Computed(why, frozenset([number]), operand.dtype)

    def computed(self, number: int) -> Computed | None:
        """What an operand is of the result of a call, which can be called again."""
        operand = self[number]
        found = self[operand.of] if isinstance(operand, Cast) else operand
        return found if isinstance(found, Computed) and found.call is not None else None

    def retyped(self, number: int) -> Cast | AsBits | None:
        """An operand that is the cast of a cast, or whose bits are seen as a dtype of the same
        width: no movement, but known of what arrives. None: it is not.
        """
        operand = self[number]
        if not isinstance(operand, (Cast, AsBits)) or self.arrives(number, retyped=False):
            return None
        is_wide = operand.dtype.itemsize != self[operand.of].dtype.itemsize
        if (isinstance(operand, AsBits) and is_wide) or not self.arrives(operand.of):
            return None
        return operand

    def arrives(self, number: int, *, retyped: bool = True) -> bool:
        """Whether an operand is moved, or of the result of a call, or known of one that is."""
        if isinstance(self.final(number), (OfSource, Constant)):
            return True
        return self.computed(number) is not None or (retyped and self.retyped(number) is not None)

    def _is_of_call(self, number: int) -> bool:
        operand = self[number]
        while isinstance(operand, (Cast, AsBits)):
            operand = self[operand.of]
        return isinstance(operand, Computed)

    def not_moved(
        self, pieces: Sequence[Piece], *, computes: bool = False, retypes: bool = False
    ) -> NotMoved | None:
        """What of the pieces is no element of a source, and no constant; None: all is.
        ``computes``: they may be of the result of a call. ``retypes``: they may be known of what
        arrives.
        """
        for number in dict.fromkeys(each.source for each in pieces):
            if computes and self.computed(number) is not None:
                continue
            is_known = retypes and self.retyped(number) is not None
            if is_known and (computes or not self._is_of_call(number)):
                continue
            found = self.final(number)
            if isinstance(found, Computed):
                return NotMoved(self.names_of([number]), f"{found.why}{at(found.line)}")
            if isinstance(found, Held):
                return NotMoved("none", f"it is what {found.name!r} held before")
        return None

    def of_sources(self, pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], tuple[Any, ...]]:
        """Pieces from the sources, by their numbers; from constants as below 0, and their values.
        All must be.
        """
        numbers: dict[int, int] = {}
        constants: list[Any] = []
        for number in dict.fromkeys(each.source for each in pieces):
            found = self.final(number)
            if isinstance(found, OfSource):
                numbers[number] = found.number
            else:
                assert isinstance(found, Constant), "as asked before"
                constants.append(found.value)
                numbers[number] = -len(constants)
        some = [each._replace(source=numbers[each.source]) for each in pieces]
        return join_pieces(some), tuple(constants)

    def as_bits(self, number: int, dtype: torch.dtype) -> int:
        """An operand whose memory is seen as that dtype."""
        operand = self[number]
        if operand.dtype == dtype:
            return number
        if isinstance(operand, Constant) and _is_zero(operand):
            return self.number(Constant(0, dtype))
        if isinstance(operand, AsBits):
            return self.as_bits(operand.of, dtype)
        return self.number(AsBits(number, dtype))

    def sources_of(self, numbers: Sequence[int] | frozenset[int]) -> set[int]:
        """The sources that operands are made of."""
        found: set[int] = set()
        for number in numbers:
            operand = self[number]
            if isinstance(operand, OfSource):
                found.add(operand.number)
            elif isinstance(operand, (Cast, AsBits)):
                found |= self.sources_of([operand.of])
            elif isinstance(operand, Computed):
                found |= self.sources_of(operand.operands)
        return found

    def names_of(self, numbers: Sequence[int] | frozenset[int]) -> str:
        """The names of the sources that operands are made of."""
        names = [repr(self._names[k]) for k in sorted(self.sources_of(numbers))]
        return ", ".join(names[:4]) + (" and others" if len(names) > 4 else "") or "no source"


def lying_as(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of a tensor with these strides. Elements that lie at one place are equal.

    >>> lying_as(torch.tensor([[1, 1], [2, 2]]), (3, 0)).stride()
    (3, 0)
    """
    shape, device = tensor.shape, tensor.device
    sizes = [n if step else min(n, 1) for n, step in zip(shape, strides)]
    first = tensor.detach().as_strided(sizes, tensor.stride(), int(tensor.storage_offset()))
    memory = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=device).copy_(first)
    return memory.expand(shape)


def is_own(operand: Operand) -> bool:
    """Whether the program's own tensors have its values in their memory."""
    return isinstance(operand, Constant) or (isinstance(operand, Computed) and not operand.operands)


@cache
def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a dtype has every value of another one.

    >>> holds(torch.float32, torch.bfloat16), holds(torch.float16, torch.bfloat16)
    (True, False)
    """
    if wide.is_complex or narrow.is_complex:
        return wide == narrow
    if wide.is_floating_point != narrow.is_floating_point:
        return False
    if torch.bool in (wide, narrow):
        return narrow == torch.bool
    if wide.is_floating_point and wide.itemsize == 1:
        return wide == narrow  # some have no infinity, or no -0.0
    if wide.is_floating_point:
        one, other = torch.finfo(wide), torch.finfo(narrow)
        return (
            one.eps <= other.eps
            and one.max >= other.max
            and one.tiny * one.eps <= other.tiny * other.eps
        )
    low, high = torch.iinfo(wide), torch.iinfo(narrow)
    return low.min <= high.min and high.max <= low.max


def filled_with(value: Any, dtype: torch.dtype) -> Any:
    """A number as a tensor of that dtype has it that is filled with it."""
    with dispatch_modes.no_modes():
        return torch.zeros((), dtype=dtype).fill_(value).item()


def _cast(value: Any, dtype: torch.dtype, to: torch.dtype) -> Any:
    """A number of a tensor as one of another dtype has it."""
    with dispatch_modes.no_modes():
        return torch.zeros((), dtype=dtype).fill_(value).to(to).item()


def _is_zero(constant: Constant) -> bool:
    """Whether all bits are 0."""
    with dispatch_modes.no_modes():
        whole = torch.zeros(1, dtype=constant.dtype).fill_(constant.value)
        return not whole.view(torch.uint8).any()


def calling_line() -> str:
    """Where the program calls: the innermost line that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_THEIRS, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def at(where: str) -> str:
    """The line, for the end of a clause."""
    return f" ({where})" if where else ""


# The folders of this package and of torch.
_THEIRS = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)

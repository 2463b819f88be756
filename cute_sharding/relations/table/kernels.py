"""What an op's kernel needs of its local arguments beside the values of tensors: sizes of the local
part, or a memory layout.

These are data; dtensor/decide/local.py acts on them. Numbers are positions among the op's
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class AlignedMask(NamedTuple):
    """The mask, argument ``at``, must start rows at addresses that the kernel can load from."""

    at: int


class Images(NamedTuple):
    """The first ``tensors`` arguments must have the same memory format; argument ``number`` is the
    number of their images.
    """

    tensors: int
    number: int


class Sizes(NamedTuple):
    """The first of the sizes, argument ``sizes``, if there are any, must be those of the tensor
    ``of`` in the dims ``dims``.
    """

    of: int
    sizes: int
    dims: tuple[int, ...]


class SizesBeside(NamedTuple):
    """The sizes, argument ``sizes``, must be those of the tensor ``of``, but for the dim that
    argument ``dim`` names.
    """

    of: int
    sizes: int
    dim: int


@dataclass(frozen=True)
class Matrices:
    """The first argument must be row-major locally if and only if the whole tensor is."""


@dataclass(frozen=True)
class Bits:
    """The first argument must lie so that its elements can be read as those of the second, a dtype
    of another size: rows start at addresses that the larger size divides.
    """


class MeanGradient(NamedTuple):
    """The gradient of a loss whose reduction is argument ``reduction``: for a mean it is divided by
    the number of elements of the second argument.
    """

    reduction: int


Kernel = AlignedMask | Images | Sizes | SizesBeside | Matrices | Bits | MeanGradient

"""What an op's kernel needs of its local arguments beside the values of tensors: sizes of the local
part, or a memory layout.

These are data; dtensor/decide/local_arguments.py acts on them. Numbers are positions among the op's
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class AlignedMask(NamedTuple):
    """The mask, argument ``at``, begins each row at an address that the kernel can load from."""

    at: int


class Images(NamedTuple):
    """The first ``tensors`` lie in one memory format, and argument ``number`` is how many images
    they have.
    """

    tensors: int
    number: int


class LeadingSizes(NamedTuple):
    """The first two of the sizes, argument ``sizes``, are those of the tensor, argument ``of``."""

    of: int
    sizes: int


class Channels(NamedTuple):
    """The sizes of a bias, argument ``sizes``, where there is one, are the channels of the tensor,
    argument ``of``.
    """

    of: int
    sizes: int


@dataclass(frozen=True)
class Matrices:
    """The first argument must be row-major locally if and only if the whole tensor is."""


class MeanGradient(NamedTuple):
    """The gradient of a loss whose reduction is argument ``reduction``: of a mean, it is divided by
    the number of elements of the second argument.
    """

    reduction: int


Kernel = AlignedMask | Images | LeadingSizes | Channels | Matrices | MeanGradient

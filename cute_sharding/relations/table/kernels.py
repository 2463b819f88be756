"""What an op's kernel wants of its local arguments beside the values of tensors: sizes that are
those of a part, tensors that lie in some way.

Data alone; what is done about each is dtensor/decide/local_arguments.py. Places are those of an
op's arguments.
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
    """The first argument lies row by row, or not, as the whole does."""


class MeanGradient(NamedTuple):
    """The gradient of a loss whose reduction is argument ``reduction``: of a mean, it is divided by
    the number of elements of the second argument.
    """

    reduction: int


Kernel = AlignedMask | Images | LeadingSizes | Channels | Matrices | MeanGradient

"""What a rank holds: bytes by what they are for and by layer, when that is the most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS = "activations"  # and whatever else is held
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS)


class Of(NamedTuple):
    """What bytes are for.

    Attributes:
        kind: one of ``KINDS``.
        layer: a layer of the model, or layers that are one behind the other: ``blocks.*``. Nothing
            where it is of none.
    """

    kind: str
    layer: str


class Moment(NamedTuple):
    """A stretch of a step, in which layers of one kind run.

    Attributes:
        backward: whether gradients were computed.
        layer: as in :class:`Of`.
        at: which of the layers that are one behind the other: 0 the first, 1 one between, 2 the
            last.
    """

    backward: bool
    layer: str
    at: int


def layer_of(path: str) -> tuple[str, int | None]:
    """The layer of a module, and its number where it is one of a list: what stands before the first
    number of its path, or the path's first word.

    >>> layer_of("blocks.3.attention.wq"), layer_of("norm")
    (('blocks.*', 3), ('norm', None))
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:i], "*"]), int(part)
    return parts[0], None


@dataclass(frozen=True)
class Memory:
    """The most that a rank holds at once.

    Attributes:
        moments: the most that is held in each stretch of the step: bytes by what they are for.
    """

    moments: Mapping[Moment, Mapping[Of, int]]

    @classmethod
    def of(cls, found: Sequence[tuple[bool, str, Sequence[tuple[str, str, int]]]]) -> Memory:
        """From what a run has found: whether gradients were computed, the path of the module, and
        (kind, path, bytes) of all that was held.
        """
        last: dict[str, int] = {}
        for _, path, _ in found:
            layer, number = layer_of(path)
            last[layer] = max(last.get(layer, 0), number or 0)
        moments: dict[Moment, Counter[Of]] = {}
        for backward, path, held in found:
            layer, number = layer_of(path)
            at = 0 if not number else 2 if number == last[layer] else 1
            counted: Counter[Of] = Counter()
            for kind, owner, size in held:
                counted[Of(kind, layer_of(owner)[0])] += size
            moment = Moment(backward, layer, at)
            if counted.total() > moments.get(moment, Counter()).total():
                moments[moment] = counted
        return cls(moments)

    @property
    def most(self) -> Mapping[Of, int]:
        """What is held when that is the most."""
        return max(self.moments.values(), key=lambda held: sum(held.values()), default={})

    @property
    def peak(self) -> int:
        """The most that is held at once, in bytes."""
        return sum(self.most.values())

    def by_kind(self) -> dict[str, int]:
        """What the most is for: bytes of each of ``KINDS``."""
        found = dict.fromkeys(KINDS, 0)
        for of, size in self.most.items():
            found[of.kind] += size
        return found

    def by_layer(self) -> dict[str, dict[str, int]]:
        """The same, layer by layer."""
        found: dict[str, dict[str, int]] = {}
        for of, size in self.most.items():
            found.setdefault(of.layer, dict.fromkeys(KINDS, 0))[of.kind] += size
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data, in bytes."""
        return {"peak": self.peak, "by_kind": self.by_kind(), "by_layer": self.by_layer()}

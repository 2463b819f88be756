"""The memory of a rank at its peak: bytes by purpose and by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS = "activations"  # and all other storages
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS)


class Purpose(NamedTuple):
    """The purpose of bytes.

    Attributes:
        kind: one of ``KINDS``.
        layer: a layer of the model, or consecutive layers, such as ``blocks.*``. Empty for bytes
            that belong to no layer.
    """

    kind: str
    layer: str


class Moment(NamedTuple):
    """A part of a step, in which layers of one kind run.

    Attributes:
        backward: whether gradients were computed.
        layer: as in :class:`Purpose`.
        at: the position among consecutive layers: 0 for the first, 1 for any between, 2 for the
            last.
    """

    backward: bool
    layer: str
    at: int


def layer_of(path: str) -> tuple[str, int | None]:
    """The layer of a module, and its number if it belongs to a list of layers: the path before its
    first number, or the first word of the path.

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
    """The most memory that a rank holds at once.

    Attributes:
        moments: the most memory in each part of the step: bytes by purpose.
    """

    moments: Mapping[Moment, Mapping[Purpose, int]]

    @classmethod
    def of(cls, found: Sequence[tuple[bool, str, Sequence[tuple[str, str, int]]]]) -> Memory:
        """The memory from the records of a run: whether gradients were computed, the path of the
        module, and (kind, path, bytes) of all storages.
        """
        last: dict[str, int] = {}
        for _, path, _ in found:
            layer, number = layer_of(path)
            last[layer] = max(last.get(layer, 0), number or 0)
        moments: dict[Moment, Counter[Purpose]] = {}
        for backward, path, held in found:
            layer, number = layer_of(path)
            at = 0 if not number else 2 if number == last[layer] else 1
            counted: Counter[Purpose] = Counter()
            for kind, owner, size in held:
                counted[Purpose(kind, layer_of(owner)[0])] += size
            moment = Moment(backward, layer, at)
            if counted.total() > moments.get(moment, Counter()).total():
                moments[moment] = counted
        return cls(moments)

    @property
    def most(self) -> Mapping[Purpose, int]:
        """The storages at the peak."""
        return max(self.moments.values(), key=lambda held: sum(held.values()), default={})

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return sum(self.most.values())

    def by_kind(self) -> dict[str, int]:
        """The bytes at the peak, for each of ``KINDS``."""
        found = dict.fromkeys(KINDS, 0)
        for of, size in self.most.items():
            found[of.kind] += size
        return found

    def by_layer(self) -> dict[str, dict[str, int]]:
        """The bytes at the peak, layer by layer."""
        found: dict[str, dict[str, int]] = {}
        for of, size in self.most.items():
            found.setdefault(of.layer, dict.fromkeys(KINDS, 0))[of.kind] += size
        return found

    def to_dict(self) -> dict[str, Any]:
        """The memory as plain data, in bytes."""
        return {"peak": self.peak, "by_kind": self.by_kind(), "by_layer": self.by_layer()}

"""The results of dry runs: the bytes that a step receives and holds; and the same of a model with
many layers, from runs with few layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

from cute_sharding.exchange.network import Chosen
from cute_sharding.tools.profile.values import Cause, Collective, Place, seconds_of

STOCK = "PyTorch"
# The columns, with their flags.
SETTINGS: dict[str, dict[str, str]] = {
    STOCK: {},
    "views": {"USE_CUTE_VIEW_PROPAGATION": "1"},
    "redistribution": {"USE_CUTE_REDISTRIBUTION": "1"},
    "movement": {"USE_CUTE_MOVEMENT": "1"},
    "all": {"USE_CUTE_SHARDING": "1"},
}
PLANNED = "planned"  # one more column: all flags, and a plan of the step
# The numbers of layers of the models that run. Two steps of one layer show whether each layer adds
# the same. Each model has a first and a last layer.
DEPTHS = (2, 3, 4)
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS = "activations"  # and all other storages
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS)


class Alike(NamedTuple):
    """The common properties of collectives that are counted together: some of those of a
    :class:`~cute_sharding.tools.profile.values.Collective`.
    """

    place: Place | None
    backward: bool
    op: str
    group: tuple[tuple[int, int], ...]  # the mesh dims of the group, and the ranks of each
    itemsize: int


# The amount of communication of equal collectives: their number, the elements that this rank
# receives, and those that the busiest rank receives (if unknown, those of this rank).
TrafficAmount: TypeAlias = "tuple[int, int, int]"


def group_on(mesh: Sequence[int], ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The mesh dims on which the ranks differ, and the number of ranks on each.

    >>> group_on((2, 4), [4, 5, 6, 7])
    ((1, 4),)
    """
    found, step = [], 1
    for m in range(len(mesh) - 1, -1, -1):
        parts = len({rank // step % mesh[m] for rank in ranks})
        if parts > 1:
            found.append((m, parts))
        step *= mesh[m]
    return tuple(reversed(found))


@dataclass(frozen=True)
class Traffic:
    """The bytes that a step receives.

    Attributes:
        rows: groups of equal collectives, with their amounts.
    """

    rows: dict[Alike, TrafficAmount]

    @classmethod
    def of(cls, collectives: Iterable[Collective], mesh: Sequence[int]) -> Traffic:
        """The recorded collectives, on a mesh of these sizes whose ranks start at 0. Barriers
        receive nothing.
        """
        rows: dict[Alike, TrafficAmount] = {}
        for one in collectives:
            if one.op != "barrier":
                group = group_on(mesh, one.ranks)
                alike = Alike(one.place, one.backward, one.op, group, one.itemsize)
                many, received, busiest = rows.get(alike, (0, 0, 0))
                rows[alike] = many + 1, received + one.received, busiest + one.most
        return cls(rows)

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return sum(n for n, _, _ in self.rows.values())

    @property
    def received_bytes(self) -> int:
        """The bytes that the rank receives."""
        return sum(n * alike.itemsize for alike, (_, n, _) in self.rows.items())

    @property
    def busiest_bytes(self) -> int:
        """The bytes that the busiest rank of each collective receives."""
        return sum(n * alike.itemsize for alike, (_, _, n) in self.rows.items())

    def seconds(self, mesh: Sequence[int], network: Chosen = None) -> float:
        """The seconds of all collectives by the network model, one after the other."""
        return sum(
            n * seconds_of(alike.op, alike.group, busiest / n, alike.itemsize, mesh, network)
            for alike, (n, _, busiest) in self.rows.items()
            if n
        )

    def by_op(self) -> dict[str, int]:
        """The bytes that the busiest rank receives by each kind of collective."""
        found: Counter[str] = Counter()
        for alike, (_, _, n) in self.rows.items():
            found[alike.op] += n * alike.itemsize
        return dict(sorted(found.items()))

    def by_line(self) -> dict[Place | None, Traffic]:
        """For each line, the communication of its forward and backward pass."""
        found: dict[Place | None, dict[Alike, TrafficAmount]] = {}
        for alike, amount in self.rows.items():
            found.setdefault(alike.place, {})[alike] = amount
        return {place: Traffic(rows) for place, rows in found.items()}


# What bytes are for: one of KINDS, and a layer of the model, or consecutive layers, such as
# ``blocks.*``; empty for bytes that belong to no layer.
Purpose: TypeAlias = "tuple[str, str]"
# A part of a step, in which layers of one kind run: whether gradients were computed, the layer, and
# the position among consecutive layers: 0 for the first, 1 for any between, 2 for the last.
Moment: TypeAlias = "tuple[bool, str, int]"


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
    def of(cls, peaks: Mapping[tuple[bool, str], Mapping[tuple[str, str], int]]) -> Memory:
        """The memory from the records of a run: by (whether gradients were computed, the path of
        the module), the bytes of all storages by (kind, path).
        """
        last: dict[str, int] = {}
        for _, path in peaks:
            layer, number = layer_of(path)
            last[layer] = max(last.get(layer, 0), number or 0)
        moments: dict[Moment, Counter[Purpose]] = {}
        for (backward, path), held in peaks.items():
            layer, number = layer_of(path)
            at = 0 if not number else 2 if number == last[layer] else 1
            counted: Counter[Purpose] = Counter()
            for (kind, owner), size in held.items():
                counted[kind, layer_of(owner)[0]] += size
            moment = backward, layer, at
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
        return {kind: sum(n for (of, _), n in self.most.items() if of == kind) for kind in KINDS}

    def by_layer(self) -> dict[str, int]:
        """The bytes at the peak, layer by layer."""
        return {layer: sum(held.values()) for layer, held in self.by_layer_and_kind().items()}

    def by_layer_and_kind(self) -> dict[str, dict[str, int]]:
        """The bytes at the peak, layer by layer, for each of ``KINDS`` that the layer holds."""
        found: dict[str, Counter[str]] = {}
        for (kind, layer), size in self.most.items():
            found.setdefault(layer, Counter())[kind] += size
        return {
            layer: {kind: held[kind] for kind in KINDS if held[kind]}
            for layer, held in found.items()
        }


@dataclass(frozen=True)
class DryRun:
    """A step with one setting.

    Attributes:
        setting: one of ``SETTINGS``, or ``PLANNED``.
        step: the communication of the step, up to a failure.
        setup: the communication before the step.
        memory: the memory of the rank.
        failure: the line and the error, if the step does not run; None if it runs.
        causes: the ops of DTensors that communicate. The program asks for all other communication.
        counted: whether the figures follow from runs with fewer layers.
    """

    setting: str
    step: Traffic
    setup: Traffic
    memory: Memory
    failure: str | None = None
    causes: tuple[Cause, ...] = ()
    counted: bool = False


Key = TypeVar("Key")


def counted(runs: Sequence[DryRun], layers: int) -> DryRun | None:
    """The run of a model with so many layers, from runs with ``DEPTHS`` layers; or the first of
    them that failed. None if further layers do not all add the same.
    """
    failed = next((run for run in runs if run.failure is not None), None)
    if failed is not None:
        return failed
    step, setup = (
        _grown([getattr(run, name).rows for run in runs], layers) for name in ("step", "setup")
    )
    memory = _memory([run.memory for run in runs], layers)
    if step is None or setup is None or memory is None:
        return None
    both = [Traffic(rows) for rows in (step, setup)]
    return replace(runs[-1], step=both[0], setup=both[1], memory=memory, counted=True)


def _memory(found: Sequence[Memory], layers: int) -> Memory | None:
    """The memory, in each part of the step. While a layer runs, the held memory grows linearly with
    the layers before it and after it. So the peak is in the first or in the last layer, and each
    of the ``DEPTHS`` has these two.
    """
    moments = [{m: held for m, held in each.moments.items() if m[2] != 1} for each in found]
    if any({*one} != {*other} for one, other in pairwise(moments)):
        return None
    flat = [
        {(moment, of): (n,) for moment, held in each.items() for of, n in held.items()}
        for each in moments
    ]
    sizes = _grown(flat, layers)
    if sizes is None:
        return None
    grown: dict[Moment, dict[Purpose, int]] = {moment: {} for moment in moments[0]}
    for (moment, of), (n,) in sizes.items():
        grown[moment][of] = n
    return Memory(grown)


def _grown(found: Sequence[Mapping[Key, tuple[int, ...]]], layers: int) -> dict[Key, Any] | None:
    """For each key, the values at ``layers`` of the straight lines through the values of
    ``DEPTHS``; None if some are not on a straight line.
    """
    grown: dict[Key, Any] = {}
    for key in dict.fromkeys(key for each in found for key in each):
        known = next(each[key] for each in found if key in each)
        values = zip(*[each.get(key, (0,) * len(known)) for each in found])
        grown[key] = ()
        for first, second, third in values:
            if third - second != second - first:
                return None
            grown[key] += (third + (layers - DEPTHS[-1]) * (third - second),)
    return grown

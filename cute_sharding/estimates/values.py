"""The results of dry runs, setting by setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cute_sharding.estimates.memory import Memory
from cute_sharding.estimates.traffic import Traffic
from cute_sharding.profiling import Place

STOCK = "PyTorch"
# Seconds, or bytes, that differ by a smaller share count as equal.
ALIKE = 0.01
# The columns, with their flags.
SETTINGS: dict[str, dict[str, str]] = {
    STOCK: {},
    "views": {"USE_CUTE_VIEW_PROPAGATION": "1"},
    "redistribution": {"USE_CUTE_REDISTRIBUTION": "1"},
    "movement": {"USE_CUTE_MOVEMENT": "1"},
    "all": {"USE_CUTE_SHARDING": "1"},
}


@dataclass(frozen=True)
class Failure:
    """The failure of a step.

    Attributes:
        text: the error, in one line.
        place: the line of the program; None if the error has no line of the program.
    """

    text: str
    place: Place | None

    def __str__(self) -> str:
        return self.text if self.place is None else f"{self.place}: {self.text}"


class Cause(NamedTuple):
    """An op that communicates.

    Attributes:
        place: the line of the program.
        backward: whether the op computes a gradient.
        op: the name of the op.
        text: the op, its tensors and the rule that decided, in a sentence.
    """

    place: Place
    backward: bool
    op: str
    text: str


@dataclass(frozen=True)
class Run:
    """A step with one setting.

    Attributes:
        setting: one of ``SETTINGS``.
        step: the communication of the step, up to a failure.
        setup: the communication before the step.
        memory: the memory of the rank.
        failure: the reason why the step does not run; None if it runs.
        causes: the ops of DTensors that communicate. The program asks for all other communication.
        counted: whether the figures follow from runs with fewer layers.
    """

    setting: str
    step: Traffic
    setup: Traffic
    memory: Memory
    failure: Failure | None = None
    causes: tuple[Cause, ...] = ()
    counted: bool = False


@dataclass(frozen=True)
class Comparison:
    """The cost of one step of a program, with PyTorch alone and with each flag.

    Attributes:
        program: the function.
        mesh: the number of devices of each mesh dim.
        names: the names of the mesh dims; None if they have no names.
        rank: the rank that was run.
        device: the kind of devices: "cuda" or "cpu".
        network: the links, as text; None: the default.
        layers: the number of layers, if the caller gave it; None otherwise.
        runs: one run for each setting, PyTorch alone first.
    """

    program: str
    mesh: tuple[int, ...]
    names: tuple[str, ...] | None
    rank: int
    device: str
    network: str | None
    layers: int | None
    runs: tuple[Run, ...]

    def run(self, setting: str) -> Run:
        """The run of a setting."""
        return next(run for run in self.runs if run.setting == setting)

    def seconds(self, run: Run) -> float:
        """The seconds of the collectives of the step, by the network model."""
        return run.step.seconds(self.mesh, self.network)

    @property
    def stock(self) -> Run | None:
        """The run without flags; None if the caller left this setting out."""
        return next((run for run in self.runs if run.setting == STOCK), None)

    @property
    def best(self) -> Run | None:
        """The run with the least time by the network; among equal times, the run with the fewest
        bytes; among equal bytes, the first run, which has the fewest flags. None if no setting
        runs.
        """
        some = [run for run in self.runs if run.failure is None]
        least = min(map(self.seconds, some), default=0.0)
        alike = [run for run in some if self.seconds(run) <= least * (1 + ALIKE)]
        return min(alike, key=lambda run: run.step.busiest_bytes, default=None)

    def mesh_dim(self, m: int) -> str:
        """The name of a mesh dim, or its number."""
        return self.names[m] if self.names else f"dim {m}"

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data: sizes in bytes, times in seconds."""
        return {
            "program": self.program,
            "mesh": list(self.mesh),
            "mesh_dim_names": None if self.names is None else list(self.names),
            "rank": self.rank,
            "device": self.device,
            "network": self.network,
            "layers": self.layers,
            "settings": {run.setting: self._of_run(run) for run in self.runs},
        }

    def _of_run(self, run: Run) -> dict[str, Any]:
        return {
            "failure": None if run.failure is None else str(run.failure),
            "counted": run.counted,
            "collectives": run.step.collectives,
            "received_bytes": run.step.received_bytes,
            "busiest_bytes": run.step.busiest_bytes,
            "seconds": self.seconds(run),
            "setup_collectives": run.setup.collectives,
            "setup_bytes": run.setup.busiest_bytes,
            "memory": run.memory.to_dict(),
            "causes": [{**of._asdict(), "place": of.place._asdict()} for of in run.causes],
            "lines": [self._of_line(place, of) for place, of in run.step.by_line().items()],
        }

    def _of_line(self, place: Place | None, traffic: Traffic) -> dict[str, Any]:
        return {
            "place": None if place is None else place._asdict(),
            "collectives": traffic.collectives,
            "received_bytes": traffic.received_bytes,
            "busiest_bytes": traffic.busiest_bytes,
            "seconds": traffic.seconds(self.mesh, self.network),
            "rows": [
                {
                    "op": alike.op,
                    "backward": alike.backward,
                    "mesh_dims": [self.mesh_dim(m) for m, _ in alike.group],
                    "itemsize": alike.itemsize,
                    **amount._asdict(),
                }
                for alike, amount in traffic.rows.items()
            ],
        }


def of_lines(runs: Sequence[Run]) -> list[Place | None]:
    """The lines that receive bytes in any of the runs, in their order."""
    return list(dict.fromkeys(place for run in runs for place in run.step.by_line()))

"""What a dry run found, setting by setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cute_sharding.estimates.memory import Memory
from cute_sharding.estimates.traffic import Traffic
from cute_sharding.profiling import Place

STOCK = "PyTorch"
# Of seconds and of bytes: what differs by less of them is alike.
ALIKE = 0.01
# The columns, and the flags of each.
SETTINGS: dict[str, dict[str, str]] = {
    STOCK: {},
    "views": {"USE_CUTE_VIEW_PROPAGATION": "1"},
    "redistribution": {"USE_CUTE_REDISTRIBUTION": "1"},
    "movement": {"USE_CUTE_MOVEMENT": "1"},
    "all": {"USE_CUTE_SHARDING": "1"},
}


@dataclass(frozen=True)
class Failure:
    """That a step does not run.

    Attributes:
        text: the error, in one line.
        place: the line of the program; None where it is of none.
    """

    text: str
    place: Place | None

    def __str__(self) -> str:
        return self.text if self.place is None else f"{self.place}: {self.text}"


class Cause(NamedTuple):
    """An op that sends something.

    Attributes:
        place: the line of the program.
        backward: whether it is a gradient.
        op: its name.
        why: why it sends, in a sentence.
        todo: what would avoid it, a sentence each, the cheapest first.
    """

    place: Place
    backward: bool
    op: str
    why: str
    todo: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A step with one setting.

    Attributes:
        setting: one of ``SETTINGS``.
        step: what the step receives; where it failed, up to there.
        setup: what is received before it.
        memory: what the rank holds.
        failure: why it does not run; None where it does.
        causes: the ops of DTensors that send something; the program asks for the rest itself.
        counted: whether layers were counted and not run.
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
    """What one step of a program costs, on stock PyTorch and with each flag.

    Attributes:
        program: the function.
        mesh: how many devices each mesh dim has.
        names: of the mesh dims; None where they have none.
        rank: the rank that was run.
        device: what kind of devices: "cuda" or "cpu".
        network: the links, as text; None: the default.
        layers: how many the model has, where the step was told; None where it was not.
        runs: a run of each setting, the stock first.
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
        """What the collectives of its step take by the network."""
        return run.step.seconds(self.mesh, self.network)

    @property
    def stock(self) -> Run | None:
        """Without any flag; None where that was not asked for."""
        return next((run for run in self.runs if run.setting == STOCK), None)

    @property
    def best(self) -> Run | None:
        """What runs and takes the least time by the network; of those alike what receives the
        fewest bytes, and of these the first, which has the fewest flags. None where nothing runs.
        """
        some = [run for run in self.runs if run.failure is None]
        least = min(map(self.seconds, some), default=0.0)
        alike = [run for run in some if self.seconds(run) <= least * (1 + ALIKE)]
        return min(alike, key=lambda run: run.step.busiest_bytes, default=None)

    @property
    def fewest(self) -> Run | None:
        """What runs and receives the fewest bytes, then takes the least time by the network. None
        where nothing runs.
        """
        return min(
            (run for run in self.runs if run.failure is None),
            key=lambda run: (run.step.busiest_bytes, self.seconds(run)),
            default=None,
        )

    def mesh_dim(self, m: int) -> str:
        """The name of a mesh dim, or its number."""
        return self.names[m] if self.names else f"dim {m}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data: sizes in bytes, times in seconds."""
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
    """The lines that receive in any of the runs, in their order."""
    return list(dict.fromkeys(place for run in runs for place in run.step.by_line()))

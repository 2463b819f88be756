"""An estimate, and the estimate as text: the settings side by side, the layers, the lines and the
ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from textwrap import wrap
from typing import Any

from cute_sharding._html import of_text
from cute_sharding._words import bytes_text, counted, seconds_text
from cute_sharding.tools.estimate.memory import KINDS
from cute_sharding.tools.estimate.traffic import Traffic
from cute_sharding.tools.estimate.values import ALIKE, STOCK, DryRun
from cute_sharding.tools.profile.report import Place

LINES = 8  # the most lines of the program to show, and the most layers
OPS = 3  # the most ops of a line to show


@dataclass(frozen=True)
class Estimate:
    """The cost of one step of a program, with PyTorch alone and with each flag. ``print`` shows it.

    Attributes:
        program: the function.
        mesh: the number of devices of each mesh dim.
        names: the names of the mesh dims; None if they have no names.
        rank: the rank that was run.
        device: the kind of devices: "cuda" or "cpu".
        network: the links, as text; None: the default.
        layers: the number of layers, if the caller gave it; None otherwise.
        runs: one run for each setting, PyTorch alone first.

    >>> from cute_sharding.tools.estimate.memory import Memory
    >>> empty = DryRun("PyTorch", Traffic({}), Traffic({}), Memory({}))
    >>> Estimate("train.py:step", (4,), None, 0, "cpu", None, None, (empty,)).best.setting
    'PyTorch'
    """

    program: str
    mesh: tuple[int, ...]
    names: tuple[str, ...] | None
    rank: int
    device: str
    network: str | None
    layers: int | None
    runs: tuple[DryRun, ...]

    def run(self, setting: str) -> DryRun:
        """The run of a setting."""
        return next(run for run in self.runs if run.setting == setting)

    def seconds(self, run: DryRun) -> float:
        """The seconds of the collectives of the step, by the network model."""
        return run.step.seconds(self.mesh, self.network)

    @property
    def stock(self) -> DryRun | None:
        """The run without flags; None if the caller left this setting out."""
        return next((run for run in self.runs if run.setting == STOCK), None)

    @property
    def best(self) -> DryRun | None:
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

    def _of_run(self, run: DryRun) -> dict[str, Any]:
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

    def _repr_html_(self) -> str:
        return of_text(str(self))

    def __str__(self) -> str:
        return self.with_details()

    def with_details(self, *settings: str) -> str:
        """The text, with the layers, the lines and the ops of the given settings. By default, the
        text has the layers and lines of PyTorch and of the best setting, and the ops of the best
        setting.

        Raises:
            ValueError: a setting is not one of the columns.

        >>> from cute_sharding.tools.estimate.memory import Memory
        >>> empty = DryRun("PyTorch", Traffic({}), Traffic({}), Memory({}))
        >>> found = Estimate("train.py:step", (4,), None, 0, "cpu", None, None, (empty,))
        >>> found.with_details("all")
        Traceback (most recent call last):
        ValueError: the estimate has no setting 'all': give one or more of PyTorch
        """
        runs = {run.setting: run for run in self.runs}
        unknown = [setting for setting in settings if setting not in runs]
        if unknown:
            raise ValueError(
                f"the estimate has no setting {unknown[0]!r}: give one or more of {', '.join(runs)}"
            )
        asked = [runs[setting] for setting in dict.fromkeys(settings)]
        shown = _that_run(asked or [self.stock, self.best])
        ops = [_ops(run) for run in _that_run(asked or [self.best])]
        parts = [_head(self), _settings(self), _layers(shown), _lines(shown), *ops, _failures(self)]
        return "\n\n".join("\n".join(part) for part in parts if part)


def of_lines(runs: Sequence[DryRun]) -> list[Place | None]:
    """The lines that receive bytes in any of the runs, in their order."""
    return list(dict.fromkeys(place for run in runs for place in run.step.by_line()))


def _head(estimate: Estimate) -> list[str]:
    sizes = ", ".join(
        f"{name}={n}" if estimate.names else str(n)
        for name, n in zip(estimate.names or estimate.mesh, estimate.mesh)
    )
    over = {"cuda": "GPUs over NCCL", "cpu": "CPUs over gloo"}[estimate.device]
    lines = [
        f"{estimate.program}, one step on mesh ({sizes}): rank {estimate.rank} of "
        f"{prod(estimate.mesh):,}, as on {over}"
    ]
    if any(run.counted for run in estimate.runs):
        lines.append(
            f"{estimate.layers} layers: computed from runs with 2, 3 and 4 layers, because each "
            f"further "
            "layer adds the same"
        )
    elif estimate.layers is not None:
        lines.append(f"{estimate.layers} layers, all of which were run")
    default = "NVLink in hosts of eight devices, InfiniBand between"
    return [*lines, f"network: {estimate.network or default}"]


def _table(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Rows with a label at the beginning, in columns."""
    label = max(len(row[0]) for row in rows)
    widths = [max(len(row[1][i]) for row in rows) for i in range(len(rows[0][1]))]
    return [
        f"{name:<{label}}  {'  '.join(f'{x:>{n}}' for x, n in zip(cells, widths))}".rstrip()
        for name, cells in rows
    ]


def _settings(estimate: Estimate) -> list[str]:
    def row(name: str, of: Callable[[DryRun], str]) -> tuple[str, list[str]]:
        return name, ["-" if run.failure else of(run) for run in estimate.runs]

    rows = [
        ("", [run.setting for run in estimate.runs]),
        row("received", lambda run: bytes_text(run.step.busiest_bytes)),
        row("collectives", lambda run: f"{run.step.collectives:,}"),
        row("time by the network", lambda run: seconds_text(estimate.seconds(run))),
        row("memory, at most", lambda run: bytes_text(run.memory.peak)),
        *(row(f"  {kind}", partial(_held, kind)) for kind in KINDS),
        row("received before the step", lambda run: bytes_text(run.setup.busiest_bytes)),
    ]
    return _table(rows)


def _held(kind: str, run: DryRun) -> str:
    return bytes_text(run.memory.by_kind()[kind])


def _that_run(runs: Sequence[DryRun | None]) -> list[DryRun]:
    """The runs that did not fail, each once."""
    return list({run.setting: run for run in runs if run and not run.failure}.values())


def _layers(runs: Sequence[DryRun]) -> list[str]:
    """The memory of each layer at the peak."""
    if not runs:
        return []
    held = [run.memory.by_layer() for run in runs]
    sizes: dict[str, list[int]] = {}
    for layer in dict.fromkeys(layer for each in held for layer in each):
        sizes[layer] = [sum(each.get(layer, {}).values()) for each in held]
    largest = sorted(sizes, key=lambda layer: -max(sizes[layer]))
    rows = [("memory by layer, at the peak", [run.setting for run in runs])]
    rows += [
        (f"  {layer or 'outside of all layers'}", [bytes_text(n) for n in sizes[layer]])
        for layer in largest[:LINES]
    ]
    return _table(rows) + _more(len(largest) - LINES, "layer")


def _lines(runs: Sequence[DryRun]) -> list[str]:
    """The bytes that each line receives, the largest first."""
    if not runs:
        return []
    found = [run.step.by_line() for run in runs]
    places = of_lines(runs)
    nothing = Traffic({})

    def most(place: Place | None) -> int:
        return max(each.get(place, nothing).busiest_bytes for each in found)

    largest = sorted(places, key=lambda place: -most(place))
    if not largest:
        return ["no line receives anything"]
    rows = [("received for each line, forward and backward", [run.setting for run in runs])]
    for place in largest[:LINES]:
        each = [lines.get(place, nothing) for lines in found]
        cells = [f"{bytes_text(of.busiest_bytes)} in {of.collectives:,}" for of in each]
        rows.append((f"  {place or 'unknown line'}", cells))
    return _table(rows) + _more(len(largest) - LINES, "line")


def _ops(run: DryRun) -> list[str]:
    """The ops of DTensors that communicate with a setting; lines that receive the most first."""
    causes: dict[Place, list[str]] = {}
    for cause in run.causes:
        causes.setdefault(cause.place, []).append(cause.text)
    by_line, nothing = run.step.by_line(), Traffic({})
    largest = sorted(causes, key=lambda place: -by_line.get(place, nothing).busiest_bytes)
    lines = [f"ops of DTensors that communicate, {run.setting}"] if causes else []
    for place in largest[:LINES]:
        lines.append(f"  {place}")
        texts = list(dict.fromkeys(causes[place]))
        for text in texts[:OPS]:
            lines += wrap(text, 96, initial_indent="    ", subsequent_indent="      ")
        lines += [f"  {each}" for each in _more(len(texts) - OPS, "op")]
    return lines + _more(len(causes) - LINES, "line")


def _more(n: int, what: str) -> list[str]:
    return [f"  and {counted(n, f'more {what}')}"] if n > 0 else []


def _failures(estimate: Estimate) -> list[str]:
    """The reasons why settings do not run. Settings with the same reason share a line."""
    found: dict[str, list[str]] = {}
    for run in estimate.runs:
        if run.failure is not None:
            found.setdefault(str(run.failure), []).append(run.setting)
    return [
        f"{', '.join(names)}: {'does' if len(names) == 1 else 'do'} not run. {why}"
        for why, names in found.items()
    ]

"""``estimate``: a step on every setting, side by side. Each setting has a process of its own, which
shares nothing with other processes, and sets its flags before it imports torch.
"""

from __future__ import annotations

import json
import linecache
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from inspect import getsourcefile
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any, Literal, TypeVar

from cute_sharding import _html
from cute_sharding._settings import FLAGS
from cute_sharding._words import bytes_text, columns, counted, mesh_text, seconds_text
from cute_sharding.exchange import Network
from cute_sharding.programs.plan import StepPlan
from cute_sharding.tools.drawing.charts import Bar, BarGroup, bar_chart
from cute_sharding.tools.estimate import values
from cute_sharding.tools.estimate.values import DEPTHS, KINDS, PLANNED, SETTINGS, DryRun, Traffic
from cute_sharding.tools.files import save
from cute_sharding.tools.profile.values import Place

Key = TypeVar("Key")
# The environment variable that marks a process of a dry run.
_DRY_RUN = "_CUTE_SHARDING_DRY_RUN"
SECONDS = 600
LINES = 8  # the most lines of the program to show, and the most layers
OPS = 3  # the most ops of a line to show
# Seconds, or bytes, that differ by a smaller share count as equal.
ALIKE = 0.01


def estimate(
    step: Callable[..., Any] | str,
    mesh: Sequence[int] | Mapping[str, int],
    *,
    network: str | None = None,
    layers: int | None = None,
    rank: int = 0,
    device: Literal["cuda", "cpu"] = "cuda",
    settings: Sequence[str] = tuple(SETTINGS),
    plan: StepPlan | str | Path | None = None,
) -> Estimate:
    """The bytes that one step of a program would receive and hold, with PyTorch alone and with each
    flag. The estimate needs no device, no memory for the model, and no process for each rank.

    ``step(mesh)`` takes a ``DeviceMesh``, makes a model, its batch and an optimizer, and returns
    one step: a function without arguments. A separate row counts the communication before the step.
    Tensors have shapes but no elements. The mesh and the tensors have the device type "cpu".

    Args:
        step: a function at the top of a module, or its name: ``module:function``,
            ``file.py:function``.
        mesh: the number of devices of each mesh dim; with names if the program uses the names of
            mesh dims, such as ``{"dp": 64, "tp": 8}``.
        network: the links, as in ``USE_CUTE_NETWORK``: ``infiniband,nvlink``, or
            ``flat:ALPHA,BETA``. By default, NVLink within hosts of eight devices, and InfiniBand
            between hosts.
        layers: the number of layers of the model. ``step(mesh, layers=n)`` is called for 2, 3 and 4
            layers. If each layer adds the same, the figures for all layers follow exactly.
            Otherwise, all layers are run.
        rank: the rank that is run. If shards are uneven, rank 0 holds the largest shards.
        device: "cuda" runs the step as on GPUs over NCCL, and "cpu" as on CPUs over gloo.
        settings: the columns, from "PyTorch", "views", "redistribution", "movement" and "all".
        plan: of this step, or its path: one more column "planned", with all flags and the plan.

    Returns:
        An :class:`~cute_sharding.tools.estimate.Estimate`, which you can print. Bytes are those
        that the busiest rank of each collective receives. Seconds follow the network model (Chan et
        al. 2007).

    Raises:
        ValueError: an argument has an unknown value, the function cannot be imported by name, or
            the plan is of another mesh.
        ImportError: the program cannot be imported, or has no such function.
        RuntimeError: a process ended without a result.

    >>> estimate("training_step", mesh={"dp": 64, "tp": 8})
    Traceback (most recent call last):
    ValueError: 'training_step' is not the name of a function: write module:function or \
file.py:function
    """
    sizes, names = sizes_and_names(mesh)
    check(sizes, network, layers, rank, device, settings)
    module, file, name = located(step)
    request = dict[str, Any](function=(module, file, name), sizes=sizes, names=names, rank=rank)
    request |= {"device": device, "plan": None if plan is None else _plan_on(plan, sizes, names)}
    shown = [*settings, *([] if plan is None else [PLANNED])]
    runs = _runs(request, {name: _flags(name, network) for name in shown}, layers)
    program = f"{module if file is None else os.path.relpath(file)}:{name}"
    return Estimate(program, sizes, names, rank, device, network, layers, runs)


def sizes_and_names(
    mesh: Sequence[int] | Mapping[str, int],
) -> tuple[tuple[int, ...], tuple[str, ...] | None]:
    """The sizes of the mesh dims, and their names if they have some."""
    if isinstance(mesh, Mapping):
        return tuple(mesh.values()), tuple(mesh)
    return tuple(mesh), None


def _flags(setting: str, network: str | None) -> dict[str, str]:
    """The flags of a column; a network is for this package."""
    flags = SETTINGS["all" if setting == PLANNED else setting]
    return flags | ({"USE_CUTE_NETWORK": network} if flags and network else {})


def _plan_on(
    plan: StepPlan | str | Path, sizes: tuple[int, ...], names: tuple[str, ...] | None
) -> StepPlan:
    """A plan, which is one of a step on this mesh.

    Raises:
        ValueError: it is of another mesh.
    """
    found = plan if isinstance(plan, StepPlan) else StepPlan.load(plan)
    if (found.mesh, found.names) != (sizes, names):
        raise ValueError(
            f"the plan is of a step on mesh {mesh_text(found.mesh, found.names)}, and the estimate "
            f"is on mesh {mesh_text(sizes, names)}: estimate the step on the mesh of the plan, "
            "with the same names, or plan it on this one"
        )
    return found


def _runs(
    request: Mapping[str, Any], flags: Mapping[str, Mapping[str, str]], layers: int | None
) -> tuple[DryRun, ...]:
    """The runs of all settings; of many layers from few, or else of all. A plan does not know the
    ops of a model with fewer layers.
    """
    runs: dict[str, DryRun | None] = dict.fromkeys(flags)
    if layers is not None and layers > DEPTHS[-1]:
        few = {setting: some for setting, some in flags.items() if setting != PLANNED}
        every = _results({**request, "layers": DEPTHS}, few)
        runs |= {setting: values.counted(found, layers) for setting, found in every.items()}
    left = {setting: flags[setting] for setting, run in runs.items() if run is None}
    again = _results({**request, "layers": [layers]}, left)
    found = {setting: run or again[setting][0] for setting, run in runs.items()}
    return tuple([replace(run, setting=setting) for setting, run in found.items()])


def check(
    sizes: tuple[Any, ...],
    network: str | None,
    layers: int | None,
    rank: int,
    device: str,
    settings: Sequence[str],
) -> None:
    """
    Raises:
        ValueError: an argument of :func:`estimate` has an unknown value.
    """
    if not sizes or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            f"mesh={sizes}: pass the number of devices of each mesh dim, such as (64, 8)"
        )
    if not 0 <= rank < prod(sizes):
        raise ValueError(f"rank={rank}: the mesh {sizes} has the ranks 0 to {prod(sizes) - 1}")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r} is neither 'cuda' nor 'cpu'")
    if layers is not None and layers < 1:
        raise ValueError(f"layers={layers}: a model has at least one layer")
    if not settings or not {*settings} <= {*SETTINGS}:
        raise ValueError(f"settings={list(settings)}: give one or more of {', '.join(SETTINGS)}")
    if network is not None:
        Network.parse(network).checked(sizes)


def located(step: Callable[..., Any] | str) -> tuple[str, str | None, str]:
    """A function of a program, in a form that another process can find: the name of its module, the
    file of the module unless it can be imported by name, and the function's dotted name. From a
    function, or from ``module:function`` or ``file.py:function``.

    Raises:
        ValueError: another process could not find the function.

    >>> located("package.train:step")
    ('package.train', None, 'step')
    """
    if isinstance(step, str):
        where, _, name = step.rpartition(":")
        if not where or not name:
            raise ValueError(
                f"{step!r} is not the name of a function: write module:function or file.py:function"
            )
        if not where.endswith(".py"):
            return where, None, name
        if not Path(where).exists():
            raise ValueError(f"the file {where!r} does not exist: give the path of a Python file")
        return Path(where).stem, where, name
    module, name = getattr(step, "__module__", None), getattr(step, "__qualname__", "<")
    if not callable(step) or "<" in name or not isinstance(module, str):
        raise ValueError(
            f"estimate cannot import {step!r} in a new process: pass a function that is "
            "defined at the top level of a module, or 'module:function'"
        )
    if module != "__main__":
        return module, None, name
    file = getsourcefile(step)
    if file is None or not Path(file).exists():
        raise ValueError(
            f"estimate cannot import {name} in a new process, because the function is not in a "
            "file: write the function into a file, and pass 'file.py:function'"
        )
    return Path(file).stem, file, name


def _results(
    request: Mapping[str, Any], flags: Mapping[str, Mapping[str, str]]
) -> dict[str, list[DryRun]]:
    """The runs of each setting, of which the last may have failed.

    Raises:
        ImportError: the program cannot be imported.
        RuntimeError: a process ended without a result, or this process is itself part of a dry run.
    """
    if flags and os.environ.get(_DRY_RUN):
        raise RuntimeError(
            "estimate was called inside a dry run of estimate, which imports the file of the step. "
            'In the file of the step, call estimate only behind if __name__ == "__main__":'
        )
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def result(name: str) -> list[DryRun]:
            asked = Path(folder, f"{name}, asked")
            plan = request["plan"] if name == PLANNED else None
            asked.write_bytes(pickle.dumps({**request, "plan": plan}))
            return _result(asked, Path(folder, name), flags[name])

        return dict(zip(flags, pool.map(result, flags)))


def environment(flags: Mapping[str, str]) -> dict[str, str]:
    """The environment of a dry run: only the given flags, the search path of this process, one
    thread, and no compiler, because a compiled program sends the same as an eager program.
    """
    kept = {name: value for name, value in os.environ.items() if name not in FLAGS}
    ours = str(Path(__file__).parents[2])
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([ours, *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        _DRY_RUN: "1",
        **flags,
    }


def _result(asked: Path, answer: Path, flags: Mapping[str, str]) -> list[DryRun]:
    command = [sys.executable, "-m", "cute_sharding.tools.estimate", str(asked), str(answer)]
    try:
        done = subprocess.run(
            command, env=environment(flags), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the dry run took more than {SECONDS} s: run fewer layers with layers=, or use a "
            "smaller step"
        ) from None
    if not answer.exists():
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RuntimeError(
            f"the process of a dry run exited with {done.returncode}, and its last output was: "
            f"{last}"
        )
    found: list[DryRun] | str = pickle.loads(answer.read_bytes())
    if isinstance(found, str):
        raise ImportError(f"estimate cannot import the program that contains the step: {found}")
    return found


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
        runs: one run for each setting, PyTorch alone first, the planned one last.

    >>> from cute_sharding.tools.estimate.values import Memory
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
    def best(self) -> DryRun | None:
        """The run with the least time by the network; among equal times, the run with the fewest
        bytes; among equal bytes, the first run, which has the fewest flags. None if no setting
        runs.
        """
        some = [run for run in self.runs if run.failure is None]
        least = min(map(self.seconds, some), default=0.0)
        alike = [run for run in some if self.seconds(run) <= least * (1 + ALIKE)]
        return min(alike, key=lambda run: run.step.busiest_bytes, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data: sizes in bytes, times in seconds."""
        return {
            "program": self.program,
            "mesh": list(self.mesh),
            "mesh_dim_names": self.names and list(self.names),
            "rank": self.rank,
            "device": self.device,
            "network": self.network,
            "layers": self.layers,
            "settings": {
                run.setting: {
                    "failure": run.failure,
                    "counted": run.counted,
                    **self._of_traffic(run.step),
                    "setup": self._of_traffic(run.setup),
                    "memory": {
                        "peak": run.memory.peak,
                        "by_kind": run.memory.by_kind(),
                        "by_layer": run.memory.by_layer(),
                    },
                    "causes": [
                        {"place": of.place and of.place._asdict(), "op": of.op, "text": of.text}
                        for of in run.causes
                    ],
                    "lines": [
                        {"place": place and place._asdict(), **self._of_traffic(of)}
                        for place, of in run.step.by_line().items()
                    ],
                }
                for run in self.runs
            },
        }

    def _of_traffic(self, of: Traffic) -> dict[str, Any]:
        return {
            "collectives": of.collectives,
            "received_bytes": of.received_bytes,
            "busiest_bytes": of.busiest_bytes,
            "seconds": of.seconds(self.mesh, self.network),
        }

    def html(self) -> str:
        """The estimate as one HTML page without other files: what each line receives and each layer
        holds as charts, and the text.
        """
        return _html.page("Estimate of a step", self._repr_html_())

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(sentence)}</p>" for sentence in self._head()]
        if self.best is not None:
            parts += [self._totals(), self._lines_chart(), self._layers_chart()]
        return f'{"".join(parts)}<div class="scroll">{_html.of_text(str(self))}</div>'

    def _totals(self) -> str:
        """A row for each setting, which fits a narrow screen."""
        rows = [
            (
                run.setting,
                bytes_text(run.step.busiest_bytes),
                f"{run.step.collectives:,}",
                seconds_text(self.seconds(run)),
                bytes_text(run.memory.peak),
            )
            for run in self._running
        ]
        return _html.stacked(rows, ("", "received", "collectives", "time", "memory"))

    def _lines_chart(self) -> str:
        """A chart of what each line receives with each setting."""
        sent = {run.setting: run.step.by_line() for run in self._running}
        kinds = {one.op for of in sent.values() for line in of.values() for one in line.rows}

        def bar(setting: str, place: Place | None) -> Bar:
            of = sent[setting].get(place, Traffic({}))
            many = counted(of.collectives, "collective")
            return Bar(setting, f"{bytes_text(of.busiest_bytes)} in {many}", of.by_op())

        most = _most({setting: _received(of) for setting, of in sent.items()})
        groups = [
            BarGroup(
                str(place or "unknown line"),
                [bar(setting, place) for setting in sent],
                _text_of(place),
            )
            for place in most[:LINES]
        ]
        return bar_chart(_first("Received for each line", most, "lines"), groups, sorted(kinds))

    def _layers_chart(self) -> str:
        """A chart of what the layers hold at the peak of memory with each setting."""
        held = {run.setting: run.memory.by_layer_and_kind() for run in self._running}

        def bar(setting: str, layer: str) -> Bar:
            of = held[setting].get(layer, {})
            return Bar(setting, bytes_text(sum(of.values())), of)

        sizes = {
            setting: {layer: sum(of.values()) for layer, of in each.items()}
            for setting, each in held.items()
        }
        most = _most(sizes)
        groups = [
            BarGroup(layer or "outside of all layers", [bar(setting, layer) for setting in held])
            for layer in most[:LINES]
        ]
        return bar_chart(_first("Memory of each layer, at the peak", most, "layers"), groups, KINDS)

    @property
    def _running(self) -> list[DryRun]:
        return [run for run in self.runs if run.failure is None]

    def save(self, path: str | Path) -> Path:
        """Write the estimate to a file. The suffix gives the form: plain data (.json), the page
        (.html) or the text (.txt).

        Returns:
            The path.

        Raises:
            ValueError: another suffix.
        """
        forms: dict[str, Callable[[], str]] = {
            ".json": lambda: json.dumps(self.to_dict(), indent=2),
            ".html": self.html,
            ".txt": lambda: f"{self}\n",
        }
        return save(path, "estimate", forms)

    def __str__(self) -> str:
        parts = [self._head()]
        if self.best is not None:
            parts += [self._settings(), self._layers(), self._lines(), self._ops()]
        parts.append(self._failures())
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _head(self) -> list[str]:
        over = {"cuda": "GPUs over NCCL", "cpu": "CPUs over gloo"}[self.device]
        lines = [
            f"{self.program}, one step on mesh {mesh_text(self.mesh, self.names)}: rank "
            f"{self.rank} of {prod(self.mesh):,}, as on {over}"
        ]
        if any(run.counted for run in self.runs):
            whole = ", ".join(run.setting for run in self.runs if not run.counted)
            lines.append(
                f"{self.layers} layers: computed from runs with 2, 3 and 4 layers, because each "
                f"further layer adds the same{f'; {whole}: all were run' if whole else ''}"
            )
        elif self.layers is not None:
            lines.append(f"{self.layers} layers, all of which were run")
        default = "NVLink in hosts of eight devices, InfiniBand between"
        return [*lines, f"network: {self.network or default}"]

    def _failures(self) -> list[str]:
        """The settings with which the step does not run, and why."""
        settings: dict[str, list[str]] = {}
        for run in self.runs:
            if run.failure is not None:
                settings.setdefault(run.failure, []).append(run.setting)
        return [
            f"{', '.join(some)}: {'does' if len(some) == 1 else 'do'} not run. {failure}"
            for failure, some in settings.items()
        ]

    def _table(self, title: str, rows: Mapping[str, Callable[[DryRun], str]]) -> list[str]:
        """A row for each name, with what it says of each run."""
        cells = [
            (
                f"  {name}" if title else name,
                *["-" if run.failure else of(run) for run in self.runs],
            )
            for name, of in rows.items()
        ]
        return columns(
            [(title, *[run.setting for run in self.runs]), *cells], left=1, right=len(self.runs)
        )

    def _settings(self) -> list[str]:
        rows: dict[str, Callable[[DryRun], str]] = {
            "received": lambda run: bytes_text(run.step.busiest_bytes),
            "collectives": lambda run: f"{run.step.collectives:,}",
            "time by the network": lambda run: seconds_text(self.seconds(run)),
            "memory, at most": lambda run: bytes_text(run.memory.peak),
            **{
                f"  {kind}": partial(lambda kind, run: bytes_text(run.memory.by_kind()[kind]), kind)
                for kind in KINDS
            },
            "received before the step": lambda run: bytes_text(run.setup.busiest_bytes),
        }
        return self._table("", rows)

    def _largest(
        self, title: str, what: str, of: Callable[[DryRun], Mapping[Any, tuple[int, str]]]
    ) -> list[str]:
        """The largest of what each run has by name: a size, and the size as text."""
        each = {run.setting: of(run) for run in self.runs}
        sizes = {
            setting: {name: size for name, (size, _) in found.items()}
            for setting, found in each.items()
        }
        largest = _most(sizes)
        rows = {
            str(name): partial(lambda name, run: each[run.setting].get(name, (0, "0 B"))[1], name)
            for name in largest[:LINES]
        }
        return self._table(title, rows) + _more(largest, what)

    def _layers(self) -> list[str]:
        """The memory of each layer at the peak."""
        return self._largest(
            "memory by layer, at the peak",
            "layer",
            lambda run: {
                layer or "outside of all layers": (size, bytes_text(size))
                for layer, size in run.memory.by_layer().items()
            },
        )

    def _lines(self) -> list[str]:
        """The bytes that each line receives."""
        if not any(run.step.rows for run in self.runs):
            return ["no line receives anything"]
        return self._largest(
            "received for each line",
            "line",
            lambda run: {
                place or "unknown line": (
                    of.busiest_bytes,
                    f"{bytes_text(of.busiest_bytes)} in {of.collectives:,}, "
                    f"{seconds_text(of.seconds(self.mesh, self.network))}",
                )
                for place, of in run.step.by_line().items()
            },
        )

    def _ops(self) -> list[str]:
        """The ops of DTensors that communicate with the best setting; lines that receive the most
        first.
        """
        best = self.best
        if best is None or not best.causes:
            return []
        texts: dict[Place | None, dict[str, None]] = {}
        for cause in best.causes:
            texts.setdefault(cause.place, {})[cause.text] = None
        lines = [f"ops of DTensors that communicate, {best.setting}"]
        for place, said in list(texts.items())[:LINES]:
            lines.append(f"  {place}")
            for text in list(said)[:OPS]:
                lines += wrap(text, 96, initial_indent="    ", subsequent_indent="      ")
            lines += [f"  {each}" for each in _more(said, "op", OPS)]
        return lines + _more(texts, "line")


def _most(sizes: Mapping[str, Mapping[Key, int]]) -> list[Key]:
    """The names of what settings have by name, the largest of all settings first."""
    most: dict[Key, int] = {}
    for found in sizes.values():
        for name, size in found.items():
            most[name] = max(most.get(name, 0), size)
    return sorted(most, key=lambda name: -most[name])


def _received(of: Mapping[Place | None, Traffic]) -> dict[Place | None, int]:
    return {place: traffic.busiest_bytes for place, traffic in of.items()}


def _text_of(place: Place | None) -> str:
    return linecache.getline(place.file, place.line).strip() if place else ""


def _first(title: str, every: Sized, what: str) -> str:
    """The title of a chart that shows the first of them."""
    return title if len(every) <= LINES else f"{title}: the first {LINES} of {len(every)} {what}"


def _more(every: Sized, what: str, shown: int = LINES) -> list[str]:
    left = len(every) - shown
    return [f"  and {counted(left, f'more {what}')}"] if left > 0 else []

"""``estimate``: a step on every setting, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

from cute_sharding.exchange import Network
from cute_sharding.tools.estimate.layers import DEPTHS, memory_of, traffic_of
from cute_sharding.tools.estimate.memory import Memory
from cute_sharding.tools.estimate.processes import Function, results
from cute_sharding.tools.estimate.table import Estimate
from cute_sharding.tools.estimate.traffic import Traffic
from cute_sharding.tools.estimate.values import SETTINGS, CommunicatingOp, DryRun, Failure
from cute_sharding.tools.profile.report import Place


def estimate(
    step: Callable[..., Any] | str,
    mesh: Sequence[int] | Mapping[str, int],
    *,
    network: str | None = None,
    layers: int | None = None,
    rank: int = 0,
    device: Literal["cuda", "cpu"] = "cuda",
    settings: Sequence[str] = tuple(SETTINGS),
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

    Returns:
        An :class:`~cute_sharding.tools.estimate.Estimate`, which you can print. Bytes are those
        that the busiest rank of each collective receives. Seconds follow the network model (Chan et
        al. 2007).

    Raises:
        ValueError: an argument has an unknown value, or the function cannot be imported by name.
        ImportError: the program cannot be imported, or has no such function.
        RuntimeError: a process ended without a result.

    >>> estimate("training_step", mesh={"dp": 64, "tp": 8})
    Traceback (most recent call last):
    ValueError: 'training_step' is not the name of a function: write module:function or \
file.py:function
    """
    names, sizes = (
        (tuple(mesh), tuple(mesh.values())) if isinstance(mesh, Mapping) else (None, mesh)
    )
    sizes = tuple(sizes)
    _check(sizes, network, layers, rank, device, settings)
    function = Function.of(step)
    request = {"function": function, "sizes": sizes, "names": names, "rank": rank}
    flags = {setting: _flags(setting, network) for setting in settings}
    where = function.module if function.file is None else os.path.relpath(function.file)
    program, runs = f"{where}:{function.name}", _runs({**request, "device": device}, flags, layers)
    return Estimate(program, sizes, names, rank, device, network, layers, runs)


def _runs(
    request: Mapping[str, Any], flags: Mapping[str, Mapping[str, str]], layers: int | None
) -> tuple[DryRun, ...]:
    """The runs of all settings."""
    depths = DEPTHS if layers is not None and layers > DEPTHS[-1] else (layers,)

    def asked(layers: Sequence[int | None], settings: Sequence[str]) -> dict[str, list[DryRun]]:
        some = [flags[setting] for setting in settings]
        found = results({**request, "layers": layers}, some, os.cpu_count() or 1)
        return {setting: _read(result) for setting, result in zip(settings, found)}

    runs = {
        setting: some[0] if len(depths) == 1 else _counted(dict(zip(depths, some)), layers)
        for setting, some in asked(depths, [*flags]).items()
    }
    again = [setting for setting, run in runs.items() if run is None]
    runs |= {setting: some[0] for setting, some in asked((layers,), again).items()}
    return tuple([replace(run, setting=setting) for setting, run in runs.items() if run])


def _check(
    sizes: tuple[Any, ...],
    network: str | None,
    layers: int | None,
    rank: int,
    device: str,
    settings: Sequence[str],
) -> None:
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
    unknown = [name for name in settings if name not in SETTINGS]
    if unknown or not settings:
        raise ValueError(f"settings={list(settings)}: give one or more of {', '.join(SETTINGS)}")
    if network is not None:
        Network.parse(network).checked(sizes)


def _flags(setting: str, network: str | None) -> dict[str, str]:
    flags = SETTINGS[setting]
    return {**flags, "USE_CUTE_NETWORK": network} if flags and network else dict(flags)


def _read(result: Mapping[str, Any]) -> list[DryRun]:
    """The runs of one setting, of which the last may have failed."""
    if "import" in result:
        failure = Failure(result["import"], _place(result["place"]))
        raise ImportError(f"estimate cannot import the program that contains the step: {failure}")
    return [
        DryRun(
            "",
            Traffic.from_data(found["step"]),
            Traffic.from_data(found["setup"]),
            Memory.of(found["memory"]),
            found["error"] and Failure(found["error"]["text"], _place(found["error"]["place"])),
            tuple([CommunicatingOp(Place(*place), *others) for place, *others in found["causes"]]),
        )
        for found in result["runs"]
    ]


def _place(data: Sequence[Any] | None) -> Place | None:
    return None if data is None else Place(*data)


def _counted(found: Mapping[int | None, DryRun], layers: int | None) -> DryRun | None:
    """The run of all layers, computed from the runs of ``DEPTHS``; None if it does not follow from
    them.
    """
    some = {depth: run for depth, run in found.items() if depth is not None}
    for run in some.values():
        if run.failure is not None:
            return run
    assert layers is not None
    step, setup = (
        traffic_of(layers, {depth: getattr(run, name) for depth, run in some.items()})
        for name in ("step", "setup")
    )
    memory = memory_of(layers, {depth: run.memory for depth, run in some.items()})
    if step is None or setup is None or memory is None:
        return None
    last = some[DEPTHS[-1]]
    return replace(last, step=step, setup=setup, memory=memory, counted=True)

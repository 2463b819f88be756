"""Runs the step on one rank of a made-up world, on tensors without memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.dtensor.replaced.communication import stand_for
from cute_sharding.tools.estimate import stand_ins
from cute_sharding.tools.estimate.modules import Layers
from cute_sharding.tools.estimate.programs import place_of, said
from cute_sharding.tools.estimate.storages import Storages
from cute_sharding.tools.estimate.traffic import Traffic
from cute_sharding.tools.profile.profiler import Profiler
from cute_sharding.tools.profile.reporting import report

# The backend of the groups, by the kind of devices.
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def run(
    step: Callable[..., Any],
    sizes: Sequence[int],
    names: Sequence[str] | None,
    rank: int,
    device: str,
    layers: Sequence[int | None],
) -> list[dict[str, Any]]:
    """The communication and memory of the step, once for each number of layers; with None, the
    function gets no number of layers.
    """
    stand_for(BACKENDS[device])
    dispatch_modes.start_group(rank, prod(sizes))
    mesh = init_device_mesh(
        "cpu", tuple(sizes), mesh_dim_names=None if names is None else (*names,)
    )
    found = []
    for many in layers:
        given = {} if many is None else {"layers": many}
        make = partial(step, mesh, **given)
        found.append(once(make, sizes, device, explains=many == layers[-1]))
        gc.collect()
        if found[-1]["error"] is not None:
            break
    return found


def causes(recorder: Profiler) -> list[list[Any]]:
    """The ops of DTensors that communicate: the line, whether the op computes a gradient, the op,
    and what was recorded, in a sentence.
    """
    return [
        [[*of.place], of.backward, of.op, of.text]
        for of in (line.cause for line in report(recorder).lines)
        if of.kind == "op" and of.place is not None
    ]


def once(
    make: Callable[[], Any], sizes: Sequence[int], device: str, *, explains: bool = False
) -> dict[str, Any]:
    """The communication and memory of the step that ``make()`` returns; if it returns nothing, of
    ``make()`` itself. A step with an optimizer is run a second time, because the optimizer's
    state then exists from the start. ``explains``: also list the ops that communicate.
    """
    recorder, layers, fakes = Profiler(), Layers(), stand_ins.Fakes()
    memory = Storages(layers, fakes.mode)
    starts, error = [0], None  # the records before the step, and before its second run
    with ExitStack() as contexts:
        if device == "cuda":
            contexts.enter_context(stand_ins.GpuKernels())
            contexts.enter_context(stand_ins.exchanges_shards())
        for context in (layers, memory, memory.resizing(), fakes, recorder):
            contexts.enter_context(context)
        try:
            step = make()
            if step is not None:
                starts.append(len(recorder.collectives))
                memory.forget_peaks()
                step()
                if memory.optimized:
                    starts.append(len(recorder.collectives))
                    step()
        except Exception as raised:
            place = place_of(raised)
            error = {"text": said(raised), "place": None if place is None else [*place]}
    setup = recorder.collectives[: starts[1] if len(starts) > 1 else 0]
    return {
        "error": error,
        "step": Traffic.of(recorder.collectives[starts[-1] :], sizes).to_data(),
        "setup": Traffic.of(setup, sizes).to_data(),
        "causes": causes(recorder) if explains and error is None else [],
        "memory": [
            [backward, layer, [[*of, size] for of, size in held.items()]]
            for (backward, layer), held in memory.peaks.items()
        ],
    }

"""Runs one setting in this process: ``python -m cute_sharding.tools.estimate REQUEST RESULT``. The
step runs on one rank of a made-up world, on tensors without memory. The process ends with the run,
so that it may tell torch of devices and ranks that do not exist.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

from torch.distributed.device_mesh import init_device_mesh

from cute_sharding._settings import from_environment
from cute_sharding._words import counted
from cute_sharding.dtensor.programs.planned import planned
from cute_sharding.dtensor.programs.weights import MakingWeights
from cute_sharding.dtensor.replaced import dispatch_modes, observing
from cute_sharding.dtensor.replaced.communication import stand_for
from cute_sharding.dtensor.run.placements import checked_placements
from cute_sharding.dtensor.switch import adapter
from cute_sharding.programs.plan import StepPlan
from cute_sharding.tools.estimate import stand_ins
from cute_sharding.tools.estimate.storages import Layers, Storages
from cute_sharding.tools.estimate.values import DryRun, Memory, Traffic
from cute_sharding.tools.profile.causes import recorded
from cute_sharding.tools.profile.recorder import Recorder
from cute_sharding.tools.profile.values import Place

# The backend of the groups, by the kind of devices.
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def main(request: dict[str, Any]) -> list[DryRun] | str:
    """The runs; or why the program cannot be imported, or has no such function."""
    warnings.filterwarnings("ignore", message=".*random operators may not have complete support")
    settings = from_environment(os.environ)
    if settings is not None and not adapter.is_enabled():
        adapter.enable(**settings)
    try:
        step = function_of(*request.pop("function"))
    except NoFunction as error:
        return str(error)
    except Exception as error:
        return said(error)
    return run(step, **request)


class NoFunction(ImportError):
    """The program has no function with this name."""


def function_of(module: str, file: str | None, name: str) -> Callable[..., Any]:
    """The function with this name in a module, or in a file that runs as a module with another name
    than ``__main__``.

    Raises:
        NoFunction: there is no such function.
        ImportError: the file is no Python file.
    """
    if file is None:
        found: Any = importlib.import_module(module)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
        spec = importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file: give a file whose name ends in .py")
        found = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    program = vars(found)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        own = [each for each, of in program.items() if getattr(of, "__module__", "") == module]
        said = f": it has {', '.join(map(repr, own))}" if own else ""
        raise NoFunction(f"{file or module} has no function {name!r}{said}")
    return cast(Callable[..., Any], found)


def said(error: BaseException) -> str:
    """The error in one line, after the innermost line of the program in its traceback; with a
    remedy if there is one.
    """
    words = " ".join(str(error).split())
    text = f"{type(error).__name__}{f': {words}' if words else ', without a message'}"
    if isinstance(error, stand_ins.NEEDS_VALUES):
        text = (
            f"the elements of a tensor are asked for ({text.rpartition(' ')[2]}), and a dry run "
            "has none: leave out of the step what reads a value (item(), bool(), tolist()), and "
            "what has a shape that depends on values (nonzero, unique, indexing by a mask)"
        )
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if observing.kind_of(frame).is_own:
            return f"{Place(frame.f_code.co_filename, line, frame.f_code.co_name)}: {text}"
    return text


def run(
    step: Callable[..., Any],
    sizes: Sequence[int],
    names: tuple[str, ...] | None,
    rank: int,
    device: str,
    layers: Sequence[int | None],
    plan: StepPlan | None = None,
) -> list[DryRun]:
    """The communication and memory of the step, once for each number of layers; with None, the
    function gets no number of layers. With a plan, the step runs by it.
    """
    stand_for(BACKENDS[device])
    dispatch_modes.start_group(rank, prod(sizes))
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)
    found: list[DryRun] = []
    for many in layers:
        make = partial(step, mesh, **({} if many is None else {"layers": many}))
        found.append(once(make, sizes, device, plan))
        gc.collect()
        if found[-1].failure is not None:
            break
    return found


def placed_by(plan: StepPlan, make: Callable[[], Any], recorder: Recorder) -> Any:
    """The step that ``make()`` returns, with its weights where the plan wants them.

    Raises:
        ValueError: there is no step, or there are other weights.
    """
    making = MakingWeights(recorder.last_line)
    with making:
        step = make()
    if step is None:
        raise ValueError(
            "a plan is for the step that the function returns, and it returns nothing: return the "
            "step as a function"
        )
    if plan.weights:
        weights = making.weights()
        made, wanted = ([tuple(x.shape) for x in of] for of in (weights.tensors, plan.weights))
        if made != wanted:
            raise ValueError(
                f"the plan places {counted(len(wanted), 'weight')}, and the step makes "
                f"{len(made)}, or other shapes: plan this step"
            )
        weights.place(
            [
                checked_placements(of.after, of.shape, tuple(x.device_mesh.shape), "the plan")
                for of, x in zip(plan.weights, weights.tensors)
            ]
        )
    return step


def once(
    make: Callable[[], Any], sizes: Sequence[int], device: str, plan: StepPlan | None = None
) -> DryRun:
    """The communication and memory of the step that ``make()`` returns; if it returns nothing, of
    ``make()`` itself. A step with an optimizer is run a second time, because the optimizer's
    state then exists from the start.
    """
    recorder, layers, fakes = Recorder(), Layers(), stand_ins.Fakes()
    memory = Storages(layers, fakes.mode)
    starts, failure = [0], None  # the records before the step, and before its second run
    with ExitStack() as contexts:
        if device == "cuda":
            contexts.enter_context(stand_ins.on_gpus())
        for context in (layers, memory, memory.resizing(), fakes, recorder):
            contexts.enter_context(context)
        try:
            step = make() if plan is None else placed_by(plan, make, recorder)
            if step is not None:
                starts.append(len(recorder.seen))
                memory.find_parameters()
                memory.forget_peaks()
                if plan is not None:
                    contexts.enter_context(planned(plan))
                step()
                if memory.optimized:
                    starts.append(len(recorder.seen))
                    step()
        except Exception as raised:
            failure = said(raised)
    collectives = recorder.collectives
    lines = recorded(recorder, None)["lines"] if failure is None else ()
    causes = [line.cause for line in lines if line.cause.kind in ("op", "planned")]
    return DryRun(
        "",
        step=Traffic.of(collectives[starts[-1] :], sizes),
        setup=Traffic.of(collectives[: starts[1] if len(starts) > 1 else 0], sizes),
        memory=Memory.of(memory.peaks),
        failure=failure,
        causes=tuple([cause for cause in causes if cause.place is not None]),
    )


if __name__ == "__main__":
    result = main(pickle.loads(Path(sys.argv[1]).read_bytes()))
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))

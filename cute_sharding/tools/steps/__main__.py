"""Plans a step in this process: ``python -m cute_sharding.tools.steps REQUEST RESULT``. The step
runs on one rank of a made-up world, on tensors without memory: twice to record it, and once more as
planned, to count what it then receives.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cute_sharding._memory import remember_all
from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.dtensor.replaced.communication import stand_for
from cute_sharding.exchange import MemoryLimitError
from cute_sharding.programs.plan import StepPlan
from cute_sharding.tools.estimate import stand_ins
from cute_sharding.tools.estimate.__main__ import BACKENDS, NoFunction, function_of, said
from cute_sharding.tools.profile.recorder import Recorder
from cute_sharding.tools.steps.planning import CannotPlan, Planning, freed, made


def main(request: dict[str, Any]) -> StepPlan | Exception | str:
    """The plan; or why the program cannot be imported or run."""
    try:
        step = function_of(*request.pop("function"))
    except NoFunction as error:
        return ValueError(str(error))
    except Exception as error:
        return said(error)
    remember_all()  # as long as this process lives
    sizes, names = request.pop("sizes"), request.pop("names")
    stand_for(BACKENDS[request["device"]])
    dispatch_modes.start_group(request.pop("rank"), prod(sizes))
    try:
        return planned_step(step, init_device_mesh("cpu", sizes, mesh_dim_names=names), **request)
    except (ImportError, MemoryLimitError) as error:
        return error
    except CannotPlan as error:
        return ValueError(str(error))
    except Exception as error:
        return said(error)


def planned_step(
    step: Callable[..., Any],
    mesh: DeviceMesh,
    *,
    device: str = "cuda",
    program: str = "",
    memory_limit: int | None = None,
    free: str | None = None,
    network: str | None = None,
    fixed: Sequence[str] = (),
    each_line: bool = False,
) -> StepPlan:
    """The plan of a step, of which this process runs one rank, with nobody else there."""
    recorder = Recorder()
    with ExitStack() as contexts:
        if device == "cuda":
            contexts.enter_context(stand_ins.on_gpus())
        for context in (stand_ins.Fakes(), recorder):
            contexts.enter_context(context)
        planning = Planning(recorder, mesh, program, memory_limit, network, fixed, each_line)
        if free is not None:
            return freed(planning, step)
        run = made(planning, step)
        asked = planning.asked(run)
        plan = planning.plan(run, asked, planning.solved(asked))
        return planning.each_alone(plan, partial(made, planning, step))


if __name__ == "__main__":
    result = main(pickle.loads(Path(sys.argv[1]).read_bytes()))
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))

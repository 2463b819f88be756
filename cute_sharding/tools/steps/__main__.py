"""Plans a step in this process: ``python -m cute_sharding.tools.steps REQUEST RESULT``. The step
runs on one rank of a made-up world, on tensors without memory: twice to record it, and once more as
planned, to count what it then receives.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cute_sharding.dtensor.programs.asking import plan_of, program_of
from cute_sharding.dtensor.programs.planned import Planned
from cute_sharding.dtensor.programs.recording import Recording
from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.dtensor.replaced.communication import stand_for
from cute_sharding.dtensor.replaced.observing import line_text
from cute_sharding.exchange import MemoryLimitError
from cute_sharding.programs.plan import StepPlan, Totals
from cute_sharding.programs.program import Price
from cute_sharding.programs.solve import solve
from cute_sharding.tools.estimate import stand_ins
from cute_sharding.tools.estimate.__main__ import BACKENDS, function_of, said
from cute_sharding.tools.profile.recorder import Recorder


def main(request: dict[str, Any]) -> StepPlan | Exception | str:
    """The plan; or why the program cannot be imported or run."""
    try:
        step = function_of(*request.pop("function"))
    except Exception as error:
        return said(error)
    sizes, names = request.pop("sizes"), request.pop("names")
    stand_for(BACKENDS[request["device"]])
    dispatch_modes.start_group(request.pop("rank"), prod(sizes))
    try:
        return planned_step(step, init_device_mesh("cpu", sizes, mesh_dim_names=names), **request)
    except (ImportError, MemoryLimitError) as error:
        return error
    except Exception as error:
        return said(error)


def planned_step(
    step: Callable[..., Any],
    mesh: DeviceMesh,
    *,
    device: str = "cuda",
    program: str = "",
    memory_limit: int | None = None,
) -> StepPlan:
    """The plan of a step, of which this process runs one rank, with nobody else there."""
    recorder = Recorder()
    with ExitStack() as contexts:
        if device == "cuda":
            contexts.enter_context(stand_ins.GpuKernels())
            contexts.enter_context(stand_ins.exchanges_shards())
        for context in (stand_ins.Fakes(), recorder):
            contexts.enter_context(context)
        run = step(mesh)
        run()  # makes what an optimizer keeps
        counting = partial(_counted, recorder)
        with counting() as by_op, Recording(recorder.last_line, counting) as recording:
            run()
        recorded = recording.recorded
        asked = program_of(recorded, counting, line_text)
        solved = solve(asked, memory_limit=memory_limit)
        ops = plan_of(recorded, asked, solved, line_text)
        keys = recorded.keys
        plan = StepPlan(
            program,
            tuple(mesh.shape),
            mesh.mesh_dim_names,
            tuple(keys),
            tuple(keys.values()),
            ops,
            {},
            tuple(recorded.gradients.items()),
        )
        with counting() as counted, Planned(plan):
            run()
    least = solved.price._replace(received=min(int(solved.least), solved.price.received))
    # What the program sends by itself, as FSDP does.
    beside = by_op().minus(recorded.received)
    totals = {"op by op": by_op(), "planned": counted(), "bound": least.plus(beside)}
    return replace(
        plan,
        totals={name: Totals(of.received, of.collectives) for name, of in totals.items()},
    )


@contextmanager
def _counted(recorder: Recorder) -> Iterator[Callable[[], Price]]:
    """What is received inside the block, as the function says after it."""
    begin = len(recorder.seen)
    end = [begin]

    def price() -> Price:
        found = [recorder.collective_of(seen) for seen in recorder.seen[begin : end[0]]]
        sent = [one for one in found if one.op != "barrier"]
        return Price(sum(one.most * one.itemsize for one in sent), len(sent))

    yield price
    end[0] = len(recorder.seen)


if __name__ == "__main__":
    result = main(pickle.loads(Path(sys.argv[1]).read_bytes()))
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))

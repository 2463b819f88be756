"""Plans a step in this process: ``python -m cute_sharding.tools.steps REQUEST RESULT``. The step
runs on one rank of a made-up world, on tensors without memory: twice to record it, and once more as
planned, to count what it then receives.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from cute_sharding.dtensor.programs.asking import program_of
from cute_sharding.dtensor.programs.planned import Planned, planned_op
from cute_sharding.dtensor.programs.recording import Recorded, Recording
from cute_sharding.dtensor.replaced import dispatch_modes
from cute_sharding.dtensor.replaced.communication import stand_for
from cute_sharding.dtensor.replaced.observing import line_text
from cute_sharding.dtensor.run.placements import text
from cute_sharding.programs.plan import PlannedOp, StepPlan, Totals
from cute_sharding.programs.program import Price, Program, Solved
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
    stand_for(BACKENDS[request["device"]])
    dispatch_modes.start_group(request["rank"], prod(request["sizes"]))
    try:
        return planned_step(step, **request)
    except ImportError as error:
        return error
    except Exception as error:
        return said(error)


def planned_step(
    step: Callable[..., Any],
    sizes: Sequence[int],
    names: tuple[str, ...] | None,
    rank: int,
    device: str,
    program: str,
) -> StepPlan:
    """The plan of a step, in a process of a made-up world."""
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)
    recorder = Recorder()
    with ExitStack() as contexts:
        if device == "cuda":
            contexts.enter_context(stand_ins.GpuKernels())
            contexts.enter_context(stand_ins.exchanges_shards())
        for context in (stand_ins.Fakes(), recorder):
            contexts.enter_context(context)
        run = step(mesh)
        run()  # makes what an optimizer keeps
        with _counted(recorder) as by_op, Recording(recorder.last_line) as recording:
            run()
        recorded = recording.recorded
        asked = program_of(recorded, partial(_counted, recorder), line_text)
        solved = solve(asked)
        plan = StepPlan(
            program,
            tuple(sizes),
            names,
            tuple(recorded.keys),
            tuple(recorded.keys.values()),
            ops_of(recorded, asked, solved),
            {},
        )
        with _counted(recorder) as counted, Planned(plan):
            run()
    totals = {
        "op by op": by_op(),
        "planned": counted(),
        "bound": Price(min(int(solved.least), solved.price.received), solved.price.collectives),
    }
    return replace(
        plan,
        totals={name: Totals(of.received, of.collectives) for name, of in totals.items()},
    )


def ops_of(recorded: Recorded, program: Program, solved: Solved) -> tuple[PlannedOp, ...]:
    """The ops of the plan: of each kind its way."""
    calls: dict[int, list[int]] = {}
    for c, call in enumerate(recorded.calls):
        calls.setdefault(call.kind, []).append(c)
    # The last call that reads a tensor in some placements as a copy.
    last: dict[tuple[int, Any], tuple[int, int]] = {}
    for c, call in enumerate(recorded.calls):
        way = program.ops[c].ways[solved.ways[c]]
        for i, (t, placements) in enumerate(zip(call.operands, way.operands)):
            last[t, placements] = c, i
    found = []
    for k, kind in enumerate(recorded.kinds):
        ways = {solved.ways[c] for c in calls[k]}
        assert len(ways) == 1, "ops of one kind take the same way"
        way = program.ops[calls[k][0]].ways[ways.pop()]
        reads: list[str | None] = []
        keeps = []
        for i, placements in enumerate(way.operands):
            moves = i not in kind.as_lies and any(
                solved.lies[recorded.calls[c].operands[i]] != placements for c in calls[k]
            )
            reads.append(text(placements) if moves else None)  # type: ignore[arg-type]
            keeps.append(
                moves
                and any(last[recorded.calls[c].operands[i], placements] != (c, i) for c in calls[k])
            )
        gives = []
        for i, placements in enumerate(way.results):
            lies = {solved.lies[recorded.calls[c].results[i]] for c in calls[k]}
            gives.append(text(lies.pop()) if lies != {placements} else None)  # type: ignore[arg-type]
        found.append(
            planned_op(
                kind.key,
                results=kind.results,
                reads=tuple(reads),
                keeps=tuple(keeps),
                gives=tuple(gives),
                line=line_text(recorded.calls[calls[k][0]].line),
                calls=len(calls[k]),
            )
        )
    return tuple(found)


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

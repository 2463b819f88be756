"""Plans of a step that runs in this process, of its weights as they are, or wherever they are best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.programs.asking import plan_of, program_of, received_by_op
from cute_sharding.dtensor.programs.numbers import Key, given_key
from cute_sharding.dtensor.programs.planned import Planned
from cute_sharding.dtensor.programs.recording import Recorded, Recording
from cute_sharding.dtensor.programs.weights import MakingWeights, Weights
from cute_sharding.dtensor.replaced.observing import line_text
from cute_sharding.dtensor.run.placements import text
from cute_sharding.exchange import MemoryLimitError
from cute_sharding.programs.plan import PlannedWeight, StepPlan, Totals
from cute_sharding.programs.program import OpWay, Price, Program, Solved
from cute_sharding.programs.solve import seconds_first, solve
from cute_sharding.tools.profile.causes import modelled
from cute_sharding.tools.profile.recorder import Recorder

Step: TypeAlias = "Callable[[], Any]"


class CannotPlan(ValueError):
    """The step is none that can be planned as was asked."""


class Asked(NamedTuple):
    """A step that ran, what its ops can do, and what it received op by op."""

    recorded: Recorded
    program: Program
    by_op: Price

    @property
    def written(self) -> list[OpWay]:
        """The ways that its calls took."""
        return [op.ways[0] for op, _ in zip(self.program.ops, self.recorded.calls)]


@dataclass(frozen=True)
class Planning:
    """How steps are planned.

    Attributes:
        recorder: sees all that is sent.
        mesh: the devices.
        name: of the program.
        memory_limit: the bytes that a device may hold.
        network: the links by which seconds are weighed; None: bytes are weighed.
    """

    recorder: Recorder
    mesh: DeviceMesh
    name: str
    memory_limit: int | None = None
    network: str | None = None

    def asked(
        self,
        run: Step,
        key: Callable[[DTensor], Key] = given_key,
        free: Iterable[Sequence[Key]] = (),
        written: Sequence[OpWay] = (),
    ) -> Asked:
        """Run a step, and ask its ops what they do on other placements."""
        recording = Recording(self.recorder.last_line, self.counting, key)
        with self.counting() as by_op, recording:
            run()
        recorded = recording.recorded
        program = program_of(recorded, self.counting, line_text, free=free, written=written)
        return Asked(recorded, program, by_op())

    def solved(self, program: Program) -> Solved:
        """How it runs at the least price."""
        weigh = None if self.network is None else seconds_first(program)
        return solve(program, weigh=weigh, memory_limit=self.memory_limit)

    def plan(self, run: Step, asked: Asked, beside: Asked | None = None) -> StepPlan:
        """The plan of a step that was asked.

        Args:
            beside: the step as written, if it is not the one that was asked.
        """
        recorded, program, _ = asked
        solved = self.solved(program)
        written = beside or asked
        plan = StepPlan(
            self.name,
            tuple(self.mesh.shape),
            self.mesh.mesh_dim_names,
            tuple(recorded.keys),
            tuple(recorded.keys.values()),
            plan_of(
                recorded,
                program,
                solved,
                line_text,
                received_by_op(written.recorded, written.program),
            ),
            {},
        )
        with self.counting() as counted, Planned(plan):
            run()
        totals = {
            "op by op": self.total(written.by_op),
            "planned": self.total(counted()),
            "bound": self.bound(solved),
        }
        return replace(plan, totals=totals)

    def total(self, price: Price) -> Totals:
        seconds = None if self.network is None else price.seconds
        return Totals(price.received, price.collectives, seconds)

    def bound(self, solved: Solved) -> Totals:
        """Below what no plan gets."""
        if self.network is not None:
            return Totals(0, 0, min(solved.least, solved.price.seconds))
        return Totals(min(int(solved.least), solved.price.received), solved.price.collectives)

    @contextmanager
    def counting(self) -> Iterator[Callable[[], Price]]:
        """What is received inside the block, as the function says after it."""
        seen = self.recorder.seen
        begin = len(seen)
        end = [begin]

        def price() -> Price:
            found = [self.recorder.collective_of(one) for one in seen[begin : end[0]]]
            sent = [one for one in found if one.op != "barrier"]
            seconds = 0.0
            if self.network is not None:
                seconds = sum(modelled(one, [self.mesh], self.network) for one in sent)
            return Price(sum(one.most * one.itemsize for one in sent), len(sent), seconds)

        yield price
        end[0] = len(seen)


# -- weights ---------------------------------------------------------------------------------------


def freed(planning: Planning, step: Callable[..., Any]) -> StepPlan:
    """The plan of a step with its weights where they are best, or as they are if that receives no
    less.

    The weights are told apart while their placements are chosen. In a run they are known by their
    shapes and placements alone, so the step is then made anew, and planned with the weights there.
    """
    run, weights = _made(planning, step)
    with weights.optimized():
        run()
    written = planning.asked(run)
    try:
        as_written = planning.plan(run, written)
    except MemoryLimitError:
        as_written = None
    asked = planning.asked(run, weights.key(), weights.alike())
    solved = planning.solved(asked.program)
    placements = _chosen(weights, asked, solved)
    before = [tuple(weight.placements) for weight in weights.tensors]
    names, shapes = weights.names(), [tuple(weight.shape) for weight in weights.tensors]
    run, weights = _made(planning, step)
    weights.place(placements)
    run()
    again = planning.asked(run, written=written.written)
    if _ops(again) != _ops(written):
        raise CannotPlan(
            "the step runs other ops when its weights have other placements, so a plan cannot "
            "place them: leave out free, or let the step not depend on placements"
        )
    made = planning.plan(run, again, written)
    totals, bound = made.totals, planning.bound(solved)
    if as_written is not None:
        of_written = as_written.totals["planned"]
        if totals["planned"].weight >= of_written.weight:
            made, placements, totals = as_written, before, as_written.totals
        totals = {"op by op": totals["op by op"], "as written": of_written, **totals}
    return replace(
        made,
        totals={**totals, "bound": min(bound, totals["planned"], key=lambda of: of.weight)},
        weights=tuple(
            [
                PlannedWeight(name, shape, text(one), text(other))
                for name, shape, one, other in zip(names, shapes, before, placements)
            ]
        ),
    )


def _made(planning: Planning, step: Callable[..., Any]) -> tuple[Step, Weights]:
    making = MakingWeights(planning.recorder.last_line)
    with making:
        run = step(planning.mesh)
    weights = making.weights()
    if not weights.tensors:
        raise CannotPlan(
            'free="parameters" needs weights to place, and the step has no torch.nn.Parameter that '
            "is a DTensor: make each weight a torch.nn.Parameter(distribute_tensor(...)), or leave "
            "out free"
        )
    return run, weights


def _chosen(weights: Weights, asked: Asked, solved: Solved) -> list[Any]:
    """The placements of each weight; its own if no op reads it."""
    recorded = asked.recorded
    lies = {recorded.numbers[free.values[0]]: free.values[0] for free in asked.program.free}
    found = []
    for weight, (key, *_) in zip(weights.tensors, weights.alike()):
        t = lies.get(recorded.keys.get(key, -1))
        found.append(tuple(weight.placements) if t is None else solved.lies[t])
    return found


def _ops(asked: Asked) -> list[Any]:
    return [asked.recorded.kinds[call.kind].func for call in asked.recorded.calls]

"""Plans of a step in this process: with its weights as they are, or where they are best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_sharding.dtensor.programs.asking import plan_of, program_of, received_by_op, with_fixed
from cute_sharding.dtensor.programs.numbers import Key, given_key
from cute_sharding.dtensor.programs.planned import Planned
from cute_sharding.dtensor.programs.recording import Recorded, Recording
from cute_sharding.dtensor.programs.ways import Placements
from cute_sharding.dtensor.programs.weights import MakingWeights, Weights
from cute_sharding.dtensor.replaced.observing import Line, line_text
from cute_sharding.dtensor.run.placements import text
from cute_sharding.programs.plan import PlannedWeight, StepPlan, Totals
from cute_sharding.programs.program import OpWay, Price, Program, Solved
from cute_sharding.programs.solve import seconds_first, solve
from cute_sharding.tools.profile.causes import modelled
from cute_sharding.tools.profile.recorder import Recorder

Step: TypeAlias = "Callable[[], Any]"


class CannotPlan(ValueError):
    """The step is none that can be planned as was asked."""


class AskedStep(NamedTuple):
    """A step that ran, what its ops can do, and what it received op by op."""

    recorded: Recorded
    program: Program
    by_op: Price

    @property
    def ways(self) -> list[OpWay]:
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
        fixed: the ends of lines whose ops do what they do as written.
        each_line: whether to count what each line saves alone.
    """

    recorder: Recorder
    mesh: DeviceMesh
    name: str
    memory_limit: int | None = None
    network: str | None = None
    fixed: Sequence[str] = ()
    each_line: bool = False

    def asked(
        self,
        run: Step,
        key: Callable[[DTensor], Key] = given_key,
        free: Iterable[Sequence[Key]] = (),
        written: AskedStep | None = None,
    ) -> AskedStep:
        """Run a step, and ask its ops what they do on other placements.

        Args:
            key, free: as in :class:`.Recording` and :func:`.program_of`.
            written: the step as written, if its weights now have other placements.
        """
        recording = Recording(self.recorder.last_line, self.counting, key)
        with self.counting() as by_op, recording:
            run()
        recorded = recording.recorded
        if written is not None and _ops(recorded) != _ops(written.recorded):
            raise CannotPlan(
                "the step runs other ops when its weights have other placements, so a plan cannot "
                "place them: leave out free, or let the step not depend on placements"
            )
        ways = () if written is None else written.ways
        program = program_of(recorded, self.counting, line_text, free=free, written=ways)
        found = AskedStep(recorded, program, by_op())
        self._check_fixed(recorded)
        fixed = with_fixed(program, recorded, self._is_fixed, (written or found).ways)
        return found._replace(program=fixed)

    def _is_fixed(self, line: Line | None) -> bool:
        return line_text(line).endswith(tuple(self.fixed))

    def _check_fixed(self, recorded: Recorded) -> None:
        lines = dict.fromkeys(line_text(call.line) for call in recorded.calls)
        for fixed in self.fixed:
            if not any(line.endswith(fixed) for line in lines):
                raise CannotPlan(
                    f"fixed={fixed!r}: no op of the step is on that line. Give the end of a line "
                    f"as print(plan) shows it, such as {next(iter(lines), 'train.py:12')}"
                )

    def solved(self, asked: AskedStep) -> Solved:
        """How a step runs at the least price."""
        weigh = None if self.network is None else seconds_first(asked.program)
        return solve(asked.program, weigh=weigh, memory_limit=self.memory_limit)

    def plan(
        self, run: Step, asked: AskedStep, solved: Solved, beside: AskedStep | None = None
    ) -> StepPlan:
        """The plan of a step that was asked, and solved.

        Args:
            beside: the step as written, if it is not the one that was asked.
        """
        recorded, program, _ = asked
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
            tuple(recorded.gradients.items()),
        )
        with self.counting() as counted, Planned(plan):
            run()
        totals = {
            "op by op": self.total(written.by_op),
            "planned": self.total(counted()),
            "bound": self.bound(asked, solved),
        }
        return replace(plan, totals=totals)

    def each_alone(self, plan: StepPlan, make: Callable[[], Step]) -> StepPlan:
        """The plan, with what each line that changes saves alone, if that is to be counted.

        Args:
            make: makes the step anew, so that a run finds nothing of those before.
        """

        def total(part: StepPlan) -> Totals:
            run = make()
            with self.counting() as counted, Planned(part):
                run()
            return self.total(counted())

        def saved(line: str) -> Totals | None:
            try:
                return by_op.minus(total(plan.only(line)))
            except Exception:  # of the program, which finds rows elsewhere than without a plan
                return None

        if not self.each_line:
            return plan
        by_op = total(plan.only())
        return replace(plan, alone={line: saved(line) for line in plan.changed()})

    def total(self, price: Price) -> Totals:
        seconds = None if self.network is None else price.seconds
        return Totals(price.received, price.collectives, seconds)

    def bound(self, asked: AskedStep, solved: Solved) -> Totals:
        """Below what no plan gets, with what the program sends by itself, as FSDP does."""
        beside = asked.by_op.minus(asked.recorded.received)
        if self.network is not None:
            seconds = min(solved.least, solved.price.seconds) + beside.seconds
            return Totals(0, 0, seconds)
        received = min(int(solved.least), solved.price.received)
        least = solved.price._replace(received=received).plus(beside)
        return Totals(least.received, least.collectives)

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


class WeightChoice(NamedTuple):
    """Where a weight lies as written, and where it is best; and what is then held of it."""

    before: Placements
    after: Placements
    held_before: int = 0
    held_after: int = 0


def freed(planning: Planning, step: Callable[..., Any]) -> StepPlan:
    """The plan of a step with its weights where they are best, or as they are if that is no better.

    The weights are told apart while their placements are chosen. In a run they are known by their
    shapes and placements alone, so the step is then made anew, and planned with the weights there.
    """
    run, weights = _weighted(planning, step)
    with weights.optimized():
        run()
    written = planning.asked(run)
    of_written = replace(planning, memory_limit=None).solved(written)
    as_written = planning.plan(run, written, of_written)
    asked = planning.asked(run, weights.key(), weights.alike())
    solved = planning.solved(asked)
    choices = _choices(weights, asked, solved)
    names = weights.names(run)
    found = _planned_there(planning, step, written, choices)
    totals, bound = found.totals, planning.bound(asked, solved)
    fits = planning.memory_limit is None or of_written.peak <= planning.memory_limit
    before, after = (sum(held) for held in zip(*[choice[2:] for choice in choices]))
    beside = as_written.totals["planned"]
    if fits and (totals["planned"].weight, after) >= (beside.weight, before):
        found, totals = as_written, as_written.totals
        choices = [WeightChoice(of.before, of.before, *[of.held_before] * 2) for of in choices]
    totals = {"op by op": totals["op by op"], "as written": beside, **totals}
    plan = replace(
        found,
        totals={**totals, "bound": min(bound, totals["planned"], key=lambda of: of.weight)},
        weights=tuple(
            [
                PlannedWeight(name, tuple(x.shape), text(of.before), text(of.after), *of[2:])
                for name, x, of in zip(names, weights.tensors, choices)
            ]
        ),
    )
    return planning.each_alone(plan, partial(_made_there, planning, step, choices))


def _planned_there(
    planning: Planning,
    step: Callable[..., Any],
    written: AskedStep,
    choices: Sequence[WeightChoice],
) -> StepPlan:
    """The plan of the step, made anew, with its weights brought to where they are best."""
    run = _made_there(planning, step, choices)
    asked = planning.asked(run, written=written)
    return planning.plan(run, asked, planning.solved(asked), written)


def _made_there(
    planning: Planning, step: Callable[..., Any], choices: Sequence[WeightChoice]
) -> Step:
    """The step, made anew, with its weights brought to where they are best."""
    run, weights = _weighted(planning, step)
    weights.place([choice.after for choice in choices])
    run()
    return run


def made(planning: Planning, step: Callable[..., Any]) -> Step:
    """The step, made anew, and run once, which makes what an optimizer keeps."""
    run: Step = step(planning.mesh)
    run()
    return run


def _weighted(planning: Planning, step: Callable[..., Any]) -> tuple[Step, Weights]:
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


def _choices(weights: Weights, asked: AskedStep, solved: Solved) -> list[WeightChoice]:
    """For each weight; one that no op reads stays where it is."""
    recorded, program = asked.recorded, asked.program
    free = {recorded.numbers[of.values[0]]: of for of in program.free}
    found = []
    for weight, (key, *_) in zip(weights.tensors, weights.alike()):
        before = tuple(weight.placements)
        of = free.get(recorded.keys.get(key, -1))
        if of is None:
            found.append(WeightChoice(before, before))
            continue
        after: Any = solved.lies[of.values[0]]
        sizes = [program.sizes[program.kinds[v]] for v in of.values]
        held = [sum(each[placing] for each in sizes) for placing in (before, after)]
        found.append(WeightChoice(before, after, *held))
    return found


def _ops(recorded: Recorded) -> list[Any]:
    return [recorded.kinds[call.kind].func for call in recorded.calls]

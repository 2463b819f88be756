"""The plan of a step, as a value: where each op's operands and results are brought."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha1
from pathlib import Path
from typing import Any

from cute_sharding._words import bytes_text, columns, counted, seconds_text

VERSION = 1


@dataclass(frozen=True)
class Totals:
    """What a step receives.

    Attributes:
        received: the bytes that the busiest rank of each collective receives, summed.
        collectives: their number.
        seconds: what they take by the network, one after the other; None without a network.
    """

    received: int
    collectives: int
    seconds: float | None = None

    @property
    def weight(self) -> float:
        """What a plan makes small: seconds if a network is given, else bytes."""
        return self.received if self.seconds is None else self.seconds


@dataclass(frozen=True)
class PlannedWeight:
    """A weight of a step, and where a plan wants it.

    Attributes:
        name: in the module that has it; else in the step function, or the line that makes it.
        shape: in elements.
        before: its placements in the program.
        after: those of the plan.
        held_before, held_after: the bytes that the fullest device then holds of it, its gradient
            and what an optimizer keeps for it, between two steps.
    """

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    held_before: int = 0
    held_after: int = 0


@dataclass(frozen=True)
class PlannedOp:
    """An op of a step on values of the step.

    Attributes:
        op: its name, such as "aten.mm.default".
        arguments: its arguments, a value as its number; ``{"torch": name}`` is an attribute of
            torch, such as a dtype, and ``{"float": text}`` a float.
        named: its keyword arguments.
        results: the numbers of its results; None for an operand that it writes to.
        reads: for each operand the placements to which it is brought before the op runs; None: as
            it lies.
        keeps: for each operand whether what it is brought to is kept for a later op.
        gives: for each result the placements to which it is brought; None: as the op makes it.
        line: the line of the program, ``file:number``; of a gradient the line of which it is one.
        calls: how often a step runs it.
        before, after: the bytes that all its calls receive, op by op and as planned.
    """

    op: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    results: tuple[int | None, ...]
    reads: tuple[str | None, ...]
    keeps: tuple[bool, ...]
    gives: tuple[str | None, ...]
    line: str = "an unknown line"
    calls: int = 1
    before: int = 0
    after: int = 0

    @property
    def saves(self) -> int:
        """The bytes that all its calls receive less; below 0, more, of which others save more."""
        return self.before - self.after

    @property
    def changes(self) -> bool:
        """Whether it brings anything anywhere."""
        return any(self.reads) or any(self.gives)


@dataclass(frozen=True)
class StepPlan:
    """How a step runs at the least price: which values are brought where. ``print`` shows it, and
    :func:`cute_sharding.planned` runs a program by it.

    Whatever a plan says, results are right: it only says to which placements DTensors are
    redistributed on the way. (Local tensors lie as placements say; those of the program that was
    planned, as without a plan.) An op that it does not know is decided op by op.

    Attributes:
        program: the function that was planned.
        mesh, names: the number of devices of each mesh dim, and their names.
        given: for each value that no op makes its shape, dtype, placements, mesh and names.
        numbers: the numbers of these values.
        ops: the ops.
        gradients: pairs of numbers: a value, and its gradient.
        totals: what the step receives with "PyTorch" alone, "op by op" and "planned", as counted
            in dry runs; and the "bound", below which no plan of these ops gets (of seconds alone,
            if a network is given). If the plan places weights, also what the step receives "as
            written", planned with the weights as they are, without a limit of memory.
        weights: if the plan places them, the weights in the order in which the program makes them.

    >>> from cute_sharding.programs.plan import PlannedOp, Totals
    >>> once = PlannedOp("aten.mm.default", (0, 1), {}, (2,), (None, None), (False,) * 2, ("[R]",))
    >>> given = [((8, 8), "torch.float32", placed, (4,), ()) for placed in ("[S(1)]", "[S(0)]")]
    >>> totals = {"planned": Totals(384, 1)}
    >>> plan = StepPlan("train.py:step", (4,), None, tuple(given), (0, 1), (once,), totals)
    >>> print(plan)
    train.py:step, one step on mesh (4)
    <BLANKLINE>
         planned     384 B in 1 collective
    <BLANKLINE>
    an unknown line  0 B -> 0 B
        aten.mm.default
            gives result 0 as [R]
    >>> StepPlan.of_json(plan.to_json()) == plan
    True
    """

    program: str
    mesh: tuple[int, ...]
    names: tuple[str, ...] | None
    given: tuple[tuple[Any, ...], ...]
    numbers: tuple[int, ...]
    ops: tuple[PlannedOp, ...]
    totals: Mapping[str, Totals]
    gradients: tuple[tuple[int, int], ...] = ()
    weights: tuple[PlannedWeight, ...] = ()

    @property
    def placements(self) -> dict[str, str]:
        """For each weight, by name, where the plan wants it: ``reshard(model, plan.placements)``
        brings the weights of a model there.
        """
        return {weight.name: weight.after for weight in self.weights}

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON that a person can read and change."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> StepPlan:
        """A plan that :meth:`save` has written.

        Raises:
            ValueError: the file is no such plan, or of another version.
        """
        return cls.of_json(Path(path).read_text(), str(path))

    def to_json(self) -> str:
        """The plan as text, one op a line."""
        found = asdict(self) | {"version": VERSION}
        ops = found.pop("ops")
        if not self.weights:
            del found["weights"]
        head = json.dumps(found, indent=1)[:-2]
        lines = ",\n  ".join(json.dumps(op) for op in ops)
        return f'{head},\n "ops": [\n  {lines}\n ]\n}}'

    @classmethod
    def of_json(cls, text: str, where: str = "the text") -> StepPlan:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: the text is no such plan, or of another version.
        """
        try:
            found = json.loads(text)
            version = found.pop("version")
            ops = tuple([PlannedOp(**_frozen(op)) for op in found.pop("ops")])
            weights = [PlannedWeight(**_frozen(of)) for of in found.pop("weights", ())]
            totals = {name: Totals(**of) for name, of in found.pop("totals").items()}
            given = tuple(map(_frozen, found.pop("given")))
            mesh, names = tuple(found.pop("mesh")), found.pop("names")
            numbers = tuple(found.pop("numbers"))
            gradients = _frozen(found.pop("gradients"))
            plan = cls(
                mesh=mesh,
                names=names and tuple(names),
                given=given,
                numbers=numbers,
                gradients=gradients,
                ops=ops,
                totals=totals,
                weights=tuple(weights),
                **found,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{where} is no plan of a step ({error}): write one with plan.save(path)"
            ) from None
        if version != VERSION:
            raise ValueError(
                f"{where} is a plan of version {version}, and this release reads version "
                f"{VERSION}: plan the step again"
            )
        return plan

    @cached_property
    def digest(self) -> str:
        """A text that tells this plan from others."""
        return sha1(self.to_json().encode(), usedforsecurity=False).hexdigest()[:16]

    def explain(self, line: str) -> str:
        """What the plan does on a line of the program: ``file:number``, or the end of it."""
        found = {of: ops for of, ops in self._by_line().items() if of.endswith(line)}
        if not found:
            raise ValueError(
                f"no op of the plan is on a line {line!r}: give a line as print(plan) shows it, "
                f"such as {next(iter(self._by_line()), 'train.py:12')}"
            )
        return "\n".join(text for of, ops in found.items() for text in _line(of, ops, all_ops=True))

    def __str__(self) -> str:
        lines = self._totals()
        if self.weights:
            before = sum(weight.held_before for weight in self.weights)
            after = sum(weight.held_after for weight in self.weights)
            lines += ["", f"weights hold  {bytes_text(before)} -> {bytes_text(after)}"]
            rows = [(w.name, f"{w.shape}", f"{w.before} -> {w.after}") for w in self.weights]
            lines += [f"    {row}" for row in columns(rows, left=2)]
        for of, ops in self._by_line().items():
            if any(op.changes or op.saves for op in ops):
                lines += ["", *_line(of, ops)]
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        sizes = ", ".join(
            f"{name}={n}" if name else str(n)
            for name, n in zip(self.names or ("",) * len(self.mesh), self.mesh)
        )
        lines = [f"{self.program}, one step on mesh ({sizes})", ""]
        for name, total in self.totals.items():
            cells = [] if total.seconds is None else [f"{seconds_text(total.seconds):>8}"]
            if name != "bound":
                sent = counted(total.collectives, "collective")
                cells.append(f"{bytes_text(total.received):>8} in {sent}")
            elif not cells:
                cells.append(f"{bytes_text(total.received):>8}")
            lines.append(f"{name:>12}  {'  '.join(cells)}")
        return lines

    def _by_line(self) -> dict[str, list[PlannedOp]]:
        """The ops of each line, the line on which most is saved first."""
        found: dict[str, list[PlannedOp]] = {}
        for op in self.ops:
            found.setdefault(op.line, []).append(op)
        return dict(sorted(found.items(), key=lambda item: -sum(op.saves for op in item[1])))


def _line(line: str, ops: Sequence[PlannedOp], *, all_ops: bool = False) -> list[str]:
    """A line of the program: what it receives op by op and as planned, and what its ops do."""
    before, after = (sum(each) for each in zip(*[(op.before, op.after) for op in ops]))
    lines = [f"{line}  {bytes_text(before)} -> {bytes_text(after)}"]
    for op in ops:
        if not (op.changes or all_ops):
            continue
        lines.append(f"    {op.op}{_times(op.calls)}")
        for i, text in enumerate(op.reads):
            if text:
                kept = ", kept for a later op" if op.keeps[i] else ""
                lines.append(f"        reads operand {i} as {text}{kept}")
        lines += [f"        gives result {i} as {x}" for i, x in enumerate(op.gives) if x]
    return lines


def _times(n: int) -> str:
    return f", {n} times" if n > 1 else ""


def _frozen(value: Any) -> Any:
    """Lists as tuples, within objects too."""
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value

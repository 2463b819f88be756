"""The plan of a step, as a value: where each op's operands and results are brought."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha1
from pathlib import Path
from typing import Any

from cute_sharding._words import bytes_text, columns, counted, mesh_text, seconds_text

VERSION = 3


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

    def minus(self, other: Totals) -> Totals:
        """What is saved if the other is received in place of this; below 0, more is received.

        >>> Totals(12, 3).minus(Totals(4, 5))
        Totals(received=8, collectives=-2, seconds=None)
        """
        times = self.seconds, other.seconds
        seconds = None if None in times else (times[0] or 0.0) - (times[1] or 0.0)
        return Totals(self.received - other.received, self.collectives - other.collectives, seconds)

    def saved_text(self, of: int = 0) -> str:
        """What is saved, in words; with how much of so many bytes it is.

        >>> Totals(4_200, 1).saved_text(42_000), Totals(-950, 0, 2e-6).saved_text()
        ('saves 4.2 kB (10 %) and 1 collective', 'saves 2 us, and adds 950 B')
        """
        share = f" ({100 * abs(self.received) / of:.3g} %)" if of else ""
        amounts = [
            (self.received, f"{bytes_text(abs(self.received))}{share}"),
            (self.collectives, counted(abs(self.collectives), "collective")),
            (self.seconds or 0.0, seconds_text(abs(self.seconds or 0.0))),
        ]
        saves, adds = (
            " and ".join(text for n, text in amounts if n * sign > 0) for sign in (1, -1)
        )
        parts = [f"{word} {said}" for word, said in (("saves", saves), ("adds", adds)) if said]
        return ", and ".join(parts) or "saves nothing"


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
        arguments: its arguments; ``"%3"`` is the value 3, ``{"torch": name}`` an attribute of
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

    @property
    def does(self) -> list[str]:
        """What it brings where, in words."""
        kept = [", kept for a later op" if keeps else "" for keeps in self.keeps]
        reads = [f"reads operand {i} as {to}{kept[i]}" for i, to in enumerate(self.reads) if to]
        return reads + [f"gives result {i} as {to}" for i, to in enumerate(self.gives) if to]

    @property
    def as_it_lies(self) -> PlannedOp:
        """The op without a plan."""
        reads, gives = ((None,) * len(each) for each in (self.reads, self.gives))
        keeps = (False,) * len(self.keeps)
        return replace(self, reads=reads, keeps=keeps, gives=gives, after=self.before)


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
        alone: for each line that changes what the step saves if it alone changes, as counted in
            dry runs; below 0, it receives more; None: the step does not run so. Empty if nobody
            asked.

    >>> from cute_sharding.programs.plan import PlannedOp, Totals
    >>> ab = ("%0", "%1")
    >>> once = PlannedOp("aten.mm.default", ab, {}, (2,), (None, None), (False,) * 2, ("[R]",))
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
    alone: Mapping[str, Totals | None] = field(default_factory=dict)

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
        for name in ("weights", "alone"):
            if not found[name]:
                del found[name]
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
            plan = cls._of_data(found) if version == VERSION else None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{where} is no plan of a step ({error}): write one with plan.save(path)"
            ) from None
        if plan is None:
            raise ValueError(
                f"{where} is a plan of version {version}, and this release reads version "
                f"{VERSION}: plan the step again"
            )
        return plan

    @classmethod
    def _of_data(cls, found: dict[str, Any]) -> StepPlan:
        """A plan from what :meth:`to_json` writes, without the version."""
        ops = [PlannedOp(**_frozen(op)) for op in found.pop("ops")]
        weights = [PlannedWeight(**_frozen(of)) for of in found.pop("weights", ())]
        names = found.pop("names")
        return cls(
            mesh=tuple(found.pop("mesh")),
            names=names and tuple(names),
            given=tuple(map(_frozen, found.pop("given"))),
            numbers=tuple(found.pop("numbers")),
            gradients=_frozen(found.pop("gradients")),
            ops=tuple(ops),
            totals={name: Totals(**of) for name, of in found.pop("totals").items()},
            weights=tuple(weights),
            alone={of: n and Totals(**n) for of, n in found.pop("alone", {}).items()},
            **found,
        )

    @cached_property
    def digest(self) -> str:
        """A text that tells this plan from others."""
        return sha1(self.to_json().encode(), usedforsecurity=False).hexdigest()[:16]

    def explain(self, line: str) -> str:
        """What the plan does on a line of the program: ``file:number``, or the end of it."""
        by_line = self._by_line()
        return "\n".join(
            text for of in self._lines(line) for text in self._line(of, by_line[of], all_ops=True)
        )

    def only(self, *lines: str) -> StepPlan:
        """The plan in which only the ops of these lines bring values anywhere: ``file:number``, or
        the end of it. All other ops read and give values as they lie.

        Nobody has counted what the step then receives, so there is no total "planned". Lines that
        change have the figures of this plan, and all others those of op by op.
        """
        kept = {of for line in lines for of in self._lines(line)}
        return replace(
            self,
            ops=tuple([op if op.line in kept else op.as_it_lies for op in self.ops]),
            totals={name: total for name, total in self.totals.items() if name != "planned"},
            alone={of: saved for of, saved in self.alone.items() if of in kept},
        )

    def saving(self) -> dict[str, Totals]:
        """The lines that save something if each alone changes, and what; the most first. Empty if
        nobody counted that.
        """

        def weight(saved: Totals) -> tuple[float, int]:
            return saved.weight, saved.collectives

        known = {of: saved for of, saved in self.alone.items() if saved and weight(saved) > (0, 0)}
        return dict(sorted(known.items(), key=lambda each: weight(each[1]), reverse=True))

    def changed(self) -> dict[str, tuple[int, int]]:
        """The lines that change, the line on which most is saved first, and what each receives op
        by op and as planned.
        """
        return {
            of: _received(ops)
            for of, ops in self._by_line().items()
            if any(op.changes for op in ops)
        }

    def _lines(self, line: str) -> list[str]:
        """The lines of the plan with this name, or else with this end."""
        by_line = self._by_line()
        found = [of for of in by_line if of == line] or [of for of in by_line if of.endswith(line)]
        if not found:
            raise ValueError(
                f"no op of the plan is on a line {line!r}: give a line as print(plan) shows it, "
                f"such as {next(iter(by_line), 'train.py:12')}"
            )
        return found

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
                lines += ["", *self._line(of, ops)]
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        lines = [f"{self.program}, one step on mesh {mesh_text(self.mesh, self.names)}", ""]
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

    def _line(self, line: str, ops: Sequence[PlannedOp], *, all_ops: bool = False) -> list[str]:
        """A line of the program: what it receives op by op and as planned, what it saves alone, and
        what its ops do.
        """
        before, after = map(bytes_text, _received(ops))
        alone = f", {_alone(self.alone[line])}" if line in self.alone else ""
        lines = [f"{line}  {before} -> {after}{alone}"]
        for op in ops:
            if not (op.changes or all_ops):
                continue
            lines.append(f"    {op.op}{_times(op.calls)}")
            lines += [f"        {text}" for text in op.does]
        return lines


def _received(ops: Sequence[PlannedOp]) -> tuple[int, int]:
    """The bytes that ops receive op by op and as planned."""
    return sum(op.before for op in ops), sum(op.after for op in ops)


def _alone(saved: Totals | None) -> str:
    """What a line saves alone.

    >>> _alone(Totals(4_200, 0)), _alone(None)
    ('alone saves 4.2 kB', 'alone does not run')
    """
    return "alone does not run" if saved is None else f"alone {saved.saved_text()}"


def _times(n: int) -> str:
    return f", {n} times" if n > 1 else ""


def _frozen(value: Any) -> Any:
    """Lists as tuples, within objects too."""
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value

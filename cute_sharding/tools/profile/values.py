"""The communication of a program as plain values: collectives, their causes, and the lines of the
program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from cute_sharding._words import bytes_text, counted, mesh_text
from cute_sharding.exchange.network import Chosen, Network
from cute_sharding.programs.plan import StepPlan, Totals


class Place(NamedTuple):
    """A line of the program.

    Attributes:
        file: the file name, as Python knows it.
        line: the line number, from 1.
        function: the name of the function that contains the line.

    >>> str(Place("/home/me/model.py", 12, "forward"))
    'model.py:12 forward'
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_last(self.file)}:{self.line} {self.function}"


class Collective(NamedTuple):
    """One collective, or one batch of messages between ranks, as this rank ran it.

    Attributes:
        op: the kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast",
            "reduce", "scatter", "gather", "send", "receive", "messages" (a batch of both) or
            "barrier".
        name: the op of torch that ran it, such as "_c10d_functional.all_reduce".
        ranks: the ranks of the group, ascending.
        dtype: the dtype of the sent elements, such as "float32"; "uint8" if elements are sent as
            bytes.
        itemsize: the bytes of a sent element.
        received, sent: the elements that this rank received from other ranks, and sent to them, by
            the rules of ``cute_sharding.exchange.step``.
        busiest: the elements that the busiest rank received: of all ranks for a plan of this
            package, and of the ranks of the group otherwise. None if this rank cannot know the
            number, for example for an all-to-all of the program with different splits.
        place: the line of the program for which it ran; for a gradient, the line of the forward op.
            None if the line is unknown.
        backward: whether it ran while gradients were computed.
        recomputed: whether it ran again in the backward pass, for a checkpointed region.
        caller: the line that called the function of ``place``. None for a gradient, or if the line
            is unknown.
        start: seconds since the recording began.
        measured: seconds from the start until the program waited for the result; if no wait was
            seen, until the backend took the collective.
        model: seconds by the network's model.
        mesh_dims: the names of the mesh dims of its group; empty if no DTensor has such a mesh.

    >>> place = Place("model.py", 12, "forward")
    >>> one = Collective("all-gather", "", (0, 1), "float32", 4, 10, 10, 10, place)
    >>> one.received_bytes, one.busiest_bytes
    (40, 40)
    """

    op: str
    name: str
    ranks: tuple[int, ...]
    dtype: str
    itemsize: int
    received: int
    sent: int
    busiest: int | None
    place: Place | None = None
    backward: bool = False
    recomputed: bool = False
    caller: Place | None = None
    start: float = 0.0
    measured: float = 0.0
    model: float = 0.0
    mesh_dims: tuple[str, ...] = ()

    @property
    def over(self) -> str:
        """The mesh dims of its group, or the number of its ranks, in words.

        >>> Collective("all-gather", "", (0, 1), "float32", 4, 10, 10, 10).over
        '2 ranks'
        """
        return "+".join(self.mesh_dims) or counted(len(self.ranks), "rank")

    @property
    def received_bytes(self) -> int:
        """The bytes that this rank received."""
        return self.received * self.itemsize

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank sent."""
        return self.sent * self.itemsize

    @property
    def busiest_bytes(self) -> int | None:
        """The bytes that the busiest rank received; None if this rank cannot know the number."""
        return None if self.busiest is None else self.busiest * self.itemsize

    @property
    def most(self) -> int:
        """The elements that the busiest rank received, or this rank, if the number is unknown."""
        return self.received if self.busiest is None else self.busiest

    def to_dict(self) -> dict[str, Any]:
        """The collective as plain data: elements, bytes and seconds."""
        lines = {"place": self.place, "caller": self.caller}
        return {
            **self._asdict(),
            "ranks": list(self.ranks),
            "mesh_dims": list(self.mesh_dims),
            **{name: None if line is None else line._asdict() for name, line in lines.items()},
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "busiest_bytes": self.busiest_bytes,
        }


# The collectives whose elements a host receives once, for all its devices.
_TOGETHER = ("all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce")


def seconds_of(
    op: str,
    group: Sequence[tuple[int, int]],
    elements: float,
    itemsize: int,
    mesh: Sequence[int],
    network: Chosen,
) -> float:
    """The seconds of a collective by :meth:`~cute_sharding.exchange.Network.collective`. Over
    several mesh dims, the fastest dims come first, as in the times of plans. A rank receives from
    the ranks that differ from it on the slower dims in proportion to their number.

    Args:
        op: the kind of the collective.
        group: the mesh dims of its group, and the number of ranks of each.
        elements: the elements that the busiest rank receives.
        itemsize: the bytes of an element.
        mesh: the sizes of the mesh.
        network: its links.
    """
    links = Network.of_elements(tuple(mesh), network, itemsize)
    dims = sorted(group, key=lambda each: links.link(each[0]).beta)
    ranks = near = 1
    for _, parts in dims:
        ranks *= parts
    total = 0.0
    for m, parts in dims:
        total += links.collective(
            m,
            parts,
            elements * near * (parts - 1) / max(ranks - 1, 1),
            together=op in _TOGETHER,
            times=2 if op == "all-reduce" else 1,
        )
        near *= parts
    return total


class MovedTensor(NamedTuple):
    """A tensor that was redistributed: its global shape, the sizes and the names of the mesh dims,
    and the placements before and after, as DTensor prints them.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    names: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def text(self) -> str:
        """The redistribution in words."""
        before, after = (f"[{', '.join(side)}]" for side in (self.before, self.after))
        return f"a tensor of {self.shape} from {before} to {after}"


# By the word for the rule that decided an op, a phrase.
RULES = {
    "view": "cute_sharding's rule for views",
    "movement": "cute_sharding's rule for movement ops",
    "signature": "cute_sharding's signature of the op",
    "fallback": "cute_sharding's fallback",
    "PyTorch": "PyTorch's rule",
    "program": "a rule that the program registered",
    "plan": "the plan of the step",
}
# What calls the backward pass of a function.
GRADIENT = "autograd"
# The most tensors that a sentence names one by one.
MOST_NAMED = 3


class Cause(NamedTuple):
    """The cause of a collective, as it was recorded: an op on tensors with certain placements, on a
    line of the program.

    Attributes:
        place: the line; for a gradient, the line of the forward op.
        backward: whether the op computes a gradient.
        op: the op, such as "slice", or the function that the program called.
        kind: "op" (an op of a DTensor), "planned" (a plan of the step redistributes an operand or a
            result of an op), "asked" (the program or a library redistributes a DTensor itself),
            "direct" (the program or a library calls a collective) or "compiled" (a compiled
            program).
        rule: the rule that decided, one of ``RULES``; "program" if the program itself asks for the
            communication. Empty if the rule is unknown.
        moved: the tensors that were redistributed for it.
        operands, results: all tensors, as text: shape and placements.
        asker: the module of torch that has called the function for the program; "autograd" if this
            is the backward pass of the function; empty if the program has called it.
    """

    place: Place | None
    backward: bool
    op: str
    kind: str
    rule: str = ""
    moved: tuple[MovedTensor, ...] = ()
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    asker: str = ""

    @property
    def text(self) -> str:
        """The cause in a sentence.

        >>> moved = MovedTensor((4, 6), (2,), ("tp",), ("S(1)",), ("R",))
        >>> Cause(None, False, "slice", "op", "PyTorch", (moved,)).text
        "slice redistributes a tensor of (4, 6) from [S(1)] to [R], by PyTorch's rule"
        """
        moved = _named([each.text for each in self.moved])
        if self.kind == "direct":
            return f"{self.op} communicates outside of the ops of DTensors"
        if self.kind == "compiled":
            return f"{self.op} communicates in a compiled graph, which records no tensors"
        if self.kind == "planned":
            return f"the plan of the step redistributes {moved}, for {self.op}"
        if self.kind == "asked":
            who = f"{self.op}(){f' in {self.asker}' if self.asker else ''}"
            if self.asker == GRADIENT:
                who = f"the backward pass of {self.op}()"
            return f"{who} redistributes {moved}" if moved else f"{who} communicates"
        if moved:
            left = Counter(self.operands)  # those that were not redistributed
            left.subtract([f"{each.shape} [{', '.join(each.before)}]" for each in self.moved])
            beside = _named([operand for operand, n in left.items() if n > 0])
            said = f"{self.op} redistributes {moved}" + (f", beside {beside}" if beside else "")
        else:
            operands, results = map(_named, (self.operands, self.results))
            to = f" to {results}" if results else ""
            said = f"{self.op} communicates" + (f", from {operands}{to}" if operands else "")
        return f"{said}, by {RULES[self.rule]}" if self.rule else said


def _named(tensors: Sequence[str], between: str = " and ") -> str:
    """Tensors as text, of which the first are named."""
    some = list(dict.fromkeys(tensors))
    left = len(some) - MOST_NAMED
    return between.join([*some[:MOST_NAMED], *([f"{left} more"] if left > 0 else [])])


class PlannedLine(NamedTuple):
    """What a line of the program receives by the plan of a step, in bytes.

    Attributes:
        before, after: op by op, and as planned.
        alone: what the step saves if the line alone changes; None if that is unknown.
        line: the line, ``file:number``.
        does: what the plan brings where on this line, in words.

    >>> PlannedLine(5_510_000, 721_000).text
    'By the plan of the step, this line receives 721 kB in place of 5.51 MB.'
    >>> PlannedLine(800, 200, Totals(-40, 2)).text.partition(". ")[2]
    'If it alone changes, the step saves 2 collectives, and adds 40 B.'
    """

    before: int
    after: int
    alone: Totals | None = None
    line: str = ""
    does: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """That, in sentences."""
        before, after = bytes_text(self.before), bytes_text(self.after)
        said = f"By the plan of the step, this line receives {after} in place of {before}."
        if self.alone is None:
            return said
        return f"{said} If it alone changes, the step {self.alone.saved_text()}."

    def to_dict(self) -> dict[str, Any]:
        """The line as plain data."""
        alone = self.alone and asdict(self.alone)
        return {**self._asdict(), "alone": alone, "does": list(self.does), "text": self.text}


class PlannedStep(NamedTuple):
    """What the plan of a step saves, in all and line by line: what to change first.

    Attributes:
        title: the step, and its mesh.
        before: what it receives op by op; None if the plan does not say.
        saved: what the whole plan saves; None if the plan does not say.
        lines: the lines that change. If it was counted what each saves alone, only those that save
            something, the most first; otherwise all, the line that saves most in the plan first.
    """

    title: str
    before: Totals | None
    saved: Totals | None
    lines: tuple[PlannedLine, ...]

    @classmethod
    def of(cls, plan: StepPlan) -> PlannedStep:
        """What a plan saves."""
        before, after = (plan.totals.get(name) for name in ("op by op", "planned"))
        does: dict[str, dict[str, None]] = {}
        for op in plan.ops:
            for what in op.does:
                does.setdefault(op.line, {})[f"{op.op} {what}"] = None
        changed = plan.changed()
        return cls(
            f"{plan.program} on mesh {mesh_text(plan.mesh, plan.names)}",
            before,
            before and after and before.minus(after),
            tuple(
                [
                    PlannedLine(*changed[of], plan.alone.get(of), of, tuple(does.get(of, ())))
                    for of in plan.saving() or changed
                    if of in changed
                ]
            ),
        )

    @property
    def is_counted(self) -> bool:
        """Whether it is known what each line saves alone."""
        return any(line.alone for line in self.lines)

    @property
    def head(self) -> str:
        """What the list is, in a sentence."""
        if not self.lines:
            return f"The plan of {self.title} changes no line."
        first = f"Change this first, by the plan of {self.title}"
        if self.before is None:
            return f"{first}:"
        sent = counted(self.before.collectives, "collective")
        return f"{first}, which op by op receives {bytes_text(self.before.received)} in {sent}:"

    def rows(self) -> list[tuple[str, str, str]]:
        """For each line: its name, what it saves, and what the plan does there."""
        of = self.before.received if self.before else 0
        return [
            (
                _last(line.line),
                line.alone.saved_text(of)
                if line.alone
                else f"{bytes_text(line.before)} -> {bytes_text(line.after)}",
                _named(line.does, "; "),
            )
            for line in self.lines
        ]

    @property
    def tail(self) -> str:
        """What all lines save together, in sentences."""
        parts = []
        if self.saved and self.before:
            whole = self.saved.saved_text(self.before.received)
            parts.append(f"The whole plan {whole}.")
        if self.lines and not self.is_counted:
            parts.append(
                "These are the bytes of each line in the whole plan; plan-step --each-line also "
                "counts what each saves alone."
            )
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The list as plain data."""
        totals = {"before": self.before, "saved": self.saved}
        return {
            "title": self.title,
            **{name: of and asdict(of) for name, of in totals.items()},
            "lines": [line.to_dict() for line in self.lines],
        }


def _last(path: str) -> str:
    """Without folders."""
    return path.replace("\\", "/").rpartition("/")[2]


class Line(NamedTuple):
    """All communication of one cause.

    Attributes:
        cause: the cause.
        collectives: the collectives, in order.
        planned: what the line of the program receives by a plan, if one is given that changes it.
    """

    cause: Cause
    collectives: tuple[Collective, ...]
    planned: PlannedLine | None = None

    @property
    def received(self) -> int:
        """The bytes that the busiest rank received, or this rank, where that is unknown."""
        return sum(one.most * one.itemsize for one in self.collectives)

    @property
    def is_of_busiest(self) -> bool:
        """Whether all bytes are those of the busiest rank, and none are those of this rank."""
        return all(one.busiest is not None for one in self.collectives)

    @property
    def model(self) -> float:
        """The seconds by the network's model."""
        return sum(one.model for one in self.collectives)

    @property
    def measured(self) -> float:
        """The measured seconds."""
        return sum(one.measured for one in self.collectives)

    @property
    def kinds(self) -> dict[str, int]:
        """The number of collectives of each kind."""
        return dict(Counter(one.op for one in self.collectives))

    @property
    def over(self) -> list[str]:
        """The mesh dims of the groups."""
        return list(dict.fromkeys(one.over for one in self.collectives))

    @property
    def callers(self) -> dict[Place, int]:
        """The lines that called the function of this line, as far as known, and the number of
        collectives of each; the most first.
        """
        found = Counter(one.caller for one in self.collectives)
        return {line: n for line, n in found.most_common() if line is not None}

    def to_dict(self) -> dict[str, Any]:
        """The line as plain data: bytes and seconds."""
        cause = self.cause
        return {
            **cause._asdict(),
            "place": None if cause.place is None else cause.place._asdict(),
            "moved": [moved._asdict() for moved in cause.moved],
            "text": cause.text,
            "planned": self.planned and self.planned.to_dict(),
            "kinds": self.kinds,
            "over": self.over,
            "received_bytes": self.received,
            "model_seconds": self.model,
            "measured_seconds": self.measured,
            "collectives": [one.to_dict() for one in self.collectives],
        }


def with_plan(lines: Sequence[Line], plan: StepPlan) -> tuple[Line, ...]:
    """The lines, with what those that a plan changes receive by it. A plan that was made elsewhere
    knows a line by the name of its file, if only one of its lines has that name and number.
    """
    changed = plan.changed()
    named: dict[str, list[str]] = {}
    for of in changed:
        named.setdefault(_last(of), []).append(of)

    def planned(place: Place | None) -> PlannedLine | None:
        whole = "" if place is None else f"{place.file}:{place.line}"
        found = [whole] if whole in changed else named.get(_last(whole), [])
        if len(found) != 1:
            return None
        return PlannedLine(*changed[found[0]], plan.alone.get(found[0]), found[0])

    return tuple([line._replace(planned=planned(line.cause.place)) for line in lines])

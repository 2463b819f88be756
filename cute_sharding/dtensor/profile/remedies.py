"""What to do about a communication, in sentences: placements for which an op sends nothing, the op
that sharded a tensor, and the op that makes a Partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.profile.asking import (
    EVERYTHING,
    Answered,
    Ask,
    asked_of,
    in_brackets,
    moved_of,
    name_of,
    schema_of,
)
from cute_sharding.dtensor.profile.avoiding import free_placements, sharded_parts
from cute_sharding.dtensor.profile.gradients import Way, ways_around
from cute_sharding.dtensor.profile.origins import Flow
from cute_sharding.dtensor.profile.profiler import Asked, Call
from cute_sharding.dtensor.profile.roots import hooked, of_moved_sum, of_sharded, of_sum, root_of
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial
from cute_sharding.profiling import Moved, Root


@dataclass(frozen=True)
class Sending:
    """An op that communicates.

    Args:
        call: the op.
        schema: the op on its specs.
        now: its redistributions and results, or the error of its rule.
        forward: the op whose gradient the op computes.
        ask: computes the redistributions of an op.
        flow: the ops of the program; None: unknown.
    """

    call: Call
    schema: OpSchema
    now: Answered | Exception
    forward: Call | None
    ask: Ask
    flow: Flow | None

    def remedies(self) -> tuple[tuple[str, ...], Root | None]:
        """Ways to avoid the communication, in sentences; and the line that shards a tensor, if it
        may be the reason.
        """
        if not isinstance(self.now, Answered):
            return self._without_root(), None
        least, flow = self.now.other.received, self.flow
        found = None if flow is None else flow.sharded_by(self.call, least)
        if found is None:
            return self._without_root(), None
        return (of_sharded(found), *self._without_root()), root_of(found)

    def _without_root(self) -> tuple[str, ...]:
        if not self.call.backward:
            return _avoiding(self.schema, self.now, self.call.settings, self.ask, self)
        name, forward, ask = name_of(self.call), self.forward, self.ask
        said = (*self._of_sums(), *_around(name, self.schema, self.now, forward, ask))
        return said or _of_forward(name, forward, ask) or of_gradient(self.call)

    def _of_sums(self) -> tuple[str, ...]:
        """The advice for operands of a gradient's op that are reduced, if it is known where the
        Partials came from.
        """
        moved = self.now.moved if isinstance(self.now, Answered) else ()
        said = [text for pair in dict.fromkeys(moved) for text in self.of_sum(*pair)]
        return tuple(dict.fromkeys(said))

    def of_sum(self, before: DTensorSpec, after: DTensorSpec) -> tuple[str, ...]:
        """The advice for one operand, if the op that makes this Partial is known."""
        pairs = zip(before.placements, after.placements)
        if not any(isinstance(p, Partial) and p != q for p, q in pairs):
            return ()
        return of_sum(self.call, before, after, self.ask, self.flow)


# -- by the rule of the op ------------------------------------------------------------------------


# The ops by which autograd adds gradients.
_ADDS = ("add", "add_")


def of_gradient(source: Call | Asked) -> tuple[str, ...]:
    """The advice for a gradient. Its forward op determines its placements, so the program cannot
    change them at the gradient.
    """
    if not source.backward:
        return ()
    if isinstance(source, Call) and name_of(source) in _ADDS:
        return (
            "autograd adds the gradients of a tensor that several ops use, and the placements of "
            "this tensor decide the placements of the gradients",
        )
    line = "" if source.place is None else f" line {source.place.line}"
    if isinstance(source, Call):
        of = f" in{line}" if line else ""
        return (
            f"the forward op{of} decides the placements of this gradient: change the placements of "
            "the forward op",
        )
    of = f"{name_of(source)}(){' in' if line else ''}{line}"
    return (f"{of} causes this communication: remove the call, or use other placements",)


def of_redistribution(source: Asked, moved: Moved) -> tuple[str, ...]:
    """The advice for a redistribution that the program asks for. A gradient that is a Partial has
    to be reduced, so its redistribution is needed.
    """
    sums = of_moved_sum(moved)
    if not (source.backward and sums):
        return sums or of_gradient(source)
    whole = [moved.names[m] for m in moved.changed if moved.after[m] == "R"]
    needed = (
        f"this communication is needed: the gradient is a Partial, and {name_of(source)}() reduces "
        "it once"
    )
    return (needed if whole else f"{needed}, to a Shard, which receives the least",)


def _around(
    name: str,
    schema: OpSchema,
    now: Answered | Exception,
    forward: Call | None,
    ask: Ask,
) -> tuple[str, ...]:
    """Placements of the operands of the forward op, or of the gradient of its result, that avoid
    the communication.
    """
    of = None if forward is None else schema_of(forward)
    if forward is None or of is None or name in _ADDS or not isinstance(now, Answered):
        return ()
    ways = ways_around(schema, now.moved, of, ask)
    op, said = _at_line(forward), _of_result(name, now, forward, ways)
    for way in ways:
        there = in_brackets(way.placements)
        if way.operand is None:
            continue
        which = f"operand {way.operand}" if len(op_schemas.specs_of(of)) > 1 else "the input"
        text = f"{name} sends nothing if {which} of {op} is {there}"
        if way.gradient is not None:
            text += f", and the gradient of its result {in_brackets(way.gradient)}"
        if way.received is not None:
            text += f"; a redistribution of {which} to these placements receives {way.received:,} B"
            text += "" if way.gradient is None else ", in addition to the gradient"
            text += _mark(now, way.received)
        said.append(text)
    return tuple(said)


def _of_result(name: str, now: Answered, forward: Call, ways: Sequence[Way]) -> list[str]:
    """The placements of the gradient of the forward op's result, and the call that gives them."""
    found = [way for way in ways if way.operand is None]
    if not found:
        return []
    there = " or ".join(in_brackets(way.placements) for way in found)
    text = (
        f"{name} sends nothing if the gradient of the result of {_at_line(forward)} is {there}: "
        f"call {hooked(found[0].placements)} on this result"
    )
    received = found[0].received
    if received is not None:
        text += f", which receives {received:,} B{_mark(now, received)}"
    return [text]


def _of_forward(name: str, forward: Call | None, ask: Ask) -> tuple[str, ...]:
    """The forward op that determines the placements of a gradient, and placements for which this
    forward op sends nothing.
    """
    of = None if forward is None else schema_of(forward)
    if forward is None or of is None or name in _ADDS:
        return ()
    op = f"the placements of this gradient come from {_at_line(forward)}"
    ways = _avoiding(of, asked_of(partial(ask, of)), forward.settings, ask)
    if not ways:
        return (f"{op}: change the placements there",)
    return (f"{op}, which also communicates: {ways[0]}",)


def _at_line(call: Call) -> str:
    """An op and its line."""
    return name_of(call) + ("" if call.place is None else f" in line {call.place.line}")


def _avoiding(
    schema: OpSchema,
    now: Answered | Exception,
    settings: Settings | None,
    ask: Ask,
    sending: Sending | None = None,
) -> tuple[str, ...]:
    """Placements that avoid the communication, the cheapest first. If some placements receive less
    than the op does now, all others are left out. Otherwise, all are marked.
    """
    if not isinstance(now, Answered):
        return ()
    specs = op_schemas.specs_of(schema)
    todo: list[str] = []
    found: list[tuple[int, str]] = []  # bytes, and the advice
    for at, dims in _to_change(specs, now):
        spec = specs[at]
        if any(isinstance(spec.placements[m], Partial) for m in dims):
            pair = next((pair for pair in now.moved if pair[0] is spec), None)
            if pair is not None:
                known = () if sending is None else sending.of_sum(*pair)
                todo += known or of_moved_sum(moved_of(*pair))
            continue
        todo += _of_parts(schema, at, dims, settings)
        which = f"operand {at}" if len(specs) > 1 else "its input"
        for received, placements in free_placements(schema, at, dims, ask):
            free = f"{schema.op._opname} sends nothing if {which} is {in_brackets(placements)}"
            if received is None:
                todo.append(free)
            else:
                there = f"; a redistribution to these placements receives {received:,} B"
                found.append((received, free + there))
    least = now.other.received
    paying = [each for each in found if least is None or each[0] < least]
    if not paying and not todo:
        todo += _of_others(schema, now, ask, only_sums=bool(found))
    ranked = sorted(paying or found, key=lambda each: each[0])
    return tuple(dict.fromkeys([*todo, *(said + _mark(now, n) for n, said in ranked)]))


def _mark(now: Answered, received: int) -> str:
    """A remark for placements whose redistribution receives, or may receive, at least as many bytes
    as the op does now.
    """
    least = now.other.received
    if least is None:
        return " (the bytes that the op receives now are unknown)"
    return "" if received < least else " (no less than now)"


def _of_others(schema: OpSchema, now: Answered, ask: Ask, *, only_sums: bool) -> list[str]:
    """The advice about an operand that is not redistributed: as it is a Partial or sharded, it may
    be the reason why other operands are redistributed.
    """
    moved = [before for before, _ in now.moved]
    dims = {m for pair in now.moved for m, (p, q) in enumerate(_placements(*pair)) if p != q}
    for at, spec in enumerate(op_schemas.specs_of(schema)):
        sums = [m for m, p in enumerate(spec.placements) if isinstance(p, Partial)]
        cut = [m for m in sorted(dims) if not spec.placements[m].is_replicate()]
        if not (sums or (cut and not only_sums)) or any(spec is each for each in moved):
            continue
        for received, placements in free_placements(schema, at, sums or cut, ask):
            there, op = in_brackets(placements), schema.op._opname
            if sums:
                return [
                    f"{op} sends nothing if operand {at}, which is a Partial, is first reduced to "
                    f"{there}, once for all ops that use it"
                ]
            text = f"{op} sends nothing if operand {at}, which it does not redistribute, is {there}"
            if received is not None:
                text += f"; a redistribution to these placements receives {received:,} B"
                text += _mark(now, received)
            return [text]
    return []


def _placements(before: DTensorSpec, after: DTensorSpec) -> list[tuple[object, object]]:
    return list(zip(before.placements, after.placements))


def _of_parts(
    schema: OpSchema, at: int, dims: Sequence[int], settings: Settings | None
) -> list[str]:
    """The advice for an op that divides a sharded dim into equal parts, such as a fused weight: to
    shard each part, instead of the whole.
    """
    spec = op_schemas.specs_of(schema)[at]
    by = settings if settings is not None and settings.movement else EVERYTHING
    found = []
    for m, placements in sharded_parts(schema, at, dims, Ask(by, None)):
        on = "" if by is settings else " with cute_sharding.enable(movement=True)"
        found.append(
            f"{schema.op._opname} sends nothing{on} if its input is "
            f"{in_brackets(placements)}, as with a fused weight of which each part is sharded "
            f"on {moved_of(spec, spec).names[m]}: see docs/tutorial.md#fused-weights"
        )
    return found


def _to_change(specs: Sequence[DTensorSpec], now: Answered) -> list[tuple[int, list[int]]]:
    """Pairs of an operand, and the mesh dims on which its placement matters."""
    found = []
    for before, after in now.moved:
        at = next((k for k, spec in enumerate(specs) if spec is before), None)
        pairs = enumerate(zip(before.placements, after.placements))
        if at is not None:
            found.append((at, [m for m, (p, q) in pairs if p != q]))
    if not now.moved and now.by_function:
        for at, spec in enumerate(specs):
            cut = [m for m, p in enumerate(spec.placements) if p.is_shard() or "_S" in str(p)]
            found += [(at, cut)] if cut else []
    return found

"""From what ran to a :class:`~cute_sharding.programs.program.Program`: every way of every op, and
what it costs to bring values from one of them to another. And from how it runs at the least price
to the ops of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from cute_sharding.dtensor.programs.numbers import Key
from cute_sharding.dtensor.programs.planned import planned_op
from cute_sharding.dtensor.programs.recording import Counting, OpKind, Recorded
from cute_sharding.dtensor.programs.ways import (
    Placements,
    held,
    move_price,
    multiplications,
    price_shared,
    standard,
    ways_of,
)
from cute_sharding.dtensor.replaced.asked import Ask
from cute_sharding.dtensor.replaced.local_tensors import tree_map
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, NormPartial
from cute_sharding.dtensor.run.placements import text
from cute_sharding.programs.plan import PlannedOp
from cute_sharding.programs.program import FreeValues, Op, OpWay, Price, Program, Solved


def program_of(
    recorded: Recorded,
    counting: Counting,
    what: Callable[[Any], str] = str,
    *,
    free: Iterable[Sequence[Key]] = (),
    written: Sequence[OpWay] = (),
) -> Program:
    """What ran, as a program of tensors.

    Args:
        counting: counts what is received while an op runs.
        what: the text for a line.
        free: keys of values that are given, but whose placements are chosen: those that lie alike.
        written: the ways that the calls take in the program as it is written; none: what they did.
    """
    loose = {recorded.keys[key]: key for alike in free for key in alike if key in recorded.keys}
    asked = _Asked(recorded, counting, loose)
    ways = [*map(asked.ways, recorded.kinds, _of_kinds(recorded, written))]
    specs = dict(recorded.given)
    for kind in recorded.kinds:
        specs |= {n: spec for n, spec in zip(kind.results, kind.made) if n is not None}
    ops, within, made, fixed = list[Op](), dict[int, int](), set[int](), set[int]()
    for call in recorded.calls:
        kind = recorded.kinds[call.kind]
        if isinstance(kind.func, Ask):
            fixed.update(call.results)
        else:
            places = zip(call.results, kind.within)
            within |= {t: call.operands[at] for t, at in places if at is not None}
        made.update(call.results)
        about = f"{kind.func} at {what(call.line)}"
        op = Op(call.operands, call.results, ways[call.kind], call.kind, kind.as_lies, about)
        ops.append(replace(op, call=call.number))
    tensors = {t: specs[number] for t, number in enumerate(recorded.numbers)}
    start = {t: tuple(spec.placements) for t, spec in tensors.items() if t not in made}
    kinds = {t: _kind_of(spec) for t, spec in tensors.items()}
    of_kind: dict[Hashable, DTensorSpec] = {kinds[t]: spec for t, spec in tensors.items()}
    chosen = _free_values(recorded, free, tensors, made)
    lying = _lying(ops, start, chosen, kinds)
    return Program(
        tuple(ops),
        {t: placements for t, placements in start.items() if recorded.numbers[t] not in loose},
        _moves(lying, of_kind),
        kinds,
        fixed=frozenset((*within, *fixed)),
        sizes={
            kind: {placements: held(of_kind[kind], placements) for placements in {**one, **other}}
            for kind, (one, other) in lying.items()
        },
        kept=recorded.kept | start.keys(),
        within=within,
        alone=_alone(recorded, ops, within),
        free=chosen,
        shared=partial(price_shared, of_kind),
    )


def _alone(recorded: Recorded, ops: Sequence[Op], within: Mapping[int, int]) -> frozenset[int]:
    """Tensors in whose memory is one whose local tensor the program gets, to which a rank may then
    write alone.
    """
    memory = dict(within)
    for call, op in zip(recorded.calls, ops):
        kind = recorded.kinds[call.kind]
        if isinstance(kind.func, Ask) and not op.ways[0].price.received:
            memory |= dict.fromkeys(call.results, *call.operands)

    def owner(t: int) -> int:
        while t in memory:
            t = memory[t]
        return t

    handed = set(map(owner, recorded.handed))
    return frozenset([t for t in range(len(recorded.numbers)) if owner(t) in handed])


def with_fixed(
    program: Program, recorded: Recorded, is_fixed: Callable[[Any], bool], written: Sequence[OpWay]
) -> Program:
    """The program in which ops of some lines do what they do as written, and their results stay.

    Args:
        program: what ran, by :func:`program_of`.
        is_fixed: whether a line is one of those.
        written: the ways that the calls take in the program as it is written.
    """
    kinds = {call.kind for call in recorded.calls if is_fixed(call.line)}
    ops, stay = list(program.ops), set(program.fixed)
    for c, (call, own) in enumerate(zip(recorded.calls, written)):
        if call.kind in kinds:
            same = [way for way in ops[c].ways if way.operands == own.operands]
            ops[c] = replace(ops[c], ways=tuple(same[:1]) or ops[c].ways[:1])
            stay.update(call.results)
    return replace(program, ops=tuple(ops), fixed=frozenset(stay))


def _of_kinds(recorded: Recorded, written: Sequence[OpWay]) -> list[OpWay | None]:
    """For each kind the way of its call that multiplies least."""
    found: list[OpWay | None] = [None] * len(recorded.kinds)
    for call, way in zip(recorded.calls, written):
        kind, known = recorded.kinds[call.kind], found[call.kind]
        if known is None or multiplications(kind, way) < multiplications(kind, known):
            found[call.kind] = way
    return found


def _free_values(
    recorded: Recorded,
    free: Iterable[Sequence[Key]],
    tensors: Mapping[int, DTensorSpec],
    made: Collection[int],
) -> tuple[FreeValues, ...]:
    of_number: dict[int, list[int]] = {}
    for t, number in enumerate(recorded.numbers):
        if t not in made:
            of_number.setdefault(number, []).append(t)
    found = []
    for alike in free:
        numbers = [recorded.keys[key] for key in alike if key in recorded.keys]
        values = [t for number in numbers for t in of_number[number]]
        if values:
            found.append(FreeValues(tuple(values), tuple(_placings(tensors[values[0]]))))
    return tuple(found)


def _placings(spec: DTensorSpec) -> list[Placements]:
    """Those that a value may get, its own first."""
    return list(dict.fromkeys([tuple(spec.placements), *standard(spec)]))


class _Asked:
    """The ways of kinds; layers that repeat are asked once."""

    def __init__(self, recorded: Recorded, counting: Counting, free: Collection[int]) -> None:
        self._counting = counting
        self._known: dict[Hashable, tuple[OpWay, ...]] = {}
        # For each value the placements in which it may lie.
        self._candidates: dict[int, dict[Placements, None]] = {
            number: dict.fromkeys(_placings(spec) if number in free else [tuple(spec.placements)])
            for number, spec in recorded.given.items()
        }

    def ways(self, kind: OpKind, written: OpWay | None) -> tuple[OpWay, ...]:
        candidates = [[*self._candidates[number]] for number in kind.operands]
        arguments = tree_map(_told, (kind.args, kind.kwargs))
        key = (kind.func, repr(arguments), tuple(map(tuple, candidates)), written)
        if key not in self._known:
            own = OpWay(
                tuple([tuple(spec.placements) for spec in kind.specs]),
                tuple([tuple(spec.placements) for spec in kind.made]),
            )
            self._known[key] = tuple(ways_of(kind, candidates, self._counting, written)) or (own,)
        found = self._known[key]
        for i, (number, spec) in enumerate(zip(kind.results, kind.made)):
            if number is not None:
                made = dict.fromkeys([way.results[i] for way in found])
                if not kind.as_lies:
                    made |= dict.fromkeys(standard(spec))
                self._candidates[number] = made  # type: ignore[assignment]
        return found


def _told(leaf: Any) -> Any:
    return (*_kind_of(leaf), text(leaf.placements)) if isinstance(leaf, DTensorSpec) else leaf


def _kind_of(spec: DTensorSpec) -> tuple[Hashable, ...]:
    """Values for which moves cost the same."""
    meta: Any = spec.tensor_meta
    return tuple(spec.shape), str(meta.dtype), tuple(spec.mesh.shape), spec.mesh.mesh_dim_names


# For each kind of value, how ops make it and how ops want it.
_Lying: TypeAlias = "dict[Hashable, tuple[dict[Any, None], dict[Any, None]]]"


def _lying(
    ops: Iterable[Op],
    start: Mapping[int, Any],
    free: Iterable[FreeValues],
    kinds: Mapping[int, Hashable],
) -> _Lying:
    found: _Lying = {kind: ({}, {}) for kind in kinds.values()}
    for t, placements in start.items():
        found[kinds[t]][0][placements] = None
    for values in free:
        found[kinds[values.values[0]]][0].update(dict.fromkeys(values.placings))
    for op in ops:
        for way in op.ways:
            for t, placements in zip(op.operands, way.operands):
                found[kinds[t]][1][placements] = None
            for t, placements in zip(op.results, way.results):
                found[kinds[t]][0][placements] = None
    return found


def _moves(
    lying: _Lying, specs: Mapping[Hashable, DTensorSpec]
) -> dict[Hashable, dict[Any, Price]]:
    return {
        kind: {
            (before, after): price
            for before in {**made, **wanted}
            for after in wanted
            if before != after and (price := move_price(specs[kind], before, after)) is not None
        }
        for kind, (made, wanted) in lying.items()
    }


# -- the answer ------------------------------------------------------------------------------------


def plan_of(
    recorded: Recorded,
    program: Program,
    solved: Solved,
    what: Callable[[Any], str] = str,
    before: Sequence[int] = (),
) -> tuple[PlannedOp, ...]:
    """The ops of a plan: where the operands and the results of each kind are brought.

    Args:
        program: what ran, by :func:`program_of`.
        what: the text for a line.
        before: the bytes that each call receives op by op; none: as it ran.
    """
    calls: dict[int, list[int]] = {}
    # The last call that reads a tensor in some placements, and as which operand.
    last: dict[tuple[int, Any], tuple[int, int]] = {}
    for c, call in enumerate(recorded.calls):
        calls.setdefault(call.kind, []).append(c)
        needed = program.ops[c].ways[solved.ways[c]].operands
        for i, (tensor, placements) in enumerate(zip(call.operands, needed)):
            last[tensor, placements] = c, i

    before = before or received_by_op(recorded, program)
    after = _received(program, solved)

    def planned(k: int, kind: OpKind) -> PlannedOp:
        some = [recorded.calls[c] for c in calls[k]]
        way = program.ops[calls[k][0]].ways[solved.ways[calls[k][0]]]
        reads, keeps = list[str | None](), list[bool]()
        for i, placements in enumerate(way.operands):
            moved = [solved.lies[call.operands[i]] != placements for call in some]
            moves = i not in kind.as_lies and any(moved) and _is_written(placements)
            again = [last[r.operands[i], placements] != (c, i) for c, r in zip(calls[k], some)]
            reads.append(_placements_text(placements) if moves else None)
            alone = any(call.operands[i] in program.alone for call in some)
            keeps.append(moves and any(again) and not alone)
        gives = [
            _placements_text(lies) if lies != placements and _is_written(lies) else None
            for lies, placements in zip([solved.lies[t] for t in some[0].results], way.results)
        ]
        return planned_op(
            kind.key,
            results=kind.results,
            reads=tuple(reads),
            keeps=tuple(keeps),
            gives=tuple(gives),
            line=what(some[0].line),
            calls=len(some),
            before=sum(before[c] for c in calls[k]),
            after=sum(after[c] for c in calls[k]),
        )

    parts: dict[Key, list[tuple[OpKind, PlannedOp]]] = {}
    for k, kind in enumerate(recorded.kinds):
        if not isinstance(kind.func, Ask):  # which the program gets, whatever a plan says
            parts.setdefault(kind.key, []).append((kind, planned(k, kind)))
    return tuple(map(_joined, parts.values()))


def _joined(parts: Sequence[tuple[OpKind, PlannedOp]]) -> PlannedOp:
    """What the parts of a call do, as the call does it."""
    (_, first), *others = parts
    if not others:
        return first
    reads: dict[int, str | None] = {}
    keeps: dict[int, bool] = {}
    for kind, part in parts:
        reads |= dict(zip(kind.places, part.reads))
        keeps |= dict(zip(kind.places, part.keeps))
    return replace(
        first,
        results=tuple([result for _, part in parts for result in part.results]),
        reads=tuple([reads[place] for place in sorted(reads)]),
        keeps=tuple([keeps[place] for place in sorted(keeps)]),
        gives=tuple([given for _, part in parts for given in part.gives]),
        before=sum(part.before for _, part in parts),
        after=sum(part.after for _, part in parts),
    )


def received_by_op(recorded: Recorded, program: Program) -> list[int]:
    """The bytes that each op receives without a plan: it redistributes what it reads."""
    lie = dict(program.given)
    found = []
    for op in program.ops:
        way = op.ways[0]
        moves = [(t, lie[t], p) for t, p in zip(op.operands, way.operands)]
        found.append(way.price.received + sum(program.received(*move) for move in moves))
        lie |= dict(zip(op.results, way.results))
    return found


def _received(program: Program, solved: Solved) -> list[int]:
    """The bytes that each op receives as planned: for itself, for copies that no op before made,
    and to bring its results elsewhere.
    """
    found, copied = [], set[tuple[int, Any]]()
    for op, w in zip(program.ops, solved.ways):
        way = op.ways[w]
        moves = [(t, p, solved.lies[t]) for t, p in zip(op.results, way.results)]
        for t, p in zip(op.operands, way.operands):
            if (t, p) not in copied or t in program.alone:
                copied.add((t, p))
                moves.append((t, solved.lies[t], p))
        found.append(way.price.received + sum(program.received(*move) for move in moves))
    return found


def _is_written(placements: Any) -> bool:
    """Whether a plan can say it. An op that reads part of a norm makes it of a replica itself."""
    return not any(isinstance(p, NormPartial) for p in placements)


def _placements_text(placements: Any) -> str:
    return text(placements)

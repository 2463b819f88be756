"""The causes of collectives, in sentences: the redistributed tensors, the rule, and the reason; the
bytes that PyTorch alone and this package would have sent; and placements that avoid the
communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.profile.asking import (
    EVERYTHING,
    Answered,
    Ask,
    by_package,
    by_torch,
    moved_of,
    redistributed,
    schema_of,
    spec_text,
)
from cute_sharding.dtensor.profile.avoiding import free_placements, sharded_parts
from cute_sharding.dtensor.profile.gradients import ways_around
from cute_sharding.dtensor.profile.profiler import Asked, Call, Ran
from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Partial
from cute_sharding.profiling import Cause, Collective, Moved, Other
from cute_sharding.relations.table import VIEWS


def name_of(source: Call | Asked) -> str:
    """The name of an op without its overload, or of the function that the program calls."""
    if isinstance(source, Asked):
        return source.function
    return registry.name_of(source.op).removesuffix(".default").partition(".")[0]


_OF_LIBRARIES = {"FSDP": "FSDP gathers parameters before they are used, and reduces gradients"}


def of_asked(asked: Asked, network: Any) -> Cause:
    """The cause of communication that the program asks for."""
    name, why = name_of(asked), ""
    todo: tuple[str, ...] = ()
    moved: tuple[Moved, ...] = ()
    theirs = ours = Other(None)
    if asked.kind == "direct":
        why = _OF_LIBRARIES.get(
            name, f"the program, or a library that it uses, calls {name} itself"
        )
    elif asked.kind == "compiled":
        why = "a compiled program sends it, and a compiled graph does not record tensors and rules"
        todo = ("profile the program without torch.compile to see tensors and rules",)
    elif asked.before is not None and asked.after is not None:
        pair = asked.before, asked.after
        moved = (moved_of(*pair),)
        what = (
            f"the backward pass of {name}() redistributes the gradient"
            if asked.backward
            else f"the program calls {name}()"
        )
        why = f"{what}: {_from_to(moved[0])}"
        theirs, ours = (
            _or_unknown(partial(redistributed, *pair, by, network)) for by in (None, EVERYTHING)
        )
        todo = (*_of_pending(moved[0]), *_of_gradient(asked))
    else:
        why = f"the program calls {name}()"
    return Cause(
        asked.place, asked.backward, name, asked.kind, moved, (), (), why, todo, theirs, ours
    )


def of_call(
    call: Call,
    notes: Sequence[Ran],
    sent: Sequence[Collective],
    network: Any,
    forward: Call | None = None,
    calls: int | None = None,
) -> Cause:
    """The cause of an op on DTensors. ``sent`` has the collectives of the op, if there are any, in
    ``calls`` calls; None: in a part of one call. ``forward`` is the op whose gradient the op
    computes.
    """
    name = name_of(call)
    seen = dict.fromkeys(note.moved for note in notes)
    moved = tuple([moved_of(*pair) for pair in seen if pair is not None and None not in pair])
    cause = Cause(call.place, call.backward, name, "op", moved)
    schema = schema_of(call)
    if schema is None:
        return cause._replace(
            why=_moves(name, moved)
            or f"{name} communicates, and one of its arguments is a plain tensor"
        )
    specs = op_schemas.specs_of(schema)
    cause = cause._replace(operands=tuple(map(spec_text, specs)))
    theirs = _asked(partial(by_torch, schema, network))
    ours = _asked(partial(by_package, schema, call.settings or EVERYTHING, network))
    now = ours if call.settings is not None else theirs
    if isinstance(now, Answered):
        cause = cause._replace(results=tuple(map(spec_text, now.results)))
        if not moved:
            cause = cause._replace(moved=tuple([moved_of(*pair) for pair in now.moved]))
    cause = cause._replace(torch=_other(theirs), package=_other(ours))
    if not sent:
        return cause._replace(why=_free(name, theirs))
    ask, why = Ask(call.settings, network), _why(name, cause, now, call.settings, schema)
    now = _as_recorded(now, sent, calls)
    if call.backward:
        todo = (
            _around(name, schema, now, forward, ask)
            or _of_forward(name, forward, ask)
            or _of_gradient(call)
        )
    else:
        todo = _avoiding(schema, now, call.settings, ask)
    return cause._replace(why=why, todo=todo)


def _as_recorded(
    now: Answered | Exception, sent: Sequence[Collective], calls: int | None
) -> Answered | Exception:
    """The decision with the recorded bytes of the busiest rank, if the rule does not give the
    bytes.
    """
    busiest = [one.itemsize * one.busiest for one in sent if one.busiest is not None]
    if isinstance(now, Exception) or now.other.received is not None or not calls:
        return now
    if len(busiest) < len(sent) or sum(busiest) % calls:
        return now
    return now._replace(other=Other(sum(busiest) // calls))


def _asked(ask: Callable[[], Answered]) -> Answered | Exception:
    try:
        return ask()
    except Exception as error:  # any error is the answer of the rule for this op
        return error


def _other(found: Answered | Exception) -> Other:
    if isinstance(found, Answered):
        return found.other
    return Other(None, None, next(iter(str(found).splitlines()), type(found).__name__))


def _or_unknown(ask: Callable[[], Other]) -> Other:
    try:
        return ask()
    except Exception as error:
        return Other(None, None, next(iter(str(error).splitlines()), type(error).__name__))


# -- why -------------------------------------------------------------------------------------------


# The most tensors of a list to describe one by one.
MOVES_SHOWN = 3


def _in(placements: Sequence[str]) -> str:
    return f"[{', '.join(placements)}]"


def _from_to(moved: Moved) -> str:
    return f"a tensor of {moved.shape} from {_in(moved.before)} to {_in(moved.after)}"


def _free(name: str, theirs: Answered | Exception) -> str:
    if not isinstance(theirs, Answered) or not theirs.moved:
        return f"{name} sends nothing with this package"
    to = moved_of(*theirs.moved[0])
    return (
        f"{name} sends nothing with this package; PyTorch alone redistributes its input from "
        f"{_in(to.before)} to {_in(to.after)}"
    )


def _moves(name: str, moved: Sequence[Moved]) -> str:
    said = [_from_to(each) for each in moved[:MOVES_SHOWN]]
    if len(moved) > MOVES_SHOWN:
        said.append(f"{len(moved) - MOVES_SHOWN} more")
    return f"{name} redistributes {' and '.join(said)}" if said else ""


def _beside(schema: OpSchema, now: Answered | Exception) -> str:
    """A phrase about the second of two operands, if only the first is redistributed."""
    moved = [before for before, _ in now.moved] if isinstance(now, Answered) else []
    specs = op_schemas.specs_of(schema)
    stay = [spec for spec in specs if not any(spec is each for each in moved)]
    return (
        f", while the other operand is {spec_text(stay[0])}" if len(stay) == len(moved) == 1 else ""
    )


def _why(
    name: str,
    cause: Cause,
    now: Answered | Exception,
    settings: Settings | None,
    schema: OpSchema,
) -> str:
    """The sentence with the dim and the rule."""
    moves = _moves(name, cause.moved) + _beside(schema, now)
    if settings is None:
        return (
            f"{moves}, by PyTorch's rule for {name}"
            if moves
            else (f"PyTorch's implementation of {name} communicates")
        )
    outcome = now.outcome if isinstance(now, Answered) else ""
    if outcome == "redistribution":
        return f"{moves}. {_of_view(schema, settings)}".strip()
    if isinstance(now, Answered) and now.by_function and outcome == "exchanged":
        return (
            f"the result of {name} on a rank has rows that other ranks hold, and one exchange "
            f"sends "
            "only these rows"
        )
    if not moves:
        return (
            f"the result of {name} has no dims, and is a Partial because its operand is "
            f"{cause.operands[0].partition(') ')[2]}: the package reduces it at once, so that one "
            "rank alone may read it"
            if isinstance(now, Answered) and any(not spec.shape for spec in now.results)
            else f"{name} communicates by this package's rule"
        )
    rule = {
        "signature": f"this package's signature of {name}",
        "gate": "this package's fallback, because PyTorch's rule could be wrong for these "
        "placements",
    }.get(outcome, f"PyTorch's rule for {name}")
    return f"{moves}, by {rule}"


def _of_view(schema: OpSchema, settings: Settings) -> str:
    """The reason why a view is not free."""
    if registry.name_of(schema.op) not in VIEWS or not settings.views:
        return ""
    error = _asked(
        lambda: by_package(schema, replace(settings, implicit_redistribution="error"), None)
    )
    if isinstance(error, Answered):
        return "Ranks would not hold whole blocks of the view's result"
    lines = str(error).splitlines()
    reason = lines[0].partition("cannot be done without communication: ")[2]
    heads = [line for line in lines[1:2] if "split into" in line]
    return " ".join([f"{reason[:1].upper()}{reason[1:]}", *heads]).strip()


# -- what to do ------------------------------------------------------------------------------------


# The ops by which autograd adds gradients.
_ADDS = ("add", "add_")


def _of_gradient(source: Call | Asked) -> tuple[str, ...]:
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
    op, said = _at_line(forward), []
    for way in ways_around(schema, now.moved, of, ask):
        there = _in([*map(str, way.placements)])
        if way.operand is None:
            said.append(f"{name} sends nothing if the gradient of the result of {op} is {there}")
            continue
        which = f"operand {way.operand}" if len(op_schemas.specs_of(of)) > 1 else "the input"
        text = f"{name} sends nothing if {which} of {op} is {there}"
        if way.gradient is not None:
            text += f", and the gradient of its result {_in([*map(str, way.gradient)])}"
        if way.received is not None:
            text += f"; a redistribution of {which} to these placements receives {way.received:,} B"
            text += "" if way.gradient is None else ", in addition to the gradient"
            text += _mark(now, way.received)
        said.append(text)
    return tuple(said)


def _of_forward(name: str, forward: Call | None, ask: Ask) -> tuple[str, ...]:
    """The forward op that determines the placements of a gradient, and placements for which this
    forward op sends nothing.
    """
    of = None if forward is None else schema_of(forward)
    if forward is None or of is None or name in _ADDS:
        return ()
    op = f"the placements of this gradient come from {_at_line(forward)}"
    ways = _avoiding(of, _asked(partial(ask, of)), forward.settings, ask)
    if not ways:
        return (f"{op}: change the placements there",)
    return (f"{op}, which also communicates: {ways[0]}",)


def _at_line(call: Call) -> str:
    """An op and its line."""
    return name_of(call) + ("" if call.place is None else f" in line {call.place.line}")


def _of_pending(moved: Moved) -> tuple[str, ...]:
    """The advice for a reduced Partial: the reduction is necessary, but a reduction to a Shard
    receives half of the bytes.
    """
    dims = [m for m in moved.changed if moved.before[m].startswith(("P", "_NormP", "MaskP"))]
    whole = [m for m in dims if moved.after[m] == "R"]
    if dims and not whole:
        return ("a Partial has to be reduced once; a reduction to a Shard receives the least",)
    if not whole:
        return ()
    where = ", ".join(moved.names[m] for m in whole)
    return (
        f"a Partial has to be reduced once: a reduction to a Shard on {where} (a reduce-scatter) "
        "receives half as many bytes as a reduction to Replicate (an all-reduce)",
    )


def _avoiding(
    schema: OpSchema,
    now: Answered | Exception,
    settings: Settings | None,
    ask: Ask,
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
            todo += [] if pair is None else _of_pending(moved_of(*pair))
            continue
        todo += _of_parts(schema, at, dims, settings)
        which = f"operand {at}" if len(specs) > 1 else "its input"
        for received, placements in free_placements(schema, at, dims, ask):
            free = f"{schema.op._opname} sends nothing if {which} is {_in([*map(str, placements)])}"
            if received is None:
                todo.append(free)
            else:
                there = f"; a redistribution to these placements receives {received:,} B"
                found.append((received, free + there))
    least = now.other.received
    paying = [each for each in found if least is None or each[0] < least]
    if not paying and not todo:
        todo += _of_others(schema, now, ask)
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


def _of_others(schema: OpSchema, now: Answered, ask: Ask) -> list[str]:
    """The advice about an operand that is not redistributed: if it is a Partial, it may be the
    reason why other operands are redistributed.
    """
    moved = [before for before, _ in now.moved]
    for at, spec in enumerate(op_schemas.specs_of(schema)):
        sums = [m for m, p in enumerate(spec.placements) if isinstance(p, Partial)]
        if not sums or any(spec is each for each in moved):
            continue
        for _, placements in free_placements(schema, at, sums, ask):
            return [
                f"{schema.op._opname} sends nothing if operand {at}, which is a Partial, is first "
                f"reduced to {_in([*map(str, placements)])}, once for all ops that use it"
            ]
    return []


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
            f"{_in([*map(str, placements)])}, as with a fused weight of which each part is sharded "
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

"""The causes of collectives, in sentences: the redistributed tensors, the rule, and the reason; and
the bytes that PyTorch alone and this package would have sent.
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
    asked_of,
    by_package,
    by_torch,
    in_brackets,
    moved_of,
    name_of,
    redistributed,
    schema_of,
    spec_text,
)
from cute_sharding.dtensor.profile.origins import Flow
from cute_sharding.dtensor.profile.profiler import Asked, Call, Ran
from cute_sharding.dtensor.profile.remedies import Sending, of_redistribution
from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.profiling import Cause, Collective, Moved, Other
from cute_sharding.relations.table import VIEWS

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
        todo = of_redistribution(asked, moved[0])
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
    flow: Flow | None = None,
) -> Cause:
    """The cause of an op on DTensors. ``sent`` has the collectives of the op, if there are any, in
    ``calls`` calls; None: in a part of one call. ``forward`` is the op whose gradient the op
    computes, and ``flow`` has all ops of the program.
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
    theirs = asked_of(partial(by_torch, schema, network))
    ours = asked_of(partial(by_package, schema, call.settings or EVERYTHING, network))
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
    todo, root = Sending(call, schema, now, forward, ask, flow).remedies()
    return cause._replace(why=why, todo=todo, root=root)


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


def _from_to(moved: Moved) -> str:
    return (
        f"a tensor of {moved.shape} from {in_brackets(moved.before)} to {in_brackets(moved.after)}"
    )


def _free(name: str, theirs: Answered | Exception) -> str:
    if not isinstance(theirs, Answered) or not theirs.moved:
        return f"{name} sends nothing with this package"
    to = moved_of(*theirs.moved[0])
    return (
        f"{name} sends nothing with this package; PyTorch alone redistributes its input from "
        f"{in_brackets(to.before)} to {in_brackets(to.after)}"
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
    error = asked_of(
        lambda: by_package(schema, replace(settings, implicit_redistribution="error"), None)
    )
    if isinstance(error, Answered):
        return "Ranks would not hold whole blocks of the view's result"
    lines = str(error).splitlines()
    reason = lines[0].partition("cannot be done without communication: ")[2]
    heads = [line for line in lines[1:2] if "split into" in line]
    return " ".join([f"{reason[:1].upper()}{reason[1:]}", *heads]).strip()

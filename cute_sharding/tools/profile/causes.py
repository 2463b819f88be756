"""The causes of collectives as plain values: lines, ops, tensors, and the rules that decided.

A decision depends only on the op, the specs of its operands, the settings and the release of torch.
So the rule in force gives it once more for a recorded op. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cute_sharding.dtensor.bookkeeping import stats
from cute_sharding.dtensor.decide import propagation
from cute_sharding.dtensor.replaced import dispatch_modes, op_schemas
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, MaskPartial, Placement
from cute_sharding.dtensor.run.op_plan import of_torch, plan_of
from cute_sharding.tools.profile.profiler import PLAIN, Asked, Call, Ran
from cute_sharding.tools.profile.report import Cause, MovedTensor


def of_asked(asked: Asked) -> Cause:
    """The cause of communication that the program asks for, or that no op of a DTensor asks for."""
    moved: tuple[MovedTensor, ...] = ()
    if asked.before is not None and asked.after is not None:
        moved = (moved_of(asked.before, asked.after),)
    rule = "" if asked.kind == "compiled" else "program"
    return Cause(asked.place, asked.backward, asked.function, asked.kind, rule, moved)


def of_call(call: Call, notes: Sequence[Ran]) -> Cause:
    """The cause of collectives that an op on DTensors ran."""
    pairs = dict.fromkeys(note.moved for note in notes)
    moved = tuple([moved_of(*pair) for pair in pairs if pair is not None and None not in pair])
    cause = Cause(call.place, call.backward, name_of(call), "op", moved=moved)
    schema = schema_of(call)
    if schema is None:
        return cause
    cause = cause._replace(operands=tuple(map(spec_text, op_schemas.specs_of(schema))))
    if any(note.is_torchs for note in notes):
        return cause._replace(rule="PyTorch")
    try:
        found = decided(schema, call)
    except Exception:  # the op ran in a context that has ended, such as loss_parallel
        return cause
    # Of operands that lie alike, the records do not say how many are redistributed.
    by_operand = tuple([moved_of(*pair) for pair in found.moved])
    return cause._replace(
        rule=found.rule,
        moved=by_operand if {*by_operand} >= {*moved} else moved,
        results=tuple(map(spec_text, found.results)),
    )


def name_of(source: Call | Asked) -> str:
    """The name of an op without its overload, or of the function that the program calls."""
    if isinstance(source, Asked):
        return source.function
    return op_schemas.name_of(source.op).removesuffix(".default").partition(".")[0]


def moved_of(before: DTensorSpec, after: DTensorSpec) -> MovedTensor:
    """A redistribution as plain values."""
    mesh: Any = before.mesh
    sizes = tuple(map(int, mesh.shape))
    names = mesh.mesh_dim_names or tuple([f"mesh dim {m}" for m in range(len(sizes))])
    placements = [tuple(map(_text, spec.placements)) for spec in (before, after)]
    return MovedTensor(tuple(map(int, before.shape)), sizes, tuple(names), *placements)


def spec_text(spec: DTensorSpec) -> str:
    """The shape and the placements."""
    return f"{tuple(spec.shape)} [{', '.join(map(_text, spec.placements))}]"


def _text(placement: Placement) -> str:
    """A placement as DTensor prints it; for a masked embedding, without the size of the table."""
    return "MaskP(sum)" if isinstance(placement, MaskPartial) else str(placement)


# By what stats() counts, the word for the rule (:data:`cute_sharding.tools.profile.report.RULES`).
_RULES = {
    **dict.fromkeys(("algebra", "tracing", "redistribution"), "view"),
    **dict.fromkeys(("free", "exchanged"), "movement"),
    "signature": "signature",
    "gate": "fallback",
    "stock": "PyTorch",
}


class Decided(NamedTuple):
    """A decision.

    Attributes:
        rule: the word for the rule that decided.
        moved: for each operand that is redistributed, the specs before and after.
        results: the specs of the results.
    """

    rule: str
    moved: tuple[tuple[DTensorSpec, DTensorSpec], ...]
    results: tuple[DTensorSpec, ...]


def schema_of(call: Call) -> OpSchema | None:
    """The op on its specs; None if an argument was a plain tensor, or could not be recorded."""
    if PLAIN in _leaves((call.args, call.kwargs)):
        return None
    args = tuple([_listed(value) for value in call.args])
    kwargs = {name: _listed(value) for name, value in call.kwargs}
    return OpSchema(call.op, args, kwargs, op_schemas.schema_info(call.op))


def decided(schema: OpSchema, call: Call) -> Decided:
    """The decision for the op. Raises what the rule raises."""
    stock, settings = op_schemas.stock_propagation(), call.settings
    is_ours = settings is not None and settings.views
    rule = propagation(stock, settings) if settings is not None and is_ours else stock
    with dispatch_modes.no_modes(), stats.count_apart() as outcomes:
        found = rule(schema)
    word = _RULES[outcomes[-1]] if outcomes else "PyTorch"
    if op_schemas.is_of_the_program(schema.op):
        word = "program"
    wanted = found.redistribute_schema
    plan = (wanted and plan_of(wanted)) or of_torch(found, schema)
    results = [x for x in plan.specs if isinstance(x, DTensorSpec)]
    return Decided(word, () if plan.takes_all else _moved(schema, plan.wanted), tuple(results))


def _moved(schema: OpSchema, wanted: OpSchema) -> tuple[tuple[DTensorSpec, DTensorSpec], ...]:
    specs, to = (op_schemas.specs_of(each) for each in (schema, wanted))
    pairs = zip(specs, to) if len(specs) == len(to) else ()
    return tuple([(a, b) for a, b in pairs if tuple(a.placements) != tuple(b.placements)])


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple) and not isinstance(value, DTensorSpec):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value

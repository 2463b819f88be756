"""What was decided for a recorded op. A decision depends only on the op, the specs of its operands,
the settings and the release of torch, so that the rule in force gives it once more. Nothing runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.bookkeeping import stats
from cute_sharding.dtensor.decide import propagation
from cute_sharding.dtensor.profile.profiler import PLAIN, Call
from cute_sharding.dtensor.replaced import dispatch_modes, op_schemas, registry
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec

# By what stats() counts, the word for the rule (:data:`cute_sharding.profiling.report.RULES`).
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
    return OpSchema(call.op, args, kwargs, registry.schema_info(call.op))


def decided(schema: OpSchema, call: Call) -> Decided:
    """The decision for the op. Raises what the rule raises."""
    stock, settings = registry.stock_propagation(), call.settings
    is_ours = settings is not None and settings.views
    rule = propagation(stock, settings) if settings is not None and is_ours else stock
    with dispatch_modes.no_modes(), stats.count_apart() as outcomes:
        found = rule(schema)
    word = _RULES[outcomes[-1]] if outcomes else "PyTorch"
    if registry.is_of_the_program(schema.op):
        word = "program"
    results = [x for x in answers.specs_of_results(found) if isinstance(x, DTensorSpec)]
    return Decided(word, _moved(schema, found), tuple(results))


def _moved(schema: OpSchema, found: Any) -> tuple[tuple[DTensorSpec, DTensorSpec], ...]:
    wanted = found.redistribute_schema
    answer = None if wanted is None else answers.answer_of(wanted)
    if wanted is None or (answer is not None and answer.takes_all):
        return ()
    specs, to = (op_schemas.specs_of(each) for each in (schema, wanted))
    pairs = zip(specs, to) if len(specs) == len(to) else ()
    moved = [(a, b) for a, b in pairs if tuple(a.placements) != tuple(b.placements)]
    return (*moved, *(answer.keywords.values() if answer else ()))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple) and not isinstance(value, DTensorSpec):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value

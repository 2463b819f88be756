"""What torch's own rule makes of an op, on a mesh that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.dtensor.replaced import op_schemas, registry, tensor_specs
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.reports.stock import stock_plan
from cute_sharding.dtensor.switch import adapter


def stock_rule(
    name: str,
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    arguments: Sequence[Any],
    *,
    times: int | None = None,
) -> dict[str, Any]:
    """What torch's own rule needs of a tensor of global ``shape`` and gives, as plain data; no
    process group is needed. Ours are switched off for it.

    Args:
        name: the aten overload.
        arguments: those after the tensor.
        times: the tensor is given so many times, in a list, as to ``cat``.
    """
    before = adapter.settings()
    adapter.disable()
    try:
        return _answered(name, shape, mesh, placements, arguments, times)
    finally:
        adapter.switch_to(before)


def _answered(
    name: str,
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    arguments: Sequence[Any],
    times: int | None,
) -> dict[str, Any]:
    spec = tensor_specs.unbound_spec(tuple(shape), tuple(mesh), placements)
    op: Any = registry.overload(name)
    given: Any = spec if times is None else [spec] * times
    schema = OpSchema(op, (given, *arguments), {}, registry.schema_info(op))
    rule = registry.propagation()
    try:
        found = rule(schema)
    except Exception as error:  # whatever torch raises is what it says to this op
        words = next(iter(str(error).splitlines()), "") or type(error).__name__
        return {"error": words, "input": None, "outputs": None, "received_elements": None}
    wanted = [each.placements for each in op_schemas.specs_of(found.redistribute_schema or schema)]
    moves = [to for to in wanted if tuple(to) != tuple(placements)]
    plans = [stock_plan(shape, mesh, placements, to) for to in moves]
    output = found.output_spec
    outputs: list[Any] = [output] if isinstance(output, DTensorSpec) else list(output or ())
    return {
        "error": next((plan.error for plan in plans if plan.error is not None), None),
        "input": _text(moves[0] if moves else placements),
        "outputs": [_text(each.placements) for each in outputs],
        "received_elements": sum(plan.received_elements for plan in plans),
    }


def _text(placements: Sequence[Placement]) -> list[str]:
    return list(map(str, placements))

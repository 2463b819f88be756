"""The causes of collectives as plain values: lines, ops, tensors, and the rules that decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.dtensor.profile.decided import decided, schema_of
from cute_sharding.dtensor.profile.profiler import Asked, Call, Ran
from cute_sharding.dtensor.replaced import op_schemas, registry
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, MaskPartial, Placement
from cute_sharding.profiling import Cause, Moved


def of_asked(asked: Asked) -> Cause:
    """The cause of communication that the program asks for, or that no op of a DTensor asks for."""
    moved: tuple[Moved, ...] = ()
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
    return registry.name_of(source.op).removesuffix(".default").partition(".")[0]


def moved_of(before: DTensorSpec, after: DTensorSpec) -> Moved:
    """A redistribution as plain values."""
    mesh: Any = before.mesh
    sizes = tuple(map(int, mesh.shape))
    names = mesh.mesh_dim_names or tuple([f"mesh dim {m}" for m in range(len(sizes))])
    placements = [tuple(map(_text, spec.placements)) for spec in (before, after)]
    return Moved(tuple(map(int, before.shape)), sizes, tuple(names), *placements)


def spec_text(spec: DTensorSpec) -> str:
    """The shape and the placements."""
    return f"{tuple(spec.shape)} [{', '.join(map(_text, spec.placements))}]"


def _text(placement: Placement) -> str:
    """A placement as DTensor prints it; for a masked embedding, without the size of the table."""
    return "MaskP(sum)" if isinstance(placement, MaskPartial) else str(placement)

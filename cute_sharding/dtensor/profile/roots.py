"""Sentences about where a communication begins: the op that sharded a tensor, and the op that makes
a Partial.
"""

from __future__ import annotations

from collections.abc import Sequence

from cute_sharding.dtensor.profile.asking import (
    Ask,
    in_brackets,
    name_of,
    schema_of,
    spec_text,
)
from cute_sharding.dtensor.profile.avoiding import with_placements
from cute_sharding.dtensor.profile.gradients import roles_of, swapped
from cute_sharding.dtensor.profile.origins import Flow, Sharded, Summed
from cute_sharding.dtensor.profile.profiler import Call
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from cute_sharding.profiling import Moved, Root


def at_line(call: Call) -> str:
    """An op with its file and line."""
    if call.place is None:
        return name_of(call)
    where = str(call.place).partition(" ")[0]
    return f"{name_of(call)} in {'the backward pass of ' if call.backward else ''}{where}"


def hooked(placements: Sequence[Placement]) -> str:
    """The call that redistributes the gradient of a tensor."""
    return f"register_hook(lambda grad: grad.redistribute(placements={as_code(placements)}))"


def as_code(placements: Sequence[Placement]) -> str:
    """Placements as a program writes them."""
    plain = [f"Shard({p.dim})" if type(p) is Shard else repr(p) for p in placements]
    return f"[{', '.join(plain)}]"


# -- a tensor that became sharded ------------------------------------------------------------------


def of_sharded(found: Sharded) -> str:
    """The advice for a tensor that an op sharded for the sake of a smaller operand."""
    op, _, where = at_line(found.call).partition(" in ")
    there = in_brackets(found.whole)
    text = (
        f"the tensor may have become {in_brackets(found.result.placements)} in "
        f"{where or 'an unknown line'}, where {op} combines a {spec_text(found.large)} with a "
        f"{spec_text(found.small)}: a redistribution of the smaller to {there} receives "
        f"{found.received:,} B"
    )
    source = found.source
    if source is None:
        return text
    return (
        f"{text}; the smaller may come from {at_line(source.call)}, and a redistribution of its "
        f"result, {spec_text(source.spec)}, to {in_brackets(source.whole)} receives "
        f"{source.received:,} B"
    )


def root_of(found: Sharded) -> Root:
    """The line to change, for several ops."""
    source = found.source
    call = found.call if source is None else source.call
    if source is None:
        what = (
            f"combines a {spec_text(found.large)} with a {spec_text(found.small)}: redistribute "
            f"the smaller to {in_brackets(found.whole)}, which receives {found.received:,} B"
        )
    else:
        what = (
            f"returns a {spec_text(source.spec)}, as which larger tensors become sharded: "
            f"redistribute this result to {in_brackets(source.whole)}, which receives "
            f"{source.received:,} B"
        )
    return Root(call.place, call.backward, name_of(call), f"{at_line(call)} {what}")


# -- a Partial -------------------------------------------------------------------------------------


def of_moved_sum(moved: Moved) -> tuple[str, ...]:
    """The advice for a reduced Partial: the reduction is necessary, but a reduction to a Shard
    receives half of the bytes.
    """
    dims = [m for m in moved.changed if moved.before[m].startswith(("P", "_NormP", "MaskP"))]
    whole = [m for m in dims if moved.after[m] == "R"]
    if dims and not whole:
        return (
            "this communication is needed: a Partial has to be reduced once, and a reduction to a "
            "Shard receives the least",
        )
    if not whole:
        return ()
    where = ", ".join(moved.names[m] for m in whole)
    return (
        f"a Partial has to be reduced once: a reduction to a Shard on {where} (a reduce-scatter) "
        "receives half as many bytes as a reduction to Replicate (an all-reduce)",
    )


def of_sum(
    call: Call, before: DTensorSpec, after: DTensorSpec, ask: Ask, flow: Flow | None
) -> tuple[str, ...]:
    """The advice for operands that are such a Partial and are reduced, if the op that makes the
    Partial is known: to reduce it there, or why the reduction is needed.
    """
    if flow is None:
        return ()
    found = flow.summed_by(call, before)
    said = [_of_sum(each, before, after, ask, flow) for each in found]
    return tuple(dict.fromkeys(filter(None, said)))


def _of_sum(found: Summed, before: DTensorSpec, after: DTensorSpec, ask: Ask, flow: Flow) -> str:
    smaller = found.grown and _of_smaller(found.grown, found.at, before, after, ask, flow)
    if smaller:
        return smaller
    maker, forward = found.call, flow.forward_of(found.call)
    come = f"this Partial may come from {at_line(maker)}"
    if found.users > 1:
        come += f", and {found.users} ops reduce it, or a tensor that is computed from it"
        if not maker.backward:
            return f"{come}: redistribute the result of {name_of(maker)} once, before these ops"
        operand = None if forward is None else _operand_of_gradient(maker, forward, flow)
        if forward is not None and operand is not None:
            kept = tuple([Replicate() if isinstance(p, Partial) else p for p in operand.placements])
            return (
                f"{come}: reduce it once, by a call of {hooked(kept)} on the operand "
                f"{spec_text(operand)} of {name_of(forward)}"
            )
    if maker.backward:
        return f"{come}: with the placements there, it has to be reduced once for each step"
    return ""


def _of_smaller(
    grown: Call, at: int, before: DTensorSpec, after: DTensorSpec, ask: Ask, flow: Flow
) -> str:
    """The advice to reduce a smaller Partial, of which an op makes the larger one; empty if this
    is not known to receive less.
    """
    schema = schema_of(grown)
    if schema is None:
        return ""
    specs = op_schemas.specs_of(schema)
    now, forward = ask.received_to(before, after.placements, sums=True), flow.forward_of(grown)
    small, what = specs[at], "the smaller"
    there = tuple([Replicate() if isinstance(p, Partial) else p for p in small.placements])
    results = () if forward is None else flow.results_of(forward)
    role = roles_of(specs, flow.operands_of(forward), results)[at] if forward and results else None
    is_gradient = role is not None and role.operand is None
    if grown.backward and not is_gradient:
        return ""
    if role is not None and is_gradient:
        same = tuple(results[0].placements)
        wanted = swapped(same, len(results[0].shape)) if role.is_swapped else same
        there = wanted if _ends_sum(schema, at, wanted, ask) else there
    received = ask.received_to(small, there, sums=True)
    if received is None or now is None or received >= now or not _ends_sum(schema, at, there, ask):
        return ""
    made = f"{at_line(grown)} makes this Partial of a smaller one, {spec_text(small)}"
    if forward is None or role is None:
        what = f"a redistribution of the smaller one to {in_brackets(there)}"
        return f"{made}: {what} receives {received:,} B"
    shown = swapped(there, len(small.shape)) if role.is_swapped else there
    return (
        f"{made}: a call of {hooked(shown)} on the result of {at_line(forward)} reduces the "
        f"smaller one, which receives {received:,} B"
    )


def _ends_sum(schema: op_schemas.OpSchema, at: int, there: tuple[Placement, ...], ask: Ask) -> bool:
    """Whether the op sends nothing and returns no Partial if an operand has these placements."""
    if any(isinstance(p, Partial) for p in there):
        return False
    try:
        answered = ask(with_placements(schema, {at: there}))
    except Exception:  # after any error of the rule, this is no way
        return False
    is_sum = any(isinstance(p, Partial) for spec in answered.results for p in spec.placements)
    return answered.other.received == 0 and not is_sum


def _operand_of_gradient(call: Call, forward: Call, flow: Flow) -> DTensorSpec | None:
    """The operand of the forward op whose gradient the op computes; None if it is unknown."""
    results = flow.results_of(call)[:1]
    fitting = [
        spec
        for spec in flow.operands_of(forward)
        if any(tuple(spec.shape) == tuple(each.shape) for each in results)
    ]
    return fitting[0] if len(fitting) == 1 else None

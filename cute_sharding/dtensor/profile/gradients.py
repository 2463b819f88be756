"""Placements that avoid a communication of a gradient. The gradient's op reads the operands of the
forward op, and the gradient of its result. So the package tries placements of these tensors for
which the forward op does not send more than now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cute_sharding.dtensor.profile.asking import Answered, Ask
from cute_sharding.dtensor.profile.avoiding import (
    NAMED,
    candidates,
    free_placements,
    is_free,
    with_placements,
)
from cute_sharding.dtensor.replaced import op_schemas
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.run.placements import on_dim

Placements = tuple[Placement, ...]


class Way(NamedTuple):
    """Placements for which the gradient's op sends nothing.

    Attributes:
        operand: the number of an operand of the forward op; None: the gradient of its result.
        placements: the placements of this tensor.
        received: the bytes that the busiest rank receives to redistribute the operand, or the
            gradient, to these placements; None: unknown, or the operand is a Partial.
        gradient: the placements that the gradient of the result then needs; None: its present
            placements.
    """

    operand: int | None
    placements: Placements
    received: int | None
    gradient: Placements | None = None


class Role(NamedTuple):
    """The role of an operand of the gradient's op: an operand of the forward op, unchanged or with
    its last two dims swapped; or the gradient of the result, if ``operand`` is None.
    """

    operand: int | None
    is_swapped: bool


def ways_around(
    schema: OpSchema, moved: Sequence[tuple[DTensorSpec, DTensorSpec]], forward: OpSchema, ask: Ask
) -> list[Way]:
    """Ways for the operands that the gradient's op redistributes, the cheapest first. Empty if the
    roles of the operands are unknown.

    Args:
        schema: the gradient's op.
        moved: for each operand that is redistributed, the specs before and after.
        forward: the op whose gradient the op computes.
        ask: computes the redistributions of an op.
    """
    given, specs = (op_schemas.specs_of(each) for each in (forward, schema))
    answered = ask(forward)
    roles = roles_of(specs, given, answered.results)
    ways: list[Way] = []
    for before, after in moved:
        at = next((k for k, spec in enumerate(specs) if spec is before), None)
        role = None if at is None else roles[at]
        if at is None or role is None:
            continue
        pairs = enumerate(zip(before.placements, after.placements))
        dims = [m for m, (p, q) in pairs if p != q]
        if role.operand is None:
            found = free_placements(schema, at, dims, ask)
            for _, placements in found:
                received = ask.received_to(before, placements, sums=True)
                there = swapped(placements, len(before.shape)) if role.is_swapped else placements
                ways.append(Way(None, there, received))
        elif len(answered.results) == 1:
            ways += _of_operand(schema, forward, answered, roles, role, dims, after, ask)
    return sorted(dict.fromkeys(ways), key=lambda way: way.received or 0)[:NAMED]


def _of_operand(
    schema: OpSchema,
    forward: OpSchema,
    answered: Answered,
    roles: Sequence[Role | None],
    role: Role,
    dims: Sequence[int],
    after: DTensorSpec,
    ask: Ask,
) -> Iterator[Way]:
    """Ways with other placements of an operand of the forward op."""
    assert role.operand is not None
    spec = op_schemas.specs_of(forward)[role.operand]
    wanted = _swapped(after) if role.is_swapped else tuple(after.placements)
    for placements in dict.fromkeys([wanted, *candidates(spec, dims)]):
        changed = with_placements(forward, {role.operand: placements})
        try:
            now = ask(changed)
        except Exception:  # after any error of the rule, this is no way
            continue
        if not _sends_no_more(now, answered):
            continue
        gradient = _gradient_then(schema, roles, answered, now)
        if gradient is None:
            continue
        places: dict[int, Placements] = {}
        for k, each in enumerate(roles):
            if each is not None and each.operand is None:
                places[k] = gradient
            elif each is not None and each.operand == role.operand:
                places[k] = swapped(placements, len(spec.shape)) if each.is_swapped else placements
        if is_free(ask, with_placements(schema, places)):
            stays = tuple(now.results[0].placements) == tuple(answered.results[0].placements)
            yield Way(
                role.operand,
                placements,
                ask.received_to(spec, placements),
                None if stays else gradient,
            )


def _gradient_then(
    schema: OpSchema, roles: Sequence[Role | None], before: Answered, now: Answered
) -> Placements | None:
    """The placements of the gradient of the result if the result has other placements: those of the
    result if they were equal before, and otherwise the present placements. None if it is unknown
    which operand is the gradient.
    """
    at = next((k for k, role in enumerate(roles) if role and role.operand is None), None)
    if at is None:
        return None
    spec, role = op_schemas.specs_of(schema)[at], roles[at]
    assert role is not None
    gradient = _swapped(spec) if role.is_swapped else tuple(spec.placements)
    was, becomes = (tuple(each.results[0].placements) for each in (before, now))
    if gradient == was:
        gradient = tuple([Replicate() if isinstance(p, Partial) else p for p in becomes])
    return swapped(gradient, len(spec.shape)) if role.is_swapped else gradient


def _sends_no_more(now: Answered, before: Answered) -> bool:
    a, b = now.other, before.other
    return a.error is None and a.received is not None and a.received <= (b.received or 0)


def roles_of(
    specs: Sequence[DTensorSpec], given: Sequence[DTensorSpec], results: Sequence[DTensorSpec]
) -> list[Role | None]:
    """For each operand of a gradient's op, its role; None if it is unknown.

    Args:
        specs: the operands.
        given, results: the operands and results of the forward op.
    """
    roles = [_role(spec, given, results) for spec in specs]
    if not any(role is not None and role.operand is None for role in roles):
        # One operand is the gradient: if all fit operands, the first with the shape of a result.
        alone = [_role(spec, (), results) for spec in specs]
        at = next((k for k, role in enumerate(alone) if role is not None), None)
        if at is not None:
            roles[at] = alone[at]
    return roles


def _role(
    spec: DTensorSpec, given: Sequence[DTensorSpec], results: Sequence[DTensorSpec]
) -> Role | None:
    shape, placements = tuple(spec.shape), tuple(spec.placements)
    back = _swap_shape(shape), _swapped(spec)
    for is_swapped, (as_shape, as_placements) in enumerate(((shape, placements), back)):
        for i, one in enumerate(given):
            if (tuple(one.shape), tuple(one.placements)) == (as_shape, as_placements):
                return Role(i, bool(is_swapped))
    for is_swapped, as_shape in enumerate((shape, back[0])):
        if any(tuple(one.shape) == as_shape for one in results[:1]):
            return Role(None, bool(is_swapped))
    return None


# -- the last two dims swapped ---------------------------------------------------------------------


def _swap_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *reversed(shape[-2:]))


def _swapped(spec: DTensorSpec) -> Placements:
    return swapped(tuple(spec.placements), len(spec.shape))


def swapped(placements: Placements, ndim: int) -> Placements:
    """The placements with the last two dims swapped."""
    return tuple([_swap_one(p, ndim) for p in placements])


def _swap_one(placement: Placement, ndim: int) -> Placement:
    if not isinstance(placement, (Shard, StridedShard)) or ndim < 2:
        return placement
    dims = [*range(ndim - 2), ndim - 1, ndim - 2]
    return on_dim(placement, dims[placement.dim])

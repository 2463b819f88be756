"""What would avoid a communication of a gradient. Its op works on what the forward op was given,
and on the gradient of what that gave: so placements of either are tried, and the forward op has to
send no more than it does.
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

Placements = tuple[Placement, ...]


class Way(NamedTuple):
    """Placements under which the gradient's op sends nothing.

    Attributes:
        operand: of the forward op, by number; None: the gradient of its result.
        placements: that it is to have.
        received: bytes that the busiest rank receives to bring the operand there; None: a sum has
            to be finished first, or it is the gradient.
        gradient: how the gradient of the result then has to lie; None: as it does.
    """

    operand: int | None
    placements: Placements
    received: int | None
    gradient: Placements | None = None


class _Role(NamedTuple):
    """What an operand of the gradient's op is: an operand of the forward op, as it was or with its
    last two dims swapped; or, ``operand`` is None, the gradient of the result.
    """

    operand: int | None
    is_swapped: bool


def ways_around(
    schema: OpSchema, moved: Sequence[tuple[DTensorSpec, DTensorSpec]], forward: OpSchema, ask: Ask
) -> list[Way]:
    """Of the operands that are redistributed for a gradient's op: the cheapest first; none where
    it is not known what they are.

    Args:
        schema: the gradient's op.
        moved: of its operands that are redistributed, the specs before and after.
        forward: the op that it is the gradient of.
        ask: what an op needs.
    """
    given, specs = (op_schemas.specs_of(each) for each in (forward, schema))
    answered = ask(forward)
    roles = _roles(specs, given, answered.results)
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
            ways += [Way(None, placements, None) for _, placements in found]
        elif len(answered.results) == 1:
            ways += _of_operand(schema, forward, answered, roles, role, dims, after, ask)
    return sorted(dict.fromkeys(ways), key=lambda way: way.received or 0)[:NAMED]


def _of_operand(
    schema: OpSchema,
    forward: OpSchema,
    answered: Answered,
    roles: Sequence[_Role | None],
    role: _Role,
    dims: Sequence[int],
    after: DTensorSpec,
    ask: Ask,
) -> Iterator[Way]:
    """Other placements of the forward op's operand."""
    assert role.operand is not None
    spec = op_schemas.specs_of(forward)[role.operand]
    wanted = _swapped(after) if role.is_swapped else tuple(after.placements)
    for placements in dict.fromkeys([wanted, *candidates(spec, dims)]):
        changed = with_placements(forward, {role.operand: placements})
        try:
            now = ask(changed)
        except Exception:  # whatever the rule raises, it is no way
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
                places[k] = _swap(placements, len(spec.shape)) if each.is_swapped else placements
        if is_free(ask, with_placements(schema, places)):
            stays = tuple(now.results[0].placements) == tuple(answered.results[0].placements)
            yield Way(
                role.operand,
                placements,
                ask.received_to(spec, placements),
                None if stays else gradient,
            )


def _gradient_then(
    schema: OpSchema, roles: Sequence[_Role | None], before: Answered, now: Answered
) -> Placements | None:
    """How the gradient of the result lies if the result lies otherwise: as the result, if it did,
    and else as it does. None where it is not known which operand it is.
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
    return _swap(gradient, len(spec.shape)) if role.is_swapped else gradient


def _sends_no_more(now: Answered, before: Answered) -> bool:
    a, b = now.other, before.other
    return a.error is None and a.received is not None and a.received <= (b.received or 0)


def _roles(
    specs: Sequence[DTensorSpec], given: Sequence[DTensorSpec], results: Sequence[DTensorSpec]
) -> list[_Role | None]:
    roles = [_role(spec, given, results) for spec in specs]
    if not any(role is not None and role.operand is None for role in roles):
        # One is the gradient: where all lie as operands do, the first of its shape.
        alone = [_role(spec, (), results) for spec in specs]
        at = next((k for k, role in enumerate(alone) if role is not None), None)
        if at is not None:
            roles[at] = alone[at]
    return roles


def _role(
    spec: DTensorSpec, given: Sequence[DTensorSpec], results: Sequence[DTensorSpec]
) -> _Role | None:
    shape, placements = tuple(spec.shape), tuple(spec.placements)
    back = _swap_shape(shape), _swapped(spec)
    for is_swapped, (as_shape, as_placements) in enumerate(((shape, placements), back)):
        for i, one in enumerate(given):
            if (tuple(one.shape), tuple(one.placements)) == (as_shape, as_placements):
                return _Role(i, bool(is_swapped))
    for is_swapped, as_shape in enumerate((shape, back[0])):
        if any(tuple(one.shape) == as_shape for one in results[:1]):
            return _Role(None, bool(is_swapped))
    return None


# -- the last two dims swapped ---------------------------------------------------------------------


def _swap_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *reversed(shape[-2:]))


def _swapped(spec: DTensorSpec) -> Placements:
    return _swap(tuple(spec.placements), len(spec.shape))


def _swap(placements: Placements, ndim: int) -> Placements:
    return tuple([_swap_one(p, ndim) for p in placements])


def _swap_one(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Replicate | Partial) or ndim < 2:
        return placement
    dims = [*range(ndim - 2), ndim - 1, ndim - 2]
    if isinstance(placement, StridedShard):
        return StridedShard(dims[placement.dim], split_factor=placement.split_factor)
    return Shard(dims[placement.dim]) if isinstance(placement, Shard) else placement

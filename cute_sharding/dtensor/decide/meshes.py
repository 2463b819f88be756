"""Describes operands on several meshes on one mesh, if that takes no communication.

torch raises for such operands. Here an operand is described on the mesh of the op if its placements
there are proved to mean the same: the mesh has the same devices, flattened or refined
(:mod:`cute_sharding.sharding.regroup`). A replica on a slice of a mesh is known to be equal only
within that slice, so nothing is proved about it on the whole mesh.

A tensor of one element is a number, and so is a tensor expanded from one element. torch takes a
plain tensor of one element as a replica on the mesh of the other operands; here a number on another
mesh is taken in the same way. If it is pending, it is first reduced on its own mesh, in one
reduction for all numbers with the same pending reduction: the result is ``number.full_tensor()``.
Every rank of the op's mesh has to be on the number's mesh or on a slice of it, or it would have no
such number.

Ops on lists (``_foreach_``, ``_fused_``) count as one op for each element of the lists, each on a
mesh of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from cute_sharding.dtensor.bookkeeping.stats import logger
from cute_sharding.dtensor.door.cuts import parts_of, placements_of
from cute_sharding.dtensor.door.understood import are_read_as_order, are_understood
from cute_sharding.dtensor.replaced import dispatch, op_schemas, process_groups, symints
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Replicate,
    is_by_elements,
)
from cute_sharding.dtensor.run.numbers import finish, pending_of
from cute_sharding.dtensor.run.op_plan import OpPlan
from cute_sharding.propagation.operands import Part
from cute_sharding.sharding.regroup import regrouped

Propagate = Callable[[OpSchema], OpPlan]


def on_one_mesh(propagate: Propagate) -> Propagate:
    """A propagator for ops on specs of one or several meshes: ``propagate``, called with the specs
    as described on one mesh.
    """

    def propagate_on_one_mesh(op_schema: OpSchema) -> OpPlan:
        specs = op_schemas.specs_of(op_schema)
        if all(spec.mesh == specs[0].mesh for spec in specs):
            return propagate(op_schema)
        answered = _of_lists if op_schemas.is_of_lists(op_schema.op) else _of_tensors
        found = answered(propagate, op_schema)
        return propagate(op_schema) if found is None else found  # torch's rule, which mostly raises

    return propagate_on_one_mesh


def _of_tensors(propagate: Propagate, schema: OpSchema) -> OpPlan | None:
    """The plan for an op, its operands described on one mesh; None if no mesh is known to do."""
    read = _read_on_one_mesh(schema)
    if read is None:
        return None
    logger.debug("%s: operands of several meshes are read on one: %s", schema.op, read)
    return replace(propagate(read).asked(schema), read=Reading(schema, read))


# -- on which mesh ---------------------------------------------------------------------------------


def _read_on_one_mesh(schema: OpSchema) -> OpSchema | None:
    """The op with all specs on one mesh; None if no mesh is known to do."""
    for mesh in _meshes(schema):
        specs = op_schemas.specs_of(schema)
        read = [on for on in (_spec_on(mesh, spec) for spec in specs) if on is not None]
        if len(read) == len(specs):
            return op_schemas.with_specs(schema, read)
    return None


def _meshes(schema: OpSchema) -> list[Any]:
    """The meshes on which the op may run, the best first. A tensor that is written to stays on its
    mesh. For tensors, a mesh with more dims can describe more placements. For numbers alone, the
    smallest mesh asserts equal values on the fewest ranks.
    """
    written = [spec.mesh for _, spec in op_schemas.written(schema.op, schema)]
    if written:
        return written[:1]
    specs = op_schemas.specs_of(schema)
    of_tensors = [spec.mesh for spec in specs if not _is_number(spec)]
    found = sorted(of_tensors, key=lambda mesh: -mesh.ndim) or sorted(
        [spec.mesh for spec in specs], key=lambda mesh: mesh.size()
    )
    return list(dict.fromkeys(found))


def _spec_on(mesh: Any, spec: DTensorSpec) -> DTensorSpec | None:
    """The spec of the same local tensor on another mesh; for a number, of its reduced value. None
    if no such spec is known.
    """
    if spec.mesh == mesh:
        return spec
    lists = [process_groups.rank_lists(of) for of in (spec.mesh, mesh)]
    if _is_number(spec):
        having, wanting = (frozenset(chain(*ranks)) for ranks in lists)
        pending = pending_of(spec)
        known = all(
            type(p) is Replicate or (not spec.shape and _is_finished_alone(p))
            for p in spec.placements
        )
        # All ranks that have a pending part of the number must take part in its reduction.
        if not known or not (having == wanting if pending else having >= wanting):
            return None
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, spec.tensor_meta)
    if lists[0] != lists[1] or not are_understood([spec]) or are_read_as_order([spec]):
        return None
    shape = symints.numbers_at_hand(tuple(spec.shape))
    if shape is None or symints.is_symbolic(symints.split_factors(spec)):
        return None
    parts = parts_of(spec.placements)
    found = regrouped(shape, parts, tuple(spec.mesh.shape), tuple(mesh.shape))
    if found is None or not _always_divide(spec, parts):
        return None
    return DTensorSpec(mesh, placements_of(found, {}), spec.tensor_meta)


def _is_number(spec: DTensorSpec) -> bool:
    """Whether the tensor has no dims, or is expanded from one element, as the gradient of a sum is:
    all its elements are one.
    """
    sizes = zip(spec.shape, spec.stride)
    return all(type(step) is int and step == 0 for n, step in sizes if type(n) is not int or n != 1)


def _is_finished_alone(placement: Any) -> bool:
    return isinstance(placement, Partial) and is_by_elements(placement)


def _always_divide(spec: DTensorSpec, parts: Sequence[Part]) -> bool:
    """Whether blocks have equal sizes in every call; for symbolic sizes a guard is added."""
    blocks = [1] * len(spec.shape)
    for part, n in zip(parts, spec.mesh.shape):
        if isinstance(part, tuple):
            blocks[part[0]] *= part[1] * n
    return all(
        not symints.is_symbolic(size) or symints.is_truly(size % n == 0)
        for size, n in zip(spec.shape, blocks)
        if n > 1
    )


# -- lists -----------------------------------------------------------------------------------------


def _of_lists(propagate: Propagate, schema: OpSchema) -> OpPlan | None:
    """The plan for an op on lists, put together from the plans for the elements of each mesh.
    None if torch answers without this, or if the operands of some element have no common mesh.
    """
    apart = list(_elements(schema))
    read = [one for one in map(_one_element, apart) if one is not None]
    if len(read) < len(apart) or all(one is other for one, other in zip(read, apart)):
        return None
    groups: dict[Any, list[int]] = {}
    for i, element in enumerate(read):
        groups.setdefault(op_schemas.specs_of(element)[0].mesh, []).append(i)
    wanted, outputs = list(read), [None] * len(read)
    for places in groups.values():
        some = _join_elements([read[i] for i in places])
        found = propagate(some)
        if found.function is not some.op or found.local_values:
            return None
        for i, element in zip(places, _elements(found.wanted)):
            wanted[i] = element
        for i, spec in zip(places, found.results or ()):
            outputs[i] = spec
    if not all(map(_shares_as, read, wanted)):
        return None
    given: Any = tuple(outputs) if schema.op._schema.returns else None
    reading = Reading(schema, _join_elements(read))
    return OpPlan(schema, given, _join_elements(wanted), by_plan=True, read=reading)


def _one_element(element: OpSchema) -> OpSchema | None:
    meshes = {spec.mesh for spec in op_schemas.specs_of(element)}
    return element if len(meshes) == 1 else _read_on_one_mesh(element)


def _elements(schema: OpSchema) -> Iterator[OpSchema]:
    """The op on the first element of each of its lists, then on the second, and so on."""
    arguments: Any = schema.args_schema
    for i in range(max(map(len, filter(_is_list, arguments)))):
        args = [arg[i : i + 1] if _is_list(arg) else arg for arg in arguments]
        yield OpSchema(schema.op, tuple(args), schema.kwargs_schema, schema.schema_info)


def _join_elements(elements: Sequence[OpSchema]) -> OpSchema:
    """The inverse of :func:`_elements`; arguments that are not lists are those of the first."""
    first = elements[0]
    arguments = zip(*[one.args_schema for one in elements])
    args = [
        type(some[0])([leaf for part in some for leaf in part]) if _is_list(some[0]) else some[0]
        for some in arguments
    ]
    return OpSchema(first.op, tuple(args), first.kwargs_schema, first.schema_info)


def _is_list(arg: Any) -> bool:
    """Whether the argument has an entry for each element. All lists of such ops do, except lists
    that are left empty.
    """
    return isinstance(arg, (list, tuple)) and len(arg) > 0


def _shares_as(read: OpSchema, wanted: OpSchema) -> bool:
    """Whether operands outside of lists keep their placements: all elements, on whichever mesh,
    share the one local tensor.
    """
    before: Any = (*read.args_schema, *read.kwargs_schema.values())
    after: Any = (*wanted.args_schema, *wanted.kwargs_schema.values())
    return all(
        tuple(a.placements) == tuple(b.placements)
        for a, b in zip(before, after)
        if isinstance(a, DTensorSpec)
    )


# -- when it runs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """An op with its arguments as given, and with the same arguments described on one mesh."""

    given: OpSchema
    read: OpSchema

    def __call__(self, op_info: Any) -> None:
        """Reduce numbers of other meshes, and give the dispatcher the specs on one mesh."""
        given = dispatch.arguments_of(op_info, self.given)
        read = dispatch.arguments_of(op_info, self.read)
        local = dispatch.local_arguments(op_info)
        pending = {
            place: None if spec is read[place] else pending_of(spec)
            for place, spec in given.items()
        }
        for place, of in pending.items():
            if of is not None:
                dispatch.observe(given[place], read[place], "operands on several meshes")
        local.update(finish(local, pending))
        dispatch.give(op_info, local, read)

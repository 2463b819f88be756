"""Decides what a call of an op does: an :class:`~cute_sharding.dtensor.run.op_plan.OpPlan`. The
file to read first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.bookkeeping.stats import logger
from cute_sharding.dtensor.decide.local import for_kernel, in_order, with_numbers_finished
from cute_sharding.dtensor.decide.movement import by_movement
from cute_sharding.dtensor.decide.question import Question, in_words
from cute_sharding.dtensor.decide.redistributions import (
    by_lists,
    by_write,
    taken_back,
    without_partials,
    written_by_new,
)
from cute_sharding.dtensor.decide.values import by_numbers, of_values
from cute_sharding.dtensor.decide.views import by_view
from cute_sharding.dtensor.door.cuts import (
    are_read_as_order,
    are_understood,
    parts_of,
    placements_of,
)
from cute_sharding.dtensor.fixes.table import ALL, CUTS, Remedy, fix_of
from cute_sharding.dtensor.replaced import communication, dispatch, op_schemas, symints
from cute_sharding.dtensor.replaced.dispatch_modes import is_tracing
from cute_sharding.dtensor.replaced.op_schemas import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpSchema,
    OutputSharding,
)
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Replicate,
    StridedShard,
    is_by_elements,
)
from cute_sharding.dtensor.run.in_graphs import tag_traced
from cute_sharding.dtensor.run.op_plan import OpPlan, by_function, finish, pending_of
from cute_sharding.dtensor.run.ops import Runner
from cute_sharding.dtensor.run.placements import without
from cute_sharding.propagation.signatures import Part
from cute_sharding.sharding.sharding import regrouped

# -- meshes ----------------------------------------------------------------------------------------
# Describes operands on several meshes on one mesh, if that takes no communication.
#
# torch raises for such operands. Here an operand is described on the mesh of the op if its
# placements there are proved to mean the same: the mesh has the same devices, flattened or refined
# (``cute_sharding.sharding.sharding``). A replica on a slice of a mesh is known to be equal only
# within that slice, so nothing is proved about it on the whole mesh.
#
# A tensor of one element is a number, and so is a tensor expanded from one element. torch takes a
# plain tensor of one element as a replica on the mesh of the other operands; here a number on
# another mesh is taken in the same way. If it is pending, it is first reduced on its own mesh, in
# one reduction for all numbers with the same pending reduction: the result is
# ``number.full_tensor()``. Every rank of the op's mesh has to be on the number's mesh or on a slice
# of it, or it would have no such number.
#
# Ops on lists (``_foreach_``, ``_fused_``) count as one op for each element of the lists, each on a
# mesh of its own.

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
    lists = [communication.rank_lists(of) for of in (spec.mesh, mesh)]
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


# -- decide ----------------------------------------------------------------------------------------
# Decides what a call of an op does: an ``cute_sharding.dtensor.run.op_plan.OpPlan``.
#
# A decision is a function of the op, the specs of its operands, the settings and the release of
# torch. ``propagation`` first describes operands of several meshes on one mesh (``decide``). Then
# the first function of ``ORDER`` that has a plan decides, and ``_completed`` adds what running the
# op needs beside it. How data then moves is in ``run``.
#
# Convolutions, ``argmax`` and ``argmin`` are decided as all ops are: torch's functions of their own
# for them are replaced (``question.gated_handler``).


def propagation(
    torchs: Callable[[OpSchema], OutputSharding], settings: Settings
) -> Callable[[OpSchema], OutputSharding]:
    """The propagator's function from an op on specs to the placements that it needs and gives."""

    def plan(schema: OpSchema) -> OpPlan:
        question = Question(schema, tuple(op_schemas.specs_of(schema)), torchs, settings)
        try:
            found = decide(question)
        except NotImplementedError as error:
            raise in_words(error, schema, question.specs) from error
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            by_values = of_values(question)
            if by_values is None:
                raise in_words(error, schema, question.specs) from error
            return by_values
        found = _completed(question, found)
        if is_tracing():
            if isinstance(found.kernel, Runner) or question.is_view:
                tag_traced()
            found.settle_strides(asks=settings.redistribution or settings.movement)
        return found

    plan_on_one_mesh = on_one_mesh(plan)
    return lambda schema: plan_on_one_mesh(schema).for_torch()


def decide(question: Question) -> OpPlan:
    """The plan of the first of :data:`ORDER` that has one."""
    return next(plan for answer in ORDER if (plan := answer(question)) is not None)


def by_program(question: Question) -> OpPlan | None:
    """By the rule that the program has registered for the op; after the gate, if it may not know
    some placements.
    """
    if not op_schemas.is_of_the_program(question.schema.op):
        return None
    if question.is_strided:
        return question.gated((StridedShard,))
    return question.torchs(question.schema)


def by_parts(question: Question) -> None:
    """
    Raises:
        NotImplementedError: the op as a whole is not known to be right. On this error torch
            decomposes it, as it does except in inference mode, and asks for its parts.
    """
    if question.is_wrong_in_one:
        raise NotImplementedError


def by_fix(question: Question) -> OpPlan | None:
    """Where torch's rule is wrong on placements that it accepts (:mod:`..fixes`)."""
    schema = question.schema
    fix = fix_of(schema, question.specs)
    if fix is None:
        return None
    match fix.remedy:
        case Remedy.FALSE:
            return by_function(schema, lambda *_: False, question.specs[0].mesh, [], None)
        case Remedy.GATE:
            return question.gated(fix.kinds)
        case Remedy.SUM:
            return decide(replace(question, schema=op_schemas.of_sum(schema, 3))).asked(schema)
        case Remedy.SIGNATURE:
            return question.signed() or question.gated(fix.kinds)


def by_new_form(question: Question) -> OpPlan | None:
    """For an op in place, if only the form that returns a new tensor has a rule: by that."""
    schema = question.schema
    op = op_schemas.new_form(schema.op)
    if op is None:
        return None
    new = OpSchema(op, schema.args_schema, schema.kwargs_schema, op_schemas.schema_info(op))
    found = decide(replace(question, schema=new))
    return written_by_new(found.prepared(for_kernel(op_schemas.name_of(op), found.wanted)), schema)


def by_shape(question: Question) -> OpPlan | None:
    """For ops whose results do not depend on the values of an operand that is pending: they are the
    same everywhere.
    """
    if not question.is_made_anew:
        return None
    schema = question.schema
    if schema.op._schema.is_mutable:
        return question.torchs(without_partials(schema)).asked(schema)
    found = by_torch(question) or by_gate(question)
    return found.placed(lambda spec: without((Partial,), spec.placements))


def by_rule(question: Question) -> OpPlan | None:
    """By the op's signature (:mod:`.signatures`); but not if a reduction is pending that signatures
    do not know, such as that of a norm, and torch has a rule that may.
    """
    row = question.row
    torch_may = (
        question.is_pending_otherwise
        and question.is_right_in_torch
        and row is not None
        and not row.filled
        and not op_schemas.is_derived(question.schema.op)
    )
    return None if torch_may else question.signed()


def by_torch(question: Question) -> OpPlan | None:
    """By torch's rule, if it is right on these placements. None if it refuses them."""
    if not (question.is_right_in_torch or question.is_pointwise):
        return None
    try:
        return question.moved_by_plan(question.torchs(question.schema))
    except (RuntimeError, ValueError):
        return None


def by_gate(question: Question) -> OpPlan:
    """By torch's rule, after the placements on which it is not known to be right are replicated;
    and if it refuses that, all shards. If it still refuses, by the signature, after pending
    reductions that signatures do not know; without one, as torch would have refused at first.
    """
    writes = question.schema.op._schema.is_mutable
    kinds: list[tuple[type, ...]] = [(StridedShard,)] if question.is_strided else []
    if question.is_sharded or (writes and question.is_pending):
        kinds.append(ALL if writes else CUTS)
    refused: Exception | None = None
    for each in kinds:
        try:
            return question.gated(each)
        except Exception as error:
            refused = refused or error
    if (found := question.signed()) is not None:
        return found
    if question.is_composite:
        raise NotImplementedError from refused  # torch then decomposes the op
    if question.is_strided and refused is not None:
        raise refused
    return question.torchs(question.schema)


# The first that has a plan decides.
ORDER: tuple[Callable[[Question], OpPlan | None], ...] = (
    by_program,
    by_numbers,
    by_movement,
    by_view,
    by_parts,
    by_fix,
    by_new_form,
    by_lists,
    by_write,
    by_shape,
    by_rule,
    by_torch,
    by_gate,
)


def _completed(question: Question, plan: OpPlan) -> OpPlan:
    """The plan, with what running the op needs beside it."""
    if plan.finishes is not None or plan.takes_all:
        return plan
    plan = plan.prepared(for_kernel(question.name, plan.wanted))
    if question.schema.op._schema._is_view_op() or question.is_view:
        return _of_view(plan, by_plan=question.is_view)
    return taken_back(in_order(with_numbers_finished(plan)))


def _of_view(plan: OpPlan, *, by_plan: bool) -> OpPlan:
    """The plan for a view. If its input is redistributed first, by our plan (``by_plan``) or by
    torch, the output is a copy.
    """
    before: Any = plan.schema.args_schema[0]
    if plan.needs is None or not isinstance(before, DTensorSpec):
        return plan
    after: Any = plan.needs.args_schema[0]
    if tuple(before.placements) == tuple(after.placements):
        return plan
    return replace(plan, copied=True, by_plan=by_plan or plan.by_plan)

"""Ops that write to operands: writes to redistributed copies are moved back; for pointwise ops the
other operands are redistributed to the placements of the tensor that is written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.decide.losses import outside_loss_parallel
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.door.cuts import is_uneven
from cute_sharding.dtensor.door.understood import (
    are_read_as_order,
    are_understood,
    keeps_the_only_shards,
)
from cute_sharding.dtensor.replaced import op_schemas, registry, symints, tensor_specs
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.dtensor.run.placements import on_dim, text, without
from cute_sharding.dtensor.run.written import TakingBack


def taken_back(found: Any, schema: OpSchema) -> Any:
    """The answer for an op. If it redistributes tensors that it writes to, the op runs so that what
    it writes is moved back to them: torch would go on with the copy, or lose it.
    """
    wanted, op = found.redistribute_schema, schema.op
    if wanted is None:
        return found
    written = [spec for _, spec in op_schemas.written(op, schema)]
    moved = [spec for _, spec in op_schemas.written(op, wanted)]
    if all(tuple(a.placements) == tuple(b.placements) for a, b in zip(written, moved)):
        return found
    # torch lists the specs of lists of tensors one by one, between the other arguments.
    nested = op_schemas.with_specs(schema, op_schemas.specs_of(wanted))
    run = TakingBack(op, wanted.op, schema, nested)
    found = answers.with_fields(found, schema, runs=run, takes_all=True)
    gives_these = op_schemas.is_in_place(op) and found.output_spec is not None
    if gives_these or any(argument.is_out for argument in op._schema.arguments):
        outputs: Any = written[0] if len(written) == 1 else tuple(written)
        return answers.OutputSharding(outputs, found.redistribute_schema, True)
    return found


def written_by_new(found: Any, new: OpSchema, schema: OpSchema) -> Any:
    """The answer for an op in place, from ``found``, that for the op on the same arguments that
    returns a new tensor, ``new``. The tensor that is written to keeps its placements.

    The op in place runs if the other would run on placements that its result has too; otherwise the
    other runs, and its result is redistributed and copied. Errors of the op in place, such as for
    a dtype that it cannot write, are raised first, as on one device.
    """
    registry.output_metas(schema)
    wanted: Any = found.redistribute_schema or new
    written, to, made = (
        op_schemas.specs_of(schema)[0],
        op_schemas.specs_of(wanted)[0],
        answers.specs_of_results(found)[0],
    )
    takes_all = answers.answer_of(wanted).takes_all
    if wanted.op is new.op and not takes_all and tuple(made.placements) == tuple(to.placements):
        in_place = answers.OutputSharding(written, found.redistribute_schema)
        if found.redistribute_schema is None:
            return in_place
        return answers.with_fields(in_place, schema, runs=schema.op)
    nested = schema if takes_all else op_schemas.with_specs(schema, op_schemas.specs_of(wanted))
    run = TakingBack(schema.op, wanted.op, schema, nested, made)
    return answers.with_fields(answers.OutputSharding(written), schema, runs=run, takes_all=True)


def as_what_is_written(name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Any | None:
    """The answer for a pointwise op that writes to a tensor, or to each of a list: its other
    operands are redistributed to the placements of the tensor that it writes to.

    torch does so only if the shards are even, or every device has some element; otherwise it
    raises. None if torch's rule applies: all have the same placements, shards are plain and even,
    or the tensor that is written to is pending.
    """
    arguments, wanted, differ = op_schemas.arguments(schema), [], False
    targets = [found for is_written, found in arguments if is_written]
    for is_written, found in arguments:
        fitting = next((some for some in targets if len(some) in (1, len(found))), None)
        for i, spec in enumerate(found):
            of = None if fitting is None else fitting[i % len(fitting)]
            if spec is None or of is None:
                return None
            wanted.append(tuple(spec.placements) if is_written else following(of, spec))
            differs = tuple(of.placements) != tuple(spec.placements)
            if is_written and differs:
                return None
            differ = differ or differs
    if not differ or not are_understood(specs):
        return None
    written = [spec for some in targets for spec in some if spec is not None]
    if any(isinstance(p, Partial) for spec in written for p in spec.placements) or not any(
        tensor_specs.split_factors(spec)
        or is_uneven(spec)
        or any(symints.is_truly(n == 0) for n in spec.shape)
        for spec in written
    ):
        return None
    as_order = are_read_as_order(specs)
    if as_order and not keeps_the_only_shards(specs, wanted):
        return None
    count(name, "signature")
    logger.debug("%s: operands as what is written: %s", name, ", ".join(map(text, wanted)))
    return answers.op_sharding(
        schema,
        specs,
        wanted,
        [tuple(spec.placements) for spec in written],
        registry.output_metas(schema),
        as_order=as_order,
    )


def following(written: DTensorSpec, operand: DTensorSpec) -> tuple[Placement, ...]:
    """The placements that give each device the rows of the operand, which may be broadcast, for its
    part of the tensor that is written to.
    """
    before = len(written.shape) - len(operand.shape)

    def placed(p: Placement) -> Placement:
        if (
            not isinstance(p, (Shard, StridedShard))
            or p.dim < before
            or (
                symints.is_truly(operand.shape[p.dim - before] == 1)
                and not symints.is_truly(written.shape[p.dim] == 1)
            )
        ):
            return Replicate()
        return on_dim(p, p.dim - before)

    return tuple([placed(p) for p in written.placements])


def decide_write(question: Question) -> Any:
    """The answer for a pointwise op that writes to an operand. A pending operand has to be reduced
    before it is written to, as for the op that returns a new tensor.
    """
    schema, stock = question.schema, question.stock
    try:
        found = as_what_is_written(question.name, schema, question.specs)
        return question.moved_by_plan(stock(schema)) if found is None else found
    except Exception:
        if not any(
            isinstance(p, Partial)
            for _, spec in op_schemas.written(schema.op, schema)
            for p in spec.placements
        ):
            raise
    finished = without_partials(schema)
    specs = op_schemas.specs_of(finished)
    found = as_what_is_written(question.name, finished, specs) or stock(finished)
    found = answers.from_other_specs(found, finished)
    if question.smooths_labels:
        return answers.with_fields(found, schema, runs=outside_loss_parallel(schema.op))
    return found


def without_partials(schema: OpSchema) -> OpSchema:
    """The op on operands of which every pending one is replicated."""
    return op_schemas.replaced_specs(schema, lambda spec: without((Partial,), spec.placements))

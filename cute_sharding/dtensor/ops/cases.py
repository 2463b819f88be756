"""The table of who answers for an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cute_sharding.dtensor.ops.by_signature import by_signature, for_less
from cute_sharding.dtensor.ops.carried import CARRIED
from cute_sharding.dtensor.ops.cuts import (
    devices_differ,
    is_of_views,
    is_sharded,
    leave_one_without,
    some_device_is_empty,
    without,
)
from cute_sharding.dtensor.ops.gate import gated
from cute_sharding.dtensor.ops.local_arguments import prepared
from cute_sharding.dtensor.ops.losses import without_smoothing
from cute_sharding.dtensor.ops.plain_shards import (
    ATTENTION,
    is_norm_of_nothing,
    plain_shards_go_wrong,
)
from cute_sharding.dtensor.ops.scalars import with_scalars_finished
from cute_sharding.dtensor.ops.written import as_what_is_written, taken_back
from cute_sharding.dtensor.torch_private import (
    answers,
    dispatch_modes,
    op_schemas,
    registry,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.torch_private.op_schemas import OpSchema
from cute_sharding.dtensor.torch_private.tensor_specs import (
    DTensorSpec,
    Partial,
    Replicate,
    Shard,
    StridedShard,
)
from cute_sharding.ops.table import BY_OVERLOAD, LINEAR, POINTWISE, Row
from cute_sharding.views import BY_OVERLOAD as VIEWS


@dataclass(frozen=True)
class Question:
    """Which placements an op needs and gives.

    Attributes:
        schema: the op, with specs for its tensors.
        specs: these, in the order of its arguments.
        stock: torch's own answer to such questions.
        by_signatures: whether signatures may answer it; else torch does, with the gate before it.
    """

    schema: OpSchema
    specs: tuple[DTensorSpec, ...]
    stock: Callable[[OpSchema], Any]
    by_signatures: bool = True

    @property
    def name(self) -> str:
        return registry.name_of(self.schema.op)

    @property
    def is_strided(self) -> bool:
        return any(tensor_specs.split_factors(spec) for spec in self.specs)

    @property
    def is_sharded(self) -> bool:
        return any(map(is_sharded, self.specs))

    @property
    def is_pending(self) -> bool:
        return any(isinstance(p, Partial) for spec in self.specs for p in spec.placements)

    @property
    def row(self) -> Row | None:
        """The op's row in the table of signatures, where these may answer."""
        if not self.by_signatures:
            return None
        row = BY_OVERLOAD.get(self.name)
        return (
            POINTWISE
            if row is None
            and self.is_strided
            and op_schemas.is_pointwise(self.schema.op)
            and not self.is_pending
            else row
        )


Answer = Callable[[Question], Any]


def propagation(
    torchs: Callable[[OpSchema], Any], *, by_signatures: bool = True
) -> Callable[[OpSchema], Any]:
    """What stands in for the propagator's way from an op on specs to the placements that it needs
    and gives: by signatures, by torch where it is right, and by the gate for all else.
    """

    def stock(schema: OpSchema) -> Any:
        """torch's answer, or what it would be for replicas."""
        try:
            return torchs(schema)
        except RuntimeError as error:  # since 2.14 it refuses some of them
            first = schema.args_schema[0] if schema.args_schema else None
            if (
                "require placement changes" not in str(error)
                or op_schemas.is_pointwise(schema.op)
                or not isinstance(first, DTensorSpec)
                or not is_sharded(first)
            ):
                raise
            plain = op_schemas.replaced_specs(
                schema, lambda spec: without((Shard, StridedShard), spec.placements)
            )
            return answers.from_other_specs(torchs(plain), plain)

    def decide(schema: OpSchema) -> Any:
        question = Question(schema, tuple(op_schemas.specs_of(schema)), stock, by_signatures)
        replies = (answer(question) for holds, answer in CASES if holds(question))
        found = next(found for found in replies if found is not None)
        if schema.op._schema._is_view_op() or question.name in VIEWS:
            return answers.of_view(found, schema, by_plan=question.name in VIEWS)
        found = prepared(question.name, schema, answers.with_keywords(found, schema))
        return taken_back(with_scalars_finished(found, schema), schema)

    return decide


def _torchs(question: Question) -> Any:
    """The answer of torch's propagator; where it has none, or refuses what is cut, that of the op's
    signature, if it has a row here, and else the gate's. (Of views the propagator's answer is ours:
    their rules stand in its registry.)
    """
    try:
        return question.stock(question.schema)
    except (RuntimeError, ValueError):
        found = _where_torch_refuses(question)
        if found is None:
            raise
        return found


def _torchs_or_for_less(question: Question) -> Any:
    """torch's answer; where it has to move operands, with these brought by plan, or that of a
    signature where less is received so: torch may gather rows that are fewer than devices, or what
    meets something pending. And where it leaves a device none, of which the op refuses to compute.
    """
    found = _torchs(question)
    wanted = getattr(found, "redistribute_schema", None) or question.schema
    if question.row and question.row.filled and leave_one_without(op_schemas.specs_of(wanted)):
        return _signed(question) or found
    row = question.row or (POINTWISE if op_schemas.is_pointwise(question.schema.op) else None)
    if (
        row is None
        or wanted is question.schema
        or not question.by_signatures
        or question.is_strided
        or not question.is_sharded
    ):
        return found
    less = for_less(row, question.name, question.schema, question.specs, found)
    return less or answers.from_other_specs(found, question.schema)


def _where_torch_refuses(question: Question) -> Any | None:
    if question.name in VIEWS:
        return None
    found = None if question.row is None else _signed(question)
    if found is None and question.is_sharded:
        try:
            found = _gate(Shard, StridedShard)(question)
        except Exception:  # then it was not for the shards
            return None
    return found


def _misread(question: Question) -> tuple[type, ...]:
    """The kinds of placements on which torch is wrong, where it is so on plain shards: of attention
    it cuts what is pending.
    """
    return (Shard, StridedShard, *[Partial] * (question.name in ATTENTION))


def _gate(*kinds: type) -> Answer:
    return lambda question: gated(
        partial(_torchs_or_signed, question), question.name, question.schema, kinds
    )


def _torchs_or_signed(question: Question, plain: OpSchema) -> Any:
    """Of the op on plain placements the answer of torch, or of a signature where it has no rule."""
    try:
        return question.stock(plain)
    except NotImplementedError:
        row, specs = question.row, op_schemas.specs_of(plain)
        found = None if row is None else by_signature(row, question.name, plain, specs)
        if found is None:
            raise
        return found


def _is_written_pointwise(question: Question) -> bool:
    return question.schema.op._schema.is_mutable and op_schemas.is_pointwise(question.schema.op)


def _written_pointwise(question: Question) -> Any:
    """What is pending has to be finished before it is written to, as in the op that gives a new
    tensor.
    """
    schema, stock = question.schema, question.stock
    try:
        return as_what_is_written(question.name, schema, question.specs) or stock(schema)
    except Exception:
        if dispatch_modes.is_tracing() or not any(
            isinstance(p, Partial)
            for _, spec in op_schemas.written(schema.op, schema)
            for p in spec.placements
        ):
            raise
    finished = op_schemas.replaced_specs(schema, lambda spec: without((Partial,), spec.placements))
    found = as_what_is_written(question.name, finished, op_schemas.specs_of(finished)) or stock(
        finished
    )
    found = answers.from_other_specs(found, finished)
    if question.name == "masked_fill_.Scalar":
        return answers.instead(found, schema, without_smoothing(schema.op))
    return found


def _is_made_anew(question: Question) -> bool:
    """Whether what comes of the op has nothing to do with what is pending in the operand: torch has
    such values, the same on each device, be summed.
    """
    return question.is_pending and question.name in ("empty_like.default", "fill_.Scalar")


def _made_anew(question: Question) -> Any:
    schema = question.schema
    if schema.op._schema.is_mutable:
        finished = op_schemas.replaced_specs(
            schema, lambda spec: without((Partial,), spec.placements)
        )
        return answers.from_other_specs(question.stock(finished), finished)
    return answers.with_outputs(
        _torchs(question), lambda spec: without((Partial,), spec.placements)
    )


def _is_one_value(question: Question) -> bool:
    """item(): one value, and the same on every rank, which a pending sum is not."""
    return question.name == "_local_scalar_dense.default" and any(
        not isinstance(p, Replicate) for spec in question.specs for p in spec.placements
    )


def _compares_other_shapes(question: Question) -> bool:
    """``equal`` of tensors of two shapes, of which torch would have the one cut as the other is."""
    shapes = [tuple(spec.shape) for spec in question.specs]
    return (
        question.name == "equal.default"
        and not symints.is_symbolic(*shapes)
        and len({*shapes}) > 1
        and question.is_sharded
    )


def _are_not_equal(question: Question) -> Any:
    mesh = question.specs[0].mesh
    return answers.by_function(question.schema, lambda *_: False, mesh, [], None)


def _is_drawn_by_ranks(question: Question) -> bool:
    """Whether ranks draw their own parts one by one where that would show: devices have parts of
    different sizes, after which ranks would not draw alike again; or blocks as only views make
    them. (An order of shards, as the weights of fully_shard over tensor parallelism have, begins as
    it does in torch's hands.)

    On accelerators torch has each rank draw its own part, of what the op was given first.
    """
    op, mesh = question.schema.op, question.specs[0].mesh
    return (
        question.is_sharded
        and op_schemas.draws(op)
        and not op_schemas.draws_apart(op, mesh)
        and any(devices_differ(spec) or is_of_views(spec) for spec in question.specs)
    )


def _is_told_sizes(question: Question) -> bool:
    """Whether torch runs the op on shards with the global sizes, which it is told as numbers."""
    return question.name == "native_group_norm_backward.default" and question.is_sharded


def _is_derived(question: Question) -> bool:
    """Whether the op has a row here, and no rule in torch: it would derive one from what the op
    decomposes to, by trying all placements of all operands at each op within. Of attention that
    takes half a minute, with a mask much more.
    """
    return (
        question.row not in (None, POINTWISE)
        and registry.is_derived(question.schema.op)
        and all(spec.mesh.size() > 1 for spec in question.specs)
    )


def _is_pending_pointwise(question: Question) -> bool:
    return (
        question.by_signatures
        and question.is_strided
        and question.is_pending
        and question.name not in BY_OVERLOAD
        and op_schemas.is_pointwise(question.schema.op)
        and not question.schema.op._schema.is_mutable
    )


def _pending_pointwise(question: Question) -> Any | None:
    """torch's answer where nothing has to be moved. Else it would look for the ways from strided
    shards to all placements it knows, which may take minutes, find none, and replicate everything.
    """
    if len({tuple(spec.placements) for spec in question.specs}) == 1:
        found = question.stock(question.schema)
        if not getattr(found, "needs_redistribute", True):
            return found
    of_two = len(question.specs) == 2  # x + 1 is not linear in x
    row = LINEAR.get(question.name, POINTWISE) if of_two else POINTWISE
    return by_signature(row, question.name, question.schema, question.specs)


def _is_right_in_torch(question: Question) -> bool:
    """Whether torch's own answer is known to be right. (A mesh of one device is its stand-in for
    ops that it decomposes: what holds there is to hold anywhere. Of ops that keep any cut only the
    pointwise ones take no elements on any device: pools refuse a tensor without channels.)
    """
    if all(spec.mesh.size() == 1 for spec in question.specs):
        return True
    if plain_shards_go_wrong(question.schema, question.specs):
        return False
    if not question.is_strided:
        return True
    op = question.schema.op
    return question.row is None and (
        question.name in VIEWS
        or question.name in CARRIED
        or op_schemas.is_pointwise(op)
        or (
            op_schemas.keeps_any_cut(op)
            and (op_schemas.draws(op) or not any(map(some_device_is_empty, question.specs)))
        )
    )


def _signed(question: Question) -> Any | None:
    row = question.row
    assert row is not None
    return by_signature(row, question.name, question.schema, question.specs)


# The first that holds, and has an answer.
CASES: tuple[tuple[Callable[[Question], bool], Answer], ...] = (
    (_is_drawn_by_ranks, _gate(Shard, StridedShard)),
    (_is_written_pointwise, _written_pointwise),
    (_is_made_anew, _made_anew),
    (_is_one_value, _gate(Shard, StridedShard, Partial)),
    (_compares_other_shapes, _are_not_equal),
    (
        lambda question: is_norm_of_nothing(question.schema, question.specs),
        _gate(Shard, StridedShard),
    ),
    (_is_derived, _signed),
    (_is_told_sizes, _gate(Shard, StridedShard)),
    (_is_pending_pointwise, _pending_pointwise),
    (_is_right_in_torch, _torchs_or_for_less),
    (lambda question: question.row is not None, _signed),
    (
        lambda question: plain_shards_go_wrong(question.schema, question.specs),
        lambda question: _gate(*_misread(question))(question),
    ),
    (lambda question: question.is_strided and question.row is not POINTWISE, _gate(StridedShard)),
    (lambda question: True, _torchs),
)

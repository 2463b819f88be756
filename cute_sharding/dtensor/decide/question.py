"""Facts about an op that its decision depends on, and the plans of which decisions are made: by
torch, by the signature, and by the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.decide.signatures import by_signature
from cute_sharding.dtensor.door.cuts import (
    is_of_views,
    is_sharded,
    is_uneven,
    some_device_is_empty,
)
from cute_sharding.dtensor.replaced import (
    communication,
    dispatch_modes,
    op_schemas,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.op_schemas import OpSchema, name_of
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    MaskPartial,
    Partial,
    Placement,
    Replicate,
    StridedShard,
)
from cute_sharding.dtensor.run.op_plan import OpPlan, of_torch, run_slowly, shapes_of_results
from cute_sharding.dtensor.run.ops import LIVE, reach
from cute_sharding.dtensor.run.placements import text, without
from cute_sharding.relations.table import OF_TORCH, SIGNATURES, VIEWS, OfTorch, Row
from cute_sharding.relations.table.along import ADDITIONS, COMMUTING, POINTWISE
from cute_sharding.relations.table.indexing import BY_MASK

# -- refusals --------------------------------------------------------------------------------------
# Errors for ops without a rule, which say what to do instead.


def in_words(error: Exception, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Exception:
    """torch's error for an op without a rule, or one that writes results whose shape depends on
    values; the message says what to do. The class stays the same: torch decomposes some ops on this
    error.
    """
    given = ", ".join(f"{tuple(spec.shape)} as {text(spec.placements)}" for spec in specs)
    if not isinstance(error, NotImplementedError):
        told = (
            f"{name_of(schema.op)} of {given} is not possible, because the op writes to a tensor, "
            "and what it writes has a shape that depends on values. Use the op that returns a new "
            "tensor. Or call the op on .full_tensor() on each rank."
        )
    else:
        told = (
            f"{error} The operands are {given}. Call the op on the whole tensor, .full_tensor(), "
            "on each rank. Or redistribute to Replicate, call the op on .to_local(), and pass the "
            "result to DTensor.from_local. Or register a rule: "
            "torch.distributed.tensor.experimental.register_sharding."
        )
    found = type(error)(told)
    vars(found).update(vars(error))
    return found


# -- gate ------------------------------------------------------------------------------------------
# The gate: an op about which nothing is known runs as in torch, on operands without strided shards.
# And functions in place of torch's own ones for ops that skip the propagator.


def gated(
    plain_plan: Callable[[OpSchema], OpPlan],
    name: str,
    schema: OpSchema,
    kinds: tuple[type, ...] = (StridedShard,),
) -> OpPlan:
    """The plan after the mesh dims with placements of these ``kinds`` are replicated: that of
    ``plain_plan`` for the op on such operands. If the op then writes in place to a replica,
    :mod:`.redistributions` has that copied back.

    Raises:
        RuntimeError: the op writes to such a tensor in another way than ``add_``, ``out=`` and
            batch norms do: it would write to the replica, and the write would be lost.
    """
    written = op_schemas.written(schema.op, schema)
    is_out = any(op_schemas.is_out(schema.op, argument) for argument, _ in written)
    if (
        (is_out or not op_schemas.writes_unsaid(schema.op))
        and any(tensor_specs.split_factors(spec) for _, spec in written)
        and not (len(written) == 1 and op_schemas.is_in_place(schema.op))
    ):
        if not dispatch_modes.is_tracing() and all(
            op_schemas.is_out(schema.op, argument) for argument, _ in written
        ):
            replicas = op_schemas.replaced_specs(
                schema, lambda spec: (Replicate(),) * spec.mesh.ndim
            )
            count(name, "gate")
            return OpPlan(schema, None, replicas, by_plan=True)
        argument, spec = next(
            (argument, spec) for argument, spec in written if tensor_specs.split_factors(spec)
        )
        raise RuntimeError(
            f"{name} writes to a DTensor of shape {tuple(spec.shape)} with placements "
            f"{text(spec.placements)} (the argument {argument}), and the result could be wrong. "
            f"First call .redistribute(placements={list(without(kinds, spec.placements))!r}) and "
            "write to the result, or use the op that returns a new tensor."
        )
    plain = op_schemas.replaced_specs(schema, lambda spec: without(kinds, spec.placements))
    found = plain_plan(plain)
    count(name, "gate")
    logger.debug(
        "%s: no signature; inputs are redistributed to placements without _StridedShard", name
    )
    return found.asked(schema)


def gated_handler(op: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """A function in place of torch's for an op that skips the propagator, which asks the propagator
    as for any other op.
    """
    return run_slowly


def writing_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that writes to some of its arguments without torch's dispatcher noticing, and
    update the copies of these arguments.
    """
    results = run_slowly(op, args, kwargs)
    if LIVE:
        reach(op, args, kwargs)
    return results


# -- stock -----------------------------------------------------------------------------------------
# Which redistributions torch itself does rightly. (Reports say what it does and what that costs:
# ``reports.stock``.)


def is_torchs(spec: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch runs the redistribution of ``spec`` to ``target``: all those that a program
    without our views may reach, except those that torch is known to get wrong.

    It does not if several mesh dims shard a dim that they do not divide. If a program has flattened
    these mesh dims, torch runs one collective in place of one for each, as if the flattened mesh
    sharded the dim: 5 rows on (2, 2) are blocks of 2, 1, 1, 1 rows, and on 4 devices 2, 2, 1, 0.
    And it asks each rank's own sizes whether it may. (Whether there is such a mesh does not count
    here: it is not what a program says of the tensor.)

    It does not with _StridedShard placements, or an order of shards. For those torch searches steps
    among states that an earlier search in this process has left, which other ranks may not have; by
    each rank's own sizes, if they do not divide; and it misreads split factors that encode no
    order.
    """
    plain = symints.are_without_factors(spec.placements + target.placements)
    if not plain or tensor_specs.says_an_order(spec) or tensor_specs.says_an_order(target):
        return spec.placements == target.placements and spec.shard_order == target.shard_order
    return communication.is_ascending(spec.mesh) and _nests_evenly(spec) and _nests_evenly(target)


def _nests_evenly(spec: tensor_specs.DTensorSpec) -> bool:
    """Whether each dim that several mesh dims shard divides by all of these together."""
    parts: dict[int, list[int]] = {}
    for placement, n in zip(spec.placements, spec.mesh.shape):
        if isinstance(placement, tensor_specs.Shard) and n > 1:
            parts.setdefault(placement.dim, []).append(n)
    return all(
        len(some) == 1 or symints.is_truly(spec.shape[d] % prod(some) == 0)
        for d, some in parts.items()
    )


def is_torchs_alone(current: tensor_specs.DTensorSpec, target: tensor_specs.DTensorSpec) -> bool:
    """Whether torch redistributes rightly and without a message, so that one rank alone may leave
    it to torch. torch slices the local tensor of a replica, whatever shape the spec has; programs
    that shard a local tensor over one more mesh dim (torchtitan's SimpleFSDP) rely on it.
    """
    cuts = [tensor_specs.cut_of(placement) for placement in target.placements]
    dims = [cut[0] for cut in cuts if cut is not None]
    # If several mesh dims shard a dim, its rows may have to move.
    return is_torchs(current, target) and all(
        before == after or (before.is_replicate() and (cut is None or dims.count(cut[0]) == 1))
        for before, after, cut in zip(current.placements, target.placements, cuts)
    )


# -- question --------------------------------------------------------------------------------------
# Facts about an op that its decision depends on, and the plans of which decisions are made: by
# torch, by the signature, and by the gate.

_UNKNOWN = OfTorch(())


@dataclass(frozen=True)
class Question:
    """The question which placements an op needs and gives.

    Attributes:
        schema: the op, with specs in place of tensors.
        specs: the specs, in the order of the op's arguments.
        stock: torch's propagator, whose answers are in torch's form.
        settings: the settings in force. Without ``ops`` torch answers in place of signatures, after
            the gate.
    """

    schema: OpSchema
    specs: tuple[DTensorSpec, ...]
    stock: Callable[[OpSchema], Any]
    settings: Settings

    @cached_property
    def name(self) -> str:
        return op_schemas.name_of(self.schema.op)

    @cached_property
    def is_strided(self) -> bool:
        return any(map(tensor_specs.split_factors, self.specs))

    @cached_property
    def is_sharded(self) -> bool:
        return any(map(is_sharded, self.specs))

    @cached_property
    def is_pending(self) -> bool:
        return any(isinstance(p, Partial) for spec in self.specs for p in spec.placements)

    @property
    def is_made_anew(self) -> bool:
        """Whether an operand is pending on which the results' values do not depend. (torch leaves
        such results pending, and equal values on all devices would be summed.)
        """
        return self.is_pending and OF_TORCH.get(self.name, _UNKNOWN).leaves_pending

    @property
    def counts(self) -> bool:
        """Whether the op counts numbers, up to the greatest."""
        return OF_TORCH.get(self.name, _UNKNOWN).counts

    @property
    def smooths_labels(self) -> bool:
        """Whether label smoothing runs this op between log_softmax and the loss."""
        return OF_TORCH.get(self.name, _UNKNOWN).smooths_labels

    @property
    def is_pointwise(self) -> bool:
        return op_schemas.is_pointwise(self.schema.op)

    @property
    def is_view(self) -> bool:
        return self.name in VIEWS

    @property
    def is_alike(self) -> bool:
        """Whether all operands have the same placements."""
        return len({tuple(spec.placements) for spec in self.specs}) == 1

    @cached_property
    def row(self) -> Row | None:
        """The op's row in the table of signatures, if signatures may answer. An op that writes by a
        mask has a row of its own for that. Pointwise ops share one row, but for what they commute
        with.
        """
        if not self.settings.ops:
            return None
        if self.name in BY_MASK and op_schemas.is_by_mask(self.schema):
            return BY_MASK[self.name]
        if self.name in SIGNATURES or not self.is_pointwise:
            return SIGNATURES.get(self.name)
        if not self.is_pending:
            return POINTWISE
        addition = ADDITIONS.get((self.name, len(self.specs)))
        return addition or COMMUTING.get(self.name, POINTWISE)

    @property
    def is_composite(self) -> bool:
        """Whether torch decomposes the op before it gets here, except in inference mode, and
        neither torch nor this package has a rule for it.
        """
        op = self.schema.op
        return (
            (self.settings.ops or op._schema._is_view_op())
            and self.name not in SIGNATURES
            and op_schemas.is_composite(op)
            and op_schemas.is_derived(op)
            and all(spec.mesh.size() > 1 for spec in self.specs)
        )

    @property
    def is_wrong_in_one(self) -> bool:
        """Whether a composite op has to be decomposed here too. torch derives a rule from its
        decomposition, but runs the whole op on local tensors. What the op computes from sizes is
        then computed from local sizes: a sum divided by the rows of a batch, a mean of blocks of
        different sizes. For a view, torch tries the rule on a few devices, which may take blocks of
        some rows for those of others, and passes on sizes of the whole. And for uneven operands the
        results' blocks are not those of their placements. And for some ops the search for a rule
        takes minutes.
        """
        if not (self.is_sharded or self.is_pending) or not self.is_composite:
            return False
        if OF_TORCH.get(self.name, _UNKNOWN).in_parts:
            return True
        if self.is_pending or any(is_uneven(spec) or is_of_views(spec) for spec in self.specs):
            return not self._runs_whole
        info = self.schema.schema_info
        # Of operands in a list torch's rule redistributes none.
        if self.schema.op._schema._is_view_op() or (info is not None and info.needs_pytree):
            return True
        try:
            shapes = shapes_of_results(op_schemas.output_metas(self.schema) or ())
        except op_schemas.DataDependentOutputException:
            return True
        return () in shapes

    @property
    def _runs_whole(self) -> bool:
        """Whether torch replicates all operands first: the whole op is then right, and its operands
        are sent once.
        """
        try:
            wanted = self.torchs(self.schema).wanted
        except Exception:
            return False
        return all(
            isinstance(p, Replicate)
            for spec in op_schemas.specs_of(wanted)
            for p in spec.placements
        )

    @property
    def is_right_in_torch(self) -> bool:
        """Whether torch's rule is right on these placements, apart from fixes. (torch uses a mesh
        of one device as a stand-in for ops that it decomposes, so answers there have to hold on any
        mesh. Of the ops that keep any cut only pointwise ones accept devices without elements:
        pools refuse a tensor without channels.)
        """
        if not self.is_strided or all(spec.mesh.size() == 1 for spec in self.specs):
            return True
        op = self.schema.op
        if self.settings.ops and self.name in SIGNATURES:
            return False
        if self.is_pointwise:
            # For unlike placements torch would search for ways from strided shards to all
            # placements that it knows, which may take minutes, find none, and replicate everything.
            return self.is_alike or not self.settings.ops
        of_torch = OF_TORCH.get(self.name, _UNKNOWN)
        return of_torch.carries_any_cut or (
            op_schemas.keeps_any_cut(op)
            and (op_schemas.draws(op) or not any(map(some_device_is_empty, self.specs)))
        )

    def torchs(self, schema: OpSchema) -> OpPlan:
        """torch's plan for the op on these specs; if it would have an operand become pending as
        picked rows are, that for the rows reduced: only an index gives such contributions. Raises
        what torch's rule raises.
        """
        found = of_torch(op_schemas.with_keywords_of_rule(self.stock(schema), schema), schema)
        if found.needs is not None and _becomes_masked(schema, found.needs):
            return gated(self.torchs, self.name, schema, (MaskPartial,))
        return found

    @property
    def is_pending_otherwise(self) -> bool:
        """Whether something is pending in a way that signatures do not know: a norm, a mask."""
        return any(_is_pending_otherwise(p) for spec in self.specs for p in spec.placements)

    def signed(self) -> OpPlan | None:
        """The plan by the op's signature; None if it has none. Partials that signatures do not know
        (a norm's, a mask's) are reduced first.
        """
        if self.row is None:
            return None
        if not self.is_pending_otherwise:
            return by_signature(self.row, self.name, self.schema, self.specs)
        finished = op_schemas.replaced_specs(self.schema, _without_others)
        found = by_signature(self.row, self.name, finished, op_schemas.specs_of(finished))
        return found and found.asked(self.schema)

    def moved_by_plan(self, found: OpPlan) -> OpPlan:
        """torch's plan; if the op has a row, by our plan for the operands that torch moves."""
        if found.needs is None or self.row is None or not self.is_sharded:
            return found
        return replace(found, by_plan=True)

    def gated(self, kinds: tuple[type, ...]) -> OpPlan:
        """The plan after the mesh dims with placements of these kinds are replicated."""
        return gated(self._plain, self.name, self.schema, kinds)

    def _plain(self, plain: OpSchema) -> OpPlan:
        """The plan for the op on plain placements: torch's, or a signature's if torch has no
        rule.
        """
        try:
            return self.torchs(plain)
        except NotImplementedError:
            specs = op_schemas.specs_of(plain)
            row = self.row
            found = None if row is None else by_signature(row, self.name, plain, specs)
            if found is None:
                raise
            return found


def _becomes_masked(schema: OpSchema, needs: OpSchema) -> bool:
    """Whether an operand would become pending as rows that an index picked."""
    return any(
        tensor_specs.is_masked(after) and after != before
        for held, needed in zip(op_schemas.specs_of(schema), op_schemas.specs_of(needs))
        for before, after in zip(held.placements, needed.placements)
    )


def _is_pending_otherwise(placement: Placement) -> bool:
    return isinstance(placement, Partial) and not tensor_specs.is_of_torchs_own(placement)


def _without_others(spec: DTensorSpec) -> list[Placement]:
    return [Replicate() if _is_pending_otherwise(p) else p for p in spec.placements]

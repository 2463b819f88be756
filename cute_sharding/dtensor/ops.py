"""Ops beside views: what they are handed is known to be right.

torch decides by its own rules wherever those are known to be right: no op on plain placements comes
here, but for averages of blocks of different sizes. What views make is another matter: of
_StridedShard placements an op with a row in the table (cute_sharding/ops) carries what its
signature lets it carry; ops that torch is known to get right on any cut are torch's
(:data:`CARRIED`); all others get what torch would have had, the mesh dims of such placements
replicated by plan: the gate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isinf
from typing import Any

import torch

from cute_sharding.dtensor import compat, ledger
from cute_sharding.dtensor.compat import (
    DTensorSpec,
    OpSchema,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    strided_shard,
)
from cute_sharding.dtensor.placements import text
from cute_sharding.dtensor.reading import agree
from cute_sharding.dtensor.redistribute import redistribute_local_tensor
from cute_sharding.dtensor.stats import count, logger
from cute_sharding.dtensor.writes import LIVE, reach, take_back
from cute_sharding.ops.assign import Operand, Part, assign
from cute_sharding.ops.signature import Signature, parse
from cute_sharding.ops.table import BY_OVERLOAD, POINTWISE, Row
from cute_sharding.sharding.deal import kinds_of_device, local_size
from cute_sharding.views import BY_OVERLOAD as VIEWS

# Ops of which torch's own rules are right on any cut: docs/ops.md says how that is measured. Beside
# these, all that torch knows to be pointwise, in place or not, and of lists; and those that draw.
CARRIED = frozenset(
    [
        *(
            "clone.default",
            "contiguous.default",
            "detach.default",
            "detach_.default",
            "alias.default",
            "copy_.default",
            "_to_copy.default",
            "fill_.Scalar",
            "zero_.default",
        ),
        *("equal.default", "is_same_size.default"),
        *(
            "empty_like.default",
            "zeros_like.default",
            "ones_like.default",
            "full_like.default",
            "rand_like.default",
            "randn_like.default",
            "randint_like.default",
        ),
        *(
            "new_empty.default",
            "new_zeros.default",
            "new_ones.default",
            "new_full.default",
            "new_empty_strided.default",
        ),
        *(
            "linalg_vector_norm.default",
            "norm.Scalar",
            "linalg__powsum.default",
            "_foreach_norm.Scalar",
            "_foreach_powsum.Scalar",
        ),
    ]
)

# Rows that are asked about plain shards as well: torch takes an average over blocks of different
# sizes for one of blocks of one size.
_AVERAGES = frozenset(
    name for name in BY_OVERLOAD if "_loss" in name or name.startswith("binary_cross_entropy")
)
# And of these those that torch gets wrong on any shards: a gradient of a mean that it divides by
# the elements of a shard, a mean whose rows have weights, for which it divides by the number of
# rows, and reductions of all dims that say so by naming none.
_WRONG_ON_SHARDS: dict[str, Callable[[OpSchema], bool]] = {
    "soft_margin_loss_backward.default": lambda schema: True,
    **dict.fromkeys(
        (
            "mse_loss_backward.default",
            "smooth_l1_loss_backward.default",
            "huber_loss_backward.default",
        ),
        lambda schema: schema.args_schema[3] == 1,
    ),
    "binary_cross_entropy_backward.default": lambda schema: (
        len(schema.args_schema) < 5 or schema.args_schema[4] == 1
    ),
    **dict.fromkeys(
        (
            "sum.dim_IntList",
            "nansum.default",
            "mean.dim",
            "amax.default",
            "amin.default",
            "var.correction",
            "std.correction",
        ),
        lambda schema: _names_no_dim(schema),
    ),
    "nll_loss_forward.default": lambda schema: _weighs_rows(schema),
    "nll_loss2d_forward.default": lambda schema: _weighs_rows(schema),
}


@dataclass(frozen=True)
class Question:
    """Which placements an op needs and gives.

    Attributes:
        schema: the op, with specs for its tensors.
        specs: these, in the order of its arguments.
        stock: torch's own answer to such questions.
    """

    schema: OpSchema
    specs: tuple[DTensorSpec, ...]
    stock: Callable[[OpSchema], Any]

    @property
    def name(self) -> str:
        return compat.name_of(self.schema.op)

    @property
    def is_strided(self) -> bool:
        return any(compat.split_factors(spec) for spec in self.specs)

    @property
    def is_sharded(self) -> bool:
        return any(map(_is_sharded, self.specs))

    @property
    def is_pending(self) -> bool:
        return any(isinstance(p, Partial) for spec in self.specs for p in spec.placements)

    @property
    def row(self) -> Row | None:
        """The op's row in the table of signatures."""
        row = BY_OVERLOAD.get(self.name)
        return (
            POINTWISE
            if row is None
            and self.is_strided
            and compat.is_pointwise(self.schema.op)
            and not self.is_pending
            else row
        )


Answer = Callable[[Question], Any]


def propagation(torchs: Callable[[OpSchema], Any]) -> Callable[[OpSchema], Any]:
    """What stands in for the propagator's way from an op on specs to the placements that it needs
    and gives.
    """

    def stock(schema: OpSchema) -> Any:
        """torch's answer; of an op that writes in place to what it has to redistribute first, with
        the note that what it wrote is to be taken back: torch would go on with the copy, or lose
        it.
        """
        try:
            found = torchs(schema)
        except RuntimeError as error:  # since 2.14 it refuses some of them
            first = schema.args_schema[0] if schema.args_schema else None
            if (
                "require placement changes" not in str(error)
                or compat.is_pointwise(schema.op)
                or not isinstance(first, DTensorSpec)
                or not _is_sharded(first)
            ):
                raise
            plain = compat.replaced_specs(
                schema, lambda spec: _without((Shard, StridedShard), spec.placements)
            )
            return compat.written_back(torchs(plain), plain, schema, first)
        if (
            compat.is_in_place(schema.op)
            and schema.op._schema.is_mutable
            and compat.moves_first(found, schema)
        ):
            return compat.written_back(found, schema, schema, schema.args_schema[0])
        return found

    def decide(schema: OpSchema) -> Any:
        question = Question(schema, tuple(compat.specs_of(schema)), stock)
        answers = (answer(question) for holds, answer in CASES if holds(question))
        return next(found for found in answers if found is not None)

    return decide


def _torchs(question: Question) -> Any:
    """torch's own answer; where it has no rule at all for an op that has a row here, that of its
    signature.
    """
    try:
        return question.stock(question.schema)
    except NotImplementedError:
        found = None if question.row is None else _signed(question)
        if found is None:
            raise
        return found


def _gate(*kinds: type) -> Answer:
    return lambda question: _gated(question.stock, question.name, question.schema, kinds)


def _is_written_pointwise(question: Question) -> bool:
    return question.schema.op._schema.is_mutable and compat.is_pointwise(question.schema.op)


def _written_pointwise(question: Question) -> Any:
    """What is pending has to be finished before it is written to, as in the op that gives a new
    tensor; the tensor then is what that gives.
    """
    schema, stock = question.schema, question.stock
    try:
        return _as_what_is_written(question.name, schema, question.specs) or stock(schema)
    except Exception:
        if compat.is_tracing() or not any(
            isinstance(p, Partial) for _, spec in compat.written(schema) for p in spec.placements
        ):
            raise
    finished = compat.replaced_specs(schema, lambda spec: _without((Partial,), spec.placements))
    found = _as_what_is_written(question.name, finished, compat.specs_of(finished)) or stock(
        finished
    )
    return compat.written_back(found, finished, schema, found.output_spec)


def _is_made_anew(question: Question) -> bool:
    """Whether what comes of the op has nothing to do with what is pending in the operand: torch has
    such values, the same on each device, be summed.
    """
    return question.name in ("empty_like.default", "fill_.Scalar") and question.is_pending


def _made_anew(question: Question) -> Any:
    schema = question.schema
    if schema.op._schema.is_mutable:  # others may see it, for whom it is pending
        finished = compat.replaced_specs(schema, lambda spec: _without((Partial,), spec.placements))
        found = question.stock(finished)
        return compat.written_back(found, finished, schema, found.output_spec)
    return compat.with_outputs(
        _torchs(question), lambda spec: _without((Partial,), spec.placements)
    )


def _is_one_value(question: Question) -> bool:
    """item(): one value, and the same on every rank, which a pending sum is not."""
    return question.name == "_local_scalar_dense.default" and any(
        not isinstance(p, Replicate) for spec in question.specs for p in spec.placements
    )


def _is_drawn_by_ranks(question: Question) -> bool:
    """Whether the op draws numbers of what views alone have cut, or may have, on a mesh where ranks
    that draw different amounts would not draw alike again.
    """
    if (
        not question.is_sharded
        or not compat.draws(question.schema.op)
        or compat.draws_apart(question.specs[0].mesh)
    ):
        return False
    return question.is_strided or ledger.diverged(question.specs[0].mesh)


def _is_extreme_of_nothing(question: Question) -> bool:
    """Of no elements there is no largest and no smallest: with such an order (see _extreme) torch's
    norms raise on devices that have none, as does item().
    """
    return (
        question.name in ("linalg_vector_norm.default", "norm.Scalar", "_foreach_norm.Scalar")
        and _extreme(question.schema)
        and any(map(_some_device_is_empty, question.specs))
    )


def _is_derived(question: Question) -> bool:
    """Whether the op has a row here, and no rule in torch: it would derive one from what the op
    decomposes to, by trying all placements of all operands at each op within. Of attention that
    takes half a minute, with a mask much more.
    """
    if (
        question.row is None
        or question.row is POINTWISE
        or not compat.is_derived(question.schema.op)
    ):
        return False
    return question.is_sharded and all(spec.mesh.size() > 1 for spec in question.specs)


def _is_right_in_torch(question: Question) -> bool:
    """Whether torch's own answer is known to be right. (A mesh of one device is its stand-in for
    ops that it decomposes: what holds there is to hold anywhere.)
    """
    if not question.is_strided and not _plain_shards_go_wrong(
        question.name, question.schema, question.specs
    ):
        return True
    if question.row is None and (
        question.name in VIEWS
        or question.name in CARRIED
        or compat.keeps_any_cut(question.schema.op)
    ):
        return True
    return all(spec.mesh.size() == 1 for spec in question.specs)


def _signed(question: Question) -> Any | None:
    row = question.row
    assert row is not None
    found = _by_signature(row, question.name, question.schema, question.specs)
    if found is not None:
        ledger.note(
            question.specs[0].mesh, partial(_gives_other, question.stock, question.schema, found)
        )
    return found


# The first that holds, and has an answer.
CASES: tuple[tuple[Callable[[Question], bool], Answer], ...] = (
    (_is_drawn_by_ranks, _gate(Shard, StridedShard)),
    (_is_written_pointwise, _written_pointwise),
    (_is_made_anew, _made_anew),
    (_is_one_value, _gate(Shard, StridedShard, Partial)),
    (_is_extreme_of_nothing, _gate(Shard, StridedShard)),
    (_is_derived, _signed),
    (_is_right_in_torch, _torchs),
    (lambda question: question.row is not None, _signed),
    (lambda question: question.is_strided and question.row is not POINTWISE, _gate(StridedShard)),
    (lambda question: True, _torchs),
)


def _is_sharded(spec: DTensorSpec) -> bool:
    return any(isinstance(p, (Shard, StridedShard)) for p in spec.placements)


def _is_uneven(spec: DTensorSpec) -> bool:
    sizes: list[Any] = list(spec.shape)
    for placement, n in zip(spec.placements, spec.mesh.shape):
        if isinstance(placement, (Shard, StridedShard)):
            if compat.is_truly(sizes[placement.dim] % n != 0):
                return True
            sizes[placement.dim] //= n
    return False


def _gives_other(stock: Callable[[OpSchema], Any], schema: OpSchema, found: Any) -> bool:
    """Whether torch would have laid out the results otherwise, or raised."""
    try:
        theirs = stock(schema)
    except Exception:
        return True
    return compat.placements_of_outputs(theirs) != compat.placements_of_outputs(found)


def _plain_shards_go_wrong(name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> bool:
    if name in _WRONG_ON_SHARDS and _WRONG_ON_SHARDS[name](schema):
        return any(map(_is_sharded, specs))
    return name in _AVERAGES and any(map(_is_uneven, specs))


def _names_no_dim(schema: OpSchema) -> bool:
    """Whether the dims of a reduction are an empty list, which stands for all of them."""
    return len(schema.args_schema) > 1 and schema.args_schema[1] == []


def _weighs_rows(schema: OpSchema) -> bool:
    """Of the mean loss of classes, (scores, targets, weights, reduction, class to ignore), whether
    its rows count differently: by weights; or, for all that is known, because some are ignored.
    Torch gets the latter wrong on any shards, where it is left to it: unless a program has shards
    only here.
    """
    weights = schema.args_schema[2]
    return schema.args_schema[3] == 1 and (
        isinstance(weights, DTensorSpec) or ledger.diverged(compat.specs_of(schema)[0].mesh)
    )


def _extreme(schema: OpSchema) -> bool:
    """Whether a norm's order is one that has no value for no elements: infinite or negative."""
    return any(
        isinstance(arg, (int, float)) and (arg < 0 or isinf(arg)) for arg in schema.args_schema[1:2]
    )


def _some_device_is_empty(spec: DTensorSpec) -> bool:
    """For the sizes of this call, where they are symbols."""
    shapes, factors = compat.shapes_at_hand([spec]), compat.factors_at_hand([spec])
    if shapes is None or factors is None:
        return False
    counts = [{n} for n in shapes[0]]
    for part, parts in zip(_parts(spec.placements, factors), spec.mesh.shape):
        if isinstance(part, tuple):
            d, factor = part
            counts[d] = {
                local_size(n, factor, parts, device)
                for n in counts[d]
                for device in kinds_of_device(n, factor, parts)
            }
    return any(0 in some for some in counts)


# -- pointwise ops that write ----------------------------------------------------------------------


def _as_what_is_written(name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Any | None:
    """The sharding of a pointwise op that writes to a tensor, or to each of a list: its other
    operands are brought to the cut of what it writes to.

    torch does so only for cuts that are even, or that some element falls to every device of; for
    others it raises. None where that is torch's: all have one cut, cuts are plain and even, or what
    is written to is a pending reduction.
    """
    wanted, differ = [], False
    targets = [
        [spec for spec in found if spec is not None]
        for is_written, found in compat.arguments(schema)
        if is_written
    ]
    for is_written, found in compat.arguments(schema):
        for i, spec in enumerate(found):
            of = next(
                (
                    some[i] if len(some) == len(found) else some[0]
                    for some in targets
                    if len(some) in (1, len(found))
                ),
                None,
            )
            if spec is None or of is None:
                return None
            wanted.append(tuple(spec.placements) if is_written else _following(of, spec))
            differ = differ or tuple(of.placements) != tuple(spec.placements)
            if is_written and tuple(of.placements) != tuple(spec.placements):
                return None
    mesh = specs[0].mesh
    if (
        not differ
        or any(spec.mesh != mesh for spec in specs)
        or not all(map(_can_be_carried, specs))
    ):
        return None
    written = [spec for some in targets for spec in some]
    if any(isinstance(p, Partial) for spec in written for p in spec.placements) or not any(
        compat.split_factors(spec)
        or _is_uneven(spec)
        or any(compat.is_truly(n == 0) for n in spec.shape)
        for spec in written
    ):
        return None
    flags = {spec.use_strided_shard_as_shard_order for spec in specs if compat.split_factors(spec)}
    if len(flags) > 1 or (True in flags and not _says_what_it_means(specs, wanted)):
        return None
    count(name, "signature")
    logger.debug("%s: operands as what is written: %s", name, ", ".join(map(text, wanted)))
    return compat.op_sharding(
        schema,
        specs,
        wanted,
        [tuple(spec.placements) for spec in written],
        compat.output_metas(schema),
        as_order=True in flags,
    )


def _following(written: DTensorSpec, operand: DTensorSpec) -> tuple[Placement, ...]:
    """The placements with which a device has of the operand, which may be broadcast, what it needs
    for its part of what is written.
    """
    before = len(written.shape) - len(operand.shape)

    def placed(p: Placement) -> Placement:
        if (
            not isinstance(p, (Shard, StridedShard))
            or p.dim < before
            or (
                compat.is_truly(operand.shape[p.dim - before] == 1)
                and not compat.is_truly(written.shape[p.dim] == 1)
            )
        ):
            return Replicate()
        return (
            Shard(p.dim - before)
            if isinstance(p, Shard)
            else strided_shard(p.dim - before, p.split_factor)
        )

    return tuple([placed(p) for p in written.placements])


# -- by signature ----------------------------------------------------------------------------------


def _by_signature(
    row: Row, name: str, schema: OpSchema, specs: Sequence[DTensorSpec]
) -> Any | None:
    """The op's sharding by its signature; None where it has none for such arguments, or the
    placements are of kinds that no signature carries.
    """
    mesh = specs[0].mesh
    if (
        any(spec.mesh != mesh for spec in specs)
        or not all(map(_can_be_carried, specs))
        or len(
            {spec.use_strided_shard_as_shard_order for spec in specs if compat.split_factors(spec)}
        )
        > 1
    ):
        return None
    shapes, factors = compat.shapes_at_hand(specs), compat.factors_at_hand(specs)
    if shapes is None or factors is None:
        return None
    args, kwargs = compat.with_shapes(schema, shapes)
    pattern = row.pattern(*args, **kwargs)
    if pattern is None:
        return None
    metas = compat.output_metas(schema)
    if metas is None:
        return None
    symbolic = compat.is_symbolic(*(tuple(spec.shape) for spec in specs))
    reduce = row.reduction(*args, **kwargs)
    results = compat.shapes_of_results(metas)
    try:
        signature = parse(pattern, tuple([len(spec.shape) for spec in specs]), len(results))
        if symbolic and not _known_to_fit(signature, specs):
            return None
        if not symbolic and not signature.gives(shapes, results):
            logger.debug("%s: results of shapes %s are not what %s says", name, results, signature)
            return None
        found = assign(
            signature,
            [
                Operand(shape, _parts(spec.placements, factors))
                for spec, shape in zip(specs, shapes)
            ],
            tuple(mesh.shape),
            reduce=None if symbolic and reduce != "sum" else reduce,
            linear=row.linear,
            filled=row.filled,
        )
    except ValueError as error:
        logger.debug("%s: %s", name, error)
        return None
    wanted = [_placed(parts, factors) for parts in found.operands]
    given = [_placed(parts, factors) for parts in found.results]
    flag = any(
        spec.use_strided_shard_as_shard_order for spec in specs if compat.split_factors(spec)
    )
    if flag and not _says_what_it_means(specs, wanted):
        return None
    count(name, "signature")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s: %s: %s -> %s, %d elements received",
            name,
            signature,
            ", ".join(map(text, wanted)),
            ", ".join(map(text, given)),
            found.received,
        )
    return compat.op_sharding(schema, specs, wanted, given, metas, as_order=flag)


def _known_to_fit(signature: Signature, specs: Sequence[DTensorSpec]) -> bool:
    """Whether dims of one name are of one size in every call of the graph that is being compiled,
    not in this one alone.
    """
    sizes: dict[str, set[str]] = {}
    for spec, names in zip(specs, signature.operands):
        for n, name in zip(spec.shape, names):
            if compat.size_text(n) != "1" or not name.startswith(
                "..."
            ):  # a 1 is one in every call, and broadcast
                sizes.setdefault(name, set()).add(compat.size_text(n))
    return all(len(found) == 1 for found in sizes.values())


def _can_be_carried(spec: DTensorSpec) -> bool:
    """Whether all placements are of torch's own kinds, applied left to right or, as far as torch
    says, in the order of the split factors.
    """
    if not all(type(p) in (Shard, StridedShard, Replicate, Partial) for p in spec.placements):
        return False
    return (
        spec.use_strided_shard_as_shard_order
        or spec.shard_order is None
        or DTensorSpec.is_default_device_order(spec.shard_order)
    )


def _says_what_it_means(
    specs: Sequence[DTensorSpec], wanted: Sequence[tuple[Placement, ...]]
) -> bool:
    """Whether the assignment holds however the placements are read (reading.py): both readings are
    the same, or one operand alone is cut, as before.
    """
    if not compat.is_symbolic(*(tuple(spec.shape) for spec in specs)) and all(
        agree(spec.shape, spec, some)
        for spec, placements in zip(specs, wanted)
        for some in (tuple(spec.placements), placements)
    ):
        return True
    cut = [
        (spec, placements)
        for spec, placements in zip(specs, wanted)
        if any(isinstance(p, (Shard, StridedShard)) for p in (*spec.placements, *placements))
    ]
    return len(cut) == 1 and tuple(cut[0][0].placements) == cut[0][1]


def _parts(placements: Sequence[Placement], factors: dict[int, Any]) -> tuple[Part, ...]:
    """With the split factors as numbers, those of ``factors``."""
    result: list[Part] = []
    for p in placements:
        if isinstance(p, Partial):
            result.append(p.reduce_op)
        elif isinstance(p, StridedShard):
            result.append(
                (
                    p.dim,
                    next(
                        n
                        for n, factor in factors.items()
                        if compat.size_text(factor) == compat.size_text(p.split_factor)
                    ),
                )
            )
        else:
            result.append((p.dim, 1) if isinstance(p, Shard) else None)
    return tuple(result)


def _placed(parts: Sequence[Part], factors: dict[int, Any]) -> tuple[Placement, ...]:
    """The inverse of :func:`_parts`."""
    result: list[Placement] = []
    for part in parts:
        if isinstance(part, str):
            result.append(Partial(part))
        elif part is None:
            result.append(Replicate())
        else:
            result.append(
                Shard(part[0])
                if part[1] == 1
                else strided_shard(part[0], factors.get(part[1], part[1]))
            )
    return tuple(result)


# -- the gate --------------------------------------------------------------------------------------


def _gated(
    stock: Callable[[OpSchema], Any],
    name: str,
    schema: OpSchema,
    kinds: tuple[type, ...] = (StridedShard,),
) -> Any:
    """What torch makes of the op with the mesh dims of such placements replicated. What it then
    writes in place is taken back to the tensor that it was to write to.

    Raises:
        RuntimeError: the op writes to such a tensor in another way than ``add_``, ``out=`` and
            batch norms do: what is replicated is another tensor, and the write would be lost.
    """
    written = compat.written(schema)
    is_out = any(compat.is_out(schema.op, argument) for argument, _ in written)
    if (
        (is_out or name not in compat.WRITERS)
        and any(compat.split_factors(spec) for _, spec in written)
        and not (len(written) == 1 and compat.is_in_place(schema.op))
    ):
        if not compat.is_tracing() and all(
            compat.is_out(schema.op, argument) for argument, _ in written
        ):
            count(name, "gate")
            return compat.as_on_one_device(schema)
        argument, spec = next(
            (argument, spec) for argument, spec in written if compat.split_factors(spec)
        )
        raise RuntimeError(
            f"{name} writes to a DTensor of shape {tuple(spec.shape)} with placements "
            f"{text(spec.placements)} ({argument}), which it cannot do rightly, as far as is "
            "known. "
            "Redistribute it first, "
            f".redistribute(placements={list(_without(kinds, spec.placements))!r}), and write to "
            "the result; or take the op that gives a new tensor."
        )
    plain = compat.replaced_specs(schema, lambda spec: _without(kinds, spec.placements))
    found = stock(plain)
    count(name, "gate")
    logger.debug(
        "%s: no signature; inputs are redistributed to placements without _StridedShard", name
    )
    if (
        written
        and name not in compat.WRITERS
        and tuple(compat.written(plain)[0][1].placements) != tuple(written[0][1].placements)
    ):
        return compat.written_back(found, plain, schema, written[0][1])
    return compat.from_other_specs(found, plain)


def _without(kinds: tuple[type, ...], placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple([Replicate() if isinstance(p, kinds) else p for p in placements])


def gated_handler(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for torch's function of an op that goes past the propagator: on tensors of
    which it is not known to be right, the op by its signature; else torch's, on tensors without
    _StridedShard.

    To ops other than convolutions all of such a tensor is given: of a shard beside a replica 2.15
    gets the placements of the result wrong.
    """

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = compat.name_of(op)
        tensors = [leaf for leaf in (*args, *kwargs.values()) if compat.is_dtensor(leaf)]
        if name.startswith("convolution"):
            strays = any(
                isinstance(leaf, torch.Tensor) and not compat.is_dtensor(leaf) for leaf in args
            )  # torch takes these for replicas
            if all(tensor.device_mesh.size() == 1 for tensor in tensors) or (
                not strays and _is_right_on(tensors, args)
            ):
                return stock(op, args, kwargs)
            if strays:
                args = tuple(
                    [
                        compat.as_replica(leaf, tensors[0].device_mesh)
                        if isinstance(leaf, torch.Tensor) and not compat.is_dtensor(leaf)
                        else leaf
                        for leaf in args
                    ]
                )
                return (
                    handler(op, args, kwargs) if compat.takes_strays() else stock(op, args, kwargs)
                )
            schema = compat.schema_of(op, args, kwargs)
            found = _by_signature(BY_OVERLOAD[name], name, schema, compat.specs_of(schema))
            if found is not None:
                ledger.note(tensors[0].device_mesh, lambda: True)
                return compat.run_as(op, args, found, redistribute_local_tensor)
        elif not any(
            compat.split_factors(tensor._spec) or _some_device_is_empty(tensor._spec)
            for tensor in tensors
        ):
            return stock(op, args, kwargs)

        def plain(leaf: Any) -> Any:
            return (
                compat.with_placements(
                    leaf, [Replicate()] * leaf.device_mesh.ndim, redistribute_local_tensor
                )
                if compat.is_dtensor(leaf)
                else leaf
            )

        count(name, "gate")
        return stock(
            op, tuple(map(plain, args)), {key: plain(value) for key, value in kwargs.items()}
        )

    return handler


def writing_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What takes an op that writes to some of its arguments and gives back other tensors: where
    these arguments are moved first, what is written to the copies is taken back.
    """
    results, moved = compat.run_slowly(op, args, kwargs)
    take_back(op, args, kwargs, moved)
    if LIVE:
        reach(op, args, kwargs)
    return results


def _is_right_on(tensors: Sequence[Any], args: Sequence[Any]) -> bool:
    """Whether torch's convolution of those arguments, or its gradient, is known to be right: all is
    replicated, or, on a mesh of one dim, images are cut evenly by number or by their last dim.
    """
    images, at = (
        (1, 3) if len(args) == 9 else (2, 4)
    )  # input, weight, bias, stride, ... and gradient, input, weight, sizes of bias, stride, ...
    weight, options = tensors[images], args[at : at + 3]
    cut = [
        (tensor, p) for tensor in tensors for p in tensor.placements if not isinstance(p, Replicate)
    ]
    mesh = weight.device_mesh
    return all(
        isinstance(p, Shard)
        and any(tensor is image for image in tensors[:images])
        and mesh.ndim == 1
        and compat.is_truly(tensor.shape[p.dim] % mesh.size() == 0)
        and (
            p.dim == 0
            or (
                p.dim == tensor.ndim - 1 == 3
                and _halo_is_right(
                    tensor.shape[-1] // mesh.size(),
                    weight.shape[-1],
                    *[option[-1] for option in options],
                    mesh=mesh,
                )
            )
        )
        for tensor, p in cut
    )


def _halo_is_right(
    width: Any, kernel: Any, stride: int, padding: int, dilation: int, *, mesh: Any
) -> bool:
    """Whether what torch's neighbours in the world tell one another is what they need: of an image
    that keeps its width, or of tiles that need nothing (torch/distributed/tensor/_tp_conv.py).
    """
    if dilation != 1 or mesh.size() != compat.world_size():
        return False
    return (padding == 0 and stride == kernel and width % stride == 0) or (
        stride == 1 and kernel % 2 == 1 and padding == kernel // 2 != 0 and width >= padding
    )

"""The plan for a view: the placements of its input and of its output."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from cute_sharding._words import counted
from cute_sharding.dtensor.bookkeeping.stats import count, count_received, is_new, logger
from cute_sharding.dtensor.compiled.symbols import hints_of, symbols_of, to_sizes, to_symints
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.replaced import communication, op_schemas, symints, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import (
    DTensorSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    mesh_text,
)
from cute_sharding.dtensor.run.op_plan import OpPlan, placed
from cute_sharding.dtensor.run.placements import (
    Cuts,
    agree,
    cut_of,
    placement_of,
    replaced,
    text,
    without,
)
from cute_sharding.dtensor.run.redistribute import received_to
from cute_sharding.layout import Size, Undecided
from cute_sharding.propagation.views import carry, cheapest, unblocked
from cute_sharding.relations.table import BY_OP, VIEWS, ByDimMap
from cute_sharding.relations.view import View, view_of

# -- view placements -------------------------------------------------------------------------------
# Placements of a view's input and output, from torch's placements of its input.

# The placements that the input is redistributed to, those of the output, and a key of stats().
Way: TypeAlias = tuple[tuple[Placement, ...], tuple[Placement, ...], str]


def propagate_shape_and_sharding(
    input_src_placements: Sequence[Placement],
    global_input_shape: Sequence[int],
    rule: Sequence[Any],
    mesh_sizes: Sequence[int],
    strict_view: bool = False,
) -> tuple[Sequence[Placement], Sequence[Placement]]:
    """The placements that a view needs of its input, and those of its output.

    Signature and types are those of
    torch.distributed.tensor._ops._view_ops.propagate_shape_and_sharding; the rule may be torch's
    DimMap or ours. If the view can be free, the first result is ``input_src_placements``; else it
    is the cheapest placements for which the view is free.

    Raises:
        RuntimeError: ``strict_view``, and the view is not free. The message names the cheapest
            placements.
        ValueError: the arguments do not fit together.

    >>> from torch.distributed.tensor import Shard
    >>> from torch.distributed.tensor._ops._view_ops import view_groups
    >>> rule = view_groups((4, 6), (24,))
    >>> propagate_shape_and_sharding([Shard(1)], (4, 6), rule, (2,), strict_view=True)[1]
    [_StridedShard(dim=0, sf=4)]
    """
    placements, mesh = tuple(input_src_placements), tuple(mesh_sizes)
    if len(placements) != len(mesh):
        raise ValueError(
            f"the mesh {mesh} has {counted(len(mesh), 'dim')}, but the list of placements "
            f"{text(placements)} has {len(placements)}: give one placement for each mesh dim"
        )
    view, row = view_of(global_input_shape, rule), BY_OP["Tensor.view"]
    ways = ways_of_view(view, row, placements, mesh)
    source, output, outcome = next(ways, without_shards(row, placements, view))
    if strict_view and source != placements:
        raise RuntimeError(
            f"a view of a DTensor from shape {tuple(global_input_shape)} to {view.output_shape} on "
            f"mesh {mesh_text(mesh, None)} with placements {text(placements)} needs communication: "
            "no placements of the output give each device the elements that it holds. First "
            f"redistribute the tensor: .redistribute(placements={list(source)!r})"
        )
    count("view", outcome)
    return source, list(output)


def ways_of_view(
    view: View, row: ByDimMap, placements: tuple[Placement, ...], mesh: tuple[int, ...]
) -> Iterator[Way]:
    """The ways to do a view on a mesh of these sizes, the best one first: as the input lies, if
    the view is free; else with the input at the cheapest placements for which it is, and then with
    the input replicated on the mesh dims that block the view.

    Cheap placements are searched only if all sizes have values in the call that is being compiled;
    and there are no ways if it depends on sizes without a value what the view does. Reductions that
    the op does not commute with are done first, and all if the output has more elements.
    """
    cuts = tuple(map(cut_of, placements))
    reduced = _reduced(row, placements, view)
    unsharded = _unsharded(row, view)
    try:
        kept, found = unblocked(view, cuts, mesh, unsharded)
        _check_has_numbers(found.cuts)
        if kept == cuts and reduced == placements:
            outcome = "tracing" if found.traced else "algebra"
            yield placements, replaced(placements, found.cuts), outcome
            return
        if kept != cuts and None not in hints_of((*view.input_shape, *view.target)):
            pending = [m for m, p in enumerate(placements) if isinstance(p, Partial)]
            values = hints_of(cuts)
            target = cheapest(
                view.of_sizes(hints_of), values, mesh, fixed=pending, unsharded=unsharded
            )
            source = _moved(reduced, values, target.source)
            # The search was for the sizes at hand; that the view is free is proved for all sizes.
            proved = carry(view, tuple(map(cut_of, source)), mesh)
            _check_has_numbers(proved.cuts)
            yield source, replaced(source, proved.cuts), "redistribution"
        source = _moved(reduced, cuts, kept)
        yield source, replaced(source, found.cuts), "redistribution"
    except Undecided:
        return


def is_free(question: Question) -> bool:
    """Whether a view of a tensor of known sizes may read it as it lies."""
    (spec,), row = question.specs, VIEWS[question.name]
    options = question.schema.kwargs_schema
    view = row.view(tuple(spec.shape), *_arguments(question), **options)
    placements = tuple(spec.placements)
    cuts = tuple(map(cut_of, placements))
    kept, _ = unblocked(view, cuts, tuple(spec.mesh.shape), _unsharded(row, view))
    return kept == cuts and _reduced(row, placements, view) == placements


def without_shards(row: ByDimMap, placements: tuple[Placement, ...], view: View) -> Way:
    """The way that is right for all sizes and orders of mesh dims: nothing is sharded."""
    source = without((Shard, StridedShard), _reduced(row, placements, view))
    return source, source, "redistribution"


def _unsharded(row: ByDimMap, view: View) -> list[int]:
    """The dims that the op needs whole."""
    dims = range(len(view.input_shape)) if row.wants_whole_dims else ()
    return [d for d in dims if d not in view.kept]


def _reduced(row: ByDimMap, placements: tuple[Placement, ...], view: View) -> tuple[Placement, ...]:
    """The placements after the reductions that may not stay pending."""
    return tuple(
        [
            Replicate()
            if isinstance(p, Partial)
            and not row.may_stay(p.reduce_op if type(p) is Partial else None, view)
            else p
            for p in placements
        ]
    )


def _moved(placements: tuple[Placement, ...], before: Cuts, after: Cuts) -> tuple[Placement, ...]:
    """The placements, with those of mesh dims that change replaced."""
    return tuple([p if a == b else placement_of(b) for p, a, b in zip(placements, before, after)])


def _check_has_numbers(cuts: Cuts) -> None:
    """Check that split factors have numbers, which placements need when they leave the program.

    Raises:
        Undecided: one has none. Any number would do; the message says 2.
    """
    for cut in cuts:
        if cut is not None and isinstance(cut[1], Size) and hints_of(cut[1]) is None:
            raise Undecided(f"{cut[1]} == 2")


# -- views -----------------------------------------------------------------------------------------
# The plan for a view: the placements of its input and of its output.


def by_view(question: Question) -> OpPlan | None:
    """The plan for a view: torch's own if its sizes are symbols of no compiler. None for an op that
    is none.
    """
    if not question.is_view:
        return None
    name, schema, (spec,) = question.name, question.schema, question.specs
    shape, options, arguments = tuple(spec.shape), schema.kwargs_schema, _arguments(question)
    sized = shape, arguments, tuple(options.values()), tensor_specs.split_factors(spec)
    is_symbolic, view = symints.is_symbolic(*sized), VIEWS[name].view
    if _is_torchs(question, is_symbolic and not symints.has_shape_env(*sized)):
        count(name, "stock")
        return question.torchs(schema)
    if not is_symbolic:
        return _answered(question, view(shape, *arguments, **options))
    with symbols_of(*sized):
        options = {key: to_sizes(value) for key, value in options.items()}
        return _answered(question, view(to_sizes(shape), *to_sizes(arguments), **options))


def _arguments(question: Question) -> tuple[Any, ...]:
    """The arguments after the tensor, as rules take them: a dtype as the number of bytes of an
    element before and after.
    """
    found: list[Any] = []
    meta: Any = question.specs[0].tensor_meta
    for argument in question.schema.args_schema[1:]:
        if isinstance(argument, torch.dtype):
            found += [meta.dtype.itemsize, argument.itemsize]
        else:
            found.append(argument)
    return tuple(found)


def _is_torchs(question: Question, is_uncountable: bool) -> bool:
    """Whether torch's rule, if there is one, answers: sizes are symbols without a compiler, or the
    mesh is one device. On one device every placement is right, and torch uses such a mesh as a
    stand-in: for an op without a rule it traces the decomposition there, and takes the placements
    it sees as true on the real mesh (_decompositions.py). So no answer may hold on one device only.
    """
    on_one = tuple(question.specs[0].mesh.shape) == (1,)
    return (on_one or is_uncountable) and not op_schemas.is_derived(question.schema.op)


def _answered(question: Question, view: View) -> OpPlan:
    name, schema, (spec,) = question.name, question.schema, question.specs
    source, output, outcome = _way(question, view)
    count(name, outcome)
    _log(name, spec, view, source, output)
    if source != tuple(spec.placements) and not symints.is_symbolic(*spec.shape):
        count_received(name, received_to(spec, source))
    return placed(
        schema,
        [spec],
        [source],
        [output],
        op_schemas.output_metas(schema),
        as_order=bool(spec.use_strided_shard_as_shard_order),
    )


def _way(question: Question, view: View) -> Way:
    """The first way that is right whatever the order in which mesh dims shard (reading.py)."""
    (spec,), row = question.specs, VIEWS[question.name]
    placements, mesh = tuple(spec.placements), tuple(spec.mesh.shape)
    mesh = (2,) if mesh == (1,) else mesh  # torch's stand-in for any mesh
    is_ordered = tensor_specs.says_an_order(spec) or any(map(tensor_specs.is_last, placements))
    sized = op_schemas.takes_local_sizes(question.schema.op)
    for source, output, outcome in () if is_ordered else ways_of_view(view, row, placements, mesh):
        if spec.use_strided_shard_as_shard_order:
            output = symints.settled(output)
        if _holds_in_its_order(view, spec, source, output, sized=sized):
            return source, output, outcome
    return without_shards(row, placements, view)


def _holds_in_its_order(
    view: View,
    spec: DTensorSpec,
    source: Sequence[Placement],
    output: Sequence[Placement],
    *,
    sized: bool,
) -> bool:
    """Whether placements that are right if mesh dims shard left to right are right in the order in
    which torch reads them. ``sized``: the op is given local sizes, which torch computes left to
    right.
    """
    placed: list[tuple[Sequence[int], Sequence[Placement]]] = [(view.output_shape, output)]
    if spec.use_strided_shard_as_shard_order:
        placed += [(view.input_shape, spec.placements), (view.input_shape, source)]
    elif any(isinstance(n, Size) for n in view.output_shape):
        return True
    if all(_is_read_alike(shape, spec, placements) for shape, placements in placed):
        return True
    # Dims that the view keeps whole, as in a permutation, keep their cuts in any order.
    cuts = [cut_of(p) for p in spec.placements]
    is_kept = all(cut is None or cut[0] in view.kept for cut in cuts)
    return is_kept and source == tuple(spec.placements) and not sized


def _is_read_alike(
    shape: Sequence[Any], spec: DTensorSpec, placements: Sequence[Placement]
) -> bool:
    if any(isinstance(n, Size) for n in shape):
        parts = [1] * len(shape)
        for cut, n in zip(map(cut_of, placements), spec.mesh.shape):
            if cut is not None:
                parts[cut[0]] *= n
        if all(n % m == 0 for n, m in zip(shape, parts)):
            return True  # in any order
        shape = [int(to_symints(n)) for n in shape]  # it depends on their values
    return agree(shape, spec, placements)


def _log(
    name: str,
    spec: DTensorSpec,
    view: View,
    source: tuple[Placement, ...],
    output: tuple[Placement, ...],
) -> None:
    """Log a free view at level DEBUG; another one at level INFO, once for each op, shape and
    placements, on the first rank of the mesh.
    """
    is_free = source == tuple(spec.placements)
    if not logger.isEnabledFor(logging.DEBUG if is_free else logging.INFO):
        return
    what = (
        f"{name}: {tuple(view.input_shape)} {text(spec.placements)} -> {view.output_shape} "
        f"{text(output)} on mesh {tuple(spec.mesh.shape)}"
    )
    if is_free:
        logger.debug("%s: free", what)
    elif communication.is_first_rank(spec.mesh) and is_new((what, source)):
        received = ""
        if not symints.is_symbolic(*spec.shape):
            busiest = received_to(spec, source)().busiest
            received = f", each device receives up to {busiest} elements"
        logger.info("%s: input redistributed to %s%s", what, text(source), received)

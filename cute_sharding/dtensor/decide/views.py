"""The plan for a view: the placements of its input and of its output."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.stats import count, count_received, logger
from cute_sharding.dtensor.bookkeeping.telling import is_new
from cute_sharding.dtensor.compiled.symbols import symbols_of, to_sizes, to_symints
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.decide.view_placements import Way, ways_of_view, without_shards
from cute_sharding.dtensor.replaced import process_groups, registry, symints, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.run.op_plan import OpPlan, placed
from cute_sharding.dtensor.run.placements import cut_of, text
from cute_sharding.dtensor.run.reading import agree
from cute_sharding.dtensor.run.redistribute import received_to
from cute_sharding.layout import Size
from cute_sharding.relations.table import VIEWS
from cute_sharding.relations.view import View


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
    return (on_one or is_uncountable) and not registry.is_derived(question.schema.op)


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
        registry.output_metas(schema),
        as_order=bool(spec.use_strided_shard_as_shard_order),
    )


def _way(question: Question, view: View) -> Way:
    """The first way that is right whatever the order in which mesh dims shard (reading.py)."""
    (spec,), row = question.specs, VIEWS[question.name]
    placements, mesh = tuple(spec.placements), tuple(spec.mesh.shape)
    mesh = (2,) if mesh == (1,) else mesh  # torch's stand-in for any mesh
    is_ordered = tensor_specs.says_an_order(spec) or any(map(tensor_specs.is_last, placements))
    sized = registry.takes_local_sizes(question.schema.op)
    for source, output, outcome in () if is_ordered else ways_of_view(view, row, placements, mesh):
        if spec.use_strided_shard_as_shard_order:
            output = symints.settled(output)
        if _holds_in_its_order(view, spec, source, output, sized=sized):
            return source, output, outcome
    return without_shards(row, placements)


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
    elif process_groups.is_first_rank(spec.mesh) and is_new((what, source)):
        received = ""
        if not symints.is_symbolic(*spec.shape):
            busiest = received_to(spec, source)().busiest
            received = f", each device receives up to {busiest} elements"
        logger.info("%s: input redistributed to %s%s", what, text(source), received)

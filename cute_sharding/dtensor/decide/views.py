"""The plan for a view: the placements of its input and of its output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.bookkeeping.stats import count, count_received
from cute_sharding.dtensor.compiled.symbols import hints_of, symbols_of, to_sizes
from cute_sharding.dtensor.decide.ordered_views import holds_in_its_order, with_whole_input
from cute_sharding.dtensor.decide.question import Question
from cute_sharding.dtensor.decide.stock import moves_rightly
from cute_sharding.dtensor.decide.view_placements import Decision, count_refusal, place_view
from cute_sharding.dtensor.decide.view_words import Asked
from cute_sharding.dtensor.replaced import process_groups, registry, symints, tensor_specs
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.run.op_plan import OpPlan, placed
from cute_sharding.dtensor.run.placements import Cuts
from cute_sharding.dtensor.run.redistribute import received_to
from cute_sharding.relations.table import VIEWS
from cute_sharding.relations.view import View


def by_view(question: Question) -> OpPlan | None:
    """The plan for a view: torch's own if its sizes are symbols of no compiler. None for an op that
    is none.

    Raises:
        RuntimeError: the view is not free, and the settings ask for an error.
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
    try:
        decision = _decide(question, view)
    except RuntimeError as error:
        count_refusal(name, error)
        raise
    count(name, decision.outcome)
    moves = decision.source != tuple(spec.placements)
    if moves and not symints.is_symbolic(tuple(spec.shape), view.target):
        count_received(name, received_to(spec, decision.source))
    return placed(
        schema,
        [spec],
        [decision.source],
        [decision.output],
        registry.output_metas(schema),
        as_order=bool(spec.use_strided_shard_as_shard_order),
    )


def _decide(question: Question, view: View) -> Decision:
    """Decide on placements for the view, in the order in which mesh dims shard (reading.py)."""
    name, settings, (spec,), row = (
        question.name,
        question.settings,
        question.specs,
        VIEWS[question.name],
    )
    # Views that are not strict redistribute under any setting, as in torch.
    to = settings.implicit_redistribution
    to = "replicate" if to == "error" and not row.strict else to
    mesh = tuple(spec.mesh.shape)
    mesh = (2,) if mesh == (1,) else mesh  # torch's stand-in for any mesh
    if any(map(tensor_specs.is_last, spec.placements)):
        whole = Decision(tuple(spec.placements), (), "redistribution")
        return with_whole_input(spec, mesh, whole, name, if_not_free=to)
    speaks = partial(process_groups.is_first_rank, spec.mesh)
    decision = place_view(
        Asked(name, view, row, mesh, spec.mesh.mesh_dim_names, spec.placements, speaks),
        if_not_free=to,
        stock=partial(_stock_source, question),
        reachable=partial(_reachable, settings, spec),
    )
    if spec.use_strided_shard_as_shard_order:
        decision = decision._replace(output=symints.settled(decision.output))
    sized = registry.takes_local_sizes(question.schema.op)
    if holds_in_its_order(view, spec, decision, sized=sized):
        return decision
    return with_whole_input(spec, mesh, decision, name, if_not_free=to)


def _stock_source(question: Question) -> Sequence[Placement]:
    """The placements of the input by torch's own rule. Raises what the rule raises. (torch's
    strategy would also weigh costs of redistribution, which takes seconds on a mesh of three dims.)
    """
    (spec,), schema, row = question.specs, question.schema, VIEWS[question.name]
    shape, mesh = tuple(spec.shape), tuple(spec.mesh.shape)
    rule = row.rule(shape, *_arguments(question), **schema.kwargs_schema)
    if registry.is_derived(schema.op) or isinstance(rule, View):
        wanted: Any = question.torchs(schema).wanted.args_schema[0]
        return tuple(wanted.placements)
    theirs = registry.torch_rule(rule)
    return registry.stock_propagate(spec.placements, shape, theirs, mesh, row.strict)[0]


def _reachable(settings: Settings, spec: DTensorSpec, target: Cuts) -> bool:
    """Whether an explicit redistribution of ``spec`` to ``target``, as it runs under ``settings``,
    is known to be right.
    """
    with symbols_of(tuple(spec.shape)):
        return settings.redistribution or moves_rightly(
            tensor_specs.with_shape(spec, hints_of(to_sizes(tuple(spec.shape)))), hints_of(target)
        )

"""The propagator's answer for a view: the placements of its input and of its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.bookkeeping.settings import Implicit, Settings
from cute_sharding.dtensor.bookkeeping.stats import Received, count, count_place
from cute_sharding.dtensor.compiled.symbols import hints_of, symbols_of, to_sizes
from cute_sharding.dtensor.decide.ordered_views import holds_in_its_order, with_whole_input
from cute_sharding.dtensor.decide.places import OpPlace, move_of, redistribution_of
from cute_sharding.dtensor.decide.stock import moves_rightly
from cute_sharding.dtensor.decide.view_placements import Decision, count_refusal, place_view
from cute_sharding.dtensor.decide.view_words import Asked
from cute_sharding.dtensor.replaced import (
    dispatch_modes,
    process_groups,
    registry,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Placement
from cute_sharding.dtensor.run.graph_keys import tag_traced
from cute_sharding.dtensor.run.placements import Cuts
from cute_sharding.relations.table import VIEWS, ByDimMap
from cute_sharding.relations.view import View


class ViewQuestion(NamedTuple):
    """The question what placements a view needs and gives.

    Args:
        name: the name of the aten overload, for messages and counts.
        schema: the op, with the spec of its input.
        stock: torch's propagator.
        settings: the settings in force.
    """

    name: str
    schema: OpSchema
    stock: Callable[[OpSchema], Any]
    settings: Settings

    @property
    def spec(self) -> DTensorSpec:
        return self.schema.args_schema[0]  # type: ignore[return-value]

    @property
    def row(self) -> ByDimMap:
        return VIEWS[self.name]

    @property
    def is_strict(self) -> bool:
        """Whether the op must not communicate."""
        return self.row.strict

    @property
    def if_not_free(self) -> Implicit:
        """Views that are not strict redistribute under any setting, as in torch."""
        to = self.settings.implicit_redistribution
        return "replicate" if to == "error" and not self.is_strict else to

    def answer(self) -> Any:
        """The answer in torch's form; torch's own if its sizes are symbols of no compiler.

        Raises:
            RuntimeError: the view is not free, and the settings ask for an error.
        """
        if dispatch_modes.is_tracing():
            tag_traced()
        shape, options = tuple(self.spec.shape), self.schema.kwargs_schema
        arguments = self.schema.args_schema[1:]
        factors = tensor_specs.split_factors(self.spec)
        sized = shape, arguments, tuple(options.values()), factors
        is_symbolic = symints.is_symbolic(*sized)
        if self._is_torchs(is_symbolic and not symints.has_shape_env(*sized)):
            count(self.name, "stock")
            return self.stock(self.schema)
        if not is_symbolic:
            return self._answered(self.row.view(shape, *arguments, **options))
        with symbols_of(*sized):
            options = {key: to_sizes(value) for key, value in options.items()}
            return self._answered(self.row.view(to_sizes(shape), *to_sizes(arguments), **options))

    def _is_torchs(self, is_uncountable: bool) -> bool:
        """Whether torch's rule, if there is one, answers: sizes are symbols without a compiler, or
        the mesh is one device. On one device every placement is right, and torch uses such a mesh
        as a stand-in: for an op without a rule it traces the decomposition there, and takes the
        placements it sees as true on the real mesh (_decompositions.py). So no answer may hold on
        one device only.
        """
        on_one = tuple(self.spec.mesh.shape) == (1,)
        return (on_one or is_uncountable) and not registry.is_derived(self.schema.op)

    def _answered(self, view: View) -> Any:
        try:
            decision = self._decide(view)
        except RuntimeError as error:
            count_refusal(self.name, error)
            raise
        count(self.name, decision.outcome)
        if not symints.is_symbolic(tuple(self.spec.shape), view.target):
            count_place(self.name, self._for_stats(decision))
        return answers.op_sharding(
            self.schema,
            [self.spec],
            [decision.source],
            [decision.output],
            registry.output_metas(self.schema),
            as_order=bool(self.spec.use_strided_shard_as_shard_order),
        )

    def _for_stats(self, decision: Decision) -> OpPlace:
        spec, moves = self.spec, []
        if decision.source != tuple(spec.placements):
            moves.append(move_of(spec, decision.source))
        return OpPlace(Received, moves, lambda: [redistribution_of(spec, self._stock_source())])

    def _decide(self, view: View) -> Decision:
        """Decide on placements for the view, in the order in which mesh dims shard (reading.py)."""
        spec = self.spec
        mesh = tuple(spec.mesh.shape)
        mesh = (2,) if mesh == (1,) else mesh  # torch's stand-in for any mesh
        speaks = partial(process_groups.is_first_rank, spec.mesh)
        names = spec.mesh.mesh_dim_names
        decision = place_view(
            Asked(self.name, view, self.row, mesh, names, spec.placements, speaks),
            if_not_free=self.if_not_free,
            stock=self._stock_source,
            reachable=partial(_reachable, self.settings, spec),
        )
        if spec.use_strided_shard_as_shard_order:
            decision = decision._replace(output=symints.settled(decision.output))
        sized = registry.takes_local_sizes(self.schema.op)
        if holds_in_its_order(view, spec, decision, sized=sized):
            return decision
        return with_whole_input(view, spec, mesh, decision, self.name, if_not_free=self.if_not_free)

    def _stock_source(self) -> Sequence[Placement]:
        """The placements of the input by torch's own rule. Raises what the rule raises. (torch's
        strategy would also weigh costs of redistribution, which takes seconds on a mesh of three
        dims.)
        """
        spec, schema = self.spec, self.schema
        if registry.is_derived(schema.op) or self.row.pairs:
            wanted: Any = (self.stock(schema).redistribute_schema or schema).args_schema[0]
            return tuple(wanted.placements)
        shape = tuple(spec.shape)
        rule = self.row.rule(shape, *schema.args_schema[1:], **schema.kwargs_schema)
        mesh = tuple(spec.mesh.shape)
        theirs = registry.torch_rule(rule)
        return registry.stock_propagate(spec.placements, shape, theirs, mesh, self.is_strict)[0]


def _reachable(settings: Settings, spec: DTensorSpec, target: Cuts) -> bool:
    """Whether an explicit redistribution of ``spec`` to ``target``, as it runs under ``settings``,
    is known to be right.
    """
    with symbols_of(tuple(spec.shape)):
        return settings.redistribution or moves_rightly(
            tensor_specs.with_shape(spec, hints_of(to_sizes(tuple(spec.shape)))), hints_of(target)
        )

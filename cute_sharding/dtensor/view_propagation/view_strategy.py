"""The strategies of view ops, as torch's propagator asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cute_sharding.dtensor.bookkeeping.settings import Implicit, Settings
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.compiled.symbols import hinted, known, symbols_of
from cute_sharding.dtensor.redistributing.graph_keys import tag_traced
from cute_sharding.dtensor.redistributing.placements import Cuts
from cute_sharding.dtensor.redistributing.stock import moves_rightly
from cute_sharding.dtensor.torch_private import (
    answers,
    dispatch_modes,
    op_schemas,
    registry,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.view_propagation.ambiguity import holds_in_any_reading, whole
from cute_sharding.dtensor.view_propagation.propagate import Decision, decide, refused
from cute_sharding.views import Row, View


def _reachable(settings: Settings, spec: tensor_specs.DTensorSpec, target: Cuts) -> bool:
    """Whether an explicit redistribution, as it runs under ``settings``, can be trusted to take
    ``spec`` to ``target``.
    """
    with symbols_of(tuple(spec.shape)):
        return settings.redistribution or moves_rightly(
            tensor_specs.with_shape(spec, hinted(known(tuple(spec.shape)))), hinted(target)
        )


@dataclass(frozen=True)
class ViewStrategy:
    """The sharding strategy of one aten overload.

    Args:
        row: the op's row of the rule table.
        name: the overload's, for messages and counts.
        strict: whether the op must not communicate.
        stock: torch's own registration of it.
        settings: those that are in force.
    """

    row: Row
    name: str
    strict: bool
    stock: registry.Registration
    settings: Settings

    def __call__(self, schema: op_schemas.OpSchema) -> answers.OpStrategy:
        if dispatch_modes.is_tracing():
            tag_traced()
        given: Any = schema.args_schema[0]
        shape, arguments, options = tuple(given.shape), schema.args_schema[1:], schema.kwargs_schema
        sized = (
            shape,
            arguments,
            tuple(options.values()),
            *(tensor_specs.split_factors(option.output_spec) for option in given.strategies),
        )
        if not symints.is_symbolic(*sized):
            return self._answer(schema, given, shape, arguments, options)
        if self.stock.strategy is not None and not symints.has_shape_env(*sized):
            count(self.name, "stock")
            logger.debug(
                "%s: shape %s has sizes of another kind than a compiler's: left to torch's own "
                "rule",
                self.name,
                shape,
            )
            return self.stock.strategy(schema)
        with symbols_of(*sized):
            options = {key: known(value) for key, value in options.items()}
            return self._answer(schema, given, known(shape), known(arguments), options)

    def _answer(
        self,
        schema: op_schemas.OpSchema,
        given: Any,
        shape: Sequence[int],
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> answers.OpStrategy:
        """A choice for each of the input's, of sizes that the algebra can count with."""
        mesh = schema.get_mesh_from_args(validate=False)
        sizes = tuple(mesh.shape)
        if sizes == (1,):
            # On one device every placement is right, and torch uses just such a mesh as a stand-in:
            # for an op without a rule it traces the decomposition there, and takes what it learns
            # for true of the real mesh (_decompositions.py). So nothing may be answered that is
            # true of one device only.
            if self.stock.strategy is not None:
                count(self.name, "stock")
                return self.stock.strategy(schema)
            sizes = (2,)
        view = self.row.view(shape, *arguments, **options)
        result = answers.OpStrategy([])
        for option in given.strategies:
            spec = option.output_spec
            try:
                decision = self._decide(schema, spec, view, sizes)
            except RuntimeError as error:
                refused(self.name, error)
                raise
            count(self.name, decision.outcome)
            result.strategies.append(
                answers.op_spec(given, spec, mesh, decision.source, decision.output)
            )
        return result

    def _decide(
        self,
        schema: op_schemas.OpSchema,
        spec: tensor_specs.DTensorSpec,
        view: View,
        sizes: tuple[int, ...],
    ) -> Decision:
        """What the view does on these placements, and on either reading of them (reading.py)."""
        mesh = schema.get_mesh_from_args(validate=False)
        tensor_specs.check_shard_order(spec, self.name)
        decision = decide(
            view,
            spec.placements,
            sizes,
            if_not_free=self._if_not_free,
            op=self.name,
            row=self.row,
            mesh_names=mesh.mesh_dim_names,
            stock=partial(self._stock_source, schema, spec, sizes),
            reachable=partial(_reachable, self.settings, spec),
        )
        if spec.use_strided_shard_as_shard_order:
            decision = decision._replace(output=symints.settled(decision.output))
        sized = registry.takes_local_sizes(schema.op)
        if holds_in_any_reading(view, spec, decision, sized=sized):
            return decision
        return whole(view, spec, sizes, decision, self.name, if_not_free=self._if_not_free)

    @property
    def _if_not_free(self) -> Implicit:
        """Views that are not strict redistribute under any setting, as torch's do."""
        to = self.settings.implicit_redistribution
        return "replicate" if to == "error" and not self.strict else to

    def _stock_source(
        self, schema: op_schemas.OpSchema, spec: tensor_specs.DTensorSpec, mesh: tuple[int, ...]
    ) -> Sequence[tensor_specs.Placement]:
        """The placements that torch's own rule wants of the input. Raises what the rule raises.
        (Its strategy would weigh what redistributing costs as well: seconds, on a mesh of three
        dims.)
        """
        if self.stock.strategy is None or self.row.pairs:
            return registry.stock_input_placements(self.stock, schema)
        shape = tuple(spec.shape)
        rule = registry.torch_rule(
            self.row.rule(shape, *schema.args_schema[1:], **schema.kwargs_schema)
        )
        return registry.stock_propagate(spec.placements, shape, rule, mesh, self.strict)[0]

"""The strategies of view ops, as torch's propagator asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cute_sharding.dtensor.bookkeeping import ledger
from cute_sharding.dtensor.bookkeeping.settings import Settings
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.compiled.symbols import hinted, known, symbols_of
from cute_sharding.dtensor.redistributing.placements import Cuts, cut_of
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
from cute_sharding.dtensor.view_propagation.propagate import ask, decide, refused
from cute_sharding.views import Row


def _reachable(settings: Settings, spec: tensor_specs.DTensorSpec, target: Cuts) -> bool:
    """Whether an explicit redistribution, as it runs under ``settings``, can be trusted to take
    ``spec`` to ``target``.
    """
    with symbols_of(tuple(spec.shape)):
        return settings.redistribution or moves_rightly(
            tensor_specs.with_shape(spec, hinted(known(tuple(spec.shape)))), hinted(target)
        )


def strategy_of(
    row: Row,
    name: str,
    strict: bool,
    stock: registry.Registration,
    settings: Settings,
    traced: Callable[[], None],
) -> Callable[[op_schemas.OpSchema], answers.OpStrategy]:
    """The sharding strategy of one aten overload; ``traced`` is called where a graph is made."""

    def strategy(schema: op_schemas.OpSchema) -> answers.OpStrategy:
        if dispatch_modes.is_tracing():
            traced()
        given: Any = schema.args_schema[0]
        shape, arguments = tuple(given.shape), schema.args_schema[1:]
        sized = (
            shape,
            arguments,
            tuple(schema.kwargs_schema.values()),
            *(tensor_specs.split_factors(option.output_spec) for option in given.strategies),
        )
        if not symints.is_symbolic(*sized):
            return decided(schema, given, shape, arguments, schema.kwargs_schema)
        if stock.strategy is not None and not symints.has_shape_env(*sized):
            count(name, "stock")
            logger.debug(
                "%s: shape %s has sizes of another kind than a compiler's: left to torch's own "
                "rule",
                name,
                shape,
            )
            return stock.strategy(schema)
        with symbols_of(*sized):
            return decided(
                schema,
                given,
                known(shape),
                known(arguments),
                {key: known(value) for key, value in schema.kwargs_schema.items()},
            )

    def decided(
        schema: op_schemas.OpSchema,
        given: Any,
        shape: Sequence[int],
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> answers.OpStrategy:
        mesh = schema.get_mesh_from_args(validate=False)
        sizes = tuple(mesh.shape)
        if sizes == (1,):
            # On one device every placement is right, and torch uses just such a mesh as a stand-in:
            # for an op without a rule it traces the decomposition there, and takes what it learns
            # for true of the real mesh (_decompositions.py). So nothing may be answered that is
            # true of one device only.
            if stock.strategy is not None:
                count(name, "stock")
                return stock.strategy(schema)
            sizes = (2,)
        view = row.view(shape, *arguments, **options)
        result = answers.OpStrategy([])
        for option in given.strategies:
            spec = option.output_spec
            try:
                tensor_specs.check_shard_order(spec, name)
                decision = decide(
                    view,
                    spec.placements,
                    sizes,
                    strict=strict,
                    op=name,
                    row=row,
                    mesh_names=mesh.mesh_dim_names,
                    implicit_redistribution=settings.implicit_redistribution,
                    stock=partial(stock_source, schema, spec, sizes),
                    diverged=lambda: ledger.diverged(mesh),
                    reachable=partial(_reachable, settings, spec),
                )
                if spec.use_strided_shard_as_shard_order:
                    decision = decision._replace(output=symints.settled(decision.output))
                if not holds_in_any_reading(
                    view, spec, decision, sized=registry.takes_local_sizes(schema.op)
                ):
                    may = partial(may_redistribute, schema, spec, sizes)
                    decision = whole(view, spec, sizes, decision, name, may_redistribute=may)
            except RuntimeError as error:
                refused(name, error)
                raise
            if decision.outcome != "redistribution" and any(
                cut_of(p) is not None for p in decision.output
            ):
                ledger.note(mesh, partial(stock_moves, schema, spec, sizes))
            count(name, decision.outcome)
            result.strategies.append(
                answers.op_spec(given, spec, mesh, decision.source, decision.output)
            )
        return result

    def stock_source(
        schema: op_schemas.OpSchema, spec: tensor_specs.DTensorSpec, mesh: tuple[int, ...]
    ) -> tuple[tensor_specs.Placement, ...]:
        """The placements that torch's own rule wants of the input. Raises what the rule raises.
        (Its strategy would weigh what redistributing costs as well: seconds, on a mesh of three
        dims.)
        """
        if stock.strategy is None or row.pairs:
            return registry.stock_input_placements(stock, schema)
        rule = registry.torch_rule(
            row.rule(tuple(spec.shape), *schema.args_schema[1:], **schema.kwargs_schema)
        )
        return tuple(
            registry.stock_propagate(spec.placements, tuple(spec.shape), rule, mesh, strict)[0]
        )

    def stock_moves(
        schema: op_schemas.OpSchema, spec: tensor_specs.DTensorSpec, mesh: tuple[int, ...]
    ) -> bool:
        """Whether torch would have redistributed the input. (Where it raises, no program that runs
        on torch's rules comes by here.) Of symbols it is not asked, for each answer would be a
        guard.
        """
        return symints.is_symbolic(tuple(spec.shape), schema.args_schema[1:]) or ask(
            partial(stock_source, schema, spec, mesh)
        )[0] not in (None, tuple(spec.placements))

    def may_redistribute(
        schema: op_schemas.OpSchema, spec: tensor_specs.DTensorSpec, mesh: tuple[int, ...]
    ) -> bool:
        """Whether an input that can be read in two ways may be replicated: where views may
        communicate, or torch runs the view.
        """
        return (
            not strict
            or bool(settings.implicit_redistribution)
            or ask(partial(stock_source, schema, spec, mesh))[0] is not None
        )

    return strategy

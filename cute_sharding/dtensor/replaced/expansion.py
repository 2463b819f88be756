"""How the propagator expands a strategy for one mesh dim to the mesh
(torch/distributed/tensor/_sharding_prop.py, _ops/single_dim_strategy.py).

The expansion is wrapped: the current placements are tried first, and then torch's expansion runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, StrategyType
from torch.distributed.tensor._ops import single_dim_strategy as _single_dim_strategy
from torch.distributed.tensor.placement_types import Placement, Replicate
from torch.utils._pytree import tree_leaves

from cute_sharding.dtensor.replaced.symints import is_symbolic
from cute_sharding.dtensor.replaced.tensor_specs import split_factors

__all__ = ["as_they_are"]


def as_they_are(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's expansion of a strategy for one mesh dim to the mesh, which first tries the
    placements that it will probably choose, where comparing all others is expensive, as when it
    adds guards.
    """

    def _expand_single_dim_strategy_to_mesh(
        mesh: Any, op_schema: OpSchema, strategy_info: Any, output_tensor_meta: Any
    ) -> Any:
        schema, info, metas = op_schema, strategy_info, output_tensor_meta
        expanded = stock(mesh, schema, info, metas)
        # By kind: == would compare sizes, and unbacked symbols have none. Lists may hold strategies
        # too, as those of an index_put.
        inputs = [arg for arg in schema.args_schema if isinstance(arg, OpStrategy)]
        everywhere = [
            leaf
            for leaf in tree_leaves((schema.args_schema, schema.kwargs_schema))
            if isinstance(leaf, StrategyType)
        ]
        name = schema.op.name().split("::")[1].split(".")[0]
        if (
            len(everywhere) != len(inputs)
            or name.endswith("_")
            or schema.is_out_variant_op()
            or any(len(arg.strategies) != 1 or arg.mesh != mesh for arg in inputs)
        ):
            return expanded
        specs = [arg.strategies[0].output_spec for arg in inputs]
        if not is_symbolic(*(tuple(spec.shape) for spec in specs)) and not _are_strided(specs):
            return expanded

        def expanded_strategy(op: Any, args: Any, kwargs: Any) -> Any:
            prepared = _single_dim_strategy._PreparedSingleDimStrategy(
                info, schema, metas, num_inputs=len(specs)
            )
            given = [tuple(spec.placements) for spec in specs]
            tries = (prepared.try_propagate(mesh, one, specs) for one in _likely(given, specs))
            found = next((one for one in tries if one is not None), None)
            # From 2.14 on, an op may also refuse placements of the whole mesh although it accepts
            # them on each mesh dim: a mean refuses uneven rows.
            suits = getattr(prepared, "full_mesh_strategy_filter", None)
            if found is None or (
                suits is not None
                and not suits(
                    mesh,
                    schema,
                    found.strategies[0].input_specs,
                    found.strategies[0].output_specs,
                )
            ):
                return expanded(op, args, kwargs)
            return found

        return expanded_strategy

    return _expand_single_dim_strategy_to_mesh


def _likely(
    given: Sequence[tuple[Placement, ...]], specs: Sequence[DTensorSpec]
) -> Iterator[tuple[tuple[Placement, ...], ...]]:
    """Placements of the inputs that cost least if the op accepts them: those that they have; and if
    their plain shards agree, the same shards for all, where replicas are sliced and pending inputs
    are scattered.
    """
    yield tuple(given)
    if any(split_factors(spec) for spec in specs):
        return
    cut = []
    for of in zip(*given):
        shards = {p for p in of if p.is_shard()}
        if len(shards) > 1 or (not shards and any(p.is_partial() for p in of)):
            return
        cut.append(next(iter(shards), Replicate()))
    if any(placements != tuple(cut) for placements in given):
        yield (tuple(cut),) * len(given)


def _are_strided(specs: Sequence[DTensorSpec]) -> bool:
    """Whether some specs have _StridedShard placements, and all specs are read in the same way."""
    read = {spec.use_strided_shard_as_shard_order for spec in specs if split_factors(spec)}
    return len(read) == 1 and all(
        split_factors(spec) or DTensorSpec.is_default_device_order(spec.shard_order)
        for spec in specs
    )

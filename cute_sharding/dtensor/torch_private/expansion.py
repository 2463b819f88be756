"""How the propagator expands a strategy for one mesh dim to the mesh
(torch/distributed/tensor/_sharding_prop.py, _ops/single_dim_strategy.py).

The expansion is wrapped: it is asked about the placements at hand first, and then left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, StrategyType
from torch.distributed.tensor._ops import single_dim_strategy as _single_dim_strategy
from torch.utils._pytree import tree_leaves

from cute_sharding.dtensor.torch_private.symints import is_symbolic
from cute_sharding.dtensor.torch_private.tensor_specs import split_factors

__all__ = ["as_they_are"]


def as_they_are(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's expansion of a strategy for one mesh dim to the mesh, which first tries the
    placements that the inputs have where weighing the others costs much: it would choose them.
    """

    def _expand_single_dim_strategy_to_mesh(
        mesh: Any, schema: OpSchema, info: Any, metas: Any
    ) -> Any:
        expanded = stock(mesh, schema, info, metas)
        # By kind, for == would compare sizes, which unbacked ones do not take. Lists may hold
        # some, too: those of an index_put.
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
            found = prepared.try_propagate(mesh, tuple([spec.placements for spec in specs]), specs)
            # From 2.14 on an op may also refuse placements of the whole mesh, each dim of which
            # it would take: a mean those of uneven rows.
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


def _are_strided(specs: Sequence[DTensorSpec]) -> bool:
    """Whether some have _StridedShard placements, and no two of all are to be read in different
    ways.
    """
    read = {spec.use_strided_shard_as_shard_order for spec in specs if split_factors(spec)}
    return len(read) == 1 and all(
        split_factors(spec) or DTensorSpec.is_default_device_order(spec.shard_order)
        for spec in specs
    )

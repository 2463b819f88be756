"""The gate: an op about which nothing is known runs as in torch, on operands without strided
shards. And functions in place of torch's own ones for ops that skip the propagator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_sharding._memory import remembered
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.fixes import when
from cute_sharding.dtensor.replaced import (
    dispatch_modes,
    op_schemas,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import Replicate, Shard, StridedShard
from cute_sharding.dtensor.run.calls import run_slowly
from cute_sharding.dtensor.run.moved_views import LIVE
from cute_sharding.dtensor.run.op_plan import OpPlan
from cute_sharding.dtensor.run.placements import text, without
from cute_sharding.dtensor.run.writes import reach


def gated(
    plain_plan: Callable[[OpSchema], OpPlan],
    name: str,
    schema: OpSchema,
    kinds: tuple[type, ...] = (StridedShard,),
) -> OpPlan:
    """The plan after the mesh dims with placements of these ``kinds`` are replicated: that of
    ``plain_plan`` for the op on such operands. If the op then writes in place to a replica,
    :mod:`.written` has that copied back.

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


def placed_by_search(found: OpPlan, schema: OpSchema) -> OpPlan:
    """torch's plan for ``argmax`` or ``argmin``, with the placements that torch's function for
    them gives: it reduces a Partial, searches each shard, and compares the results if need be.
    """
    searched: Any = schema.args_schema[0]
    dim = op_schemas.argument(schema.op, schema.args_schema, schema.kwargs_schema, "dim")
    keeps = op_schemas.argument(schema.op, schema.args_schema, schema.kwargs_schema, "keepdim")
    dim = None if dim is None else dim % max(searched.ndim, 1)

    def left(p: Any) -> Any:
        if not isinstance(p, Shard) or dim is None or p.dim == dim:
            return Replicate()
        return Shard(p.dim - (p.dim > dim and not keeps))

    placements = tuple(map(left, searched.placements))
    return found.placed(lambda _: placements)


def gated_handler(op: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """A function in place of torch's for an op that skips the propagator, which asks the propagator
    as for any other op. Only ``argmax`` and ``argmin`` are torch's where that is right: it compares
    what each device finds.
    """
    place = op_schemas.place_of(op, "dim")
    return run_slowly if place is None else _search(stock, place)


def _search(stock: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Of ``argmax`` and ``argmin``, whose dim is argument ``place``."""

    def search(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dim, spec = args[place] if place < len(args) else None, args[0]._spec
        known = not symints.is_symbolic(spec.shape)
        is_right, along = (_along if known else _along.__wrapped__)(spec, dim)
        if not is_right:
            return run_slowly(op, args, kwargs)
        if along != dim:
            args = (args[0], along, *args[2:])
        return stock(op, args, kwargs)

    return search


@remembered
def _along(spec: Any, dim: int | None) -> tuple[bool, Any]:
    """Whether torch's search along ``dim`` is right, and the dim counted from the front: torch
    compares it with dims that are. A dim that the tensor does not have is torch's to report.
    """
    ndim = max(spec.ndim, 1)
    if dim is not None and not -ndim <= dim < ndim:
        return True, dim
    is_right = symints.are_without_factors(spec.placements) and not when.searches_nothing(spec, dim)
    return is_right, None if dim is None else dim % ndim


def writing_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that writes to some of its arguments without torch's dispatcher noticing, and
    update the copies of these arguments.
    """
    results = run_slowly(op, args, kwargs)
    if LIVE:
        reach(op, args, kwargs)
    return results

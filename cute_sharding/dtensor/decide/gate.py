"""The gate: an op of which nothing is known gets what torch would have had. And the functions that
stand in for torch's of ops that go past the propagator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from cute_sharding.dtensor.answer import answers
from cute_sharding.dtensor.answer.running import run_slowly
from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.decide.local_arguments import with_kernel_arguments
from cute_sharding.dtensor.decide.local_results import laying_out
from cute_sharding.dtensor.decide.signatures import by_signature
from cute_sharding.dtensor.door.cuts import (
    some_device_is_empty,
    without,
)
from cute_sharding.dtensor.extras.copies import LIVE
from cute_sharding.dtensor.extras.writes import reach
from cute_sharding.dtensor.replaced import (
    dispatch,
    dispatch_modes,
    op_schemas,
    registry,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.replaced.op_schemas import OpSchema
from cute_sharding.dtensor.replaced.tensor_specs import DTensorSpec, Replicate, Shard, StridedShard
from cute_sharding.dtensor.run.placements import text
from cute_sharding.dtensor.run.redistribute import redistribute_local_tensor
from cute_sharding.relations.table import SIGNATURES


def gated(
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
            return answers.from_other_specs(answers.OutputSharding(None), replicas)
        argument, spec = next(
            (argument, spec) for argument, spec in written if tensor_specs.split_factors(spec)
        )
        raise RuntimeError(
            f"{name} writes to a DTensor of shape {tuple(spec.shape)} with placements "
            f"{text(spec.placements)} ({argument}), which it cannot do rightly, as far as is "
            "known. "
            "Redistribute it first, "
            f".redistribute(placements={list(without(kinds, spec.placements))!r}), and write to "
            "the result; or take the op that gives a new tensor."
        )
    plain = op_schemas.replaced_specs(schema, lambda spec: without(kinds, spec.placements))
    found = stock(plain)
    count(name, "gate")
    logger.debug(
        "%s: no signature; inputs are redistributed to placements without _StridedShard", name
    )
    return answers.from_other_specs(found, plain)


def placed_by_search(found: Any, schema: OpSchema) -> Any:
    """torch's answer for ``argmax`` or ``argmin``, placed as torch's function of it leaves it: that
    finishes what is pending, searches the parts, and compares what it found where the dim is cut.
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
    return answers.with_outputs(found, lambda _: placements)


def _is_stray(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not tensor_specs.is_dtensor(leaf)


def _without_strays(args: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    return tuple(
        [tensor_specs.as_replica(leaf, mesh) if _is_stray(leaf) else leaf for leaf in args]
    )


def _replicated(leaf: Any) -> Any:
    if not tensor_specs.is_dtensor(leaf):
        return leaf
    return dispatch.with_placements(
        leaf, [Replicate()] * leaf.device_mesh.ndim, redistribute_local_tensor
    )


def _dtensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [leaf for leaf in (*args, *kwargs.values()) if tensor_specs.is_dtensor(leaf)]


def gated_handler(stock: Callable[..., Any], *, by_signatures: bool = True) -> Callable[..., Any]:
    """What stands in for torch's function of an op that goes past the propagator: on tensors of
    which it is not known to be right, the op by its signature, where these may answer; else
    torch's, on tensors without _StridedShard.

    To ops other than convolutions all of such a tensor is given: of a shard beside a replica 2.15
    gets the placements of the result wrong.
    """

    def replicated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count(registry.name_of(op), "gate")
        given_kwargs = {key: _replicated(value) for key, value in kwargs.items()}
        return stock(op, tuple(map(_replicated, args)), given_kwargs)

    def convolution(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = _dtensors(args, kwargs)
        strays = any(map(_is_stray, args))  # torch takes these for replicas
        if all(tensor.device_mesh.size() == 1 for tensor in tensors) or (
            not strays and _is_right_on(tensors, args)
        ):
            return stock(op, args, kwargs)
        mesh = tensors[0].device_mesh
        if strays:
            run = convolution if tensor_specs.takes_strays() else stock
            return run(op, _without_strays(args, mesh), kwargs)
        return signed(op, args, kwargs)

    def signed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = registry.name_of(op)
        if not by_signatures or name not in SIGNATURES or kwargs:
            return replicated(op, args, kwargs)
        schema = dispatch.schema_of(op, args, kwargs)
        specs = op_schemas.specs_of(schema)
        found = by_signature(SIGNATURES[name], name, schema, specs)
        if found is None:
            return replicated(op, args, kwargs)
        found = with_kernel_arguments(name, schema, found)
        wanted = found.redistribute_schema
        answer = None if wanted is None else answers.answer_of(wanted)
        prepare = None if answer is None else answer.prepare
        run = laying_out(op, found) or op
        return dispatch.run_as(run, args, found, redistribute_local_tensor, prepare)

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = op_schemas.place_of(op, "dim")
        if place is None:
            return convolution(op, args, kwargs)
        dim = args[place] if place < len(args) else kwargs.get("dim")
        searched = args[0]
        if _is_searched_wrongly(searched._spec, dim):
            return signed(op, args, kwargs)
        if dim is not None and dim < 0:  # which torch compares with dims from the front
            ndim = max(searched.ndim, 1)
            if -ndim <= dim:  # else it is torch's to raise
                args, kwargs = _with_dim(args, kwargs, dim + ndim)
        return stock(op, args, kwargs)

    return handler


def _with_dim(
    args: tuple[Any, ...], kwargs: dict[str, Any], dim: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a search along a dim, with that one."""
    if "dim" in kwargs:
        return args, {**kwargs, "dim": dim}
    return (args[0], dim, *args[2:]), kwargs


def _is_searched_wrongly(spec: DTensorSpec, dim: int | None) -> bool:
    """Whether torch's search of a dim, of all where none is named, is not known to be right."""
    if not symints.are_without_factors(spec.placements):
        return True
    lacks = _lacks_rows.__wrapped__ if symints.is_symbolic(spec.shape) else _lacks_rows
    return lacks(spec, dim)


@lru_cache(maxsize=1 << 12)
def _lacks_rows(spec: DTensorSpec, dim: int | None) -> bool:
    return _cuts(spec, dim) and some_device_is_empty(spec)


def _cuts(spec: DTensorSpec, dim: int | None) -> bool:
    """Whether a dim that is searched is cut; all dims are where none is named."""
    for p in spec.placements:
        if isinstance(p, Shard) and (dim is None or p.dim % spec.ndim == dim % spec.ndim):
            return True
    return False


def writing_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What takes an op that writes to some of its arguments in a way that torch's dispatcher does
    not see.
    """
    results = run_slowly(op, args, kwargs)
    if LIVE:
        reach(op, args, kwargs)
    return results


def _is_right_on(tensors: Sequence[Any], args: Sequence[Any]) -> bool:
    """Whether torch's convolution of those arguments, or its gradient, is known to be right: all is
    replicated, or, on a mesh of one dim, images are cut evenly by number. (Cut by their last dim,
    its function of them takes what it finds for replicas: to neighbours it tells nothing.)
    """
    images = 1 if len(args) == 9 else 2  # the input; or the gradient and the input
    cut = [
        (tensor, p) for tensor in tensors for p in tensor.placements if not isinstance(p, Replicate)
    ]
    mesh = tensors[images].device_mesh
    return all(
        type(p) is Shard
        and p.dim == 0
        and any(tensor is image for image in tensors[:images])
        and mesh.ndim == 1
        and symints.is_truly(tensor.shape[p.dim] % mesh.size() == 0)
        for tensor, p in cut
    )

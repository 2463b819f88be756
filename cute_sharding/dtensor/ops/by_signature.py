"""The placements that an op's signature lets it carry."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from cute_sharding.dtensor.bookkeeping.stats import count, logger
from cute_sharding.dtensor.ops.cuts import (
    can_be_carried,
    parts_of,
    placed,
    says_what_it_means,
)
from cute_sharding.dtensor.redistributing.placements import text
from cute_sharding.dtensor.torch_private import (
    answers,
    op_schemas,
    registry,
    symints,
    tensor_specs,
)
from cute_sharding.dtensor.torch_private.op_schemas import OpSchema
from cute_sharding.dtensor.torch_private.tensor_specs import DTensorSpec
from cute_sharding.ops.assign import Operand, assign
from cute_sharding.ops.signature import Signature, parse
from cute_sharding.ops.table import Row


def by_signature(row: Row, name: str, schema: OpSchema, specs: Sequence[DTensorSpec]) -> Any | None:
    """The op's sharding by its signature; None where it has none for such arguments, or the
    placements are of kinds that no signature carries.
    """
    mesh = specs[0].mesh
    if (
        any(spec.mesh != mesh for spec in specs)
        or not all(map(can_be_carried, specs))
        or len(
            {
                spec.use_strided_shard_as_shard_order
                for spec in specs
                if tensor_specs.split_factors(spec)
            }
        )
        > 1
    ):
        return None
    shapes, factors = symints.shapes_at_hand(specs), symints.factors_at_hand(specs)
    if shapes is None or factors is None:
        return None
    args, kwargs = op_schemas.with_shapes(schema, shapes)
    pattern = row.pattern(*args, **kwargs)
    if pattern is None:
        return None
    metas = registry.output_metas(schema)
    if metas is None:
        return None
    symbolic = symints.is_symbolic(*(tuple(spec.shape) for spec in specs))
    reduce = row.reduction(*args, **kwargs)
    results = answers.shapes_of_results(metas)
    try:
        signature = parse(pattern, tuple([len(spec.shape) for spec in specs]), len(results))
        if symbolic and not _known_to_fit(signature, specs):
            return None
        if not symbolic and not signature.gives(shapes, results):
            logger.debug("%s: results of shapes %s are not what %s says", name, results, signature)
            return None
        found = assign(
            signature,
            [
                Operand(shape, parts_of(spec.placements, factors))
                for spec, shape in zip(specs, shapes)
            ],
            tuple(mesh.shape),
            reduce=None if symbolic and reduce != "sum" else reduce,
            linear=row.linear,
            filled=row.filled,
        )
    except ValueError as error:
        logger.debug("%s: %s", name, error)
        return None
    wanted = [placed(parts, factors) for parts in found.operands]
    given = [placed(parts, factors) for parts in found.results]
    flag = any(
        spec.use_strided_shard_as_shard_order for spec in specs if tensor_specs.split_factors(spec)
    )
    if flag and not says_what_it_means(specs, wanted):
        return None
    count(name, "signature")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "%s: %s: %s -> %s, %d elements received",
            name,
            signature,
            ", ".join(map(text, wanted)),
            ", ".join(map(text, given)),
            found.received,
        )
    return answers.op_sharding(schema, specs, wanted, given, metas, as_order=flag)


def _known_to_fit(signature: Signature, specs: Sequence[DTensorSpec]) -> bool:
    """Whether dims of one name are of one size in every call of the graph that is being compiled,
    not in this one alone.
    """
    sizes: dict[str, set[str]] = {}
    for spec, names in zip(specs, signature.operands):
        for n, name in zip(spec.shape, names):
            if symints.size_text(n) != "1" or not name.startswith(
                "..."
            ):  # a 1 is one in every call, and broadcast
                sizes.setdefault(name, set()).add(symints.size_text(n))
    return all(len(found) == 1 for found in sizes.values())

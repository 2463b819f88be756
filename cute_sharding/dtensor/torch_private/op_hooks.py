"""Ops beside views, in propagator and dispatcher (torch/distributed/tensor/_sharding_prop.py,
_dispatch.py): what is asked before torch's rules, and what follows ops that write.

The propagator's way from specs to placements, schema infos, functions of single ops and the code of
the dispatcher's last step may be replaced here, and are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo

from cute_sharding.dtensor.torch_private import patches
from cute_sharding.dtensor.torch_private.answers import WrittenBack
from cute_sharding.dtensor.torch_private.op_schemas import WRITERS
from cute_sharding.dtensor.torch_private.patch import Installed, beginning_with
from cute_sharding.dtensor.torch_private.registry import op_handlers, overload, propagator

__all__ = [
    "HANDLED",
    "Writes",
    "install_propagation",
]


# Ops that torch's dispatcher takes past the propagator; the last two since 2.15.
HANDLED = (
    "convolution.default",
    "convolution_backward.default",
    "argmin.default",
    "argmax.default",
    "max.dim",
    "min.dim",
)


class Writes(NamedTuple):
    """What is to be done about ops that write.

    Attributes:
        reach: called with (op, args, kwargs) after each, while there are ``live`` ones.
        take_back: called with the same and torch's answer after one that wrote to copies (see
            :class:`WrittenBack`), before ``reach``; the answer to go on with.
        live: the copies that live, by id; empty, as long as no view is a copy.
    """

    reach: Callable[..., None]
    take_back: Callable[..., OutputSharding]
    live: set[int]


def install_propagation(
    installed: Installed,
    propagate: Callable[[OpSchema], OutputSharding],
    names: Sequence[str],
    handler: Callable[[Callable[..., Any]], Callable[..., Any]],
    writing: Callable[..., Any],
    writes: Writes,
) -> None:
    """Make ``propagate`` the propagator's way, on all arguments of the ops of those names;
    ``handler(torch's)`` the function of the ops that go past it; ``writing`` that of
    :data:`WRITERS`; and have ops that write followed by ``writes``.

    torch keeps what it found by the arguments that the op's schema info names: of ops that it
    decomposes it names none.
    """
    infos = _infos(tuple(names))
    of_one_dim = propagator().op_to_schema_info_for_single_dim_strategy
    handlers = op_handlers()
    installed.put(patches.SCHEMA_INFOS, infos)
    installed.put(
        patches.SCHEMA_INFOS_OF_ONE_DIM,
        {op: info for op, info in infos.items() if of_one_dim.get(op) is not None},
    )
    past = [op for op in map(overload, HANDLED) if op is not None and op in handlers]
    installed.put(patches.HANDLERS, {op: handler(handlers[op]) for op in past})
    writers = filter(None, map(overload, WRITERS))
    installed.put(patches.HANDLERS, dict.fromkeys(writers, writing))
    installed.replace(patches.PROPAGATION, lambda stock: propagate)
    called = {**writes._asdict(), "WrittenBack": WrittenBack}
    installed.put(
        patches.TAIL_NAMES, {f"_cute_sharding_{name}": value for name, value in called.items()}
    )
    # Every write comes by here: one more call would cost a tenth of the op.
    installed.replace(patches.TAIL, beginning_with(_BEGINNING, patches.TAIL))


@lru_cache(maxsize=16)
def _infos(names: tuple[str, ...]) -> dict[Any, RuntimeSchemaInfo]:
    """Schema infos that name all arguments, of the ops of those names that this torch has."""
    return {
        op: RuntimeSchemaInfo(
            0,
            [
                *(argument.name for argument in op._schema.arguments if argument.kwarg_only),
                "cute_sharding",
            ],
            any(
                isinstance(argument.type, torch.ListType) and "Tensor" in str(argument.type)
                for argument in op._schema.arguments
            ),
        )
        for op in filter(None, map(overload, names))
    }


_BEGINNING = """
if output_sharding.__class__ is _cute_sharding_WrittenBack and participating:
    output_sharding = _cute_sharding_take_back(op_call, args, kwargs, output_sharding)
if _cute_sharding_live and participating:
    _cute_sharding_reach(op_call, args, kwargs)
"""

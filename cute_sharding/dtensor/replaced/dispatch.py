"""The running dispatcher (torch/distributed/tensor/_dispatch.py): the arguments of the current call
of an op, and ops that run as it runs them.

Only the local arguments of the current call may be replaced here; :mod:`.op_schemas` and
:mod:`.redistribution_hook` change the dispatcher itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._logging._internal import LazyString
from torch.distributed.tensor import DTensor, _dispatch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "arguments_of",
    "dispatcher",
    "give",
    "is_of_lists",
    "local_arguments",
    "observe",
    "redistribute_arguments",
    "return_and_correct_aliasing",
    "schema_of",
    "tensors_of",
]


def observe(spec: DTensorSpec, wanted: DTensorSpec, what: Any) -> None:
    """Do what torch does before it redistributes an argument implicitly: a program that asked for
    it (``ExplicitRedistributionContext``) is told that ``what`` does so, or gets an error.
    (``what`` is formatted only then: while a program is traced, a mesh cannot always be.)

    Raises:
        RuntimeError: the program has asked for errors.
    """
    context: Any = _dispatch.ExplicitRedistributionContext  # type: ignore[attr-defined]
    context.observe_redistribution(
        spec, wanted, LazyString("Implicit redistribution in {}".format, what)
    )


def arguments_of(op_info: Any, schema: OpSchema) -> dict[int | str, Any]:
    """The arguments of ``schema`` in the dispatcher's form for the current call: positional ones by
    number, elements of lists one by one if it has flattened them, and keywords.
    """
    is_flat = op_info.args_tree_spec is not None
    args: Any = tree_leaves(schema.args_schema) if is_flat else schema.args_schema
    found: dict[int | str, Any] = dict(enumerate(args))
    return found | dict(schema.kwargs_schema)


def local_arguments(op_info: Any) -> dict[int | str, Any]:
    """The local arguments of the current call, keyed as in :func:`arguments_of`."""
    found: dict[int | str, Any] = dict(enumerate(op_info.local_args))
    return found | op_info.local_kwargs


def give(op_info: Any, local: dict[int | str, Any], specs: dict[int | str, Any]) -> None:
    """Replace the local arguments of the current call, and their specs."""
    count = len(op_info.local_args)
    op_info.local_args = tuple([local[i] for i in range(count)])
    op_info.local_kwargs = {name: local[name] for name in op_info.local_kwargs}
    op_info.flat_args_schema = [specs[i] for i in range(count)]


def redistribute_arguments(
    op_info: Any,
    schema: OpSchema,
    use_val_from_redistribute_schema: bool,
    move: Callable[[Sequence[tuple[torch.Tensor, DTensorSpec, DTensorSpec]]], list[torch.Tensor]],
) -> None:
    """Do what torch's dispatcher does with local arguments before an op runs: redistribute them to
    the specs of ``schema``, by ``move`` for several (local, spec, spec) at once, and take the other
    arguments of ``schema``.
    """
    dispatch: Any = _dispatch
    debug_mode = dispatch.get_active_debug_mode()
    wanted: tuple[Any, ...] = (
        tuple(tree_leaves(schema.args_schema))
        if op_info.args_tree_spec is not None
        else schema.args_schema
    )
    local_args: list[Any] = list(op_info.local_args)
    moving: list[int] = []
    for i, spec in enumerate(op_info.flat_args_schema):
        if not isinstance(spec, DTensorSpec):
            local_args[i] = wanted[i] if use_val_from_redistribute_schema else spec
        elif spec != wanted[i]:
            observe(spec, wanted[i], op_info.schema or schema.op)
            moving.append(i)
    specs = op_info.flat_args_schema
    moves = [(local_args[i], specs[i], wanted[i]) for i in moving]
    if debug_mode is None:
        moved = move(moves)
    else:
        with ExitStack() as noted:
            for i in moving:
                noted.enter_context(debug_mode.record_redistribute_calls(i, specs[i], wanted[i]))
            moved = move(moves)
    for i, local in zip(moving, moved):
        local_args[i] = local
    if use_val_from_redistribute_schema:
        local_args += wanted[len(local_args) :]
    op_info.local_args = tuple(local_args)


def is_of_lists(op_info: Any) -> bool:
    """Whether the op of the current call takes tensors in lists."""
    return op_info.args_tree_spec is not None


def dispatcher() -> Any:
    return DTensor._op_dispatcher


def schema_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpSchema:
    """The op's schema, with specs in place of DTensors."""
    schema = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    assert schema is not None
    return schema


def tensors_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], tuple[Any, Any]]]:
    """The tensors among the arguments of an op, with those in lists, and a function that puts
    others in their places.
    """
    leaves, tree = tree_flatten((args, kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def with_tensors(given: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        found = dict(zip(places, given))
        arguments: tuple[Any, Any] = tree_unflatten(
            [found.get(k, leaf) for k, leaf in enumerate(leaves)], tree
        )
        return arguments

    return [leaves[k] for k in places], with_tensors

"""What tells two calls of an op apart (torch/distributed/tensor/_op_schema.py: RuntimeSchemaInfo).

torch keeps what the propagator answers, in C++ and in Python, under a key of the specs of an op's
tensors and of those other arguments that the op's schema info names. An argument that the info does
not name does not count: a call with another value of it gets the answer of the first call.

Schema infos are replaced here, also while programs run; nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo

from cute_sharding.dtensor.replaced import patches
from cute_sharding.dtensor.replaced.patch import Installed
from cute_sharding.dtensor.replaced.registry import (
    clear_propagation_caches,
    infer_schema_info,
    is_derived,
    is_of_the_program,
    registries,
    schema_info,
)

__all__ = ["install_keys", "naming"]

# A keyword that no call ever passes.
_OURS = "cute_sharding"

# The kinds of arguments by which a rule may decide, beside tensors, which always count. (Others
# cannot be in a key, as C++ cannot hash them: generators, objects of C++ classes.)
_DECIDING = frozenset(
    (
        *("BoolType", "IntType", "SymIntType", "StringType"),
        *("ScalarTypeType", "DeviceObjType", "LayoutType", "MemoryFormatType"),
    )
)
_NUMBERS = frozenset(("FloatType", "NumberType"))


class _Naming(RuntimeSchemaInfo):
    """An info of ours, in place of ``of``: torch's, the program's, or none."""

    of: RuntimeSchemaInfo | None = None


def install_keys(installed: Installed) -> Callable[[OpSchema], OpSchema]:
    """Have every op's schema info name whatever may decide a shape, a stride, a dtype or a
    placement: now for the ops that torch has a rule or an info for, and for any other when it is
    first called. Returns the function that does so for the op of a schema, and that returns the
    schema with our info.

    Our infos name all arguments of the kinds by which a rule may decide: integers, flags, texts,
    dtypes, layouts, devices, and lists of them. A real number is mostly a value that results are
    computed with, as a learning rate is, and may be another in every step. So it is named only
    where a rule may read it: where torch's info names it (the order of a norm), where torch has no
    rule, and where the program has one. (torch counts positional arguments from the first that is
    named, so numbers behind it are named too.)

    C++ keeps a cache for each thread, and a thread cannot clear another's. So our infos of ops that
    have a rule name a keyword that no call ever passes: this keeps our entries apart from torch's
    in every thread, and torch's are found again once its infos are back. (C++ tells an info without
    keywords from one with some, whichever these are. So where torch's names keywords of the op,
    entries are apart only if ours names more.) It does not keep one setting of ours apart from
    another. A rule that torch derives is not derived again for its sake.

    What was answered by one rule does not hold once the program registers another: the op's info is
    then made anew, and this thread's caches are cleared.
    """
    of_one_dim = patches.SCHEMA_INFOS_OF_ONE_DIM.found()

    def put(op: Any, info: RuntimeSchemaInfo) -> None:
        installed.put(patches.SCHEMA_INFOS, {op: info})
        if op in of_one_dim:
            installed.put(patches.SCHEMA_INFOS_OF_ONE_DIM, {op: info})

    def complete(schema: OpSchema) -> OpSchema:
        if isinstance(schema.schema_info, _Naming):
            return schema
        op = schema.op
        info = schema_info(op)
        if not isinstance(info, _Naming):
            # torch does so in an op's first call, whose answer it keeps under a key of the tensors
            # alone. Without any info, once ours is gone, calls would be looked up under that key.
            infer_schema_info(op)
            info = naming(op, info)
            put(op, info)
        return OpSchema(op, schema.args_schema, schema.kwargs_schema, info)

    def registering(stock: Callable[..., None]) -> Callable[..., None]:
        def register(op_overload: Any, *args: Any, **kwargs: Any) -> None:
            stock(op_overload, *args, **kwargs)
            info = schema_info(op_overload)
            put(op_overload, naming(op_overload, info.of if isinstance(info, _Naming) else info))
            clear_propagation_caches()

        return register

    infos = _infos()
    installed.put(patches.SCHEMA_INFOS, infos)
    installed.put(patches.SCHEMA_INFOS_OF_ONE_DIM, {op: infos[op] for op in of_one_dim})
    for patch in (patches.RULES, patches.STRATEGIES, patches.STRATEGIES_OF_ONE_DIM):
        installed.replace(patch, registering)
    return complete


class _Made(NamedTuple):
    """Our infos, and the registries of the propagator that they were made for."""

    registries: tuple[dict[Any, Any], ...]
    infos: dict[Any, RuntimeSchemaInfo]


_made = _Made((), {})


def _infos() -> dict[Any, RuntimeSchemaInfo]:
    """Our infos for all ops that have a rule or an info. They depend on the registries alone, and
    take ten times as long as to see that these are as they were.
    """
    global _made
    found = tuple([registry.copy() for registry in registries()])
    if found != _made.registries:
        ops = set[Any]().union(*found)
        _made = _Made(found, {op: naming(op, schema_info(op)) for op in ops})
    return _made.infos


def naming(op: torch._ops.OpOverload, info: RuntimeSchemaInfo | None) -> RuntimeSchemaInfo:
    """Our info for the op, in place of ``info``."""
    arguments = _arguments(op)
    stock = info or RuntimeSchemaInfo()
    has_rule = not is_derived(op)
    kinds = _DECIDING
    if not has_rule or is_of_the_program(op):
        kinds |= _NUMBERS
    by_place = [i for i, kind in enumerate(arguments.by_place) if kind in kinds]
    keywords = [name for name, kind in arguments.by_name.items() if kind in kinds]
    named = stock.static_kwargkey or ()
    keywords += [
        name for name, kind in arguments.by_name.items() if name in named and kind in _NUMBERS
    ]
    # Without any keyword, C++ would also leave out tensors that are passed by keyword.
    has_keywords = keywords or "TensorType" in arguments.by_name.values()
    is_apart = has_keywords or (has_rule and stock.static_kwargkey is None)
    made = _Naming(
        min([stock.static_argnum, *by_place]),
        [*keywords, _OURS] if is_apart else None,
        info.needs_pytree if info is not None and has_rule else arguments.has_lists,
    )
    made.of = info
    return made


class _Arguments(NamedTuple):
    """The kinds of an op's arguments, of those in lists and options too."""

    by_place: tuple[str, ...]
    by_name: dict[str, str]
    has_lists: bool


@lru_cache(maxsize=1 << 13)
def _arguments(op: torch._ops.OpOverload) -> _Arguments:
    kinds = [(each, *_kind(each.real_type)) for each in op._schema.arguments]
    return _Arguments(
        tuple([kind for each, kind, _ in kinds if not each.kwarg_only]),
        {each.name: kind for each, kind, _ in kinds if each.kwarg_only},
        any(is_list and kind == "TensorType" for _, kind, is_list in kinds),
    )


def _kind(declared: Any) -> tuple[str, bool]:
    """The kind of an argument's type or of its elements, and whether it is a list."""
    is_list = False
    while isinstance(declared, torch.OptionalType | torch.ListType):
        is_list |= isinstance(declared, torch.ListType)
        declared = declared.getElementType()
    return declared.kind(), is_list

"""The guards of compiled programs (torch/fx/experimental/symbolic_shapes.py): on the global sizes
of DTensors, which torch leaves out, but not on sizes that a program does not read.

Nothing of the compiler is imported before the program imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["on_global_sizes"]


def on_global_sizes(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's guards on the inputs of a program, and guards on global sizes of DTensors that are
    constants in it; without those on gradients that the program does not read.

    torch leaves guards on constants to its checks of plain tensors, which see only local sizes. If
    torch wrote all guards out, offsets of local tensors and sizes of their bases would be guarded
    too, and programs would be compiled again for nothing.
    """

    def produce_guards_verbose(
        shape_env: Any,
        placeholders: Any,
        sources: Any,
        source_ref: Any = lambda source: source.name,
        *,
        ignore_static: bool = True,
        **options: Any,
    ) -> Any:
        guards = options.pop("guards", None)
        found = stock(
            shape_env,
            placeholders,
            sources,
            source_ref,
            guards=_without_unread_gradients(
                shape_env, placeholders, shape_env.guards if guards is None else guards
            ),
            ignore_static=ignore_static,
            **options,
        )
        if not ignore_static or options.get("_simplified"):
            return found  # all guards are there, or only some are wanted
        for source, n in _constant_sizes(placeholders, sources).items():
            for guards in found:
                guards.exprs.append(f"{_in_language_of(guards, source, source_ref)} == {n}")
        return found

    return produce_guards_verbose


def _constant_sizes(placeholders: Sequence[Any], sources: Sequence[Any]) -> dict[Any, int]:
    """Source -> global size, for sizes of DTensors among the inputs that are numbers."""
    from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource

    found = {}
    for value, source in zip(placeholders, sources):
        if isinstance(value, DTensor):
            sizes: tuple[Any, ...] = tuple(value.size())
            for dim, n in enumerate(sizes):
                number = n.node.maybe_as_int() if isinstance(n, torch.SymInt) else n
                if number is not None:
                    found[
                        TensorPropertySource(
                            LocalSource(source) if isinstance(source, str) else source,
                            TensorProperty.SIZE,
                            dim,
                        )
                    ] = number
    return found


def _in_language_of(guards: Any, source: Any, source_ref: Callable[[Any], str]) -> str:
    """The name of a source in guards: in Python an expression, in C++ a variable."""
    symbols = getattr(guards, "source_to_symbol", None)
    if symbols is None:
        return source_ref(source)
    if source not in symbols:
        import sympy

        symbols[source] = sympy.Symbol(f"global_size_{len(symbols)}")
    return str(symbols[source])


def _without_unread_gradients(
    shape_env: Any, placeholders: Sequence[Any], guards: Sequence[Any]
) -> list[Any]:
    """The guards without those on sizes of a gradient that is no input of the program.

    For a parameter torch also makes a fake of its ``.grad``, whose sizes have symbols of their own
    (torch/_subclasses/meta_utils.py). If the program reads the gradient, that fake is an input. If
    not, nothing can depend on these sizes, and torch cannot read them: a guard on one of them alone
    is an IndexError, and another guard would compile the program again when the gradient goes.
    """
    unread = {
        symbol
        for symbol, sources in shape_env.var_to_sources.items()
        if sources and all(_is_beneath_gradient(source) for source in sources)
    }
    if unread:
        unread -= {
            symbol for value in _sizes_of(placeholders) for symbol in value.node.expr.free_symbols
        }
    if not unread:
        return list(guards)
    return [
        guard for guard in guards if unread.isdisjoint(shape_env.simplify(guard.expr).free_symbols)
    ]


def _is_beneath_gradient(source: Any) -> bool:
    while source is not None:
        if getattr(source, "member", None) == "grad":
            return True
        source = getattr(source, "base", None)
    return False


def _sizes_of(values: Sequence[Any]) -> Iterator[Any]:
    """The symbolic numbers among the values, and in sizes of tensors and inner tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield from _sizes_of((*value.size(), *value.stride(), value.storage_offset()))
            if is_traceable_wrapper_subclass(value):
                yield from _sizes_of([getattr(value, a) for a in value.__tensor_flatten__()[0]])
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield value
